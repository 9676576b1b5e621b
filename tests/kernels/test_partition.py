"""Kernels on a mesh, called as without one: the same results, each device on its block, and no array gathered."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh
from jaxrl_kernels.partition import check_apart, dividing, mesh_of
from other_process import on_devices, result_of
from tpu_environment import tpu_environment

ON_FOUR_DEVICES = """
import json
from functools import partial
import jax, jax.numpy as jnp, numpy as np
from jax import P
from jax.sharding import Mesh, NamedSharding
from jaxrl_kernels import decode_attention, own_attention, ratio_clip
from jaxrl_kernels.decode_attention import PartialAttention
from jaxrl_kernels.partition import mesh_of

mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "tensor"))
random, out = np.random.default_rng(0), []

def normal(*shape):
    return jnp.asarray(random.normal(size=shape), jnp.float32)

def put(tree, *spec):
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, P(*spec))), tree)

def compare(name, program, arrays, placed, cut=True):
    lowered = jax.jit(program).lower(*placed)
    assert ("sdy.manual_computation" in lowered.as_text()) == cut, name
    found, wanted = lowered.compile()(*placed), jax.jit(program)(*arrays)
    far = [float(jnp.max(jnp.abs(a - b))) for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)]
    out.append([name, max(far)])

for N in (8, 7):  # rows that two devices share, and that they cannot
    rows = [normal(N, 12) for _ in range(4)]
    placed = put(rows, *(["data"] if N % 2 == 0 else []))
    for implementation in (None, "pallas", "reference") if N == 8 else (None,):
        def program(*arrays):
            def total(*arrays):
                found = ratio_clip(*arrays, whole_row=True, low=0.1, implementation=implementation)
                return found.value.sum(), found
            return jax.grad(total, has_aux=True)(*arrays)
        compare(f"ratio_clip {N} {implementation}", program, rows, placed, cut=implementation != "reference")
# A batch of calls, one call as it is, one in a `shard_map`, and one where no array is on the mesh.
stacked = [normal(3, 8, 12) for _ in range(4)]
compare("vmap", jax.vmap(lambda *x: ratio_clip(*x)), stacked, put(stacked, None, "data"))
one = [x[0] for x in stacked]
found, wanted = ratio_clip(*put(one, "data")), ratio_clip(*one)
assert found.value.sharding.spec == P("data")
same = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
same(found.value, wanted.value)
inside = jax.shard_map(lambda *x: ratio_clip(*x), mesh=mesh, in_specs=P("data"), out_specs=P("data"))
same(jax.jit(inside)(*one).value, wanted.value)
with jax.set_mesh(mesh):
    same(jax.jit(ratio_clip)(*map(np.asarray, one)).value, wanted.value)
    assert "sdy.manual_computation" in jax.jit(ratio_clip).lower(*map(np.asarray, one)).as_text()

for K in (4, 3):  # heads that two devices share, and that they cannot
    P_, B, W, R, h, S = 2, 4, 2, 2, 8, 16
    heads = ["tensor"] if K % 2 == 0 else []
    prompt = normal(P_, K, W, R, h), normal(P_, K, h, S), normal(P_, K, S, h)
    numbers = jnp.array([5, 16]), jnp.full((P_, W), 18)
    scales = jnp.abs(normal(2, P_, K, S))
    of_ring = jnp.abs(normal(2, B, K, S)), jnp.abs(normal(2, B, K))
    eight_bit = lambda *shape: jnp.asarray(random.integers(-127, 128, shape), jnp.int8)
    part = PartialAttention(normal(B, K, R, h), normal(B, K, R), jnp.abs(normal(B, K, R)))
    own = normal(B, K, R, h), eight_bit(B, K, h), eight_bit(B, K, h), eight_bit(B, K, h, S), eight_bit(B, K, S, h)

    def at_prompts(q, keys, values, length, position, scales):
        return decode_attention(
            q, keys, values, length, position, key_scale=scales[0], value_scale=scales[1], window=12
        )

    placed = *put(prompt, "data", *heads), *put(numbers, "data"), put(scales, None, "data", *heads)
    compare(f"decode_attention {K}", at_prompts, (*prompt, *numbers, scales), placed)

    def at_own(q, k, v, keys, values, count, step, part, scales, new_scales):
        return own_attention(
            q, k, v, keys, values, count, step, part, scales=tuple(scales), new_scales=tuple(new_scales)
        )

    rest = jnp.array([0, 3, 15, 7]), jnp.int32(21)
    placed = *put(own, "data", *heads), *rest, put(part, "data", *heads)
    placed += tuple(put(x, None, "data", *heads) for x in of_ring)
    compare(f"own_attention {K}", at_own, (*own, *rest, part, *of_ring), placed)
