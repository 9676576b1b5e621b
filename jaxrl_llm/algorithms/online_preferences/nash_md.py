import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.method import Algorithm, judge_among_rewards, method, run_settings
from jaxrl_llm.core.annotations import Code, Fraction, NonNegative, NonNegativeNumber, OfRun, Ours
from jaxrl_llm.core.hooks import Context, Hook, State
from jaxrl_llm.core.log_ratios import source
from jaxrl_llm.core.parts import Objective, PolicyOutputs, Trajectories, chain, part, weighted
from jaxrl_llm.core.reference import ReferenceRule
from jaxrl_llm.objectives import coupled
from jaxrl_llm.objectives.preference.pairs import higher_of, win_rates
from jaxrl_llm.rollouts.judges.comparisons import pair_judge
from jaxrl_llm.rollouts.pairs import against_opponent


@method(paper="arXiv 2312.00886", test="test_online_preferences.py::test_nash_md_is_that_of_trl")
@run_settings(*judge_among_rewards())
def nash_md(
    beta: Code[NonNegative] = 0.1,
    mixture: Code[Fraction] = 0.5,
    whole: Ours[bool] = False,
    judge: OfRun[str | None] = None,
) -> Algorithm:
    """Nash learning from human feedback by mirror descent (Nash-MD).

    Each sample y of the policy is compared with one, y', of the geometric mixture of the reference and the policy,
    which is drawn token by token and not trained on:

        log pi'(v) = mixture log pi_ref(v) + (1 - mixture) log pi(v) - log of the sum over v
        loss = mean over samples of -(P(y > y') - 1/2) log pi(y) + beta sum_t l_t log pi(y_t)

    with l = log pi - log pi_ref, and P and l constant. The last term is TRL's; whole: l of the whole response in place
    of each token's, which makes it the score-function gradient of KL(pi || pi_ref). judge: as in `xpo`; without one, P
    is 1 / (1 + exp(r' - r)) of the run's rewards. mixture 0 is self-play, 1 plays against the reference.
    """
    by = None if judge is None else pair_judge(judge)
    return Algorithm(chain(), nash(beta, whole), rollout=against_opponent(by, geometric_mixture(mixture)))


@part
def geometric_mixture(share: Fraction = 0.5) -> Hook:
    """An opponent: the normalised softmax of share log pi_ref + (1 - share) log pi, token by token."""

    def apply(logits: jax.Array, state: State, context: Context) -> jax.Array:
        assert context.other is not None
        mixed = share * jax.nn.log_softmax(context.other, axis=1) + (1 - share) * jax.nn.log_softmax(logits, axis=1)
        return jax.nn.log_softmax(jnp.where(jnp.isnan(mixed), -jnp.inf, mixed), axis=1)

    return Hook(apply, "geometric_mixture", other=ReferenceRule(), opponent=True)


@part
def nash(beta: NonNegativeNumber = 0.1, whole: bool = False) -> Objective:
    """The loss of `nash_md` on rows with info["win_rate"]. Metric: "nash"; its value is not that of a divergence."""

    def score(outputs: PolicyOutputs, batch: Trajectories) -> jax.Array:
        logp = jnp.where(batch.loss_weights != 0, outputs.logp, 0.0)
        drift = jax.lax.stop_gradient(weighted(logp - source(batch, "reference"), batch))
        drift = jnp.sum(drift, axis=1, keepdims=True) if whole else drift
        lead = jnp.nan_to_num(win_rates(batch, higher_of) - 0.5)[:, None]
        return jnp.sum(weighted((lead - beta * drift) * logp, batch), axis=1)

    def shares(s: jax.Array, batch: Trajectories) -> jax.Array:
        known = ~jnp.isnan(win_rates(batch, higher_of)) & jnp.any(batch.action_mask, axis=1)
        return -jnp.where(known, s, 0.0) / jnp.maximum(jnp.sum(known), 1)

    return coupled(score, shares, "nash", frozenset({"reference_logp", "win_rate"}))
