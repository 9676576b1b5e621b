"""A reference policy in host memory: the same numbers, and no device memory while it is not used."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import tiny_runs as runs
from conftest import rollouts_of
from other_process import result_of
from tpu_environment import tpu_environment

from jaxrl_llm.distributed.mesh import HOST, to_device, to_host, to_memory
from jaxrl_llm.learner.inputs import provide
from jaxrl_llm.learner.outputs import outputs_of
from jaxrl_llm.training.setup import set_up

pytestmark = pytest.mark.heavy


def kinds(tree: Any) -> set[str]:
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree)}


def test_the_reference_in_the_hosts_memory_gives_the_same_numbers(vectors: Callable[[str], Any]) -> None:
    """CPUs have host memory as a memory kind too, so the transfers are those of accelerators."""
    model, batch = vectors("llama_tied"), rollouts_of("llama_tied", "plain")
    there = to_memory(model.params, HOST)
    assert kinds(there) == {HOST}
    needs = frozenset({"reference_logp", "reference_affinity"})
    found, expected = (provide(model.policy, needs, model.params, p, batch) for p in (there, model.params))
    np.testing.assert_array_equal(found.need("reference_logp"), expected.need("reference_logp"))
    np.testing.assert_array_equal(found.info["reference_affinity"], expected.info["reference_affinity"])
    assert kinds(found.reference_logp) == {"device"}
    assert kinds(there) == {HOST}, "they stay there"
    program = outputs_of.trace(model.policy, there, batch).jaxpr
    assert sum(step.primitive.name == "device_put" for step in program.eqns) == len(jax.tree.leaves(there))


def test_what_is_on_the_device_is_not_moved() -> None:
    x = jax.numpy.ones(3)
    assert jax.jit(to_device).trace({"x": x}).jaxpr.eqns == []


def test_on_cpus_it_is_one_line_and_nothing_else(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    config = runs.small_config(tmp_path, reference_memory="host")
    with caplog.at_level(logging.WARNING, logger="jaxrl_llm.distributed"):
        parts, _, _ = set_up(config)
    assert [r.getMessage() for r in caplog.records] == ["weights stay where they are: on CPUs all memory is the host's"]
    assert parts.reference is not None
    assert kinds(parts.reference) == {"device"}
    x = {"x": jax.numpy.ones(2)}
    assert to_host(x) is x


ON_A_CHIP = """
import json
from functools import partial
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxrl_llm.distributed import data_mesh
from jaxrl_llm.models import ModelConfig, Policy, init_params
from jaxrl_llm.learner.outputs import outputs_of
from jaxrl_llm.core.trajectory import Trajectories

mesh = data_mesh(list(topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices)[:1])
config = ModelConfig(
    family="llama", vocab_size=4096, hidden_size=256, intermediate_size=512, num_layers=4, num_heads=4, num_kv_heads=2,
    head_dim=64, norm_epsilon=1e-5, tie_embeddings=True, rope_of_layer=(0,) * 4, window_of_layer=(0,) * 4,
    query_scale=0.125,
)
policy = Policy(config, jnp.dtype(jnp.bfloat16))
params = jax.eval_shape(partial(init_params, config=config), jax.random.key(0))
N, L = 8, 64
rows = NamedSharding(mesh, P("data"))
S = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=rows)
i32, f32 = jnp.int32, jnp.float32
batch = Trajectories(
    tokens=S(i32, N, L), token_mask=S(bool, N, L), action_mask=S(bool, N, L), behaviour_logp=S(f32, N, L),
    policy_step=S(i32, N, L), turn=S(i32, N, L), group=S(i32, N), prompt_id=S(i32, N), truncated=S(bool, N),
    temperature=S(f32, N),
)
out = {"parameters": sum(4 * x.size for x in jax.tree.leaves(params))}
for kind in ("device", "pinned_host"):
    place = NamedSharding(mesh, P(), memory_kind=kind)
    there = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), params)
    memory = outputs_of.trace(policy, there, batch).lower().compile().memory_analysis()
    out[kind] = [memory.argument_size_in_bytes, memory.host_argument_size_in_bytes]
print("RESULT" + json.dumps(out))
"""


def test_on_a_v5e_chip_the_weights_are_arguments_in_the_hosts_memory() -> None:
    found = result_of(ON_A_CHIP, environment=tpu_environment())
    (whole, none), (rest, host) = found["device"], found["pinned_host"]
    assert none == 0
    assert host >= found["parameters"], "rounded up to whole tiles"
    assert host < 1.1 * found["parameters"]
    assert rest < 2**20 < found["parameters"] < whole
