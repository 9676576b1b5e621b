"""The weights of the decode loop: padding, rounding, shardings on a mesh, and the layout in the memory of TPUs."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.distributed import named_shardings, parameter_specs
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.layers.recurrent import Carried
from jaxrl_llm.models.lora import own_adapters
from jaxrl_llm.models.mesh_axes import SAMPLED_ROWS, AnyMesh, axes_of, split_spec
from jaxrl_llm.models.parameters.table import TABLE
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.models.quantised import QuantisedBlocks, is_rounded, kind_of
from jaxrl_llm.models.quantised.layers import cast, quantised_layer, quantised_specs
from jaxrl_llm.models.stacks import of_kind, place_of, unstack
from jaxrl_llm.sampling.decode import RingCache
from jaxrl_llm.sampling.kv_cache import PrefixCache
from jaxrl_llm.sampling.speculative.verify import Tail

LANE = 128  # lanes of a TPU's tile; devices split the vocabulary at multiples of it
TO_HEADS = frozenset(  # projections [D, heads, h]
    weight.name for weight in TABLE if len(weight.axes) == 4 and weight.axes[1] == "hidden"
)


class LoopOptions(NamedTuple):
    """How `loop_params` stores weights; static."""

    vocab_shards: int = 1  # slices of the vocabulary; if there are several, each is a multiple of LANE tokens
    # Pad the rows of the unembedding to a multiple of LANE numbers. XLA for TPUs stores a matrix with other rows
    # transposed, so that the loop, which both embeds and draws tokens, would begin with copies of it.
    pad_lanes: bool = False
    wide_head: bool = False  # the unembedding in the activations' dtype, for CPUs, which would convert it at each step
    rounding: str | None = None  # projections of layers are `Quantised`, or `QuantisedBlocks`
    inputs_last: bool = False  # on a mesh, projections to heads lie as TPUs multiply by them, see `with_inputs_last`

    def padding(self, policy: Policy) -> tuple[int, int]:
        """How many rows, and how many numbers in each row, the unembedding is padded by."""
        rows = -policy.config.vocab_size % (self.vocab_shards * LANE) if self.vocab_shards > 1 else 0
        return rows, -policy.config.hidden_size % LANE if self.pad_lanes else 0

    def own_head(self, policy: Policy) -> bool:
        """Whether the loop has an unembedding of its own, "head"."""
        widens = self.wide_head and jnp.dtype(policy.activation_dtype) != jnp.dtype(policy.dtype)
        return any(self.padding(policy)) or widens


PLAIN = LoopOptions()


def options_for(device: jax.Device | None, mesh: AnyMesh | None = None, rounding: str | None = None) -> LoopOptions:
    """The options for a device, None is the default one, or for a mesh of such."""
    platform = jax.default_backend() if device is None else device.platform
    shards = 1 if mesh is None else mesh.shape.get("tensor", 1)
    several = mesh is not None and mesh.size > 1
    return LoopOptions(shards, platform == "tpu", platform == "cpu", rounding, platform == "tpu" and several)


def with_inputs_last(places: dict[str, Any]) -> dict[str, Any]:
    """Shardings of the arrays of a layer, with a layout for projections to heads: their D inputs innermost.

    Products on TPUs read these projections as matrices [heads h, D]. In the layout that XLA gives an array [D, heads,
    h] each program would begin with a copy: of a prompt's prefill that takes up to a tenth, and in the decode loop the
    memory of all these projections again. Shapes and values are the same.
    """

    def lay(place: Any) -> Any:
        if isinstance(place, QuantisedBlocks):
            return dataclasses.replace(place, values=lay(place.values))
        if is_rounded(place):  # the values, or levels
            return place._replace(**{place._fields[0]: lay(place[0])})
        return Format(Layout(major_to_minor=(1, 2, 0)), place)

    return places | {name: lay(place) for name, place in places.items() if name in TO_HEADS}


Bring = Callable[[Params, int | None], Params]  # (arrays, number of their layer; None: all but layers)


class Converter(NamedTuple):
    """Programs that give a mesh the loop's weights: the layers one by one, so that no more than one is there twice.

    A program for all would gather them all, and then copy each to where it stays.
    """

    others: Any  # of all arrays but those of layers
    layers: tuple[Any, ...]  # of each kind: of its layers, stacked, and the place of one; or of one, and None
    options: LoopOptions

    def __call__(
        self, policy: Policy, params: Params, bring: Bring | None = None, finish: Callable[[Any], Any] | None = None
    ) -> Params:
        """The loop's weights. bring: takes parameters from other devices to the mesh; finish: takes what the programs
        give from there to others. With one of them a layer has arrived before the next one sets out."""
        layers, config = params["layers"], policy.config
        waits, found = bring is not None or finish is not None, []

        def through(program: Any, arrays: Any, number: int | None, *place: Any) -> Any:
            arrays = arrays if bring is None else bring(arrays, number)
            out = program(policy, arrays, *place, self.options)
            out = out if finish is None else finish(out)
            return jax.block_until_ready(out) if waits else out

        others = through(self.others, outside_layers(params), None)
        for number, kind in enumerate(config.kind_of_layer or (0,) * config.num_layers):
            place: Any = None
            if isinstance(layers, tuple):
                given = layers[number]
            else:
                given, place = of_kind(layers, config, kind), np.int32(place_of(config, number))
                if bring is not None:
                    given, place = _one_of(given, place), None
            found.append(through(self.layers[kind], given, number, place))
        return others | {"layers": tuple(found)}


@jax.jit
def _one_of(layers: Any, place: Any) -> Any:
    """One layer out of stacked ones."""
    return jax.tree.map(lambda x: x[place], layers)


def converter(policy: Policy, params: Params, mesh: Mesh, rounding: str | None = None) -> Converter:
    """`loop_params` with the loop's shardings on a mesh of several devices."""
    options = options_for(mesh.devices.flat[0], mesh, rounding)
    target = named_shardings(loop_specs(policy, mesh, params, options), mesh)
    others = jax.jit(_others, static_argnums=(0, 2), out_shardings=outside_layers(target))
    layers = tuple(
        jax.jit(_layer, static_argnums=(0, 3), out_shardings=with_inputs_last(one) if options.inputs_last else one)
        for one in [target["layers"][policy.config.layers_of(kind)[0]] for kind in range(len(policy.config.each_kind))]
    )
    return Converter(others, layers, options)


