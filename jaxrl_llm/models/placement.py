"""How weights and hidden states are sharded over a mesh while a policy is computed.

A mesh has some of these axes. Rows are sharded over the first three; while tokens are sampled, over the first four.

    data       rows
    fsdp       rows; weights and their moments are stored in shards (`distributed.fully_sharded`): those of a layer are
               all-gathered when the layer runs, and again in the backward pass
    expert     rows; the experts of a mixture, which exchange tokens (`experts`)
    sequence   tokens of packed rows in learning, but heads in attention (DeepSpeed-Ulysses, 2309.14509): of the tokens,
               queries, keys, values and results of attention are exchanged in each layer, and nothing else is
    tensor     heads, inner units and the vocabulary; between layers, tokens (sequence parallelism, 2205.05198)

What a device with T tokens receives in a layer over s devices along "sequence", in bytes, with H query heads, K
key-value heads, of which there are K' = lcm(K, s) copies, h head size and b bytes a number: T (2 H + 2 K') h b (s-1)/s
in the forward pass, and as much in the backward pass.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxrl_kernels import norm_rotate
from jaxrl_kernels.implementations import takes_triton

from jaxrl_llm.models import mesh_axes
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.mesh_axes import (
    FSDP,
    ROWS,
    SAMPLED_ROWS,
    SEQUENCE,
    TENSOR,
    AnyMesh,
    axes_of,
    row_shards,
    takes_kernels,
)
from jaxrl_llm.models.parameters import AXES

Turned = Callable[[jax.Array, jax.Array | None, jax.Array, jax.Array], jax.Array]  # see `norm_rotate`

Flat = Callable[[jax.Array], jax.Array]


class Placement(NamedTuple):
    """Sharding constraints on a layer's states and weights."""

    states: Callable[[jax.Array, bool], jax.Array]  # [N, L, D]: between layers or, if True, where projections read them
    flat: Callable[[int, int], Flat | None]  # (N, L) -> the former of states as a matrix [N L, D], if that can be
    weights: Callable[[dict[str, Any]], dict[str, Any]]  # of one layer
    heads: Callable[[jax.Array], jax.Array]  # queries, keys or values [N, L, heads, h], for attention
    tokens: Callable[[jax.Array], jax.Array]  # [N, L, H, h] that attention gives, for the projection
    units: Callable[[jax.Array], jax.Array]  # [N, L, inner units] of the MLP
    joined: frozenset[str]  # projections that are one product with their adapters, see `projections.joined_product`
    turned: Turned | None  # norm and rotation of heads by a kernel; None: in JAX
    routed: tuple[tuple[str, ...], tuple[str, ...]]  # axes of the mesh over which [N, L, D] goes through experts
    gathers: bool  # whether `weights` gathers them


ANYWHERE = Placement(
    lambda x, whole: x, lambda N, L: None, lambda layer: layer, lambda x: x, lambda x: x, lambda x: x, frozenset(),
    None, (SAMPLED_ROWS, ()), False,
)  # fmt: skip


