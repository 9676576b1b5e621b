"""Memory on the axis "fsdp": weights, moments and gradients fall as 1/fsdp, and one layer is gathered at a time."""

from __future__ import annotations

import json
import math

import pytest
from compiling import with_devices
from test_mesh import run_program

# Of the update and the gradient on each mesh, by the compiler: bytes on a device; and shapes that collectives give.
PROGRAM = """
import dataclasses, json, re
from jaxrl_llm.distributed import fully_sharded, mesh_of
from jaxrl_llm.learner.setup import compile_learning
from jaxrl_llm.learner.step import Learner
from jaxrl_llm.learner.update import gradient

policy = dataclasses.replace(policy, remat={remat})

def measure(count):
    mesh = mesh_of(f"fsdp={count}", jax.devices()[:count])
    on_mesh = dataclasses.replace(policy, mesh=mesh)
    learner = Learner(on_mesh, algorithm, optimizer, mesh, reference=params)
    update = compile_learning(learner, params, batch)[-1].compiled
    places = fully_sharded(params, policy.config, mesh)
    shapes = jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), params, places)
    ready = batch.replace(advantages=batch.behaviour_logp, old_logp=batch.behaviour_logp)
    grad = jax.jit(lambda params, rows: gradient(on_mesh, algorithm.objective, params, rows)[0], out_shardings=places)
    grad = grad.lower(shapes, to_mesh(ready, mesh)).compile()
    gathered = " ".join(re.findall(r"= (.*?) all-gather(?:-start)?\\(", update.as_text()))
    text = update.as_text() + grad.as_text()
    layers = [(x.shape, places["layers"][name]) for name, x in params["layers"].items() if x.ndim > 2]
    stacked = [(shape, place.shard_shape(shape)) for shape, place in layers]
    whole, shards = ([f"[{','.join(map(str, shape))}]" in text for shape in shapes] for shapes in zip(*stacked))
    return {
        "update": update.memory_analysis().alias_size_in_bytes,
        "gradient": grad.memory_analysis().output_size_in_bytes - 8 * len(jax.tree.leaves(params)),  # their addresses
        "gathered": [list(map(int, shape.split(","))) for shape in re.findall(r"f32\\[([\\d,]+)\\]", gathered)],
        "whole": any(whole), "shards": all(shards),
    }

state = init_state(params, optimizer)
sizes = lambda tree, split: sum(x.nbytes for x in jax.tree.leaves(tree) if (x.ndim > 1) == split)
print("RESULT" + json.dumps({
    "found": {n: measure(n) for n in {counts}}, "state": [sizes(state, True), sizes(state, False)],
    "params": [sizes(params, True), sizes(params, False)],
    "largest": max(x[0].size if x.ndim > 2 else x.size for x in jax.tree.leaves(params)),
}))
"""


@pytest.mark.heavy
@pytest.mark.parametrize(("remat", "counts"), [(True, [2, 8]), (False, [4])])
def test_each_device_holds_its_share_and_gathers_a_layer_at_a_time(remat: bool, counts: list[int]) -> None:
    program = PROGRAM.replace("{remat}", str(remat)).replace("{counts}", str(counts))
    out = json.loads(run_program(program, XLA_FLAGS=with_devices(8)).split("RESULT")[1])
    for count, found in out["found"].items():
        for name, (split, whole) in (("update", out["state"]), ("gradient", out["params"])):
            assert found[name] == split // int(count) + whole, "vectors and counters are whole, all else is in shards"
        assert found["gathered"]
        assert max(math.prod(shape) for shape in found["gathered"]) <= out["largest"], "a layer's weight, the embedding"
        assert found["shards"]
        assert not found["whole"], "neither weights nor gradients nor moments of all layers are anywhere"
