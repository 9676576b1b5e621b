"""Projections of a layer: products with weights, with their low-rank adapters, and with what differs by row.

Each row of a batch may add a low-rank product of its own. A layer's dictionary has, under ROWS, whose they are:
`Members` of a population (`core.population`), whose matrices are drawn where they are used, from a few numbers, and
never kept. LoRA adapters by row need no entry: there the factor LORA_SCALE is one for each row and rank
(`scaled_low_rank`, `models.by_row`). N rows, L tokens, r rank.
"""

import zlib
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxrl_llm.core.population import Population
from jaxrl_llm.core.trajectory import Array
from jaxrl_llm.models.layers.products import matrix_product
from jaxrl_llm.models.parameters import ADAPTED, LORA_IN, LORA_OUT, LORA_SCALE
from jaxrl_llm.models.placement import Placement
from jaxrl_llm.models.quantised import Weight, dense

PROJECTION = "projection"  # what projections give is called in policies of `jax.checkpoint`


def linear(x: Array, weight: Weight) -> Array:
    """x [..., K] @ weight [K, N] -> [..., N], as a product of two matrices. The axes of inputs, and of outputs, of the
    weight may be several; it may be rounded (`quantised`).

    With more axes, XLA on CPU writes transposed copies of x and of the output's gradient for the weight's gradient,
    and recomputes what they are made from: a gated MLP's gradient takes 1.4 times as long.
    """
    return matrix_product(x.reshape(-1, x.shape[-1]), weight).reshape(*x.shape[:-1], -1)


# A policy of `jax.checkpoint` sees no products in functions that have gradients of their own, but names.
keep_projections = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable, jax.checkpoint_policies.save_only_these_names(PROJECTION)
)


def project(x: Array, weight: Weight, layer: dict[str, Any], name: str, joined: bool = False) -> Array:
    """`linear`, plus the adapter's output where one layer's dictionary has an adapter for `name`, and what each row's
    own member of a population adds (`by_row`). `keep_projections` tells `jax.checkpoint` to keep it.

    joined: compute both as one product, see `joined_product`, unless the weight is rounded.
    """
    return checkpoint_name(with_members(_adapted(x, weight, layer, name, joined), x, layer, name), PROJECTION)


def _adapted(x: Array, weight: Weight, layer: dict[str, Any], name: str, joined: bool) -> Array:
    if name + LORA_IN not in layer:
        return linear(x, weight)
    into, out = layer[name + LORA_IN].reshape(x.shape[-1], -1), layer[name + LORA_OUT]
    out = out.reshape(into.shape[-1], -1)
    if joined and isinstance(weight, Array):
        into = into * layer[LORA_SCALE] if LORA_SCALE in layer else into
        return joined_product(x, into, weight.reshape(x.shape[-1], -1), out)
    return linear(x, weight) + linear(scaled_low_rank(linear(x, into), layer), out)


def scaled_low_rank(x: Array, found: dict[str, Any]) -> Array:
    """What the first matrix of an adapter gives, x [N, L, r], times the factor that is beside it, if one is, in the
    dtype of x. The factor is one number, or one for each row and rank [N, r]: 0 where the row has another adapter."""
    if LORA_SCALE not in found:
        return x
    scale = found[LORA_SCALE].astype(x.dtype)
    return x * (scale[:, None] if scale.ndim else scale)


def with_adapter(layer: dict[str, Any], name: str) -> Array:
    """A projection with its adapter's product added, in the dtype of the weight."""
    weight: Any = layer[name]
    weight = weight if isinstance(weight, Array) else dense(weight)
    if name + LORA_IN not in layer:
        return weight
    into, out = layer[name + LORA_IN], layer[name + LORA_OUT]
    low_rank = into.reshape(-1, into.shape[-1]) @ out.reshape(out.shape[0], -1)
    low_rank = low_rank * layer[LORA_SCALE] if LORA_SCALE in layer else low_rank
    return weight + low_rank.reshape(weight.shape).astype(weight.dtype)


@jax.custom_vjp
def joined_product(x: Array, into: Array, weight: Array, out: Array) -> Array:
    """x [..., K] @ (weight [K, N] + into [K, r] @ out [r, N]), as two products: x @ into, and that beside x.

    By itself the product with `out` takes half as long on TPUs as that with the weight, although it has r / K of its
    operations, because the result goes through memory twice more; and so does that with `into` in the backward pass.
    """
    return _joined(x, linear(x, into), weight, out)


def _joined(x: Array, low_rank: Array, weight: Array, out: Array) -> Array:
    return linear(jnp.concatenate([x, low_rank], axis=-1), jnp.concatenate([weight, out], axis=0))


def _joined_product_forward(x: Array, into: Array, weight: Array, out: Array) -> tuple[Array, tuple[Array, ...]]:
    low_rank = linear(x, into)
    return _joined(x, low_rank, weight, out), (x, low_rank, into, weight, out)


def _joined_product_backward(residuals: tuple[Array, ...], dy: Array) -> tuple[Array, ...]:
    x, low_rank, into, weight, out = residuals
    d_low_rank = linear(dy, out.T)

    def of_matrix(inputs: jax.Array, d_outputs: jax.Array) -> jax.Array:
        return inputs.reshape(-1, inputs.shape[-1]).T @ d_outputs.reshape(-1, d_outputs.shape[-1])

    dx = _joined(dy, d_low_rank, weight.T, into.T)
    return dx, of_matrix(x, d_low_rank), of_matrix(x, dy), of_matrix(low_rank, dy)


joined_product.defvjp(_joined_product_forward, _joined_product_backward)


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


def project_summed(x: Array, layer: dict[str, Any], name: str, placement: Placement) -> Array:
    """`project` of x [N, L, K], sharded by K, -> [N, L, D], in the placement that states have between layers.

    XLA for TPUs sums and scatters the rows of a matrix; with more axes it sums all tokens on every device.
    """
    joined = name in placement.joined
    alone = name + LORA_IN not in layer and ROWS not in layer
    if alone and (spread := placement.flat(*x.shape[:2])) is not None:
        y = project(x.reshape(-1, x.shape[-1]), layer[name], layer, name, joined)
        return spread(y).reshape(*x.shape[:2], -1)
    return project(x, layer[name], layer, name, joined)
