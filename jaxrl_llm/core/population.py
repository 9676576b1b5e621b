"""A population of policies around the one that learns, for evolution strategies: how its members differ from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.core.arguments.ranges import check_number
from jaxrl_llm.core.repr import layout
from jaxrl_llm.utils.errors import InputError

OF_NOISE = 0x6E6F6973
SEEDS = 2**24  # seeds of noise are whole numbers below it, which float32 holds exactly, as a batch carries them


@dataclass(frozen=True, repr=False)
class Population:
    """Member n has W + sign_n (sigma / sqrt(rank)) B A^T in place of every projection of a layer, W [inputs, outputs].

    A [outputs, rank] and B [inputs, rank] are standard normal, drawn from the seed of the noise, the matrix and n // 2;
    sign_n is +1 for even n and -1 for odd n, so that two members share their noise (2511.16652). Embeddings, experts
    and all that is no projection are those of the policy. A static part of a `Policy` (`Policy.population`).
    """

    sigma: float = 1e-3
    rank: int = 1
    reuse: int = 1
    """Steps in a row that have the same noise; 0: all."""
    seed: int = 0
    """Of the noise of all steps; a run puts its own here."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, jax.Array):
                raise InputError(f"a population's {name} is an array, but is part of the program: give a plain number")
        check_number("a population's sigma", self.sigma, above=0)
        check_number("a population's rank", self.rank, least=1, whole=True)
        check_number("a population's reuse", self.reuse, least=0, whole=True)
        check_number("a population's seed", self.seed, least=0, most=2**32 - 1, whole=True)

    __repr__ = layout

    def seed_at(self, step: Any) -> jax.Array:
        """The seed of the noise of a step, uint32[] below SEEDS. step: int or int32[]."""
        return noise_seed(jax.random.key(self.seed), self, step)


def noise_seed(key: jax.Array, population: Population, step: Any) -> jax.Array:
    """`Population.seed_at` a step of a run that has a key, which may be traced, instead of the population's seed."""
    epoch = step // population.reuse if population.reuse else 0
    own = jax.random.fold_in(key, OF_NOISE)  # unlike all that is drawn from the key itself
    return jax.random.bits(jax.random.fold_in(own, epoch), dtype=jnp.uint32) % SEEDS
