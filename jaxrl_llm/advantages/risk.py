"""Risk measures as rewards: weight the tails of the score distribution instead of maximising its mean.

Scores of single questions are often only 0 and 1, so they are summed over bundles of questions: the j-th responses to
all questions of a bundle form its draw j, with the score X_j (2510.00911).
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core.annotations import Count, Number, OpenFraction
from jaxrl_llm.core.buckets import bucket_moments, masked_quantile
from jaxrl_llm.core.parts import Array, State, Trajectories, Transform, part
from jaxrl_llm.selection.rows import ranks_within, row_noise
from jaxrl_llm.utils.errors import require_choice

LEVELS = tuple(round(0.05 * i, 2) for i in range(1, 20))
CREDITS = ("uniform", "std", "score", "sum_mean")


def mixed_risk(
    scores: Array, low: Number, high: Number, alpha: Number, beta: Number, tail: Number, *, centred: bool = False
) -> Array:
    """(w g_C + g_R) / (w + 1): the mixed value-at-risk, elementwise, w = `tail` the weight of the lower tail:

        g_R = (max(X - low, 0) - max(X - high, 0) + c) / (beta - alpha),    g_C = -max(low - X, 0) / alpha

    low, high: the alpha- and beta-quantile of X. The result is constant above `high`. centred: c = low - high, so that
    the result is never positive; else c = 0. 1e-6 is added to the denominators.
    """
    middle = jnp.maximum(scores - low, 0.0) - jnp.maximum(scores - high, 0.0) + (low - high if centred else 0.0)
    lower = -jnp.maximum(low - scores, 0.0) / (alpha + 1e-6)
    return (tail * lower + middle / (beta - alpha + 1e-6)) / (tail + 1)


def seeking_risk(
    scores: Array, low: Number, high: Number, alpha: Number, beta: Number, tail: Number, *, centred: bool = False
) -> Array:
    """(w max(X - high, 0) / (1 - beta) + g_R) / (w + 1): `mixed_risk` with the weight on the upper tail instead."""
    middle = jnp.maximum(scores - low, 0.0) - jnp.maximum(scores - high, 0.0) + (low - high if centred else 0.0)
    upper = jnp.maximum(scores - high, 0.0) / (1 - beta + 1e-6)
    return (tail * upper + middle / (beta - alpha + 1e-6)) / (tail + 1)


RISKS = {"mixed": mixed_risk, "seeking": seeking_risk}


def track_quantiles(quantiles: Array, scores: Array, mask: Array, rate: Number) -> Array:
    """q_l + rate (l - share of scores < q_l), f32[19], for the LEVELS l: a stochastic step towards their quantiles."""
    below = jnp.sum((scores[..., None] < quantiles) & mask[..., None], axis=tuple(range(scores.ndim)))
    share = below / jnp.maximum(jnp.sum(mask), 1)
    return jnp.where(jnp.any(mask), quantiles + rate * (jnp.asarray(LEVELS) - share), quantiles)


class _Draws(NamedTuple):
    """Draws of bundles of questions, padded to N questions, N bundles and N draws."""

    rows: Array  # int32[N, N] [question, draw] -> row of the question's response in the draw
    question: Array  # bool[N] whether the question exists
    bundle: Array  # int32[N] the bundle of each question
    scores: Array  # f32[N, N] [bundle, draw] -> X
    mask: Array  # bool[N, N] [bundle, draw] whether the draw exists


def form_draws(
    reward: Array, group: Array, bundle: Array, order: Array, ragged: Literal["repeat", "smallest"] = "repeat"
) -> _Draws:
    """Draws of the scored rows: draw j has the j-th response of each group of a bundle, sorted by `order` f32[N].

    reward f32[N], group int32[N], bundle int32[N] in 0..N-1, constant within a group. ragged, for groups of different
    sizes: "repeat" makes as many draws as the largest group has responses and cycles through the smaller groups;
    "smallest" makes as many as the smallest group has.
    """
    require_choice("ragged", ragged, ("repeat", "smallest"))
    N = reward.shape[0]
    known = ~jnp.isnan(reward)
    _, index = jnp.unique(group, return_inverse=True, size=N)
    target = jnp.where(known, index, N)  # index N is dropped
    size = jnp.zeros(N, jnp.int32).at[target].add(1, mode="drop")
    rank = ranks_within(group, -order, jnp.zeros(N), known)
    responses = jnp.zeros((N, N), jnp.int32).at[target, rank].set(jnp.arange(N), mode="drop")
    of = jnp.zeros(N, jnp.int32).at[target].set(bundle, mode="drop")
    question = size > 0
    draw = jnp.arange(N)[None]
    rows = jnp.take_along_axis(responses, draw % jnp.maximum(size, 1)[:, None], axis=1)
    to = jnp.where(question, of, N)
    if ragged == "repeat":
        number = jnp.zeros(N, jnp.int32).at[to].max(size, mode="drop")
    else:
        number = jnp.full(N, N + 1, jnp.int32).at[to].min(size, mode="drop")
        number = jnp.where(number > N, 0, number)
    scores = jnp.zeros((N, N), jnp.float32).at[to].add(jnp.where(known, reward, 0.0)[rows], mode="drop")
    mask = draw < number[:, None]
    return _Draws(rows, question, of, jnp.where(mask, scores, 0.0), mask)


def spread(scores: Array, mask: Array) -> Array:
    """Sample standard deviation of the masked values along the last axis (kept with size 1); 1 where it is 0."""
    count = jnp.maximum(jnp.sum(mask, axis=-1, keepdims=True), 1)
    mean = jnp.sum(jnp.where(mask, scores, 0.0), axis=-1, keepdims=True) / count
    variance = jnp.sum(jnp.where(mask, (scores - mean) ** 2, 0.0), axis=-1, keepdims=True) / jnp.maximum(count - 1, 1)
    return jnp.where(variance > 1e-10, jnp.sqrt(jnp.maximum(variance, 1e-10)), 1.0)


def share_of_draws(
    of_draw: Array, reward: Array, group: Array, draws: _Draws, credit: Literal["uniform", "std", "score", "sum_mean"]
) -> Array:
    """Each row's advantage f32[N]: the mean of the draws' advantages of_draw f32[N, N] over its draws; 0 without any.

    credit "uniform": the mean itself; "std": divided by the standard deviation of the question's rewards (by 1 if that
    is below 1e-3); "score": times 0.5 for positive rewards, times 1.5 for others; "sum_mean": each draw's advantage
    times d_q / sum_q d_q, d_q the reward minus its question's mean (equal shares where the sum is within 1e-6 of 0).
    """
    require_choice("credit", credit, CREDITS)
    N = reward.shape[0]
    _, mean, deviation = bucket_moments(group, reward)
    of_row = of_draw[draws.bundle]
    there = draws.mask[draws.bundle] & draws.question[:, None]
    if credit == "sum_mean":

        def over_bundle(x: Array) -> Array:
            return jnp.zeros((N, N)).at[draws.bundle].add(x)[draws.bundle]

        difference = jnp.where(jnp.isnan(reward), 0.0, reward - mean)
        above = jnp.where(there, difference[draws.rows], 0.0)
        total, number = over_bundle(above), over_bundle(there.astype(jnp.float32))
        cancels = jnp.abs(total) <= 1e-6
        of_row *= jnp.where(cancels, 1 / jnp.maximum(number, 1), above / jnp.where(cancels, 1.0, total))
    at = jnp.where(there, draws.rows, N)

    def over_draws(x: Array) -> Array:
        return jnp.zeros(N).at[at].add(jnp.where(there, x, 0.0), mode="drop")

    total, number = over_draws(of_row), over_draws(jnp.ones_like(of_row))
    advantage = total / jnp.maximum(number, 1)
    if credit == "std":
        return advantage / jnp.where(deviation < 1e-3, 1.0, deviation + 1e-6)
    return advantage * jnp.where(reward > 0, 0.5, 1.5) if credit == "score" else advantage


def bundles_of(batch: Trajectories, size: int) -> Array:
    """int32[N] in 0..N-1: from info["bundle"] int32[N] if given, else `size` consecutive groups by prompt_id."""
    N = batch.group.shape[0]

    def ranked(keys: Array) -> Array:
        return jnp.unique(keys, return_inverse=True, size=N)[1]

    given = (batch.info or {}).get("bundle")
    if given is not None:
        return ranked(given)
    # Groups without a score come last, so that they do not shift the others.
    key = ranked(batch.prompt_id) * N + ranked(batch.group)
    return ranked(jnp.where(jnp.isnan(batch.scores), N * N, key)) // size


@part
def bundled_risk(
    risk: Literal["mixed", "seeking"] = "mixed",
    alpha: OpenFraction = 0.2,
    beta: OpenFraction = 0.8,
    tail: float = 1.5,
    bundle_size: Count = 5,
    quantiles: Literal["track", "batch", "mix"] = "track",
    rate: float = 0.1,
    credit: Literal["uniform", "std", "score", "sum_mean"] = "std",
    centred: bool = False,
    ragged: Literal["repeat", "smallest"] = "repeat",
) -> Transform:
    """Advantages: one of RISKS of the draws' scores, divided by their standard deviation in the bundle (+ 1e-6).

    quantiles: "track", running estimates from before this batch (in the first batch, its own quantiles); "batch", those
    of the bundle's draws; "mix", the mean of both. Responses are assigned to draws at random, anew in every update.
    """
    levels = jnp.asarray(LEVELS)

    def apply(state: tuple[Array, Array], batch: Trajectories) -> tuple[State, Trajectories]:
        step, q = state
        r = batch.scores
        draws = form_draws(r, batch.group, bundles_of(batch, bundle_size), row_noise(batch, step), ragged)
        X, mask = draws.scores, draws.mask
        first = jax.vmap(lambda level: masked_quantile(X.reshape(-1), mask.reshape(-1), level))(levels)
        q = jnp.where(step == 0, first, q)
        ends = []
        for level in (alpha, beta):
            tracked, own = q[jnp.argmin(jnp.abs(levels - level))], masked_quantile(X, mask, level)[:, None]
            ends.append({"track": tracked, "batch": own, "mix": (tracked + own) / 2}[quantiles])
        A = RISKS[risk](X, ends[0], ends[1], alpha, beta, tail, centred=centred) / (spread(X, mask) + 1e-6)
        A = share_of_draws(A, r, batch.group, draws, credit)
        q = jnp.where(step == 0, q, track_quantiles(q, X, mask, rate))
        return (step + jnp.any(mask), q), batch.replace(advantages=A[:, None] * batch.action_mask)

    return Transform(lambda: (jnp.int32(0), jnp.zeros(len(LEVELS))), apply)
