import jax.numpy as jnp

from jaxrl_llm.advantages import group_relative
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import Code, Fraction, NonNegative, NonNegativeInt, Ours, ZeroOrOne
from jaxrl_llm.core.parts import Array, chain, controller, step_part
from jaxrl_llm.objectives import policy_gradient, ratio_variance, token_mean, token_ratio, unclipped
from jaxrl_llm.replay.base import whole_groups


@step_part
def dual_ascent(value: Array, feedback: dict[str, Array], rate: float) -> Array:
    """A function `(value, feedback) -> f32[]`: the multiplier after one step of `r2vpo`."""
    return jnp.maximum(0.0, value + rate * feedback["ratio/excess"])


@method(paper="arXiv 2601.03320", test="test_trust_region.py::test_r2vpo_by_loop_and_its_soft_clip")
def r2vpo(
    variance_limit: Ours[NonNegative] = 0.02,
    multiplier: Code[NonNegative] = 0.04,
    multiplier_rate: Ours[NonNegative] = 0.1,
    replay_share: Ours[Fraction] = 1.0,
    replay_age: Ours[NonNegativeInt] = 4,
    replay_groups: Ours[NonNegativeInt] = 1024,
    ddof: Ours[ZeroOrOne] = 1,
    epsilon: Ours[NonNegative] = 1e-6,
) -> Algorithm:
    """Ratio-Variance Regularized Policy Optimization (R2VPO).

    max E[rho A] subject to E[(rho - 1)^2] <= delta, by a Lagrange multiplier and without a clip; E is a token mean:

        loss = -E[rho A] + lambda (E[(rho - 1)^2] - delta),  lambda <- max(0, lambda + eta (E[(rho - 1)^2] - delta))

    delta = variance_limit; lambda starts at `multiplier` (a re-implementation keeps it constant) and is updated after
    each update of the policy with eta = multiplier_rate (0: constant). The full paper was not available to us; the dual
    update is the standard one for this constraint. A is GRPO's, with ddof and epsilon.

    round(replay_share m) groups of at most replay_age steps before, whole and each at most once, join the m groups of a
    step; replay_share 0 is the on-policy form. The store has the newest replay_groups groups with different rewards.
    Replayed tokens have the log-probabilities of the policy that sampled them, so the penalty down-weights stale ones.
    """
    objective = policy_gradient(token_ratio(), unclipped(), token_mean())
    ascent = controller("variance_multiplier", multiplier, dual_ascent(multiplier_rate))
    transform = chain(group_relative(ddof=ddof, epsilon=epsilon), ascent)
    replay = whole_groups(replay_share, groups=replay_groups, max_age=replay_age) if replay_share else None
    return Algorithm(transform, objective + "variance_multiplier" * ratio_variance(variance_limit), replay=replay)
