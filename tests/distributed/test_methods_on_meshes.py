"""Methods with rows spread over devices: the same loss and gradient as on one, and programs that compile for TPUs.

Those that are tried sort, select, count or look at whole groups, where a mistake of partitioning would show.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from other_process import on_devices, result_of
from tpu_environment import tpu_environment

NAMES = ("bapo_adaptive_clip", "clip_cov", "d3s", "drpo_decoupled_reward", "epo", "gspo", "passk_grpo", "ppo", "riskpo")
COMMON = """
import json, sys
sys.path.insert(0, {tools!r})
import jax, jax.numpy as jnp, numpy as np
from experience import case
from jaxrl_llm import algorithms
from jaxrl_llm.distributed import data_mesh, replicate, to_mesh
from jaxrl_llm.core.trajectory import map_rows
from jax.sharding import NamedSharding, PartitionSpec as P

def program(algorithm):
    def whole(memory, batch, outputs):
        memory, ready = algorithm.transform.apply(memory, batch)
        return memory, jax.value_and_grad(lambda outputs: algorithm.objective(outputs, ready)[0])(outputs)
    return jax.jit(whole)
"""
ON_FOUR_DEVICES = """
out = {{}}
mesh = data_mesh()
for name in {names!r}:
    algorithm = algorithms.get(name)
    one, run, memory = case(11, algorithm), program(algorithm), algorithm.transform.init()
    alone = run(*jax.device_put((memory, one.batch, one.outputs), jax.devices()[0]))
    spread = run(replicate(memory, mesh), *to_mesh((one.batch, one.outputs), mesh))
    assert len(spread[1][1].logp.sharding.device_set) == 4
    pairs = zip(jax.tree.leaves(alone), jax.tree.leaves(spread), strict=True)
    out[name] = max(float(np.max(np.abs(np.asarray(a) - np.asarray(b)), initial=0)) for a, b in pairs)

# Rows that the devices do not divide: then each has all of them.
algorithm = algorithms.get("ppo")
one = case(11, algorithm)
batch = algorithm.transform.apply(algorithm.transform.init(), one.batch)[1]
few = map_rows(lambda x: x[:3], batch)
outputs = jax.tree.map(lambda x: x[:3], one.outputs)
both = jax.jit(jax.value_and_grad(lambda x: algorithm.objective(x, few)[0]))
alone, spread = both(outputs), both(replicate(outputs, mesh))
np.testing.assert_allclose(spread[0], alone[0], rtol=1e-6)
np.testing.assert_allclose(spread[1].logp, alone[1].logp, rtol=1e-6, atol=1e-7)
print("RESULT" + json.dumps(out))
"""
FOR_FOUR_CHIPS = """
from jax.experimental import topologies
mesh = data_mesh(list(topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices))
out = {{}}

def placed(tree, spec):
    place = NamedSharding(mesh, spec)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree)

for name in {names!r}:
    algorithm = algorithms.get(name)
    one = case(11, algorithm)
    rows = one.batch, one.outputs
    arguments = placed(algorithm.transform.init(), P()), *placed(rows, P("data"))
    out[name] = program(algorithm).lower(*arguments).compile().memory_analysis().temp_size_in_bytes
print("RESULT" + json.dumps(out))
"""


def run(program: str, environment: dict[str, str]) -> dict[str, float]:
    tools = str(Path(__file__).parents[1] / "algorithms")
    code = (COMMON + program).format(tools=tools, names=NAMES)
    return result_of(code, environment=environment)


@pytest.mark.heavy
def test_four_devices_find_what_one_does() -> None:
    differences = run(ON_FOUR_DEVICES, on_devices(4))
    assert set(differences) == set(NAMES)
    for name, difference in differences.items():
        assert difference < 1e-5, name


@pytest.mark.heavy
def test_they_compile_for_four_v5e_chips() -> None:
    sizes = run(FOR_FOUR_CHIPS, tpu_environment())
    assert set(sizes) == set(NAMES)
    for name, size in sizes.items():
        assert size < 2**26, name
