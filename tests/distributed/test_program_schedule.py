"""What a program's schedule hides of its collectives: of texts whose numbers are known, and of a compiled program."""

from __future__ import annotations

import pytest
from other_process import result_of
from tpu_environment import tpu_environment

from jaxrl_llm.distributed.chips import Chip
from jaxrl_llm.plan.program.collectives import collectives_in
from jaxrl_llm.plan.program.schedule import scheduled

# 10 cycles and 1,000 operations or bytes of a kernel a second; links send 64 bytes a second.
CHIP = Chip("tiny", 1, peak=1e-9, bandwidth=1e-6, links=64e-9, clock=1e-8)

SUM = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""
# Each permutation sends 256 bytes, 4 s; the all-gather 3/4 of 512 bytes, 6 s; the all-reduce 2 x 3/4 of 256 bytes, 6 s.
PERMUTED = "(f32[64]{0}, f32[64]{0}, u32[], u32[]) collective-permute-start"


def work(name: str, seconds: float, operand: str = "p") -> str:
    cycles = f'backend_config={{"estimated_cycles":"{round(10 * seconds)}"}}'
    return f"  %{name} = f32[64]{{0}} add(%{operand}, %{operand}), {cycles}"


def permuted(name: str) -> str:
    return f"  %{name} = {PERMUTED}(%p), source_target_pairs={{{{0,1}},{{1,0}}}}"


def done(name: str, of: str) -> str:
    return f"  %{name} = f32[64]{{0}} collective-permute-done(%{of})"


def entry(*lines: str) -> str:
    return "\n".join([SUM, "ENTRY %main (p: f32[64]) -> f32[64] {", "  %p = f32[64]{0} parameter(0)", *lines, "}"])


def test_what_stands_alone_is_exposed() -> None:
    found = scheduled(
        entry(
            work("first", 2),
            "  %reduced = f32[64]{0} all-reduce(%first), replica_groups=[1,4]<=[4], to_apply=%add, "
            'metadata={op_name="jit(f)/mlp/dot_general"}',
            work("last", 3, "reduced"),
        ),
        CHIP, [0] * 4,
    )  # fmt: skip
    assert (found.work, found.links, found.exposed, found.seconds) == (5, 6, 6, 11)
    assert found.sources == {"all-reduce: mlp / dot_general": 6}


def test_work_between_start_and_end_hides() -> None:
    found = scheduled(entry(permuted("s"), work("one", 1), done("d", "s"), work("two", 9)), CHIP, [0] * 4)
    assert (found.work, found.links, found.exposed) == (10, 4, 3)
    hidden = scheduled(entry(permuted("s"), work("one", 5), done("d", "s")), CHIP, [0] * 4)
    assert hidden.exposed == 0
    assert hidden.seconds == 5


def test_two_at_a_time_share_the_links() -> None:
    lines = [permuted("s1"), permuted("s2"), work("one", 5), done("d1", "s1"), done("d2", "s2")]
    found = scheduled(entry(*lines), CHIP, [0] * 4)
    assert (found.links, found.exposed) == (8, 3)  # five of eight seconds, not both of them whole
    waited = scheduled(entry(permuted("s1"), permuted("s2"), done("d2", "s2"), work("one", 1), done("d1", "s1")), CHIP)
    assert waited.exposed == 4 + 3  # nothing hides the second, and a second of work the first


def test_loops_count_as_often_as_they_run_also_inside_a_pair() -> None:
    body = f"""
%body (p: f32[64]) -> f32[64] {{
  %p = f32[64]{{0}} parameter(0)
{permuted("inner")}
{work("turned", 3)}
{done("ended", "inner")}
  ROOT %next = f32[64]{{0}} add(%turned, %ended)
}}

%condition (y: f32[64]) -> pred[] {{
  %y = f32[64]{{0}} parameter(0)
  ROOT %less = pred[] constant(true)
}}
"""
    loop = "  %loop = f32[64]{0} while(%p), condition=%condition, body=%body, " + (
        'backend_config={"known_trip_count":{"n":"1000"}}'
    )
    found = scheduled(body + entry(loop), CHIP, [0] * 4)
    assert (found.work, found.links, found.exposed) == (3000, 4000, 1000)
    # The outer one takes the work of the first turn, and one second of that of the second; then each turn is as above.
    outside = scheduled(body + entry(permuted("s"), loop, done("d", "s")), CHIP, [0] * 4)
    assert (outside.work, outside.links) == (3000, 4004)
    assert outside.exposed == 4 + 2 + 998


