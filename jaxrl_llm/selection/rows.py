"""Which rows to train on, and how often: ranks within groups, maximum-variance subsets, resampling, references.

Shapes never depend on data: a selection is a mask or a count per row. Ties are broken by noise keyed on the row's
content (`selection.noise`), so the order of rows does not matter.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_llm.core.choices import Scheme
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.core.transform import Transform, counted
from jaxrl_llm.utils.errors import require_choice

RANK_SCHEMES = ("best_random", "best_worst", "best", "uniform")
SCORE_SCHEMES = ("power", "max_min", "max_random")


@part
def keep_weighted(factor: Callable[[jax.Array, Trajectories], jax.Array]) -> Transform:
    """Multiply the selection weights by `factor(step, batch)` f32 or bool [N] or [N, L]; 0 drops."""

    def apply(step: jax.Array, batch: Trajectories) -> Trajectories:
        by = factor(step, batch).astype(jnp.float32)
        return batch.replace(weights=batch.loss_weights * (by[:, None] if by.ndim == 1 else by))

    return counted(apply)


def ranks_within(keys: jax.Array, values: jax.Array, ties: jax.Array, valid: jax.Array) -> jax.Array:
    """int32[N]: rank of each row's value among the rows with the same key, 0 for the largest.

    Rows that are not valid rank after all others. Ties go to the smaller `ties` f32[N].
    """
    N = keys.shape[0]
    _, index = jnp.unique(keys, return_inverse=True, size=N)
    order = jnp.lexsort((ties, jnp.where(valid, -values, 0.0), ~valid, index))
    position = jnp.argsort(order)
    return position - jax.ops.segment_min(position, index, num_segments=N)[index]


def max_variance_subset(values: jax.Array, valid: jax.Array, keep: jax.Array | float, ties: jax.Array) -> jax.Array:
    """bool[N]: the subset of `keep` valid rows whose values have maximal variance (D3S, 2509.22115).

    The optimum is the n - k smallest and the k largest values for some k; prefix sums give the variance for every k.
    Ties up to rounding go to the most even split. With fewer valid rows than `keep` all are kept.

    >>> A = jnp.array([-1.5, -0.5, 0.5, 1.5, -0.87, 0, 0.87, 0])
    >>> print(jnp.nonzero(max_variance_subset(A, A < 9, 4, A))[0])
    [0 3 4 6]
    """
    N = values.shape[0]
    M = jnp.sum(valid)
    n = jnp.clip(jnp.asarray(keep), 0, M).astype(jnp.int32)
    mean = jnp.sum(jnp.where(valid, values, 0.0)) / jnp.maximum(M, 1)
    centred = jnp.where(valid, values - mean, 0.0)
    position = M - 1 - ranks_within(jnp.zeros(N, jnp.int32), values, ties, valid)  # ascending; valid rows at 0..M-1
    ascending = jnp.zeros(N).at[jnp.where(valid, position, N)].set(centred, mode="drop")
    largest = jnp.arange(N + 1)

    def taken(x: jax.Array) -> jax.Array:
        """The sum over the n - k smallest and the k largest for every k, f32[N + 1]."""
        sums = jnp.concatenate([jnp.zeros(1), jnp.cumsum(x)])
        return sums[jnp.maximum(n - largest, 0)] + sums[M] - sums[jnp.maximum(M - largest, 0)]

    number = jnp.maximum(n, 1)
    variance = taken(ascending**2) / number - (taken(ascending) / number) ** 2
    variance = jnp.where(largest <= n, variance, -jnp.inf)
    good = variance >= jnp.max(variance) - 1e-5 * jnp.mean(centred**2)
    k = jnp.argmin(jnp.where(good, jnp.abs(2 * largest - n), 4 * N))
    return valid & ((position < n - k) | (position >= M - k))


def rank_weights(rank: jax.Array, count: jax.Array, scheme: Scheme) -> jax.Array:
    """Sampling probability f32[N] by rank (0 is the best) among `count`: the filters of PF-PPO (2409.06957).

    best_random: 1/2 for the best, 1/2 shared by the others; best_worst: 1/2 each; best: only the best; uniform: 1 / n.
    """
    require_choice("scheme", scheme, RANK_SCHEMES)
    first, last = ((rank == position).astype(jnp.float32) for position in (0, count - 1))
    if scheme == "best_random":
        return jnp.where(count > 1, jnp.where(rank == 0, 0.5, 0.5 / jnp.maximum(count - 1, 1)), first)
    by_scheme = {"best_worst": 0.5 * (first + last), "best": first, "uniform": 1.0 / jnp.maximum(count, 1)}
    return by_scheme[scheme]


def score_weights(
    score: jax.Array,
    valid: jax.Array,
    scheme: Scheme,
    power: jax.Array | float = 2.0,
) -> jax.Array:
    """Sampling probability f32[N] of each valid row by its score in the whole batch (verl's resampling for PF-PPO).

    Proportional to, power: |score|^power; max_min: 1 for the batch's maximum and minimum, else 0; max_random: 0.4 for
    the maximum, else 0.1; plus 1e-8, so that all-zero weights become uniform.

    >>> print(score_weights(jnp.array([1.0, -1.0, 1.0, 0.5]), jnp.array([True, True, True, False]), "max_min") > 0)
    [ True  True  True False]
    """
    require_choice("scheme", scheme, SCORE_SCHEMES)
    score = jnp.where(valid, score, 0.0)
    top = score == jnp.max(jnp.where(valid, score, -jnp.inf))
    bottom = score == jnp.min(jnp.where(valid, score, jnp.inf))
    by_scheme = {
        "power": jnp.abs(score) ** power,
        "max_min": (top | bottom).astype(jnp.float32),
        "max_random": jnp.where(top, 0.4, 0.1),
    }
    weight = jnp.where(valid, by_scheme[scheme] + 1e-8, 0.0)
    return weight / jnp.maximum(jnp.sum(weight), 1e-30)


def key_noise(noise: jax.Array, keys: jax.Array, valid: jax.Array) -> jax.Array:
    """Noise f32[N] in [0, 1) that valid rows with the same key share, computed from per-row noise f32[N].

    The sum is over integers, which is exact, so that the order of rows does not matter.
    """
    _, index = jnp.unique(keys, return_inverse=True, size=keys.shape[0])
    bits = jnp.where(valid, (noise * 2**24).astype(jnp.uint32), 0)
    total = jax.ops.segment_sum(bits, index, num_segments=keys.shape[0])[index]
    return (total & 0xFFFFFF).astype(jnp.float32) * 2**-24


def resampled_counts(
    weights: jax.Array, keys: jax.Array, draws: jax.Array | float, uniform: jax.Array, order: jax.Array
) -> jax.Array:
    """How often each row is drawn, f32[N], in `draws` draws per key with probabilities proportional to weights f32[N].

    Systematic resampling: draw j takes the row at (j + u) / draws of the cumulative weights in ascending `order`, with
    u = uniform f32[N], one number per key. Counts are unbiased, as with independent draws, with less variance: each is
    its expectation rounded up or down. Keys whose weights are all 0 have counts 0.
    """
    N = keys.shape[0]
    _, index = jnp.unique(keys, return_inverse=True, size=N)
    sorting = jnp.lexsort((order, index))
    group, w = index[sorting], weights[sorting]
    sums = jnp.cumsum(w)
    start = jax.ops.segment_min(sums - w, group, num_segments=N)[group]
    total = jnp.maximum(jax.ops.segment_max(sums, group, num_segments=N)[group] - start, 1e-30)
    n = jnp.broadcast_to(jnp.asarray(draws, jnp.float32), (N,))[sorting]
    u = uniform[sorting]

    def passed(position: jax.Array) -> jax.Array:
        return jnp.minimum(jnp.ceil(n * jnp.clip(position / total, 0.0, 1.0) - u), n)

    before = jnp.where(jnp.concatenate([jnp.ones(1, bool), group[1:] != group[:-1]]), 0.0, jnp.roll(sums - start, 1))
    counts = jnp.maximum(passed(sums - start) - passed(before), 0.0)
    return jnp.zeros(N).at[sorting].set(jnp.where(w > 0, counts, 0.0))


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
