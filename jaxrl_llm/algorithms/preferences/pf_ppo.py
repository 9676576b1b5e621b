from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.classic.ppo import ppo
from jaxrl_llm.algorithms.method import Algorithm, beside, method
from jaxrl_llm.core.annotations import AtLeastOne, Code, NonNegative, Ours, Paper, Positive
from jaxrl_llm.core.buckets import bucket_sums
from jaxrl_llm.core.parts import Trajectories, chain, step_part
from jaxrl_llm.selection.rows import keep_weighted, ranks_within, resampled_counts, row_noise


@step_part
def drawn_by_score(
    step: jax.Array, batch: Trajectories, scheme: Scheme, draws: float | None, power: float
) -> jax.Array:
    """A function `(step, batch) -> f32[N]`: how often each row is drawn by a scheme of `pf_ppo`."""
    scored, noise = ~jnp.isnan(batch.scores), row_noise(batch, step)
    keys = batch.group if scheme in RANK_SCHEMES else jnp.zeros_like(batch.group)
    (size,) = bucket_sums(keys, scored.astype(jnp.float32))
    if scheme in RANK_SCHEMES:
        weights = rank_weights(ranks_within(keys, batch.scores, noise, scored), size, scheme)
    else:
        weights = score_weights(batch.scores, scored, scheme, power)
    shared = key_noise(row_noise(batch, step + 2**20), keys, scored)
    return resampled_counts(jnp.where(scored, weights, 0.0), keys, size if draws is None else draws, shared, noise)


@method(paper="arXiv 2409.06957", test="test_selecting.py::test_pf_ppo_counts_what_it_draws")
@beside("normalisation", "the normalisation of rewards", "a transform of rewards")
def pf_ppo(
    scheme: Paper[Scheme] = "best_random",
    draws: Ours[AtLeastOne | None] = None,
    power: Code[Positive] = 2.0,
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
    kl_coefficient: Ours[NonNegative] = 0.05,
) -> Algorithm:
    """Policy Filtration for PPO (PF-PPO).

    A reward model is most reliable at the extremes of its scores, so PPO trains on samples drawn by their reward's rank
    among the N of their group (rank 1 is the best), or by their score within the batch. The scheme is one of

        "best_random"  1/2 for the best, 1/(2(N - 1)) for each other      "best_worst"  1/2 for the best and the worst
        "best"         the best only                                      "uniform"     no filter
        "power"        |score|^power over the batch, "max_min" and "max_random" (verl's resampling)

    draws: per group, or per batch for the last three; None: as many as there are samples. A sample's weight is how
    often it was drawn; draws are systematic, see `selection.rows.resampled_counts`. Advantages and returns are those of
    `ppo` with clip_low, clip_high and kl_coefficient, computed before the selection and not corrected for it. The
    critic learns from the same samples. The paper prefers "best_random" and "best_worst", and normalises rewards.
    """
    base = ppo(clip_low=clip_low, clip_high=clip_high, kl_coefficient=kl_coefficient)
    return Algorithm(chain(base.transform, keep_weighted(drawn_by_score(scheme, draws, power))), base.objective)


Scheme = Literal["best_random", "best_worst", "best", "uniform", "power", "max_min", "max_random"]  # of drawing rows
RANK_SCHEMES = ("best_random", "best_worst", "best", "uniform")


def rank_weights(rank: jax.Array, count: jax.Array, scheme: Scheme) -> jax.Array:
    """Sampling probability f32[N] by rank (0 is the best) among `count`: the filters of PF-PPO (2409.06957).

    best_random: 1/2 for the best, 1/2 shared by the others; best_worst: 1/2 each; best: only the best; uniform: 1 / n.
    """
    first, last = ((rank == position).astype(jnp.float32) for position in (0, count - 1))
    if scheme == "best_random":
        return jnp.where(count > 1, jnp.where(rank == 0, 0.5, 0.5 / jnp.maximum(count - 1, 1)), first)
    return {"best_worst": 0.5 * (first + last), "best": first, "uniform": 1.0 / jnp.maximum(count, 1)}[scheme]


def score_weights(score: jax.Array, valid: jax.Array, scheme: Scheme, power: jax.Array | float = 2.0) -> jax.Array:
    """Sampling probability f32[N] of each valid row by its score in the whole batch (verl's resampling for PF-PPO).

    Proportional to, power: |score|^power; max_min: 1 for the batch's maximum and minimum, else 0; max_random: 0.4 for
    the maximum, else 0.1; plus 1e-8, so that all-zero weights become uniform.

    >>> print(score_weights(jnp.array([1.0, -1.0, 1.0, 0.5]), jnp.array([True, True, True, False]), "max_min") > 0)
    [ True  True  True False]
    """
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
    (total,) = bucket_sums(keys, jnp.where(valid, (noise * 2**24).astype(jnp.uint32), 0))
    return (total & 0xFFFFFF).astype(jnp.float32) * 2**-24
