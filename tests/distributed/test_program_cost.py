"""What a program costs: numbers worked out by hand, for texts written by hand and programs compiled for CPU devices."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from other_process import on_devices, result_of
from tpu_environment import tpu_environment

from jaxrl_llm.plan.program.collectives import collectives_in, groups_in
from jaxrl_llm.plan.program.cost import Cost, at_depth, followed, matrix_flops, traffic_in
from jaxrl_llm.plan.program.cycles import cycles_in
from jaxrl_llm.plan.program.text import sizes, turn_of

TEXT = """
HloModule example, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%scattered (x: f32[64]) -> f32[16] {
  %x = f32[64]{0} parameter(0)
  %inner = f32[64]{0} all-reduce(%x), replica_groups=[2,4]<=[8], to_apply=%add
  %zero = s32[] constant(0)
  ROOT %mine = f32[16]{0} dynamic-slice(%inner, %zero), dynamic_slice_sizes={16}
}

%body (state: (s32[], bf16[8,16])) -> (s32[], bf16[8,16]) {
  %state = (s32[], bf16[8,16]{1,0}) parameter(0)
  %x = bf16[8,16]{1,0} get-tuple-element(%state), index=1
  %gathered = bf16[32,16]{1,0} all-gather(%x), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}, \
backend_config={"estimated_cycles":"7"}
  %i = s32[] get-tuple-element(%state), index=0
  ROOT %out = (s32[], bf16[8,16]{1,0}) tuple(%i, %x)
}