CARRIED = """
%started (x: f32[32]) -> (f32[32], f32[128]) {
  %x = f32[32]{0} parameter(0)
  %all-gather.1 = f32[128]{0} all-gather(%x), channel_id=7, replica_groups=[1,4]<=[4], dimensions={0}, \
backend_config={"async_collective_fusion_config":{"flag_start":"-1","flag_end":"-1"}}
  ROOT %call.1 = (f32[32]{0}, f32[128]{0}) custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.1 (x.1: f32[32], y.1: f32[64]) -> (f32[64], f32[128]) {
  %x.1 = f32[32]{0} parameter(0)
  %y.1 = f32[64]{0} parameter(1)
  %twice = f32[64]{0} add(%y.1, %y.1)
  %all-gather.2 = f32[128]{0} all-gather(%x.1), channel_id=7, replica_groups=[1,4]<=[4], dimensions={0}, \
backend_config={"async_collective_fusion_config":{"flag_start":"2","flag_end":"8"}}
  ROOT %both = (f32[64]{0}, f32[128]{0}) tuple(%twice, %all-gather.2)
}

%ended (x.2: f32[32]) -> f32[128] {
  %x.2 = f32[32]{0} parameter(0)
  %all-gather.3 = f32[128]{0} all-gather(%x.2), channel_id=7, replica_groups=[1,4]<=[4], dimensions={0}, \
backend_config={"async_collective_fusion_config":{"flag_start":"2","flag_end":"8"}}
  ROOT %call.3 = f32[128]{0} custom-call(%all-gather.3), custom_call_target="AsyncCollectiveDone"
}
""" + entry(
    "  %mine = f32[32]{0} slice(%p), slice={[0:32]}",
    "  %async-collective-start = (f32[32]{0}, f32[128]{0}) fusion(%mine), kind=kCustom, calls=%started",
    work("beside", 100),
    "  %fusion.1 = (f32[64]{0}, f32[128]{0}) fusion(%mine, %p), kind=kOutput, calls=%async_collective_fusion.1, "
    'backend_config={"estimated_cycles":"40"}',
    "  %async-collective-done = f32[128]{0} fusion(%mine), kind=kCustom, calls=%ended",
)


def test_a_collective_that_a_fusion_carries_on_is_one() -> None:
    assert collectives_in(CARRIED, [0] * 4) == {"all-gather": 384}
    found = scheduled(CARRIED, CHIP, [0] * 4)
    # Of 6 s the four of the fusion that carries it on are hidden; what only stands between moves nothing.
    assert (found.work, found.links, found.exposed) == (104, 6, 2)


def test_a_collective_on_other_cores() -> None:
    text = """
%offloaded (x: f32[32]) -> f32[128] {
  %x = f32[32]{0} parameter(0)
  ROOT %all-gather.1 = f32[128]{0} all-gather(%x), channel_id=7, replica_groups=[1,4]<=[4], dimensions={0}
}
""" + entry(
        "  %mine = f32[32]{0} slice(%p), slice={[0:32]}",
        "  %begun = ((f32[32]{0}), f32[128]{0}, u32[]) async-start(%mine), async_execution_thread=\"sparsecore\", "
        "calls=%offloaded",
        work("beside", 5),
        "  %over = f32[128]{0} async-done(%begun)",
    )  # fmt: skip
    found = scheduled(text, CHIP, [0] * 4)
    assert (found.work, found.links, found.exposed) == (5, 6, 1)


PROGRAM = """
import json
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxrl_llm.distributed.chips import TPUS
from jaxrl_llm.plan.program.cycles import lines_in
from jaxrl_llm.plan.program.schedule import scheduled

devices = np.array(topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices)
mesh = Mesh(devices, ("fsdp",))
layers = jax.ShapeDtypeStruct((4, 4096, 4096), jnp.bfloat16, sharding=NamedSharding(mesh, P(None, "fsdp")))
x = jax.ShapeDtypeStruct((16384, 4096), jnp.bfloat16, sharding=NamedSharding(mesh, P("fsdp")))

def run(x, layers):
    def step(x, w):
        w = jax.lax.with_sharding_constraint(w, NamedSharding(mesh, P()))
        return jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P("fsdp"))), None
    return jax.lax.scan(step, x, layers)[0]

text = jax.jit(run).lower(x, layers).compile().as_text()
one = scheduled(text, TPUS["v5e"], [0] * 4)
found = [one.work, one.links, one.exposed, sum(line.seconds for line in lines_in(text, TPUS["v5e"]))]
print("RESULT" + json.dumps(found))
"""


@pytest.mark.heavy
def test_a_compiled_program() -> None:
    work, links, exposed, lines = result_of(PROGRAM, environment=tpu_environment())
    assert work == pytest.approx(lines)
    # Three of four parts of each layer's weights, over the links of a v5e.
    assert links == pytest.approx(4 * 0.75 * 2 * 4096**2 / 200e9, rel=1e-3)
    assert 0 <= exposed <= links
