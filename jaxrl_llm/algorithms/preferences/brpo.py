"""Bootstrapped Relative Policy Optimization (Writing-Zero)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.method import method
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.buckets import bucket_sums
from jaxrl_llm.core.hyperparameters import OURS, PAPER
from jaxrl_llm.core.ranges import NonNegative
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.core.transform import counted
from jaxrl_llm.objectives import clip, policy_gradient, token_mean, token_ratio
from jaxrl_llm.selection.noise import row_noise
from jaxrl_llm.selection.rows import ranks_within


@part
def against_random_member(outlier: float, count_reference: bool) -> Callable[[jax.Array, Trajectories], Trajectories]:
    """A function `(step, batch) -> batch` with the advantages and weights of `brpo`."""

    def judged(step: jax.Array, batch: Trajectories) -> Trajectories:
        scored = ~jnp.isnan(batch.scores)
        reference = random_member(batch.group, scored, row_noise(batch, step))
        A = against_reference(batch.scores, batch.group, reference)
        total, size = bucket_sums(batch.group, A, scored.astype(jnp.float32))
        keep = jnp.abs(total) <= outlier * size * (1 + 1e-6)
        keep &= ~reference | count_reference
        return batch.replace(
            advantages=jnp.where(batch.action_mask, A[:, None], 0.0), weights=batch.loss_weights * keep[:, None]
        )

    return judged


@method(
    paper="arXiv 2506.00103",
    year=2025,
    test="test_selecting.py::test_brpo_against_a_loop",
    lacks={"judge": ("verdicts of a pairwise judge in both orders; scores are compared instead", "a judge of pairs")},
)
def brpo(
    outlier: Annotated[NonNegative, PAPER] = 0.6,
    count_reference: Annotated[bool, OURS] = True,
    clip_low: Annotated[NonNegative, OURS] = 0.2,
    clip_high: Annotated[NonNegative, OURS] = 0.2,
) -> Algorithm:
    """Bootstrapped Relative Policy Optimization (Writing-Zero).

    A random member of each group is the reference. A judge compares every other member with it, and its verdict is the
    advantage, without normalisation: A_i = +1 if o_i beats the reference, else -1; A_ref = 0. Groups with
    |sum A| / G > outlier are dropped, because their reference was an outlier. The loss is PPO's clip (clip_low,
    clip_high), averaged over tokens; count_reference: whether the reference's tokens count in that average. The sources
    available to us give neither the average nor a KL term.

    Here verdicts compare scores; a tie is not a win. A pairwise judge can be a reward that scores a whole group.
    """

    return Algorithm(
        counted(against_random_member(outlier, count_reference)),
        policy_gradient(token_ratio(), clip(clip_low, clip_high), token_mean()),
    )


def random_member(group: jax.Array, valid: jax.Array, noise: jax.Array) -> jax.Array:
    """bool[N]: one valid row of each group, the one with the largest noise."""
    return valid & (ranks_within(group, noise, noise, valid) == 0)


def against_reference(score: jax.Array, group: jax.Array, reference: jax.Array) -> jax.Array:
    """f32[N]: +1 where a row's score exceeds that of its group's reference, else -1; 0 for the reference itself.

    reference bool[N] marks one row of each group. Unscored rows (NaN), and groups without a reference, get 0
    (BRPO, 2506.00103).
    """
    N = group.shape[0]
    _, index = jnp.unique(group, return_inverse=True, size=N)
    opponent = jax.ops.segment_sum(jnp.where(reference, score, 0.0), index, num_segments=N)[index]
    present = jax.ops.segment_sum(reference.astype(jnp.float32), index, num_segments=N)[index]
    verdict = jnp.where(score > opponent, 1.0, -1.0)
    return jnp.where(reference | jnp.isnan(score) | (present == 0), 0.0, verdict)
