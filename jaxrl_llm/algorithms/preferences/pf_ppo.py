"""Policy Filtration for PPO (PF-PPO)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.classic.ppo import ppo
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.choices import Scheme
from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.hyperparameters import CODE, OURS, PAPER, NonNegative, Positive
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Trajectories, bucket_sums
from jaxrl_llm.core.transform import chain
from jaxrl_llm.selection.noise import row_noise
from jaxrl_llm.selection.rows import (
    RANK_SCHEMES,
    SCORE_SCHEMES,
    keep_weighted,
    key_noise,
    rank_weights,
    ranks_within,
    resampled_counts,
    score_weights,
)
from jaxrl_llm.utils.errors import require_choice


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


@method(
    paper="arXiv 2409.06957",
    year=2024,
    test="test_selecting.py::test_pf_ppo_counts_what_it_draws",
    beside={"normalisation": ("the normalisation of rewards", "a transform of rewards")},
)
def pf_ppo(
    scheme: Annotated[Scheme, PAPER] = "best_random",
    draws: Annotated[float | None, OURS] = None,
    power: Annotated[Positive, CODE] = 2.0,
    clip_low: Annotated[NonNegative, OURS] = 0.2,
    clip_high: Annotated[NonNegative, OURS] = 0.2,
    kl_coefficient: Annotated[NonNegative, OURS] = 0.05,
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
    require_choice("scheme", scheme, (*RANK_SCHEMES, *SCORE_SCHEMES))
    check_number("draws", draws, least=1, or_none=True)

    base = ppo(clip_low=clip_low, clip_high=clip_high, kl_coefficient=kl_coefficient)
    return Algorithm(chain(base.transform, keep_weighted(drawn_by_score(scheme, draws, power))), base.objective)
