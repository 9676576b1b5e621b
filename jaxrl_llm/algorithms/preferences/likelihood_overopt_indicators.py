from typing import Any

import jax.numpy as jnp

from jaxrl_llm.algorithms.method import Algorithm, RunSetting, given_responses, method, run_settings
from jaxrl_llm.algorithms.preferences.dpo import DivergenceName, dpo
from jaxrl_llm.core.annotations import Count, NonNegative, Ours, Paper, Positive
from jaxrl_llm.core.parts import Array, Metrics, Objective, PolicyOutputs, Trajectories, part
from jaxrl_llm.objectives import averaged, token_mean
from jaxrl_llm.objectives.preference.losses import PairLoss

ENTROPY = "indicators/top_entropy"


def _ends_by(name: str, value: Any) -> RunSetting:
    why = "held-out figures by which it ends"
    return RunSetting(name, lambda given: value, lambda config, given: bool(getattr(config, name)), why)


@method(paper="arXiv 2410.11677", test="test_indicators.py::test_likelihood_overopt_indicators_by_loop")
@run_settings(
    *given_responses(2), _ends_by("eval_every", 10), _ends_by("eval_metric", ENTROPY), _ends_by("eval_patience", 3)
)
def likelihood_overopt_indicators(
    loss: Paper[str | PairLoss] = "sigmoid",
    beta: Paper[Positive] = 0.1,
    likelihood: Paper[NonNegative] = 0.0,
    f_divergence: Ours[DivergenceName] = "reverse_kl",
    top: Ours[Count] = 10,
) -> Algorithm:
    """Likelihood over-optimisation indicators for direct alignment.

    `dpo` (loss "ipo" and "hinge" are the paper's others) whose run ends by what the policy says of held-out responses.
    With p the next-token distribution and S its `top` most probable tokens, means over the tokens of all responses:

        indicators/top_mass = sum over v in S of p(v),    indicators/top_entropy = -sum over v in S of p(v) log p(v)

    Raising the likelihood of chosen responses past a point hurts; a falling entropy says that the policy is
    over-confident, a falling mass that it leaks into the tail. A run by this name evaluates every 10 steps and ends
    when 3 evaluations had no larger entropy than the best before (eval_every, eval_metric and eval_patience, where
    they are not given). likelihood: the paper's remedy, nats a token of chosen responses; a larger beta is another.
    f_divergence: as of `dpo`. The number k is not in the paper's abstract.
    """
    base = dpo(loss, beta, f_divergence=f_divergence, likelihood=likelihood)
    return Algorithm(base.transform, base.objective + indicators(top), rollout=base.rollout)


@part
def indicators(top: Count = 10) -> Objective:
    """No loss, and the metrics of the `top` most probable tokens of the weights before the update, see above."""
    mean = token_mean()

    def objective(outputs: PolicyOutputs, batch: Trajectories) -> tuple[Array, Metrics]:
        inside = (batch.loss_weights != 0)[..., None]
        logp = jnp.where(inside, batch.need("top_logp")[..., :top], -jnp.inf)
        mass = jnp.exp(logp)
        entropy = -jnp.sum(mass * jnp.where(inside, logp, 0.0), axis=-1)
        metrics = {"indicators/top_mass": mean(jnp.sum(mass, axis=-1), batch), ENTROPY: mean(entropy, batch)}
        return jnp.zeros(()), metrics

    return averaged(objective, mean, frozenset({f"top_tokens:{top}", f"top_logp:{top}"}))