def whole_converter(policy: Policy, mesh: Mesh | None, options: LoopOptions) -> Converter:
    """`loop_params` of a layer at a time, whole on each device of the mesh of the parameters."""
    where = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    layer = jax.jit(_layer, static_argnums=(0, 3), out_shardings=where)
    others = jax.jit(_others, static_argnums=(0, 2), out_shardings=where)
    return Converter(others, (layer,) * len(policy.config.each_kind), options)


def outside_layers(params: Params) -> Params:
    """All but the layers."""
    return {name: x for name, x in params.items() if name != "layers"}


def abstract_weights(
    policy: Policy, params: Any, mesh: Mesh | None = None, weight_dtype: str | Any | None = None
) -> Params:
    """ShapeDtypeStructs of the loop's weights, with shardings and layouts on a mesh, for compiling ahead of time.

    params: arrays or ShapeDtypeStructs. The other arguments are those of `take_weights`.
    """
    device = None if mesh is None else mesh.devices.flat[0]
    options = options_for(device, mesh, kind_of(weight_dtype) or policy.rounding)
    shapes = jax.eval_shape(lambda p: loop_params(policy, p, options), params)
    if mesh is None:
        return shapes
    places = loop_places(policy, params, mesh, options)
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, places)


def loop_places(policy: Policy, params: Any, mesh: Mesh, options: LoopOptions) -> Params:
    """Where the arrays of `loop_params` are on a mesh: shardings, and layouts where options ask for them."""
    places = named_shardings(loop_specs(policy, mesh, params, options), mesh)
    if options.inputs_last:
        places["layers"] = tuple(map(with_inputs_last, places["layers"]))
    return places


@partial(jax.jit, static_argnums=(0, 2))
def loop_params(policy: Policy, params: Params, options: LoopOptions = PLAIN) -> Params:
    """The parameters with a dict per layer, in the policy's dtype; "head" is the unembedding if it is another."""
    layers = tuple(_layer(policy, layer, None, options) for layer in unstack(params, policy.config)["layers"])
    return _others(policy, outside_layers(params), options) | {"layers": layers}


