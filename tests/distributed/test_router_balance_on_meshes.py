"""The auxiliary loss and steps of correction biases on a mesh are those of one device, however tokens are split."""

from __future__ import annotations

from typing import Any

import pytest
from other_process import on_devices, result_of

pytestmark = pytest.mark.heavy

PROGRAM = """
import dataclasses, json, sys
import jax, numpy as np, jax.numpy as jnp, optax
from jaxrl_llm import load_policy, sample
from jaxrl_llm.core.transform import Objective
from jaxrl_llm.distributed import mesh_of, to_mesh
from jaxrl_llm.learner.microbatches import plan_steps
from jaxrl_llm.learner.router_balance import RouterBalance
from jaxrl_llm.learner.setup import shard
from jaxrl_llm.learner.update import update
from jaxrl_llm.learner.train_state import init_state

policy, params, _ = load_policy(sys.argv[1])
nothing = Objective(lambda outputs, batch: (jnp.float32(0), {}))
prompts, optimizer = [[5, 9, 200], [7, 1, 60, 61, 62, 3, 9], [80, 81], [100] * 6], optax.sgd(0.3)
batch = sample(policy, params, prompts, jax.random.key(0), group_size=4, max_new_tokens=12, stop_token_ids=[-1])
batch = jax.tree.map(np.asarray, batch)
biases = any(kind.router_correction for kind in policy.config.each_kind)

def learned(text):
    mesh = mesh_of(text) if text else None
    own = dataclasses.replace(policy, mesh=mesh)
    copy = jax.tree.map(jnp.copy, params)
    state = init_state(copy if mesh is None else shard(copy, own, mesh), optimizer)
    rows = jax.tree.map(jnp.asarray, batch) if mesh is None else to_mesh(batch, mesh)
    steps = plan_steps(batch, mesh=mesh)
    balance = RouterBalance(1.0, 0.01 if biases else 0.0)
    state, metrics = update(own, nothing, optimizer, state, rows, steps, balance=balance)
    return jax.device_get((state.params, metrics))

(one, metrics), out = learned(""), {}
out["moved"] = max(float(np.abs(x - y).max()) for x, y in zip(*map(jax.tree.leaves, (one, params))))
for text in sys.argv[2:]:
    many, found = learned(text)
    apart = max(float(np.abs(x - y).max()) for x, y in zip(*map(jax.tree.leaves, (one, many))))
    names = ("router/aux_loss", "router/largest_share")
    out[text] = [apart, *(abs(float(metrics[name] - found[name])) for name in names)]
print("RESULT" + json.dumps(out))
"""
MESHES = {
    "mixtral": ("data=2,expert=2", "expert=2,tensor=2", "data=2,sequence=2", "fsdp=4"),
    "glm4_moe": ("data=2,expert=2",),
}


@pytest.mark.parametrize("family", MESHES)
def test_the_update_is_that_of_one_device(family: str, vectors: Any) -> None:
    found = result_of(PROGRAM, str(vectors(family).folder), *MESHES[family], environment=on_devices(4))
    assert found.pop("moved") > 1e-3
    for text, (apart, loss, share) in found.items():
        assert apart < 2e-5, text
        assert max(loss, share) < 1e-5, text
