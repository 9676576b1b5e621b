from typing import Literal

import jax

from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import AtLeastOne, Code, Estimator, NonNegative, Number, OfRun, Ours, Positive
from jaxrl_llm.core.objective import Coefficient
from jaxrl_llm.core.parts import Objective, PolicyOutputs, Trajectories, batch_part, chain, control, part
from jaxrl_llm.objectives import discriminative, kl
from jaxrl_llm.utils.errors import is_off


@batch_part
def brevity(batch: Trajectories, longest: float) -> jax.Array:
    """A function `batch -> f32[N]`: 1 - length / longest."""
    return 1 - batch.lengths / longest


@method(paper="arXiv 2510.04474", test="test_preference.py::test_drpo_by_loop_however_it_is_split")
def drpo_decoupled_reward(
    length_temperature: Code[Positive] = 0.1,
    temperature: Code[Positive] = 10.0,
    kl_limit: Code[NonNegative] = 1e-4,
    kl_coefficient: Code[NonNegative] = 1000.0,
    kl_estimator: Code[Literal["kl", "low_var_kl"]] = "kl",
    threshold: Ours[float] = 0.5,
    max_length: OfRun[AtLeastOne | None] = None,
) -> Algorithm:
    """Decoupled Reward Policy Optimization (DRPO).

    Length only reweights right answers (score above `threshold`) among each other; wrong ones share a single penalty:

        loss = -1/prompts sum_prompts [sum_i w_i s_i - tau log mean_j exp(s_j / tau)] + sg(beta max(kl - delta, 0)) kl

    s: mean log-probability of a sample; i right, j wrong; w = softmax over the right ones of (1 - length / max_length)
    / lambda, with lambda = length_temperature (smaller: shorter answers), tau = temperature. Prompts without both kinds
    contribute 0 but count. max_length: longest completion (None: the released script's 8192). beta = kl_coefficient,
    delta = kl_limit; kl is the token mean of log pi_behaviour - log pi (kl_estimator "kl") or of rho - 1 - log rho
    ("low_var_kl"), over the whole batch. The loss has the value of this formula; the released code uses a surrogate
    with the same gradient and another value.
    """
    longest = 8192 if max_length is None else max_length

    objective = discriminative(brevity(longest), threshold, length_temperature, temperature)
    if not is_off(kl_coefficient):
        estimator: Estimator = "k1" if kl_estimator == "kl" else "k3"
        objective += hinged(kl("behaviour", estimator, reverse=True), kl_limit, kl_coefficient, "kl_guard")
    return Algorithm(chain(), objective)


@part
def hinged(penalty: Objective, limit: Number, strength: Number, name: str = "hinge") -> Objective:
    """sg(strength max(penalty - limit, 0)) * penalty: 0 up to the limit, then growing with the excess (2510.04474).

    The factor is computed over the whole batch at the current parameters and written as the control `name`.
    """

    def refresh(outputs: PolicyOutputs, batch: Trajectories) -> Trajectories:
        value, _ = penalty.function(outputs, batch)
        return batch.with_controls(**{name: strength * jax.nn.relu(value - limit)})

    return Coefficient(lambda batch: control(batch, name), refresh=refresh) * penalty