@partial(jax.jit, static_argnums=(0, 2))
def adapter_loop_params(policy: Policy, params: Params, options: LoopOptions = PLAIN) -> Params:
    """Those of `loop_params` that adapters have to themselves: what else there is would be that of the model alone."""
    found = loop_params(policy, params, options)
    head = {"head": found["head"]} if "unembed_lora_out" in params else {}
    return own_adapters(found) | head | {"layers": tuple(map(own_adapters, found["layers"]))}


def _others(policy: Policy, params: Params, options: LoopOptions) -> Params:
    """`loop_params` of all arrays but those of layers."""
    out = {name: x if name.endswith("_norm") else x.astype(policy.dtype) for name, x in params.items()}
    if options.own_head(policy) or "unembed_lora_out" in out:  # no step shall put that beside the unembedding
        head = jnp.pad(policy.unembedding(out), [(0, n) for n in options.padding(policy)])
        out["head"] = head.astype(policy.activation_dtype) if options.wide_head else head
        for name in ("unembed", "unembed_lora_out"):
            out.pop(name, None)
    return out


def _layer(policy: Policy, layers: Params, number: Any, options: LoopOptions) -> Params:
    """`loop_params` of one layer. number: which, of stacked ones; None if `layers` are the arrays of one."""
    layer = layers if number is None else jax.tree.map(lambda x: x[number], layers)
    # Rounded from the policy's dtype, as in the update.
    return quantised_layer(cast(layer, policy.dtype), options.rounding)


def loop_specs(policy: Policy, mesh: AnyMesh, adapted: Any = None, options: LoopOptions = PLAIN) -> Any:
    """A PartitionSpec for each array of `loop_params`. adapted: parameters whose LoRA adapters are included."""
    specs = parameter_specs(policy.config, mesh, False, adapted)
    options = options._replace(vocab_shards=mesh.shape.get("tensor", 1))
    if options.own_head(policy) or "unembed_lora_out" in specs:
        for name in ("unembed", "unembed_lora_out"):
            specs.pop(name, None)
        specs["head"] = PartitionSpec("tensor") if options.vocab_shards > 1 else PartitionSpec()
    if options.rounding is not None:
        own = map(policy.config.of_layer, range(policy.config.num_layers))
        each = zip(own, specs["layers"], strict=True)
        specs["layers"] = tuple(quantised_specs(config, mesh, layer, options.rounding) for config, layer in each)
    return specs | {"layers": _with_rounded(specs["layers"], adapted, policy.config, mesh)}


def _with_rounded(specs: tuple[Any, ...], given: Any, config: ModelConfig, mesh: AnyMesh) -> tuple[Any, ...]:
    """The specs of layers where some weights of the parameters given are kept rounded: of each of their arrays."""
    if given is None:
        return specs
    layers = jax.eval_shape(lambda params: unstack(params, config)["layers"], given)

    def split(number: int, layer: Params) -> Params:
        own = config.of_layer(number)

        def specs_of(name: str, w: Any) -> Any:
            return jax.tree.map(lambda x: split_spec(name, x.shape, own, mesh), w)

        return {name: specs_of(name, w) for name, w in layer.items() if is_rounded(w)}

    return tuple(own | split(number, layer) for number, (own, layer) in enumerate(zip(specs, layers, strict=True)))


def shardings(tree: Any, mesh: Mesh) -> Any:
    """Shardings of the engine's arrays: rows and prompt slots over SAMPLED_ROWS.

    Heads of caches are over "tensor", where it divides them.
    """
    size = mesh.shape.get("tensor", 1)

    def place(x: Any, heads: int = 0) -> NamedSharding:
        axes: list[Any] = [axes_of(mesh, SAMPLED_ROWS) if x.ndim else None]
        axes += ["tensor"] if heads and size > 1 and heads % size == 0 else []
        return NamedSharding(mesh, PartitionSpec(*axes[: x.ndim]))

    def by_channels(x: Any) -> NamedSharding:
        split = size > 1 and x.shape[-1] % size == 0
        return NamedSharding(mesh, PartitionSpec(*place(x).spec, None, "tensor")) if split else place(x)

    def of_layer(layer: Any) -> Any:
        places: Any = jax.tree.map(lambda x: place(x, x.shape[1]), layer)
        return places._replace(windows=tuple(map(by_channels, layer.windows))) if isinstance(layer, Carried) else places

    if isinstance(tree, PrefixCache | RingCache | Tail):
        return jax.tree.map(place, tree._replace(layers=()))._replace(layers=tuple(map(of_layer, tree.layers)))
    return jax.tree.map(place, tree)
