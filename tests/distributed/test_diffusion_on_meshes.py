"""Masked-diffusion models on several devices: the same update and samples as on one, and programs for TPUs."""

from __future__ import annotations

import subprocess
import sys

import pytest
from other_process import on_devices
from tpu_environment import tpu_environment

COMMON = """
import dataclasses, json
import jax, jax.numpy as jnp, numpy as np, optax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxrl_llm import algorithms
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.distributed import named_shardings, parameter_specs, to_mesh
from jaxrl_llm.distributed.mesh import mesh_of
from jaxrl_llm.learner.inputs import provide
from jaxrl_llm.learner.update import gradient
from jaxrl_llm.models import Policy, init_params
from jaxrl_llm.models.families import from_hf
from jaxrl_llm.sampling import sample
from jaxrl_llm.sampling.sampler import settings_of
from jaxrl_llm.sampling.unmasking.unmask import Canvas, unmask

config = from_hf({"model_type": "llada", "d_model": 64, "n_heads": 4, "n_kv_heads": 2, "n_layers": 2,
    "mlp_hidden_size": 128, "vocab_size": 64, "max_sequence_length": 64, "mask_token_id": 63, "eos_token_id": 1,
    "block_length": 8})
params = init_params(jax.random.key(0), config, scale=0.2)
bgpo = algorithms.get("bgpo", samples=2)

def loss(policy, params, batch):
    ready = bgpo.transform.apply(bgpo.transform.init(), batch)[1]
    return gradient(policy, bgpo.objective, params, ready)
"""
ON_FOUR_DEVICES = """
out = {}
prompts = [[5, 6, 7, 8]] * 8
alone = Policy(config)
drawn = sample(alone, params, prompts, jax.random.key(1), max_new_tokens=12)
drawn = drawn.replace(reward=jnp.asarray([1.0, 0.0] * 4), group=jnp.zeros(8, jnp.int32))
batch = provide(alone, bgpo.needs, params, None, drawn)
one, metrics = jax.jit(loss, static_argnums=0)(alone, params, batch)
for sizes in ("data=4", "fsdp=2,tensor=2"):
    mesh = mesh_of(sizes)
    policy = dataclasses.replace(alone, mesh=mesh)
    spread = jax.device_put(params, named_shardings(parameter_specs(config, mesh), mesh))
    again = sample(alone, spread, prompts, jax.random.key(1), max_new_tokens=12, mesh=mesh)
    assert (again.tokens == drawn.tokens).all(), sizes
    four, other = jax.jit(loss, static_argnums=0)(policy, spread, to_mesh(batch, mesh))
    assert len(jax.tree.leaves(four)[0].sharding.device_set) == 4
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(four), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * float(np.abs(a).max()))
print("RESULT")
"""
FOR_FOUR_CHIPS = """
chips = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
mesh = mesh_of("fsdp=2,tensor=2", list(chips))
policy = Policy(config, dtype=jnp.bfloat16, mesh=mesh)

def placed(tree, spec):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)), tree)

shapes = jax.eval_shape(lambda: params)
shapes = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes,
                      named_shardings(parameter_specs(config, mesh), mesh))
N, L = 8, 24
row = {name: jnp.zeros((N, L), kind) for name, kind in (("tokens", jnp.int32), ("token_mask", bool),
       ("action_mask", bool), ("behaviour_logp", jnp.float32), ("policy_step", jnp.int32), ("turn", jnp.int32))}
batch = Trajectories(**row, group=jnp.zeros(N, jnp.int32), prompt_id=jnp.zeros(N, jnp.int32),
    truncated=jnp.zeros(N, bool), reward=jnp.zeros(N), info={"elbo_terms": jnp.zeros((N, 2))})
rows = placed(batch, P("fsdp"))
size = jax.jit(loss, static_argnums=0).lower(policy, shapes, rows).compile().memory_analysis().temp_size_in_bytes
assert size < 2**26, size
canvas = Canvas(jnp.zeros((N, L), jnp.int32), jnp.zeros(N, jnp.int32), jnp.zeros((N, 8), jnp.int32),
    jnp.zeros((N, 8), bool), *(jnp.zeros(N, jnp.int32),) * 3)
settings = placed(jax.eval_shape(lambda: settings_of(policy, jax.random.key(0))), P())
unmask.lower(dataclasses.replace(policy, mesh=None), shapes, placed(canvas, P("fsdp")), settings).compile()
print("RESULT")
"""


def run(program: str, environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMMON + program], env=environment, capture_output=True, text=True, timeout=500
    )
    assert "RESULT" in done.stdout, done.stderr[-3000:]


@pytest.mark.heavy
def test_four_devices_draw_and_learn_as_one() -> None:
    run(ON_FOUR_DEVICES, on_devices(4))


@pytest.mark.heavy
def test_its_programs_compile_for_four_v5e_chips() -> None:
    environment = tpu_environment()

    run(FOR_FOUR_CHIPS, environment)
