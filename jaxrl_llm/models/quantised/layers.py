"""The layers of a decoder with rounded projections: which are rounded, how, and how they lie on a mesh."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxrl_llm.core.trajectory import Array
from jaxrl_llm.models import quantised
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.mesh_axes import AnyMesh, split_spec
from jaxrl_llm.models.parameters import PROJECTIONS, parameter_shapes
from jaxrl_llm.models.quantised import BLOCKS, KINDS, Quantised, QuantisedBlocks, is_rounded, quantise, quantise_blocks
from jaxrl_llm.models.quantised.normal_float import NormalFloat, normal_float
from jaxrl_llm.utils.errors import InputError

NAMES = frozenset(name for name, weight in PROJECTIONS.items() if not {"one", "taps", "all_inputs"} & {*weight.axes})
NAMES -= {"router", "delta_rate", "delta_decay", "score"}


def quantised_layer(layer: dict[str, Any], kind: str | None) -> dict[str, Any]:
    """A layer's parameters, or those of all layers, with its projections rounded where they are not; None: as it is.

    kind: of KINDS or BLOCKS. InputError for blocks in a layer of experts, or of latent attention.
    """

    def round_one(name: str, w: Array, kind: str) -> Quantised | QuantisedBlocks:
        if kind in BLOCKS:
            return quantise_blocks(w, BLOCKS[kind], inputs_of(name))
        return quantise(w, kind, inputs_of(name))

    return _with_projections(layer, kind, round_one)


def straight_through_layer(layer: dict[str, Any], kind: str | None) -> dict[str, Any]:
    """A layer's parameters, whose projections are rounded where they are used, but for those that are already.

    kind, InputError: as of `quantised_layer`.
    """

    def mark(name: str, w: Array, kind: str) -> quantised.StraightThrough | quantised.StraightThroughBlocks:
        return (
            quantised.StraightThroughBlocks(w, BLOCKS[kind])
            if kind in BLOCKS
            else quantised.straight_through(w, kind, inputs_of(name))
        )

    return _with_projections(layer, kind, mark)


def _with_projections(layer: dict[str, Any], kind: str | None, change: Callable[..., Any]) -> dict[str, Any]:
    """A layer, with change(name, w, kind) in place of each projection w that is not rounded."""
    if kind is None:
        return layer
    other = {"router": "experts", "key_out": "latent attention"}
    if kind in BLOCKS and (found := [what for name, what in other.items() if name in layer]):
        raise InputError(
            f"{kind} rounds the products of dense layers, but the model has {' and '.join(found)}: give weight_dtype "
            f"{BLOCKS[kind].kind}, or another model"
        )
    return {name: change(name, w, kind) if name in NAMES and not is_rounded(w) else w for name, w in layer.items()}


# How a frozen matrix may be kept, by name: a function of it and its axes of inputs.
FROZEN: dict[str, Callable[..., Quantised | NormalFloat]] = {
    **{kind: partial(quantise, kind=kind) for kind in KINDS},
    "nf4": normal_float,
}


@partial(jax.jit, static_argnames=("kind", "name"))
def frozen_weight(name: str, w: Array, kind: str) -> Any:
    """A parameter as it is kept where it does not learn: a projection of layers rounded to a kind of FROZEN."""
    return FROZEN[kind](w, inputs=inputs_of(name)) if name in NAMES else w


def rounded_specs(name: str, w: Quantised | NormalFloat, config: ModelConfig, mesh: AnyMesh) -> Any:
    """PartitionSpecs of a rounded weight on a mesh, for `shard_map`: scales are split as what they are scales of.

    InputError where blocks of inputs would be cut. config: of the layer.
    """
    if isinstance(w, Quantised):
        return jax.tree.map(lambda x: split_spec(name, x.shape, config, mesh), w)
    spec = split_spec(name, w.shape, config, mesh)
    for axis, size in zip(spec, w.scale.shape, strict=False):
        if axis is not None and size % mesh.shape[axis]:
            raise InputError(
                f"{axis}={mesh.shape[axis]} of the mesh would cut blocks of 64 inputs of {name}, of which there are "
                f"{size}: give a number that divides them, or frozen_dtype int8"
            )
    return NormalFloat(spec, spec)  # type: ignore[arg-type]


def inputs_of(name: str) -> tuple[int, ...]:
    """The axes of a projection that are its inputs, counted from the last."""
    weight = PROJECTIONS[name]
    first = len(weight.stacked) - len(weight.axes)
    return tuple(range(first, first + weight.inputs))


def quantised_specs(config: ModelConfig, mesh: AnyMesh, specs: dict[str, PartitionSpec], kind: str) -> dict[str, Any]:
    """PartitionSpecs of a `quantised_layer`, given those of the layer: scales are split over outputs as values are, and
    those of blocks are whole on each device.

    config: of the layer; kind: of KINDS or BLOCKS.
    """
    shapes = parameter_shapes(config)

    def of_scale(name: str) -> PartitionSpec:
        shape = list(shapes["layers", name][1:])
        for axis in inputs_of(name):
            shape[axis] = 1
        return split_spec(name, shape, config, mesh)

    def split(name: str, spec: Any) -> Any:
        if kind in BLOCKS:
            return QuantisedBlocks(spec, PartitionSpec(), BLOCKS[kind])  # type: ignore[arg-type]
        return Quantised(spec, of_scale(name))  # type: ignore[arg-type]

    return {name: split(name, spec) if name in NAMES else spec for name, spec in specs.items()}


def cast(layer: dict[str, Any], dtype: Any) -> dict[str, Any]:
    """The arrays of floats of a layer in a dtype; rounded ones, and whole numbers, as they are.

    Weights of norms are at least in float32, in which norms are computed: else each decode step would convert them.
    """
    wide = jnp.promote_types(dtype, jnp.float32)

    def cast_one(path: Any, x: Any) -> Any:
        if is_rounded(x) or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return x.astype(wide if str(path[-1].key).endswith("_norm") else dtype)

    found: dict[str, Any] = jax.tree_util.tree_map_with_path(cast_one, layer, is_leaf=is_rounded)
    return found
