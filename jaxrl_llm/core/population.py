"""Policies beside the one that learns: a population around it, for evolution strategies, and earlier policies of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from jaxrl_llm.core.arguments.checks import check_fields
from jaxrl_llm.core.arguments.ranges import AtLeastTwo, Count, NonNegativeInt, Positive, Range
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

    sigma: Positive = 1e-3
    rank: Count = 1
    reuse: NonNegativeInt = 1
    """Steps in a row that have the same noise; 0: all."""
    seed: Annotated[int, Range(least=0, most=2**32 - 1)] = 0
    """Of the noise of all steps; a run puts its own here."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, jax.Array):
                raise InputError(f"a population's {name} is an array, but is part of the program: give a plain number")
        check_fields(self)

    __repr__ = layout

    def seed_at(self, step: Any) -> jax.Array:
        """The seed of the noise of a step, uint32[] below SEEDS. step: int or int32[]."""
        return noise_seed(jax.random.key(self.seed), self, step)


def noise_seed(key: jax.Array, population: Population, step: Any) -> jax.Array:
    """`Population.seed_at` a step of a run that has a key, which may be traced, instead of the population's seed."""
    epoch = step // population.reuse if population.reuse else 0
    own = jax.random.fold_in(key, OF_NOISE)  # unlike all that is drawn from the key itself
    return jax.random.bits(jax.random.fold_in(own, epoch), dtype=jnp.uint32) % SEEDS


Params = Any
LEAGUE = "league"  # the entry of its parameters


@dataclass(frozen=True, repr=False)
class League:
    """Earlier policies that a rollout plays against: which are kept beside the one that learns, in places below size.

    size: of them, at least 2. The first policy keeps place 0, and stands in the others until they are taken. every:
    updates from one snapshot to the next, which take the places 1, 2, ... size - 1, 1, 2 ... Each takes the memory of
    the weights that learn, of adapters alone with LoRA.
    """

    size: AtLeastTwo = 8
    every: Count = 20

    def __post_init__(self) -> None:
        check_fields(self)

    __repr__ = layout

    def place(self, updates: jax.Array) -> jax.Array:
        """int32[]: where the policy after so many updates goes, from 1 to size - 1; `size`, which is no place, where it
        is not kept."""
        kept = (updates > 0) & (updates % self.every == 0)
        return jnp.where(kept, 1 + (updates // self.every - 1) % (self.size - 1), self.size)

    def update(self, kept: Sequence[Params], params: Params, updates: jax.Array) -> tuple[Params, ...]:
        """The policies after so many updates, of which the last gave `params`."""
        place = self.place(updates)
        return tuple(
            jax.tree.map(lambda old, new, taken=place == number: jnp.where(taken, new, old), one, params)
            for number, one in enumerate(kept)
        )
