"""How each parameter is split over the mesh axes "tensor" and "expert", and resharding of pytrees.

Over "tensor" by Megatron's rule: the first matrix of attention and of the MLP is split by its outputs (heads, inner
units), the second by its inputs, so that a layer communicates twice, each time one all-reduce of the residual stream
[N, L, D], and weights are never communicated. The embedding and the unembedding are split by vocabulary, the layer axis
never. Experts are split by inner size too, each device holding a slice of every expert: whatever the router chooses,
devices have the same load.

Over "expert" experts are split whole, and tokens are exchanged (`models.layers.moe`). It serves where slices of inner
units would be too narrow for a matrix unit, and it is an axis of rows for all else.

Over "fsdp" weights, moments and master copies are stored in shards (`fully_sharded`; ZeRO-3), split over another axis
than those above, for models that do not fit on one device. A layer's weights are all-gathered when it runs, where the
policy has the mesh (`models.placement`).

What does not divide is replicated; `describe_sharding` says so.
"""

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.lora import adapters_of, own_adapters
from jaxrl_llm.models.mesh_axes import EXPERT, SEQUENCE, TENSOR, split_counts, split_spec, splits, stored_spec
from jaxrl_llm.models.parameters import parameter_shapes, put
from jaxrl_llm.models.stacks import of_kind
from jaxrl_llm.utils.errors import InputError


class Moved(NamedTuple):
    """The cost of a `reshard`. bytes: `bytes_to_move`, over all devices; seconds: wall time."""

    bytes: int
    seconds: float


def parameter_specs(
    config: ModelConfig, mesh: Mesh | AbstractMesh, stacked: bool = True, adapted: Any = None
) -> dict[str, Any]:
    """A PartitionSpec for each parameter, in a pytree like the parameters.

    stacked: the layers are one dict of arrays with a leading layer axis, else a tuple of dicts (`stacks.unstack`).
    adapted: parameters whose adapters (`models.lora`) get specs too, where they have some; stacked or not.
    Without an axis "tensor" or "expert" in the mesh, or with those of size 1, everything is replicated.
    """
    found: dict[str, Any] = {}
    for path, shape in parameter_shapes(config).items():
        put(found, path, split_spec(path[-1], shape, config, mesh))
    layers = found["layers"]
    found |= {name: split_spec(name, x.shape, config, mesh) for name, x in own_adapters(adapted or {}).items()}
    for kind in range(len(config.each_kind)):
        if adapted is not None:
            given, numbers = adapted["layers"], config.layers_of(kind)
            one = isinstance(given, tuple)
            own = adapters_of({"layers": (given[numbers[0]],)} if one else {"layers": of_kind(given, config, kind)})
            shapes = {name: (len(numbers), *x.shape) if one else x.shape for name, x in own.items()}
            of_kind(layers, config, kind).update({n: split_spec(n, shape, config, mesh) for n, shape in shapes.items()})
    if stacked:
        return found
    each = (of_kind(layers, config, kind) for kind in config.kind_of_layer or (0,) * config.num_layers)
    return found | {"layers": tuple({name: PartitionSpec(*spec[1:]) for name, spec in own.items()} for own in each)}


def describe_sharding(config: ModelConfig, mesh: Mesh | AbstractMesh) -> list[str]:
    """One line for each parameter kind: its stacked shape, what is split and the shape on a device, or why not."""
    lines = []
    for path, shape in parameter_shapes(config).items():
        spec = split_spec(path[-1], shape, config, mesh)
        every = splits(path[-1], shape, config).values()
        wanted = [(kind, axis) for kind, axis in every if mesh.shape.get(axis, 1) > 1]
        done = " and ".join(f"{kind} over {axis}={mesh.shape[axis]}" for kind, axis in wanted if axis in spec)
        failed = []
        for kind, axis in wanted:
            if axis not in spec:
                count, words = split_counts(config)[kind]
                failed.append(f"replicated, because {mesh.shape[axis]} does not divide {count} {words}")
        shard = f", {list(NamedSharding(mesh, spec).shard_shape(shape))} a device" if done else ""
        says = "; ".join([done + shard] * bool(done) + failed) or "replicated"
        lines.append(f"{'/'.join(path)} {list(shape)}: {says}")
    return lines


