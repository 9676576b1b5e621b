"""The axes of a mesh: over which of them rows and tokens are split, and which axes of parameters (see `placement`)."""

import math
from collections.abc import Sequence

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxrl_kernels.implementations import takes_triton

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.parameters import AXES, axis_sizes

DATA, FSDP, EXPERT, SEQUENCE, TENSOR = "data", "fsdp", "expert", "sequence", "tensor"
MESH_AXES = (DATA, FSDP, EXPERT, SEQUENCE, TENSOR)  # outer to inner: the last communicate most
ROWS = (DATA, FSDP, EXPERT)
SAMPLED_ROWS = (*ROWS, SEQUENCE)
AnyMesh = Mesh | AbstractMesh


def axes_of(mesh: AnyMesh, names: Sequence[str]) -> str | tuple[str, ...] | None:
    """Those of some axes that the mesh has, for a PartitionSpec."""
    found = tuple(name for name in names if name in mesh.shape)
    return found[0] if len(found) == 1 else found or None


def row_shards(mesh: AnyMesh | None, names: Sequence[str] = ROWS) -> int:
    """How many shards rows are split into; 1 without a mesh. names: ROWS, or SAMPLED_ROWS."""
    return 1 if mesh is None else math.prod(mesh.shape.get(name, 1) for name in names)


def token_shards(mesh: AnyMesh | None) -> int:
    """How many shards the tokens of packed rows are split into in learning; 1 without a mesh."""
    return row_shards(mesh, (SEQUENCE,))


def takes_kernels(mesh: AnyMesh | None) -> bool:
    """Whether the devices of a mesh, or JAX's own where there is none, take kernels for attention."""
    device = one_device(mesh)
    return device is not None and (device.platform == "tpu" or takes_triton(device))


def one_device(mesh: AnyMesh | None) -> jax.Device | None:
    """One of the devices of a mesh, or of JAX's own where there is none."""
    if isinstance(mesh, AbstractMesh):
        return None
    return mesh.devices.flat[0] if isinstance(mesh, Mesh) else jax.local_devices()[0]


# Logical axis of a weight -> what is split (query heads go with their key-value heads), and the axis of the mesh. What
# is added after an all-reduce (out_bias, down_bias), norms and the router are not split.
SPLIT = {
    "heads": ("heads", TENSOR),
    "kv_heads": ("heads", TENSOR),
    "inner": ("inner", TENSOR),
    "shared": ("shared", TENSOR),
    "query_heads": ("states", TENSOR),
    "state_heads": ("states", TENSOR),
    "channels": ("channels", TENSOR),
    "vocabulary": ("vocabulary", TENSOR),
    "experts": ("experts", EXPERT),
}


def split_counts(config: ModelConfig) -> dict[str, tuple[int, str]]:
    """For each kind of split, the number that must divide in all layers, and what it counts."""

    def common(field: str) -> int:
        return math.gcd(*(getattr(kind, field) for kind in config.each_kind))

    return {
        "states": (math.gcd(*[kind.delta.keys for kind in config.each_kind if kind.delta]), "heads of the delta rule"),
        "channels": (config.hidden_size, "channels"),
        "heads": (common("num_kv_heads"), "key-value heads"),
        "inner": (common("intermediate_size"), "inner units"),
        "shared": (common("shared_size"), "inner units of the shared MLP"),
        "vocabulary": (config.vocab_size, "tokens of the vocabulary"),
        "experts": (config.num_experts, "experts"),
    }


def splits(name: str, shape: Sequence[int], config: ModelConfig) -> dict[int, tuple[str, str]]:
    """What of a parameter or adapter can be split: its axis -> the kind, and the axis of the mesh.

    shape: of the array, with an axis of layers or not. Arrays of the same name with other axes, as factored moments
    are, have none.
    """
    axes, sizes = AXES.get(name, ()), [axis_sizes(kind) for kind in config.each_kind]
    found = {}
    for place, axis in enumerate(axes):
        at = len(shape) - len(axes) + place
        # The router scores all experts on each device.
        own = axis in SPLIT and (axis != "experts" or place == 1) and at >= 0
        if own and shape[at] in {size.get(axis) for size in sizes}:
            found[at] = SPLIT[axis]
    return found


def split_spec(name: str, shape: Sequence[int], config: ModelConfig, mesh: AnyMesh) -> PartitionSpec:
    """The spec of a parameter of this shape on a mesh. Without trailing Nones, as jit returns them."""
    spec: list[str | None] = []
    for at, (kind, axis) in splits(name, shape, config).items():
        size = mesh.shape.get(axis, 1)
        if size > 1 and split_counts(config)[kind][0] % size == 0:
            spec += [None] * (at - len(spec)) + [axis]
    return PartitionSpec(*spec)


def stored_spec(name: str, shape: Sequence[int], config: ModelConfig, mesh: AnyMesh, first: int = 0) -> PartitionSpec:
    """`split_spec`, and over "fsdp" the longest other axis from `first` on that it divides, of arrays with several.

    Without trailing Nones, as jit returns them.
    """
    shards, spec = mesh.shape.get(FSDP, 1), list(split_spec(name, shape, config, mesh))
    spec += [None] * (len(shape) - len(spec))
    free = [axis for axis in range(first, len(shape)) if spec[axis] is None and shape[axis] % shards == 0]
    if shards > 1 and len(shape) > 1 and free:
        spec[max(free, key=lambda axis: shape[axis])] = FSDP
    while spec and spec[-1] is None:
        spec.pop()
    return PartitionSpec(*spec)