print("RESULT" + json.dumps(out))
"""


@pytest.mark.heavy
def test_on_a_mesh_results_are_the_same() -> None:
    found = result_of(ON_FOUR_DEVICES, environment=on_devices(4))
    assert len(found) == 4 + 1 + 4
    for name, far in found:
        assert far < 1e-4, (name, far)


TPU_PROGRAM = """
import json, re
import jax, jax.numpy as jnp, numpy as np
from jax import P
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jaxrl_kernels import decode_attention, own_attention
from jaxrl_kernels.decode_attention import PartialAttention

devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
mesh = Mesh(np.array(devices).reshape(2, 2), ("data", "tensor"))
P_, B, K, W, R, h, S = 4, 16, 4, 4, 2, 128, 512

def of(*shape, dtype=jnp.bfloat16):
    spec = P(*("data", "tensor")[: 2 if len(shape) > 2 else min(len(shape), 1)])
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

def report(program, *arrays):
    text = jax.jit(program).lower(*arrays).compile().as_text()
    moves = re.findall("all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter", text)
    return [text.count('"tpu_custom_call"'), len(moves)]

i32, f32 = jnp.int32, jnp.float32
part = PartialAttention(of(B, K, R, h, dtype=f32), of(B, K, R, dtype=f32), of(B, K, R, dtype=f32))
print("RESULT" + json.dumps([
    report(
        decode_attention, of(P_, K, W, R, h), of(P_, K, h, S), of(P_, K, S, h), of(P_, dtype=i32), of(P_, W, dtype=i32),
    ),
    report(
        own_attention, of(B, K, R, h), of(B, K, h), of(B, K, h), of(B, K, h, S), of(B, K, S, h), of(B, dtype=i32),
        of(dtype=i32), part,
    ),
]))
"""


@pytest.mark.heavy
def test_attention_compiles_for_four_tpus_and_nothing_travels() -> None:
    assert result_of(TPU_PROGRAM, environment=tpu_environment()) == [[1, 0], [1, 0]]


def test_the_axes_that_divide() -> None:
    mesh = AbstractMesh((4, 2, 1), ("data", "tensor", "one"))
    assert dividing(mesh, "data", 8) == "data"
    assert dividing(mesh, "data", 6) is None
    assert dividing(mesh, "data", 8, 6) is None
    assert dividing(mesh, ("data", "tensor"), 16) == ("data", "tensor")
    assert dividing(mesh, ("data", "tensor"), 12) is None
    assert dividing(mesh, ("one", "tensor"), 2) == "tensor"
    assert dividing(mesh, "one", 2) is None
    assert dividing(mesh, "another", 2) is None
    assert dividing(mesh, (), 2) is None


def test_on_one_device_there_is_no_mesh() -> None:
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    x = jnp.ones(3)
    assert mesh_of(None) is None
    assert mesh_of(None, x, {"y": (np.ones(2), None)}) is None
    assert mesh_of(None, jax.device_put(x, jax.NamedSharding(mesh, jax.P("data")))) is None
    assert mesh_of(mesh, x) is None


def test_one_mesh_axis_cuts_one_dimension() -> None:
    check_apart("data", ("tensor", "pipe"))
    with pytest.raises(ValueError, match="mesh axis 'data' cannot shard both rows and another dimension: use two axes"):
        check_apart("data", ("tensor", "data"))
