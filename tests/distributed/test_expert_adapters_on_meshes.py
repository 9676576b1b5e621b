"""Adapters of experts and embeddings on a mesh: tokens and the update are those of one device."""

from __future__ import annotations

from typing import Any

import pytest
from other_process import on_devices, result_of

pytestmark = pytest.mark.heavy

PROGRAM = """
import dataclasses, json, sys
import jax, numpy as np, jax.numpy as jnp, optax
from jaxrl_llm import algorithms, load_policy, sample
from jaxrl_llm.distributed import mesh_of, to_mesh
from jaxrl_llm.learner.microbatches import plan_steps
from jaxrl_llm.learner.setup import shard
from jaxrl_llm.learner.update import update
from jaxrl_llm.learner.train_state import init_state
from jaxrl_llm.models import lora
from jaxrl_llm.models.parameters import combine

from functools import partial
from jaxrl_llm.models.quantised.layers import frozen_weight

kind = sys.argv.pop(1)
policy, params, _ = load_policy(sys.argv[1], keep=None if kind == "plain" else partial(frozen_weight, kind=kind))
key, targets = jax.random.key(0), ("query", "gate", "up", "down", "embed", "unembed")
adapters = lora.init(key, policy.config, 4, targets)
adapters = jax.tree.map(lambda x: 0.1 * jax.random.normal(jax.random.fold_in(key, x.size), x.shape), adapters)
frozen, adapters = lora.split(lora.scaled(combine(params, adapters), 4, 6.0))
objective, optimizer = algorithms.get("dr_grpo").objective, optax.sgd(3.0)
prompts = [[5, 9, 200], [7, 1, 60, 61, 62, 3, 9], [80, 81], [100] * 6]

def both(text):
    mesh = mesh_of(text) if text else None
    own = dataclasses.replace(policy, mesh=mesh)
    place = (lambda tree: tree) if mesh is None else lambda tree: shard(tree, own, mesh)
    return mesh, own, place(frozen), place(jax.tree.map(jnp.copy, adapters))

def drawn(text):
    mesh, own, *parts = both(text)
    asked = dict(group_size=4, max_new_tokens=12, stop_token_ids=[-1], mesh=mesh)
    return jax.device_get(sample(policy, combine(*parts), prompts, key, **asked))

batch = jax.tree.map(np.asarray, drawn(""))
reward = (batch.tokens.sum(axis=1) % 3 - 1).astype(np.float32)
batch = batch.replace(old_logp=batch.behaviour_logp, advantages=np.broadcast_to(reward[:, None], batch.tokens.shape))

def learned(text):
    mesh, own, frozen, learning = both(text)
    rows = jax.tree.map(jnp.asarray, batch) if mesh is None else to_mesh(batch, mesh)
    state = init_state(learning, optimizer)
    state, metrics = update(own, objective, optimizer, state, rows, plan_steps(batch, mesh=mesh), frozen=frozen)
    return jax.device_get((state.params, metrics["mismatch"]))

(one, mismatch), out = learned(""), {}
moved = [float(np.abs(x - y).max()) for x, y in zip(*map(jax.tree.leaves, (one, adapters)))]
for text in sys.argv[2:]:
    many, _ = learned(text)
    apart = max(float(np.abs(x - y).max()) for x, y in zip(*map(jax.tree.leaves, (one, many))))
    out[text] = [apart, bool((drawn(text).tokens == batch.tokens).all())]
print("RESULT" + json.dumps([min(moved), float(mismatch), out]))
"""


@pytest.mark.parametrize("kind", ["plain", "nf4"])
def test_tokens_and_the_update_are_those_of_one_device(kind: str, vectors: Any) -> None:
    """Also over frozen weights in four bits."""
    # The tiny model's experts have fewer inner units than "tensor" could cut into blocks of 64.
    meshes = ("data=2,expert=2", "fsdp=4", *(["expert=2,tensor=2"] if kind == "plain" else []))
    moved, mismatch, found = result_of(
        PROGRAM, kind, str(vectors("mixtral").folder), *meshes, environment=on_devices(4)
    )
    assert mismatch < 1e-5
    for text, (apart, same) in found.items():
        assert apart < 3e-5 < 3e-4 < moved, text
        assert same, text
