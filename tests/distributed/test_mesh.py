"""Data parallelism: rows spread over devices give the update of one device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from compiling import with_devices

from jaxrl_llm.distributed import check_rows, data_mesh, replicate, to_mesh
from jaxrl_llm.utils.errors import InputError

TINY = Path(__file__).parents[1] / "vectors" / "llama_tied"

# Eight rows in four groups with very uneven completions; {tiny} is the policy's folder.
COMMON = """
import jax, jax.numpy as jnp, numpy as np
from functools import partial
from jaxrl_llm import load_policy
from jaxrl_llm.algorithms import grpo
from jaxrl_llm.distributed import data_mesh, replicate, to_mesh
from jaxrl_llm.learner.optimizer import OptimizerConfig, make_optimizer
from jaxrl_llm.learner.update import prepare, update
from jaxrl_llm.learner.train_state import init_state
from jaxrl_llm.core.trajectory import Trajectories

policy, params, _ = load_policy("{tiny}", remat=False)  # compiles faster
random, place = np.random.default_rng(0), np.arange(12)
owner, end = np.arange(8) // 2, np.array([12, 4, 7, 3, 9, 5, 6, 12])[:, None]
mask = (place >= 3) & (place < end)
prompts = random.integers(0, 256, (4, 12))
tokens = np.where(place < 3, prompts[owner], random.integers(0, 256, (8, 12)))
logp = jnp.asarray(np.where(mask, -5.5 + 0.5 * random.normal(size=(8, 12)), 0), jnp.float32)
batch = Trajectories(
    tokens=jnp.asarray(tokens * (place < end), jnp.int32), token_mask=jnp.asarray(place < end),
    action_mask=jnp.asarray(mask), behaviour_logp=logp, policy_step=jnp.zeros((8, 12), jnp.int32),
    turn=jnp.asarray(np.where(mask, 0, -1)), group=jnp.asarray(owner), prompt_id=jnp.asarray(owner),
    truncated=jnp.zeros(8, bool), temperature=jnp.ones(8), reward=jnp.asarray(random.random(8), jnp.float32),
    reference_logp=logp - 0.1,
)
algorithm = grpo()
optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-3, epsilon=1e-4), 2)
"""

SHARDED = """
import dataclasses
from jaxrl_llm.distributed import fully_sharded, make_mesh, shard_params
from jaxrl_llm.learner.outputs import outputs_of
from jaxrl_llm.learner.microbatches import plan_steps
from jaxrl_llm.models.placement import row_shards

assert len(jax.devices()) == 4
alone, rows_only, both = data_mesh(jax.devices()[:1]), data_mesh(), make_mesh(2, 2)
pieces = make_mesh(1, 2, fsdp=2)
assert dict(rows_only.shape) == {"data": 4} and dict(alone.shape) == {"data": 1}

def run(mesh, in_pieces=False):
    on_mesh = dataclasses.replace(policy, mesh=mesh)
    copy = shard_params(jax.tree.map(jnp.copy, params), policy.config, mesh)
    state = init_state(copy, optimizer)
    if in_pieces:
        state = jax.device_put(state, fully_sharded(state, policy.config, mesh))
        copy = jax.tree.map(jnp.copy, state.params)
        shards = [x.addressable_shards[0].data.size / x.size for x in jax.tree.leaves(state) if x.ndim > 2]
        assert set(shards) == {1 / 4}, "matrices and their moments are cut by all devices"
    steps = plan_steps(batch, minibatches=2, seed=3, mesh=mesh)
    devices = row_shards(mesh)
    assert steps.packing.suffixes.source.shape[3] % devices == 0
    rows = to_mesh(batch, mesh)
    assert len(rows.tokens.sharding.device_set) == mesh.size
    assert rows.tokens.addressable_shards[0].data.shape == (8 // devices, 12)
    logp = outputs_of(on_mesh, copy, rows, steps).logp
    _, rows = prepare(algorithm.transform, (), rows)
    places = jax.tree.map(lambda x: x.sharding, copy)
    state, metrics = update(on_mesh, algorithm.objective, optimizer, state, rows, steps=steps)
    for leaf, place in zip(*map(jax.tree.leaves, (state.params, places)), strict=True):
        assert leaf.sharding.is_equivalent_to(place, leaf.ndim)
    return jax.device_get((state, metrics, logp))

one = run(alone)
assert one[1]["finite"] == 1 and one[1]["grad_norm"] > 1e-3
for mesh, in_pieces in ((rows_only, False), (both, False), (pieces, True)):
    many = run(mesh, in_pieces)
    np.testing.assert_allclose(many[2], one[2], atol=2e-5)
    for name, value in one[1].items():
        np.testing.assert_allclose(many[1][name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    for before, a, b in zip(*map(jax.tree.leaves, (params, many[0].params, one[0].params)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        assert np.abs(np.asarray(before) - b).max() > 1e-5
print("equal")
"""


def run_program(program: str, model: Path = TINY, **environment: str) -> str:
    """Standard output of a program in a process of its own."""
    code = COMMON.replace("{tiny}", str(model)) + program
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.heavy
def test_an_update_on_four_devices_is_that_of_one() -> None:
    assert "equal" in run_program(SHARDED, XLA_FLAGS=with_devices(4))


def test_one_device_is_a_mesh_too() -> None:
    mesh = data_mesh()
    assert mesh.axis_names == ("data",)
    assert mesh.size == len(jax.devices())
    tree = {"a": jnp.arange(4 * mesh.size), "b": None, "number": 1.5}
    spread = to_mesh(tree, mesh)
    assert spread["a"].tolist() == tree["a"].tolist()  # type: ignore[union-attr]
    assert spread["number"].sharding.is_fully_replicated
    assert replicate(tree, mesh)["a"].sharding.is_fully_replicated


@pytest.mark.parametrize("parts", [(1, 1, 1), (2, 1, 1), (1, 2, 4), (4, 2, 2), (16, 1, 1)])
def test_rows_that_split_evenly_pass(parts: tuple[int, int, int]) -> None:
    check_rows(16, *parts)


@pytest.mark.parametrize("parts", [(3, 1, 1), (1, 5, 1), (1, 1, 32), (4, 4, 2)])
def test_rows_that_do_not_split_evenly_are_refused(parts: tuple[int, int, int]) -> None:
    product = parts[0] * parts[1] * parts[2]
    with pytest.raises(InputError, match=f"16 completions.*= {product} does not divide"):
        check_rows(16, *parts)
