"""Rounded projections on meshes: samples, and log-probabilities and gradients of updates, are those of one device."""

from __future__ import annotations

from pathlib import Path

import pytest
from other_process import on_devices, result_of

VECTORS = Path(__file__).parents[1] / "vectors"
PROGRAM = """
import dataclasses, json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxrl_llm import load_policy, sample
from jaxrl_llm.distributed import fully_sharded, mesh_of, to_mesh
from jaxrl_llm.models.outputs import policy_outputs
from jaxrl_llm.models.quantised import Quantised
from jaxrl_llm.sampling import completion_ids
from jaxrl_llm.sampling.weights.layouts import abstract_weights
from jaxrl_llm.sampling.weights import take_weights

policy, params, _ = load_policy(sys.argv[1])
kind = sys.argv[2]
policy = dataclasses.replace(policy, rounding=kind)
prompts = [[3, 5, 7, 9, 11, 2, 4, 8], [3, 5, 9, 1, 2]] * 4
settings = dict(group_size=1, max_new_tokens=8, stop_token_ids=[])

def learn(policy, params, batch):
    def total(params):
        outputs = policy_outputs(policy, params, batch)
        return outputs.logp.sum(), outputs.logp
    return jax.jit(jax.grad(total, has_aux=True))(params)

one = sample(policy, params, prompts, jax.random.key(0), **settings)
lean = one.replace(entropy=None)
gradient, logp = learn(policy, params, lean)
out = {"ratio": float(np.abs(logp - one.behaviour_logp)[np.asarray(one.action_mask)].max())}
for text in sys.argv[3:]:
    mesh = mesh_of(text)
    on_mesh = dataclasses.replace(policy, mesh=mesh)
    placed = jax.device_put(params, fully_sharded(params, policy.config, mesh))
    weights = take_weights(policy, placed, mesh)
    found = sample(policy, placed, prompts, jax.random.key(0), mesh=mesh, **settings)
    many, logp_many = learn(on_mesh, placed, to_mesh(lean, mesh))
    layer = weights.loop["layers"][0]
    assert all(isinstance(layer[name], Quantised) for name in ("query", "out", "gate", "down"))
    shapes = abstract_weights(policy, jax.eval_shape(lambda: params), mesh)
    for a, b in zip(jax.tree.leaves(shapes), jax.tree.leaves(weights.loop), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and a.sharding.is_equivalent_to(b.sharding, a.ndim)
    pairs = zip(*map(jax.tree.leaves, (many, gradient)), strict=True)
    out[text] = {
        "tokens": completion_ids(found) == completion_ids(one),
        "sampled": float(np.abs(found.behaviour_logp - one.behaviour_logp).max()),
        "logp": float(np.abs(np.asarray(logp_many) - logp).max()),
        "gradient": max(float(np.abs(a - b).max() / (1e-3 + np.abs(b).max())) for a, b in pairs),
        "specs": [str(getattr(layer[n], k).sharding.spec) for n in ("gate", "down") for k in ("values", "scale")],
    }
print("RESULT" + json.dumps(out))
"""


@pytest.mark.heavy
@pytest.mark.parametrize(
    "family, kind, meshes",
    [
        ("qwen3", "int8", ("fsdp=4,tensor=2", "data=8", "data=4,sequence=2")),
        ("qwen3", "float8", ("fsdp=2,tensor=2",)),
        ("qwen3_moe", "int8", ("expert=2,tensor=2,fsdp=2", "fsdp=8")),
    ],
)
def test_on_eight_devices_as_on_one(family: str, kind: str, meshes: tuple[str, ...]) -> None:
    out = result_of(PROGRAM, str(VECTORS / family), kind, *meshes, environment=on_devices(8, quick=True))
    assert out.pop("ratio") < 1e-4
    for mesh, found in out.items():
        assert found["tokens"], (mesh, found)
        assert max(found["sampled"], found["logp"]) < 1e-3, (mesh, found)
        assert found["gradient"] < 5e-3, (mesh, found)
        if "tensor" in mesh:
            values, scale = found["specs"][:2]
            assert values.count("'tensor'") == scale.count("'tensor'") == 1
            assert "'tensor'" in found["specs"][2]
            assert "'tensor'" not in found["specs"][3]  # its outputs are whole
