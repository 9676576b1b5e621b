"""Sink slots on meshes: an iteration of learning, and what is drawn, are those of one device."""

from __future__ import annotations

import json

import pytest
from compiling import with_devices
from test_axes import KERNEL, LEARN, VECTORS, on_four_devices
from test_mesh import run_program

pytestmark = pytest.mark.heavy

SLOTS = """
from jaxrl_llm.models.policy import with_sink_slots

policy, params = with_sink_slots(policy, params, 2)
noise = np.random.default_rng(5)
params["layers"] |= {
    name: jnp.asarray(noise.normal(size=params["layers"][name].shape), jnp.float32)
    for name in ("sink_keys", "sink_values")
}
"""
DRAW = """
import json
from jaxrl_llm import sample
from jaxrl_llm.distributed import mesh_of

def draw(**more):
    prompts = [[5, 9, 200], [7, 1, 60, 61, 62, 3, 9]]
    how = dict(group_size=2, max_new_tokens=6, stop_token_ids=[-1])
    found = sample(policy, params, prompts, jax.random.key(0), **how, **more)
    return np.asarray(found.tokens).tolist(), np.asarray(found.behaviour_logp)

(one, logp), (many, other) = draw(), draw(mesh=mesh_of("data=2,tensor=2"))
print("RESULT" + json.dumps([one == many, float(np.abs(logp - other).max())]))
"""


@pytest.mark.parametrize("mesh", ["data=2,tensor=2", "sequence=4"])
@pytest.mark.parametrize("attention", ["", KERNEL], ids=["masks", "kernel"])
def test_learning_is_that_of_one_device(mesh: str, attention: str) -> None:
    """Slots go with their key-value heads; where "sequence" repeats those, they are repeated too."""
    on_four_devices(SLOTS + attention + LEARN, "llama", mesh, mesh)


def test_tokens_are_those_of_one_device() -> None:
    found = run_program(SLOTS + DRAW, VECTORS / "llama", XLA_FLAGS=with_devices(4))
    same, error = json.loads(found.split("RESULT")[1])
    assert same
    assert error < 1e-4