def check_mesh(config: ModelConfig, mesh: Mesh | AbstractMesh, name: str = "the mesh") -> None:
    """InputError where an axis does not divide what a model splits over it, but for the vocabulary.

    "tensor": key-value heads and inner units; "expert": experts; "sequence", with "tensor": query heads.
    """
    tensor, expert, sequence = (mesh.shape.get(axis, 1) for axis in (TENSOR, EXPERT, SEQUENCE))
    counts = split_counts(config)
    asked = [(f"tensor={tensor}", tensor, counts["heads"]), (f"tensor={tensor}", tensor, counts["inner"])]
    if expert > 1 and not config.num_experts:
        raise InputError(f"{name} has expert={expert}, but the model has no experts: use other axes")
    if expert > 1:
        asked.append((f"expert={expert}", expert, counts["experts"]))
    if sequence > 1:
        axes = f"sequence={sequence}" + (f" x tensor={tensor}" if tensor > 1 else "")
        asked.append((axes, sequence * tensor, (config.num_heads, "query heads")))
    wrong: dict[str, list[str]] = {}
    for axes, size, (count, words) in asked:
        if count % size:
            wrong.setdefault(axes, []).append(f"{count} {words}")
    if wrong:
        parts = [f"{axes}, which does not divide the model's {' and '.join(what)}" for axes, what in wrong.items()]
        raise InputError(f"{name} has {'; and '.join(parts)}: choose a number that does")