%condition (state.1: (s32[], bf16[8,16])) -> pred[] {
  %state.1 = (s32[], bf16[8,16]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %bound = s32[] constant(5)
  ROOT %less = pred[] compare(%i.1, %bound), direction=LT
}

%sliced (whole: f32[100,64], at: s32[]) -> f32[64] {
  %whole = f32[100,64]{1,0} parameter(0)
  %at = s32[] parameter(1)
  %zero.1 = s32[] constant(0)
  %row = f32[1,64]{1,0} dynamic-slice(%whole, %at, %zero.1), dynamic_slice_sizes={1,64}
  ROOT %flat = f32[64]{0} bitcast(%row)
}

ENTRY %main (p0: f32[64], p1: bf16[8,16], p2: f32[100,64]) -> f32[16] {
  %p0 = f32[64]{0} parameter(0)
  %p1 = bf16[8,16]{1,0} parameter(1)
  %p2 = f32[100,64]{1,0} parameter(2)
  %n = s32[] constant(3)
  %first = (s32[], bf16[8,16]{1,0}) tuple(%n, %p1)
  %loop = (s32[], bf16[8,16]{1,0}) while(%first), condition=%condition, body=%body
  %reduced = f32[64]{0} all-reduce(%p0), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add, \
backend_config={"estimated_cycles":"100"}
  %started = (f32[8]{0}, f32[64]{0}) all-gather-start(%p0), replica_groups={}, dimensions={0}
  %done = f32[64]{0} all-gather-done(%started)
  %moved = (f32[64]{0}, f32[64]{0}, u32[], u32[]) collective-permute-start(%p0), source_target_pairs={{0,4},{4,0}}
  %one = f32[64]{0} fusion(%p2, %n), kind=kLoop, calls=%sliced, backend_config={"estimated_cycles":"11"}
  %near = f32[64]{0:T(128)S(1)} copy(%one)
  ROOT %mine.1 = f32[16]{0} fusion(%near), kind=kCustom, calls=%scattered
}
"""


class TestCollectives:
    def test_bytes_by_kind(self) -> None:
        found = collectives_in(TEXT, range(8))
        assert found == {
            # Five turns of 3/4 of 32 x 16 x 2 bytes; and 7/8 of 64 x 4, as the groups are empty: all eight devices.
            "all-gather between slices": 5 * 768 + 224,
            "all-reduce between slices": 2 * 128,
            "reduce-scatter between slices": 192,
            "collective-permute between slices": 256,
        }

    def test_what_stays_within_a_slice(self) -> None:
        two = collectives_in(TEXT, [0] * 4 + [1] * 4)
        assert two["all-gather"] == 5 * 768
        assert two["all-gather between slices"] == 224
        assert two["all-reduce between slices"] == 256  # devices 0 and 4 of the transposed order
        assert two["reduce-scatter"] == 192
        assert two["collective-permute between slices"] == 256
        assert not any(kind.endswith("slices") for kind in collectives_in(TEXT, [0] * 8))

    @pytest.mark.parametrize(
        ("slices", "kind", "sent"),
        [
            ("1,2", "ALL_GATHER", 512),  # the other slice gets what the device has
            ("1:4", "ALL_GATHER", 3 * 512),
            ("1:4", "ALL_REDUCE", 768),
            ("1,2:4", "REDUCE_SCATTER", 384),
            ("1:4", "ALL_TO_ALL", 384),
            ("1,2", "ONE_TO_ONE", 512),
        ],
    )
    def test_what_the_runtime_of_several_slices_sends(self, slices: str, kind: str, sent: int) -> None:
        text = f"""
ENTRY %main (p: f32[16,8]) -> f32[16,8] {{
  %p = f32[16,8]{{1,0:T(8,128)}} parameter(0)
  %token = token[] after-all()
  %out = (f32[16,8]{{1,0:T(8,128)}}, u32[], token[]) send(%p, %token), channel_id=1, is_host_transfer=true, \
frontend_attributes={{_xla_host_transfer_rendezvous="a_0",_xla_megascale_target="{{{slices}}}x{{0:3}}",\
_xla_megascale_transfer_type="{kind}"}}
  ROOT %same = f32[16,8]{{1,0:T(8,128)}} copy(%p)
}}"""
        name = kind.lower().replace("_", "-")
        assert collectives_in(text, [0, 0, 1, 1]) == {f"{name} between slices": sent}

    def test_a_program_without_any(self) -> None:
        assert not collectives_in("ENTRY %main (p: f32[2]) -> f32[2] {\n  ROOT %p = f32[2]{0} parameter(0)\n}")


@pytest.mark.parametrize(
    ("written", "groups"),
    [
        ("[2,4]<=[8]", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("[4,2]<=[2,4]T(1,0)", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("{{0,1},{2,3},{4,5},{6,7}}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("mesh['a'=4,'b'=2] {'a'}", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("mesh['a'=4,'b'=2] {'b'}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("mesh['a'=4,'b'=2] {'a','b'}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("mesh['a'=8] {'a':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),  # the middle one of 2 x 2 x 2
        ("{}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
    ],
)
def test_groups_of_devices(written: str, groups: list[list[int]]) -> None:
    line = f"%x = f32[8]{{0}} all-gather(%y), replica_groups={written}, dimensions={{0}}"
    assert groups_in(line, 8).tolist() == groups


def test_cycles_count_turns() -> None:
    assert cycles_in(TEXT) == 5 * 7 + 100 + 11


def test_one_turn_of_the_loop_alone() -> None:
    """As of a decode step: without what the program does once, before and after."""
    turn = turn_of(TEXT)
    assert cycles_in(turn) == 7
    assert traffic_in(turn) == 8 * 16 * 2 + 32 * 16 * 2
    assert collectives_in(turn, [0] * 8) == {"all-gather": 32 * 16 * 2 * 3 // 4}
    assert turn_of(turn) == turn, "there is no loop in the loop"


def test_bytes_of_arrays() -> None:
    assert sizes("(f32[2,3]{1,0}, bf16[4], s8[5], f8e4m3fn[6,2], pred[])") == [24, 8, 5, 12, 1]


def test_traffic_of_slices_and_of_the_cores_memory() -> None:
    """The all-gathers and so on by their arrays; the fusion reads a row, the copy writes to the core's memory."""
    loop = 5 * (8 * 16 * 2 + 32 * 16 * 2)
    started = 64 * 4 + 8 * 4 + 64 * 4
    moved = 64 * 4 + 2 * 64 * 4 + 8
    fusion = 64 * 4 + 4 + 64 * 4
    copy = 64 * 4
    assert traffic_in(TEXT) == loop + 2 * 64 * 4 + started + moved + fusion + copy + 16 * 4


PROGRAM = """
import json, jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxrl_llm.plan.program.cost import cost_of
from jaxrl_llm.distributed import Program, make_mesh

mesh = make_mesh(4, devices=jax.devices())
rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

def f(x, w):
    def turn(carry, _):
        x, total = carry
        x = jax.lax.with_sharding_constraint(jnp.sin(x), rows)
        y = jax.lax.with_sharding_constraint(x, whole)  # an all-gather in each of 3 turns
        return (x, total + (y * y[::-1]).sum(0)[None]), None
    x, total = jax.lax.scan(turn, (x, w), None, length=3)[0]
    return jnp.sum(x @ total.T)  # an all-reduce of one number

x = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=rows)
traced = jax.jit(f).trace(x, jax.ShapeDtypeStruct((1, 16), jnp.float32, sharding=whole))
lowered = traced.lower()
cost = cost_of(Program("f", lowered, lowered.compile(), traced.jaxpr))
print("RESULT" + json.dumps(cost._asdict()))
"""


@pytest.mark.heavy
def test_a_program_on_four_devices() -> None:
    found = result_of(PROGRAM, environment=on_devices(4))
    assert found["arguments"] == found["given"] == 8 * 16 * 4 // 4 + 16 * 4
    assert found["collectives"]["all-gather"] == 3 * 8 * 16 * 4 * 3 // 4
    assert found["collectives"]["all-reduce"] == 4 * 2 * 3 // 4
    assert found["flops"] == 2 * 8 * 16 / 4


DONATED = """
import json, sys, jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from jaxrl_llm.plan.program.cost import cost_of
from jaxrl_llm.distributed import Program

layers, rows, D = json.loads(sys.argv[1])
(device, *_) = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices

def gradients(w, x):  # take the memory of w
    z, saved = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), x), x, w)
    return jax.lax.scan(lambda d, each: (d @ each[1].T, each[0].T @ d), z, (saved, w), reverse=True)[::-1]

def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.bfloat16, sharding=SingleDeviceSharding(device))

traced = jax.jit(gradients, donate_argnums=(0, 1)).trace(shape(layers, D, D), shape(rows, D))
lowered = traced.lower()
cost = cost_of(Program("gradients", lowered, lowered.compile(), traced.jaxpr))
print("RESULT" + json.dumps([cost.arguments, cost.results, cost.temporaries]))
"""


@pytest.mark.heavy
def test_temporaries_on_a_tpu_beside_donated_arguments() -> None:
    """Inputs of each layer, and the gradients, as the weights are read until the last of them is there."""
    layers, rows, D = 32, 2048, 2048
    arguments, results, temporaries = result_of(DONATED, json.dumps([layers, rows, D]), environment=tpu_environment())
    weights, saved = layers * D * D * 2, layers * rows * D * 2
    assert arguments == weights + rows * D * 2
    assert results < 2**16
    assert temporaries == pytest.approx(weights + saved, rel=0.1)


class TestMatrixFlops:
    def test_products_in_loops_and_their_gradients(self) -> None:
        x, w = jnp.zeros((4, 8)), jnp.zeros((3, 8, 8))

        def loss(w: jax.Array, x: jax.Array) -> jax.Array:
            return jnp.sum(jax.lax.scan(lambda x, w: (jax.nn.silu(x @ w), None), x, w)[0])

        forward = 3 * 2 * 4 * 8 * 8
        assert matrix_flops(jax.make_jaxpr(loss)(w, x)) == forward
        assert matrix_flops(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(w, x)) == 3 * forward
        # Recomputation counts.
        again = matrix_flops(jax.make_jaxpr(jax.grad(jax.checkpoint(loss), argnums=(0, 1)))(w, x))
        assert again == pytest.approx(4 * forward, rel=0.12)

    def test_products_in_groups(self) -> None:
        x, w, sizes = jnp.zeros((6, 8)), jnp.zeros((3, 8, 5)), jnp.asarray([1, 2, 3])

        def loss(w: jax.Array, x: jax.Array) -> jax.Array:
            return jnp.sum(jax.lax.ragged_dot(x, w, sizes))

        assert matrix_flops(jax.make_jaxpr(loss)(w, x)) == 2 * 6 * 8 * 5
        assert matrix_flops(jax.make_jaxpr(jax.grad(loss))(w, x)) == 2 * 2 * 6 * 8 * 5

    def test_a_kernel_and_a_branch(self) -> None:
        def kernel(x: Any, y: Any, out: Any) -> None:
            out[...] = x[...] @ y[...]

        def f(x: jax.Array, y: jax.Array) -> jax.Array:
            block = pl.BlockSpec((8, 16), lambda i: (i, 0))
            out = pl.pallas_call(
                kernel, grid=(4,), in_specs=[block, pl.BlockSpec((16, 16), lambda i: (0, 0))], out_specs=block,
                out_shape=jax.ShapeDtypeStruct((32, 16), x.dtype), interpret=True,
            )(x, y)  # fmt: skip
            return jax.lax.platform_dependent(out, y, cpu=lambda x, y: (x @ y) @ y, default=lambda x, y: x)

        jaxpr = jax.make_jaxpr(f)(jnp.zeros((32, 16)), jnp.zeros((16, 16)))
        assert matrix_flops(jaxpr, "tpu") == 2 * 32 * 16 * 16
        assert matrix_flops(jaxpr, "cpu") == 3 * 2 * 32 * 16 * 16


def test_costs_of_other_depths() -> None:
    two = Cost("decode", 100, 90, 10, 50, 8.0, 400, {"all-reduce": 20}, 1000, {"attend": (4, 8)})
    four = Cost("decode", 160, 150, 10, 60, 16.0, 700, {"all-reduce": 40, "all-gather": 6}, 1800, {"attend": (6, 9)})
    ten = at_depth(two, four, (2, 4), 10)
    collectives = {"all-gather": 24, "all-reduce": 100}
    assert ten == Cost("decode", 340, 330, 10, 90, 40, 1600, collectives, 4200, {"attend": (12, 12)})
    assert at_depth(two, four, (2, 4), 2) == two._replace(collectives={"all-gather": 0, "all-reduce": 20})


def test_the_cost_of_a_program_and_three_calls_of_another() -> None:
    others = Cost("convert", 100, 90, 10, 50, 8.0, 400, {"all-reduce": 20}, 1000, {"attend": (1, 2)})
    layer = Cost("convert_layer", 160, 150, 30, 60, 2.0, 700, {"all-gather": 6}, 100, {"attend": (3, 4)})
    found = followed(others, layer, 3)
    collectives = {"all-gather": 18, "all-reduce": 20}
    assert found == Cost("convert", 160, 150, 100, 60, 14, 2500, collectives, 1300, {"attend": (10, 14)})
