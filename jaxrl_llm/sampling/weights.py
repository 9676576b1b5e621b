"""The sampler's own view of the weights, taken from the training layout once a rollout."""

from __future__ import annotations

import time
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.distributed import bytes_to_move, named_shardings, parameter_specs
from jaxrl_llm.errors import InputError
from jaxrl_llm.models import decoder
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.sampling.cache import LayerCache, Prefixes
from jaxrl_llm.sampling.decode import Ring

LANE = 128  # devices split the vocabulary at multiples of it; numbers in a line of a TPU's memory


class Weights(NamedTuple):
    """Parameters for prompts, and for the loop: one dict a layer, so that no step copies a layer's weights."""

    prompts: Params
    loop: Params
    mesh: Mesh | None = None
    moved_bytes: int = 0  # that devices did not hold before
    moved_seconds: float = 0.0  # until all are there
    device: jax.Device | None = None  # that the parameters are bound to, without a mesh

    def spread(self, tree: Any) -> Any:
        """Put what has rows or prompt slots along its first axis on the mesh, or where the parameters are bound to.

        All arguments of the loop are bound or none is, from the first call on: else the second would compile it again.
        """
        if self.mesh is not None:
            return jax.device_put(tree, shardings(tree, self.mesh))
        return tree if self.device is None else jax.device_put(tree, self.device)


def take_weights(policy: Policy, params: Params, mesh: Mesh | None = None) -> Weights:
    """Weights for the engine, in the dtype that the policy computes in.

    mesh: the devices to decode on, with axes "data" and, to split heads, inner units and vocabulary, "tensor". Without
    one the parameters are used where they are. What is moved is counted and timed. Raises InputError in float64.
    """
    if policy.dtype == jnp.float64:
        raise InputError("tokens are not drawn in float64: sample with dataclasses.replace(policy, dtype=jnp.float32)")
    params = {name: x for name, x in params.items() if name != "critic"}
    if mesh is None or mesh.size == 1:
        if _is_ready(policy, params):
            return Weights(*_views(params))
        bound = [x for x in jax.tree.leaves(params) if _is_array(x) and x.committed]
        device = next(iter(bound[0].devices())) if bound else None
        if device is not None:
            meshes = [jax.typeof(x).sharding.mesh for x in bound]
            spread = any(not mesh.empty and mesh.size > 1 for mesh in meshes)
            params = jax.device_put(params, _alone(device) if spread else device)
        return Weights(params, loop_params(policy, params, 1, _is_tpu(device)), device=device)
    whole = _is_tpu(mesh.devices.flat[0])
    target = named_shardings(loop_specs(policy, mesh, params, whole), mesh)
    stacked = isinstance(params["layers"], dict)
    moved = bytes_to_move(params, named_shardings(parameter_specs(policy.config, mesh, stacked, params), mesh))
    start = time.perf_counter()
    if not all(_is_on(x, mesh) for x in jax.tree.leaves(params)):
        params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    convert = jax.jit(loop_params, static_argnums=(0, 2, 3), out_shardings=target)
    loop = jax.block_until_ready(convert(policy, params, mesh.shape.get("tensor", 1), whole))
    return Weights(loop, loop, mesh, moved, time.perf_counter() - start)


def _alone(device: jax.Device) -> NamedSharding:
    """A place on one device, as a mesh of it: arrays that come from a larger mesh would still be typed as on that."""
    return NamedSharding(Mesh(np.array([device]), ("data",)), PartitionSpec())


def _is_array(x: Any) -> bool:
    """Whether there is memory behind it: inside a transformation there is none."""
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)


def _is_ready(policy: Policy, params: Params) -> bool:
    """Whether layers are stacked in the memory of the one CPU that computes, as the loop needs them."""
    here = {jax.devices()[0]}
    return (
        jax.default_backend() == "cpu"
        and isinstance(params["layers"], dict)
        and all(
            _is_array(x) and x.dtype == policy.dtype == jnp.float32 and x.devices() == here
            for x in jax.tree.leaves(params)
        )
    )


