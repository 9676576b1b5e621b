"""Weights that differ from row to row: each row of a batch adds a low-rank product of its own to a layer's products.

A layer's dictionary has, under ROWS, whose they are: `Members`, the members of a population (`core.population`), whose
matrices are drawn where they are used, from a few numbers, and never kept. LoRA adapters by row need no entry of their
own: there the factor LORA_SCALE is one for each row and rank (`projections.scaled_low_rank`, `models.by_row.adapters`).

N rows, L tokens, r rank.
"""

from __future__ import annotations

import zlib
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core.population import Population
from jaxrl_llm.core.trajectory import Array
from jaxrl_llm.models.parameters import ADAPTED

ROWS = "rows"


class Members(flax.struct.PyTreeNode):
    """The members that rows of one layer belong to; with a leading axis of layers where these are stacked."""

    seed: Array  # uint32[], of the noise; uint32[N] where rows are of several steps
    layer: Array  # int32[], its number in the model
    number: Array  # int32[N], of the member
    population: Population = flax.struct.field(pytree_node=False)

    @property
    def factor(self) -> Array:
        """f32[N]: what multiplies B A^T: sign_n sigma / sqrt(r)."""
        return jnp.where(self.number % 2 == 0, 1.0, -1.0) * (self.population.sigma / self.population.rank**0.5)


def noise(members: Members, name: str, inputs: int, outputs: int) -> tuple[Array, Array]:
    """B f32[N, inputs, r] and A f32[N, outputs, r] of the matrix `name` of a layer, for each row."""
    matrix = np.uint32(zlib.crc32(name.encode()))

    def of_pair(seed: Array, pair: Array) -> Array:
        key = jax.random.key(seed)
        for number in (members.layer, matrix, pair):
            key = jax.random.fold_in(key, number)
        return jax.random.normal(key, (inputs + outputs, members.population.rank), jnp.float32)

    pairs = members.number // 2
    both = jax.vmap(of_pair)(jnp.broadcast_to(members.seed, pairs.shape), pairs)
    return both[:, :inputs], both[:, inputs:]


def inner_products(w: Array, members: Members, name: str) -> Array:
    """f32[N]: <w, sign_n (sigma / sqrt(r)) B A^T> of each row's member, w [inputs, outputs]."""
    into, out = noise(members, name, *w.shape)
    return members.factor * jnp.sum(jnp.einsum("nir,io->nor", into, w.astype(jnp.float32)) * out, axis=(1, 2))


@jax.named_scope("member")
def with_members(y: Array, x: Array, layer: dict[str, Any], name: str) -> Array:
    """y [N, L, outputs], what a projection makes of x [N, L, inputs], with what each row's own member adds to it."""
    members = layer.get(ROWS)
    if members is None or name not in ADAPTED:
        return y
    into, out = noise(members, name, x.shape[-1], y.shape[-1])
    wide = jnp.promote_types(y.dtype, jnp.float32)
    low_rank = jnp.einsum("nlk,nkr->nlr", x.astype(wide), into) * members.factor[:, None, None]
    return (y.astype(wide) + jnp.einsum("nlr,nor->nlo", low_rank, out)).astype(y.dtype)
