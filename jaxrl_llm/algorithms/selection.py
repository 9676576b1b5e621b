"""Methods that choose which samples and tokens of a batch to train on."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.group import group_relative
from jaxrl_llm.advantages.schedules import ramp
from jaxrl_llm.algorithms.actor_critic import ppo
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.choices import Scheme
from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Trajectories, bucket_sums
from jaxrl_llm.core.transform import chain, counted
from jaxrl_llm.objectives import clip, policy_gradient, token_mean, token_ratio
from jaxrl_llm.selection.noise import row_noise, token_noise
from jaxrl_llm.selection.rows import (
    RANK_SCHEMES,
    SCORE_SCHEMES,
    against_reference,
    keep_weighted,
    key_noise,
    max_variance_subset,
    random_member,
    rank_weights,
    ranks_within,
    resampled_counts,
    score_weights,
)
from jaxrl_llm.selection.tokens import share_up, top_tokens
from jaxrl_llm.utils.errors import require_choice

__all__ = ["brpo", "d3s", "pf_ppo"]


@part
def most_varied_rows(
    rows_first: float, rows_last: float, steps: float
) -> Callable[[jax.Array, Trajectories], jax.Array]:
    """A function `(step, batch) -> bool[N]`: the share of rows of maximal variance, see `d3s`."""

    def rows(step: jax.Array, batch: Trajectories) -> jax.Array:
        scored = ~jnp.isnan(batch.scores)
        A = jnp.max(jnp.where(batch.action_mask, batch.need("advantages"), -jnp.inf), axis=1)
        number = share_up(jnp.sum(scored), ramp(step, steps, rows_first, rows_last))
        return max_variance_subset(A, scored, number, row_noise(batch, step))

    return rows


@part
def highest_scored_tokens(
    tokens_first: float, tokens_last: float, steps: float
) -> Callable[[jax.Array, Trajectories], jax.Array]:
    """A function `(step, batch) -> bool[N, L]`: the share of tokens of largest |A| H, see `d3s`."""

    def tokens(step: jax.Array, batch: Trajectories) -> jax.Array:
        score = jnp.abs(batch.need("advantages")) * batch.need("entropy")
        share = ramp(step, steps, tokens_first, tokens_last)
        return top_tokens(score, batch.loss_weights > 0, share, token_noise(batch, step), "batch")

    return tokens


def d3s(
    rows_first: float = 0.25,
    rows_last: float = 0.75,
    tokens_first: float = 0.2,
    tokens_last: float = 0.8,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    total_steps: float | None = None,
) -> Algorithm:
    """Dynamic Dual-Level Down-Sampling (D3S, arXiv 2509.22115, 2025).

    Computes GRPO's advantages, keeps the subset of rows of the whole batch whose advantages have maximal variance, then
    the tokens of these rows with the largest |A| H, H the entropy of the sampling policy:

        S = argmax over |S| = n of Var(A_i, i in S);  the ceil(K * tokens of S) tokens of largest |A_i| H_it

    The share of scored rows n / N is interpolated linearly from rows_first to rows_last over total_steps (100 where
    None), K from tokens_first to tokens_last. The loss is PPO's clip (clip_low, clip_high), averaged over the kept
    tokens; advantages are not normalised again. The sources available to us print no values. Ties are broken at random
    (summaries of the paper: by index).

    Defaults. Ours: rows_first, rows_last, tokens_first, tokens_last, clip_low, clip_high. Run: total_steps.
    """
    for name, share in (("rows_first", rows_first), ("rows_last", rows_last)):
        check_number(name, share, above=0, most=1)
    steps = 100 if total_steps is None else total_steps

    return Algorithm(
        transform=chain(
            group_relative(),
            keep_weighted(most_varied_rows(rows_first, rows_last, steps)),
            keep_weighted(highest_scored_tokens(tokens_first, tokens_last, steps)),
        ),
        objective=policy_gradient(token_ratio(), clip(clip_low, clip_high), token_mean()),
    )


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


def brpo(
    outlier: float = 0.6,
    count_reference: bool = True,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Algorithm:
    """Bootstrapped Relative Policy Optimization (Writing-Zero, arXiv 2506.00103, 2025).

    A random member of each group is the reference. A judge compares every other member with it, and its verdict is the
    advantage, without normalisation: A_i = +1 if o_i beats the reference, else -1; A_ref = 0. Groups with
    |sum A| / G > outlier are dropped, because their reference was an outlier. The loss is PPO's clip (clip_low,
    clip_high), averaged over tokens; count_reference: whether the reference's tokens count in that average. The sources
    available to us give neither the average nor a KL term.

    Here verdicts compare scores; a tie is not a win. A pairwise judge can be a reward that scores a whole group.

    Defaults. Paper: outlier. Ours: count_reference, clip_low, clip_high.
    """
    check_number("outlier", outlier, least=0)

    return Algorithm(
        counted(against_random_member(outlier, count_reference)),
        policy_gradient(token_ratio(), clip(clip_low, clip_high), token_mean()),
    )


@part
def drawn_by_score(scheme: Scheme, draws: float | None, power: float) -> Callable[[jax.Array, Trajectories], jax.Array]:
    """A function `(step, batch) -> f32[N]`: how often each row is drawn by a scheme of `pf_ppo`."""

    def drawn(step: jax.Array, batch: Trajectories) -> jax.Array:
        scored, noise = ~jnp.isnan(batch.scores), row_noise(batch, step)
        keys = batch.group if scheme in RANK_SCHEMES else jnp.zeros_like(batch.group)
        (size,) = bucket_sums(keys, scored.astype(jnp.float32))
        if scheme in RANK_SCHEMES:
            weights = rank_weights(ranks_within(keys, batch.scores, noise, scored), size, scheme)
        else:
            weights = score_weights(batch.scores, scored, scheme, power)
        return resampled_counts(
            jnp.where(scored, weights, 0.0),
            keys,
            size if draws is None else draws,
            key_noise(row_noise(batch, step + 2**20), keys, scored),
            noise,
        )

    return drawn


def pf_ppo(
    scheme: Scheme = "best_random",
    draws: float | None = None,
    power: float = 2.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.05,
) -> Algorithm:
    """Policy Filtration for PPO (PF-PPO, arXiv 2409.06957, 2024).

    A reward model is most reliable at the extremes of its scores, so PPO trains on samples drawn by their reward's rank
    among the N of their group (rank 1 is the best), or by their score within the batch. The scheme is one of

        "best_random"  1/2 for the best, 1/(2(N - 1)) for each other      "best_worst"  1/2 for the best and the worst
        "best"         the best only                                      "uniform"     no filter
        "power"        |score|^power over the batch, "max_min" and "max_random" (verl's resampling)

    draws: per group, or per batch for the last three; None: as many as there are samples. A sample's weight is how
    often it was drawn; draws are systematic, see `selection.rows.resampled_counts`. Advantages and returns are those of
    `ppo` with clip_low, clip_high and kl_coefficient, computed before the selection and not corrected for it. The
    critic learns from the same samples. The paper prefers "best_random" and "best_worst", and normalises rewards.

    Defaults. Paper: scheme. Code: power. Ours: draws, clip_low, clip_high, kl_coefficient.
    """
    require_choice("scheme", scheme, (*RANK_SCHEMES, *SCORE_SCHEMES))
    check_number("draws", draws, least=1, or_none=True)

    base = ppo(clip_low=clip_low, clip_high=clip_high, kl_coefficient=kl_coefficient)
    return Algorithm(chain(base.transform, keep_weighted(drawn_by_score(scheme, draws, power))), base.objective)