def _views(params: Params) -> tuple[Params, Params]:
    """The parameters, and with layers apart, without a copy: arrays over their memory, which they keep alive.

    While they are there, a donation of the parameters copies them instead of overwriting what the views show.
    """
    memory = jax.tree.map(np.from_dlpack, params)
    place = partial(jax.device_put, may_alias=True)
    whole = jax.tree.map(place, memory)
    count = len(next(iter(memory["layers"].values())))
    layers = tuple({name: place(x[i]) for name, x in memory["layers"].items()} for i in range(count))
    return whole, whole | {"layers": layers}


def abstract_weights(policy: Policy, params: Any, mesh: Mesh | None = None) -> Params:
    """Shapes, and on a mesh places, of the loop's weights, to compile for them: params may be ShapeDtypeStructs."""
    shares = 1 if mesh is None else mesh.shape.get("tensor", 1)
    whole = _is_tpu(None if mesh is None else mesh.devices.flat[0])
    shapes = jax.eval_shape(lambda p: loop_params(policy, p, shares, whole), params)
    if mesh is None:
        return shapes
    places = named_shardings(loop_specs(policy, mesh, params, whole), mesh)
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, places)


def _is_on(x: Any, mesh: Mesh) -> bool:
    return isinstance(x, jax.Array) and x.sharding.device_set == set(mesh.devices.flat)


def _is_tpu(device: jax.Device | None) -> bool:
    """Of the default device for None."""
    return (jax.default_backend() if device is None else device.platform) == "tpu"


@partial(jax.jit, static_argnums=(0, 2, 3))
def loop_params(policy: Policy, params: Params, shares: int, whole_lanes: bool = False) -> Params:
    """Layers apart, in the dtype of the computation; "head" is the unembedding, padded where devices need it.

    shares: of the vocabulary, each a multiple of LANE tokens if there are several. whole_lanes: rows of the unembedding
    are padded to a multiple of LANE numbers. For a TPU, which keeps a matrix with other rows turned round, so that the
    loop, which looks tokens up and draws them, would begin with copies of all of it.
    """
    out = decoder.unstack(params)
    cast = lambda x: x.astype(policy.dtype)  # noqa: E731
    # The decoder casts the norms of layers, but takes the last norm as it is.
    out = {name: x if name == "final_norm" else jax.tree.map(cast, x) for name, x in out.items()}
    if any(padding := _padding(policy, shares, whole_lanes)):
        out["head"] = jnp.pad(policy.unembedding(out), [(0, n) for n in padding])
        out.pop("unembed", None)
    return out


def _padding(policy: Policy, shares: int, whole_lanes: bool) -> tuple[int, int]:
    """Rows that the unembedding lacks to be cut into so many slices at multiples of LANE, and numbers of each row."""
    rows = -policy.config.vocab_size % (shares * LANE) if shares > 1 else 0
    return rows, -policy.config.hidden_size % LANE if whole_lanes else 0


def loop_specs(policy: Policy, mesh: Mesh | AbstractMesh, adapted: Any = None, whole_lanes: bool = False) -> Any:
    """A PartitionSpec for each of `loop_params`, with the adapters of `adapted` where it has some."""
    specs = parameter_specs(policy.config, mesh, False, adapted)
    shares = mesh.shape.get("tensor", 1)
    if any(_padding(policy, shares, whole_lanes)):
        specs.pop("unembed", None)
        specs["head"] = PartitionSpec("tensor") if shares > 1 else PartitionSpec()
    return specs


def shardings(tree: Any, mesh: Mesh) -> Any:
    """Where the engine's arrays go: rows and prompt slots over "data"; heads of caches over "tensor" if they divide."""
    size = mesh.shape.get("tensor", 1)

    def place(x: Any, heads: int = 0) -> NamedSharding:
        axes = ["data" if "data" in mesh.axis_names and x.ndim else None]
        axes += ["tensor"] if heads and size > 1 and heads % size == 0 else []
        return NamedSharding(mesh, PartitionSpec(*axes[: x.ndim]))

    def cache(layer: LayerCache) -> LayerCache:
        return LayerCache(*(None if x is None else place(x, x.shape[1]) for x in layer))  # type: ignore[arg-type]

    if isinstance(tree, Prefixes | Ring):
        rest = jax.tree.map(place, tree._replace(layers=()))
        return rest._replace(layers=tuple(cache(layer) for layer in tree.layers))
    return jax.tree.map(place, tree)
