"""Credit where some episodes of a group have replies that were refined by what a simulation saw."""

from __future__ import annotations

import jax.numpy as jnp

from jaxrl_llm.advantages.group import group_advantage
from jaxrl_llm.advantages.turns.rounds import EPISODES, one_row_each
from jaxrl_llm.core.coefficients import check_moments, check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Array, Trajectories, bucket_moments, bucket_sums
from jaxrl_llm.core.transform import Transform, stateless


def refined_successes(scores: Array, group: Array, refined: Array, counted: Array, success: float = 0.0) -> Array:
    """A = 1 for refined episodes with R > success and R > max(mean of the others, mean of the refined), else 0, f32[N]
    (Dyna-GRPO, 2510.09577).

    Means are over the group's scores, f32[N], that are counted, bool[N], where there are any. NaN means not scored.

    >>> R, refined = jnp.array([10.0, 0, 0, 10, 10, 9.5, 0, 10]), jnp.arange(8) > 3
    >>> refined_successes(R, jnp.zeros(8, int), refined, jnp.ones(8, bool))[4:].tolist()
    [1.0, 1.0, 0.0, 1.0]
    """
    known = [bucket_moments(group, jnp.where(counted & kind, scores, jnp.nan)) for kind in (refined, ~refined)]
    lowest = [jnp.where(count > 0, mean, -jnp.inf) for count, mean, _ in known]
    return (refined & (scores > success) & (scores > jnp.maximum(*lowest))).astype(jnp.float32)


@part
def policy_or_simulation(success: float = 0.0, epsilon: float = 1e-6) -> Transform:
    """Groups with refined episodes, info["refined"] 1: `refined_successes` on these, whose others are not trained on.
    All other groups: (R - mean) / (std + epsilon) over their rows, as GRPO has it.

    An episode of several rows counts once in the means of groups with refined episodes.
    """
    check_number("success", success)
    check_moments(1, epsilon)

    def apply(batch: Trajectories) -> Trajectories:
        A = group_advantage(batch.scores, batch.group, epsilon=epsilon)
        marks = (batch.info or {}).get("refined")
        if marks is None:
            return batch.replace(advantages=A[:, None] * batch.action_mask)
        refined = jnp.nan_to_num(marks) > 0
        simulated = bucket_sums(batch.group, refined.astype(jnp.float32))[0] > 0
        own = refined_successes(batch.scores, batch.group, refined, one_row_each(batch), success)
        weights = jnp.ones(batch.tokens.shape, jnp.float32) if batch.weights is None else batch.weights
        return batch.replace(
            advantages=jnp.where(simulated, own, A)[:, None] * batch.action_mask,
            weights=jnp.where((simulated & ~refined)[:, None], 0.0, weights),
        )

    return stateless(apply, {"refined", *EPISODES})