def placement(config: ModelConfig, mesh: Mesh | None) -> Placement:
    """Rows over ROWS; tokens over "sequence" and, between layers, so that the residuals of the backward pass are
    sharded, over "tensor"; weights by `split_spec`. What does not divide is replicated, but for key-value heads in
    attention: they are repeated for the devices along "sequence" that need them.
    """
    kernels = _takes_tpu_kernels(mesh)
    by_kernel, joined = (_turned(config, mesh=mesh), frozenset(AXES)) if kernels else (None, frozenset())
    if mesh is None:
        natural = partial(tokens_before_units, spec=None, mesh=None)
        states_alone = (lambda x, whole: natural(x) if x.ndim == 3 else x) if kernels else ANYWHERE.states
        return ANYWHERE._replace(states=states_alone, turned=by_kernel, joined=joined)
    if mesh.shape.get(TENSOR, 1) > 1:
        joined -= {"out", "down"}  # whose inputs are sharded
    parts = mesh.shape.get(SEQUENCE, 1) * mesh.shape.get(TENSOR, 1)
    by_heads = mesh.shape.get(SEQUENCE, 1) > 1 and config.num_heads % parts == 0

    def put(x: jax.Array, *axes: Any) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*axes)))

    def rows(x: jax.Array) -> Any:
        return axes_of(mesh, ROWS) if x.shape[0] % row_shards(mesh) == 0 else None

    flat = partial(_flat, mesh, ROWS, (SEQUENCE, TENSOR))

    def states(x: jax.Array, whole: bool) -> jax.Array:
        if x.ndim == 2:
            even = x.shape[0] % row_shards(mesh, SAMPLED_ROWS) == 0
            return put(x, axes_of(mesh, SAMPLED_ROWS) if even else rows(x))
        names: tuple[str, ...] = (SEQUENCE,) if whole else (SEQUENCE, TENSOR)
        while names and x.shape[1] % row_shards(mesh, names):
            names = names[:-1]
        split = axes_of(mesh, names)
        spec = (rows(x), split) if split else (rows(x),)

        def placed(x: jax.Array) -> jax.Array:
            found = put(x, *spec)
            return tokens_before_units(found, PartitionSpec(*spec), mesh) if kernels else found

        if not whole or (matrix := flat(*x.shape[:2])) is None:
            return placed(x)
        return _with_gradient(placed, lambda dy: matrix(dy.reshape(-1, dy.shape[-1])).reshape(dy.shape), x)

    def weights(layer: dict[str, Any]) -> dict[str, Any]:
        def placed(name: str, x: jax.Array) -> jax.Array:
            whole = partial(_as_matrix, put, name, spec=mesh_axes.split_spec(name, x.shape, config, mesh))
            # Over "fsdp" alone XLA for TPUs copies weights to other layouts for it, which takes longer than the sums.
            if mesh.shape.get(TENSOR, 1) == 1 or not jnp.issubdtype(x.dtype, jnp.inexact):
                return whole(x)
            stored = mesh_axes.stored_spec(name, x.shape, config, mesh)
            return _with_gradient(whole, partial(_as_matrix, put, name, spec=stored), x)

        # Rounded weights are several arrays.
        return {name: jax.tree.map(partial(placed, name), x) for name, x in layer.items()}

    # Without this the compiler gathers the weights of the backward pass, to keep tokens on their devices.
    def units(x: jax.Array) -> jax.Array:
        if mesh.shape.get(TENSOR, 1) == 1 or x.shape[-1] % mesh.shape[TENSOR]:
            return x
        names = (SEQUENCE,) if x.shape[1] % row_shards(mesh, (SEQUENCE,)) == 0 else ()
        return put(x, rows(x), axes_of(mesh, names), TENSOR)

    # Each exchange is pinned on both sides. Otherwise the compiler may project, or sum, whole rows on every device.
    def of_tokens(x: jax.Array) -> jax.Array:
        return put(x, rows(x), SEQUENCE, axes_of(mesh, (TENSOR,)))

    def of_heads(x: jax.Array) -> jax.Array:
        return put(x, rows(x), None, axes_of(mesh, (TENSOR, SEQUENCE)))

    def heads(x: jax.Array) -> jax.Array:
        if not by_heads or x.shape[1] % mesh.shape[SEQUENCE]:
            return x
        return of_heads(of_tokens(jnp.repeat(x, math.lcm(x.shape[2], parts) // x.shape[2], axis=2)))

    def tokens(x: jax.Array) -> jax.Array:
        return of_tokens(of_heads(x)) if by_heads and x.shape[1] % mesh.shape[SEQUENCE] == 0 else x

    gathers = mesh.shape.get(FSDP, 1) > 1
    return Placement(states, flat, weights, heads, tokens, units, joined, by_kernel, (ROWS, (SEQUENCE,)), gathers)


def sampler_placement(config: ModelConfig, mesh: Mesh | None) -> Placement:
    """Placement of the sampler: states and weights stay where they are. mesh: tells the kind of the devices."""
    return ANYWHERE._replace(turned=_turned(config, row_axis=SAMPLED_ROWS) if _takes_tpu_kernels(mesh) else None)


def _takes_tpu_kernels(mesh: Mesh | None) -> bool:
    """Whether the devices take the kernels for TPUs. GPUs have one for attention alone, and nothing to gain from these
    layouts and joined products."""
    device = mesh_axes.one_device(mesh)
    return takes_kernels(mesh) and not (device is not None and takes_triton(device))


def _turned(config: ModelConfig, **where: Any) -> Turned:
    return partial(norm_rotate, epsilon=config.norm_epsilon, offset=config.norm_offset, **where)


def between_layers(placed: Placement, mesh: AnyMesh | None, rows: int, tokens: int) -> Placement:
    """A placement with states [rows, tokens, D] over "tensor" between layers, so that devices share the norms.

    What devices receive in a layer is the same: a reduce-scatter and an all-gather instead of an all-reduce.
    """
    if mesh is None or mesh.shape.get(TENSOR, 1) == 1 or tokens % mesh.shape[TENSOR]:
        return placed
    over = axes_of(mesh, SAMPLED_ROWS) if rows % row_shards(mesh, SAMPLED_ROWS) == 0 else None

    def states(x: jax.Array, whole: bool) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, jax.P(over, None if whole else TENSOR)))

    return placed._replace(states=states, flat=partial(_flat, mesh, SAMPLED_ROWS if over else (), (TENSOR,)))


def _flat(mesh: AnyMesh, rows: Sequence[str], tokens: Sequence[str], N: int, L: int) -> Flat | None:
    """See `Placement.flat`. XLA for TPUs sums products and scatters the rows of the sum if they are matrices; of arrays
    with more axes it sums all on every device, which sends twice as much. A device has one row or a part of it.

    The gradient is gathered at once: XLA may gather it for each of its products, and for one of them all rows.
    """
    if mesh.shape.get(TENSOR, 1) == 1 or row_shards(mesh, rows) != N or L % row_shards(mesh, tokens):
        return None

    def over(*axes: str) -> Flat:
        spec = PartitionSpec(axes_of(mesh, axes))
        return lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    return partial(_with_gradient, over(*rows, *tokens), over(*rows))


def _with_gradient(there: Flat, back: Flat, x: jax.Array) -> jax.Array:
    """`there` of states or weights, whose gradients go through `back`. By itself JAX asks of both the same sharding:
    that of an array that is gathered would be summed on every device."""
    moved = jax.custom_vjp(there)
    moved.defvjp(lambda x: (there(x), None), lambda _, dy: (back(dy),))
    return moved(x)


def tokens_before_units(x: jax.Array, spec: PartitionSpec | None, mesh: Mesh | None) -> jax.Array:
    """States [N, L, D], and their gradient, with the numbers of a token next to each other in memory.

    Kernels for attention have it the other way round, and XLA for TPUs would lay out all states as those, whose
    products then take up to twice as long. spec: how the states are sharded over the mesh.
    """

    def laid_out(x: jax.Array) -> jax.Array:
        return with_layout_constraint(x, Layout((0, 1, 2)))

    return laid_out(x) if mesh is None else jax.shard_map(laid_out, mesh=mesh, in_specs=spec, out_specs=spec)(x)


def _as_matrix(put: Callable[..., jax.Array], name: str, x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """A weight with a sharding; that of heads as the matrix that projections multiply by, so that TPUs gather and
    sum its gradient in the layout of the product."""
    axes = tuple(spec) + (None,) * (x.ndim - len(spec))
    if name in ("query", "key", "value") and x.ndim == 3 and axes[2] is None:
        return put(x.reshape(x.shape[0], -1), *axes[:2]).reshape(x.shape)
    if name == "out" and x.ndim == 3 and axes[1] is None:
        return put(x.reshape(-1, x.shape[-1]), axes[0], axes[2]).reshape(x.shape)
    return put(x, *spec)


def all_but_weights(primitive: Any, *_: Any, **parameters: Any) -> bool:
    """A policy of `jax.checkpoint`: save everything but gathered weights, and what costs nothing to compute again."""
    if primitive.name == "sharding_constraint":  # states have rows
        return FSDP in jax.tree.leaves(tuple(parameters["sharding"].spec))
    free = ("reshape", "transpose", "convert_element_type", "slice", "dynamic_slice", "squeeze")  # a layer's of all
    return primitive.name not in free
