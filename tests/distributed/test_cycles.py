"""Where the time of a program goes: of a text whose numbers are known, and of a program compiled for a TPU."""

from __future__ import annotations

import pytest
from other_process import result_of
from tpu_environment import tpu_environment

from jaxrl_llm.distributed.chips import TPUS, Chip, compiler_options
from jaxrl_llm.plan.program.cycles import (
    KERNELS,
    MOVES,
    OTHERS,
    PRODUCTS,
    Kernel,
    by_kind,
    by_source,
    cycles_in,
    kernels_in,
    lines_in,
)

# A loop of four turns with a product, a kernel and a copy; then a convert, a sum and a copy that starts and ends apart.
TEXT = """
HloModule jit_update

%product (a: bf16[8,8], b: bf16[8,8]) -> bf16[8,8] {
  %a = bf16[8,8]{1,0} parameter(0)
  %b = bf16[8,8]{1,0} parameter(1)
  ROOT %out = bf16[8,8]{1,0} convolution(%a, %b), dim_labels=bf_io->bf
}

%turned (c: bf16[8,8]) -> f32[8,8] {
  %c = bf16[8,8]{1,0} parameter(0)
  %t = bf16[8,8]{1,0} transpose(%c), dimensions={1,0}
  ROOT %f = f32[8,8]{1,0} convert(%t)
}

%summed (d: f32[8,8]) -> f32[8,8] {
  %d = f32[8,8]{1,0} parameter(0)
  %w = f32[8,8]{1,0} broadcast(%d), dimensions={0,1}
  ROOT %s = f32[8,8]{1,0} add(%d, %w)
}

%body (x: bf16[8,8]) -> bf16[8,8] {
  %x = bf16[8,8]{1,0} parameter(0)
  %fusion.1 = bf16[8,8]{1,0} fusion(%x, %x), kind=kOutput, calls=%product, \
metadata={op_name="jit(update)/while/body/closed_call/mlp/dot_general"}, backend_config={"estimated_cycles":"100"}
  %flash.1 = bf16[8,8]{1,0} custom-call(%fusion.1), custom_call_target="tpu_custom_call", \
metadata={op_name="jit(update)/transpose(jvp())/while/body/attention/shard_map/cond/branch_0_fun/flash/pallas_call"}, \
backend_config={"custom_call_config":{"cost_estimate":{"flops":"6000","transcendentals":"9","bytes_accessed":"500"}}}
  ROOT %copy.7 = bf16[8,8]{1,0} copy(%flash.1), \
metadata={op_name="jit(update)/checkpoint/rematted_computation/mlp/mul"}, backend_config={"estimated_cycles":"5"}
}

%condition (y: bf16[8,8]) -> pred[] {
  %y = bf16[8,8]{1,0} parameter(0)
  ROOT %less = pred[] constant(true)
}

ENTRY %main (p: bf16[8,8]) -> f32[8,8] {
  %p = bf16[8,8]{1,0} parameter(0)
  %loop = bf16[8,8]{1,0} while(%p), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"4"}}
  %begun = (bf16[8,8]{1,0}, bf16[8,8]{1,0}, u32[]) copy-start(%loop)
  %ended = bf16[8,8]{1,0} copy-done(%begun)
  %fusion.2 = f32[8,8]{1,0} fusion(%ended), kind=kLoop, calls=%turned, backend_config={"estimated_cycles":"40"}
  %gathered = f32[8,8]{1,0} all-gather(%fusion.2), replica_groups={}, dimensions={0}
  ROOT %fusion.3 = f32[8,8]{1,0} fusion(%gathered), kind=kLoop, calls=%summed, backend_config={"estimated_cycles":"70"}
}
"""
CHIP = Chip("tiny", 1, peak=1e-9, bandwidth=1e-6, links=1, clock=1e-8)  # 1,000 operations/s, 1,000 bytes/s, 10 cycles/s


def test_cycles_and_kernels_count_the_turns_of_loops() -> None:
    assert cycles_in(TEXT) == 4 * (100 + 5) + 40 + 70
    assert kernels_in(TEXT) == [Kernel("flash", 4 * 6000, 4 * 500)]


def test_kernels_count_on_the_resource_that_takes_longest() -> None:
    assert Kernel("flash", 6000, 500).seconds(CHIP) == pytest.approx(6.0)
    assert Kernel("flash", 100, 500).seconds(CHIP) == pytest.approx(0.5)
    assert Kernel("flash", 100, 500).seconds(CHIP._replace(peak=0, bandwidth=0)) == 0


def test_lines_say_what_they_are_and_where_they_come_from() -> None:
    lines = [(line.name, line.kind, line.source, round(line.seconds, 6), line.times) for line in lines_in(TEXT, CHIP)]
    assert lines == [
        ("fusion.1", PRODUCTS, "mlp / dot_general", 40.0, 4),
        ("flash", KERNELS, "backward / attention / flash / pallas_call", 24.0, 4),
        ("fusion.3", OTHERS, "fusion", 7.0, 1),
        ("fusion.2", MOVES, "fusion", 4.0, 1),
        ("copy.7", MOVES, "recomputed / mlp / mul", 2.0, 4),
    ]


def test_lines_add_up_by_kind_and_by_source() -> None:
    lines = lines_in(TEXT, CHIP)
    assert by_kind(lines) == pytest.approx({PRODUCTS: 40.0, KERNELS: 24.0, MOVES: 6.0, OTHERS: 7.0})
    twice = by_source(lines + lines)
    assert [round(line.seconds, 6) for line in twice] == [80.0, 48.0, 14.0, 8.0, 4.0]
    assert twice[0].times == 8


PROGRAM = """
import json
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jaxrl_llm.distributed.chips import TPUS, compiler_options
from jaxrl_llm.plan.program.cycles import by_kind, lines_in

found = {}
for chip, size in (("v5e", "2x2"), ("v6e", "2x2")):
    device = topologies.get_topology_desc(platform="tpu", topology_name=f"{chip}:{size}").devices[0]
    x = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16, sharding=jax.sharding.SingleDeviceSharding(device))
    options = compiler_options(x)
    text = jax.jit(lambda x: x @ x).lower(x).compile(compiler_options=options).as_text()
    found[chip] = [by_kind(lines_in(text, TPUS[chip])), sorted(options)]
print("RESULT" + json.dumps(found))
"""


@pytest.mark.heavy
def test_a_product_takes_little_more_than_at_the_peak() -> None:
    found = result_of(PROGRAM, environment=tpu_environment())
    for chip, (kinds, options) in found.items():
        least = 2 * 4096**3 / (TPUS[chip].peak * 1e12)
        assert least <= kinds[PRODUCTS] <= 1.5 * least, chip
        assert options == sorted(dict(TPUS[chip].compiler_options))
    assert "xla_tpu_scoped_vmem_limit_kib" in found["v6e"][1]


def test_a_cpu_has_no_options() -> None:
    assert compiler_options({"nothing": 1}) == {}