def named_shardings(specs: Any, mesh: Mesh | AbstractMesh) -> Any:
    """The NamedSharding of each PartitionSpec of a pytree: for `jax.device_put`, `reshard` and jit's shardings."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def _specs_like(params: Any, config: ModelConfig, mesh: Mesh | AbstractMesh) -> Any:
    """Specs for exactly these parameters, stacked or not, with a critic or not."""
    stacked = not isinstance(params.get("layers"), tuple)
    specs = parameter_specs(config, mesh, stacked, params if "layers" in params else None)
    found = {name: specs[name] for name in params if name in specs}
    if "critic" in params:
        found["critic"] = jax.tree.map(lambda _: PartitionSpec(), params["critic"])
        if "tower" in params["critic"]:
            found["critic"]["tower"] = _specs_like(params["critic"]["tower"], config, mesh)
    given: Any = jax.tree.structure(params)
    if jax.tree.structure(found) != given:
        raise InputError(
            f"these parameters are not those of a {config.family} model with {config.num_layers} layers as configured: "
            "give the configuration that they were loaded with"
        )
    return found


def shard_params(params: Any, config: ModelConfig, mesh: Mesh) -> Any:
    """Put the parameters on the devices of a mesh as `parameter_specs` says, stacked or not.

    A critic's tower (params["critic"]["tower"]) is split like the policy, its head replicated. Raises InputError where
    the names of the parameters are not those of the configuration.
    """
    return jax.device_put(params, named_shardings(_specs_like(params, config, mesh), mesh))


def bytes_per_device(shapes: Any, specs: Any, mesh: Mesh | AbstractMesh) -> int:
    """Bytes that each device of the mesh holds of these arrays; padding of the device's own layout is not counted.

    shapes: a pytree of arrays or ShapeDtypeStructs; specs: PartitionSpecs, the same pytree or a prefix of it. Raises
    InputError where an axis does not divide.
    """
    total = 0
    for x, spec in zip(jax.tree.leaves(shapes), jax.tree.leaves(jax.tree.broadcast(specs, shapes)), strict=True):
        try:
            shard = NamedSharding(mesh, spec).shard_shape(x.shape)
        except ValueError:
            sizes = dict(mesh.shape)
            raise InputError(f"an array {list(x.shape)} does not split by {spec} over the mesh {sizes}") from None
        total += math.prod(shard) * x.dtype.itemsize
    return total


def _memory(sharding: Any) -> str:
    """The kind of memory that a sharding is in: "device", "pinned_host" ..."""
    return sharding.memory_kind or next(iter(sharding.device_set)).default_memory().kind


def _regions(sharding: Any, shape: tuple[int, ...]) -> dict[Any, list[range]]:
    """For each device, the part of an array that it holds: a range of indices for each axis."""
    return {
        device: [range(n)[part] for part, n in zip(index, shape, strict=True)]
        for device, index in sharding.devices_indices_map(shape).items()
    }


def bytes_to_move(tree: Any, shardings: Any) -> int:
    """Bytes that must reach a device which does not hold them, for a tree to be laid out as `shardings` says.

    The rule: for every array and every device of the new sharding, the bytes of the device's new shard less those of
    its overlap with the shard that it has, in the same kind of memory; summed over all devices. So the same sharding
    costs 0, splitting what is replicated costs 0, a copy on a further device costs the copy, and an array of NumPy,
    which no device holds, costs all of its new shards. What a transfer really sends can be more, never less.

    tree: arrays, or ShapeDtypeStructs with a sharding; shardings: the same pytree or a prefix of it.
    """
    total = 0
    for x, new in zip(jax.tree.leaves(tree), jax.tree.leaves(jax.tree.broadcast(shardings, tree)), strict=True):
        shape, old = x.shape, getattr(x, "sharding", None)
        held = _regions(old, shape) if old is not None and _memory(old) == _memory(new) else {}
        for device, wanted in _regions(new, shape).items():
            numbers = math.prod(map(len, wanted))
            if device in held:
                overlap = zip(wanted, held[device], strict=True)
                numbers -= math.prod(max(0, min(a.stop, b.stop) - max(a.start, b.start)) for a, b in overlap)
            total += numbers * x.dtype.itemsize
    return total


def reshard(tree: Any, shardings: Any, donate: bool = False) -> tuple[Any, Moved]:
    """Lay out a whole tree as `shardings` (the same pytree, or a prefix of it) says, and wait until it is done.

    donate: the old arrays, and others that share their memory, may not be used again; they are deleted when the new
    ones are there, but for those of which a device's part stays what it is: that memory may serve on. Returns the tree
    and what was moved; the time does not include computations that the tree was still waiting for.
    """
    moved = bytes_to_move(tree, shardings)
    jax.block_until_ready(tree)
    start = time.perf_counter()
    out = jax.block_until_ready(jax.device_put(tree, shardings))
    seconds = time.perf_counter() - start
    # Not device_put(donate=True): from one CPU device to another it crashes the process (JAX 0.10.2), and where it
    # does not, it still keeps old arrays whose shards are of other sizes.
    if donate:
        pairs = list(zip(jax.tree.leaves(tree), jax.tree.leaves(jax.tree.broadcast(shardings, tree)), strict=True))

        def may_share(x: jax.Array, new: Any) -> bool:
            """Whether some device holds the same part of both."""
            old = _regions(x.sharding, x.shape)
            same_part = any(old.get(device) == part for device, part in _regions(new, x.shape).items())
            return same_part and _memory(x.sharding) == _memory(new)

        arrays = [(x, may_share(x, sharding)) for x, sharding in pairs if isinstance(x, jax.Array)]
        kept = {id(x) for x, shared in arrays if shared}  # one array may stand in several places of the tree
        for x, _ in arrays:
            if id(x) not in kept:
                x.delete()
    return out, Moved(moved, seconds)


def shardings_over(mesh: Mesh | None, sampler: Mesh | None = None) -> Callable[[ModelConfig, Any], Any] | None:
    """How a model's parameters are spread over a mesh as they are read, see `load_policy`; None on a single device.

    sampler: the same devices as tokens are sampled on them. The function raises InputError where either does not divide
    the model.
    """
    if mesh is None or mesh.size == 1:
        return None

    def shardings(config: ModelConfig, shapes: Any) -> Any:
        check_mesh(config, mesh)
        if sampler is not None:
            check_mesh(config, sampler, "the sampling mesh")
        return fully_sharded(shapes, config, mesh)

    return shardings


def fully_sharded(tree: Any, config: ModelConfig, mesh: Mesh | AbstractMesh) -> Any:
    """A NamedSharding for each array of a pytree (or its shape): parameters, adapters, or a state of training.

    Moments and master copies are sharded as their parameter: over "tensor" and "expert" as `split_spec` says, and over
    "fsdp" along the longest other axis that it divides, but not the axis of layers. Vectors and counters are
    replicated, and so is everything on a mesh without these axes.
    """

    def place(path: Any, x: Any) -> NamedSharding:
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        if not names:
            return NamedSharding(mesh, PartitionSpec())
        # Some weights of a critic's head have the names of a decoder's.
        name = "" if "head" in names[:-1] else names[-1]
        first = 1 if "layers" in names and x.ndim > 2 else 0
        return NamedSharding(mesh, stored_spec(name, x.shape, config, mesh, first))

    return jax.tree_util.tree_map_with_path(place, tree)
