"""Routing replay on a mesh with experts over devices: the experts and the update are those of one device."""

from __future__ import annotations

from typing import Any

import pytest
from other_process import on_devices, result_of

pytestmark = pytest.mark.heavy

PROGRAM = """
import dataclasses, json, sys
import jax, numpy as np, jax.numpy as jnp, optax
from jaxrl_llm import algorithms, load_policy, sample
from jaxrl_llm.distributed import make_mesh, mesh_of
from jaxrl_llm.learner.setup import shard, start
from jaxrl_llm.learner.step import Learner, learn_batch

policy, params, _ = load_policy(sys.argv[1])
asked = dict(group_size=4, max_new_tokens=12, stop_token_ids=[-1], record_experts=True)
prompts, optimizer = [[5, 9, 200], [7, 1, 60, 61, 62, 3, 9], [80, 81], [100] * 6], optax.sgd(0.3)

def on(text):
    mesh = mesh_of(text) if text else make_mesh(1, devices=jax.devices()[:1])
    return mesh, dataclasses.replace(policy, mesh=mesh if text else None)

def drawn(text):
    mesh, on_mesh = on(text)
    placed, key = shard(params, on_mesh, mesh), jax.random.key(0)
    return jax.device_get(sample(policy, placed, prompts, key, mesh=mesh if text else None, **asked))

def learned(text, routing, batch):
    mesh, on_mesh = on(text)
    algorithm = algorithms.get("minirl", routing=routing)
    learner = Learner(on_mesh, algorithm, optimizer, mesh, micro_batches=1 if text else 2)
    state, memory = start(on_mesh, algorithm, optimizer, jax.tree.map(jnp.copy, params), None, mesh)
    found = learn_batch(learner, state, memory, batch)
    return jax.device_get((found.state.params, found.batch.experts))

batch = drawn("")
reward = (batch.tokens.sum(axis=1) % 3).astype(np.float32)
batch = jax.tree.map(np.asarray, batch.replace(reward=reward, rewards={}))
known = batch.experts >= 0
others = [drawn(text).experts for text in ("data=2,expert=2", "expert=2,tensor=2")]
out = {"sampled": [bool((found == batch.experts).all()) for found in others]}
other = batch.replace(experts=np.where(known, batch.experts[..., ::-1] ^ 1, -1))  # which no router chose
for routing, given in (("rollout", other), ("recompute", batch)):
    (one, own), (many, found) = (learned(text, routing, given) for text in ("", "data=2,expert=2"))
    apart = max(float(np.abs(x - y).max()) for x, y in zip(*map(jax.tree.leaves, (one, many))))
    moved = max(float(np.abs(x - y).max()) for x, y in zip(*map(jax.tree.leaves, (one, jax.device_get(params)))))
    alike = bool((found == own)[known].all() and (own >= 0)[known].all())
    out[routing] = {"apart": apart, "moved": moved, "experts": alike}
print("RESULT" + json.dumps(out))
"""


@pytest.fixture(scope="module")
def results(vectors: Any) -> Any:
    return result_of(PROGRAM, str(vectors("mixtral").folder), environment=on_devices(4))


def test_the_same_experts_are_recorded(results: Any) -> None:
    assert results["sampled"] == [True, True]


@pytest.mark.parametrize("routing", ["rollout", "recompute"])
def test_the_update_is_that_of_one_device(routing: str, results: Any) -> None:
    """Also of one in micro-batches."""
    found = results[routing]
    assert found["experts"]
    assert found["apart"] < 1e-5 < 1e-3 < found["moved"]
