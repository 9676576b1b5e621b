"""The axes "expert" and "sequence": an iteration of learning is that of one device, and what travels is what should."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax
import pytest
from compiling import with_devices
from jax.sharding import AbstractMesh
from test_mesh import run_program
from tpu_environment import tpu_environment

from jaxrl_llm.distributed import check_mesh, fully_sharded
from jaxrl_llm.models.mesh_axes import stored_spec
from jaxrl_llm.models.placement import placement
from jaxrl_llm.utils.errors import InputError

VECTORS = Path(__file__).parents[1] / "vectors"

# An iteration on {mesh} and on one device, and the shapes that the collectives of the update on {compiled} give.
LEARN = """
import dataclasses, json, re
from jaxrl_llm.distributed import fully_sharded, mesh_of
from jaxrl_llm.learner.setup import compile_learning, shard, start
from jaxrl_llm.learner.step import Learner, learn_batch

def learner_on(text):
    mesh = mesh_of(text) if text else data_mesh(jax.devices()[:1])
    on_mesh = dataclasses.replace(policy, mesh=mesh if text else None)
    return Learner(on_mesh, algorithm, optimizer, mesh, reference=shard(params, on_mesh, mesh))

def learn(text):
    learner = learner_on(text)
    state, memory = start(learner.policy, algorithm, optimizer, jax.tree.map(jnp.copy, params), None, learner.mesh)
    found = learn_batch(learner, state, memory, batch)
    return jax.device_get((found.state.params, found.metrics, found.steps.packing))

def apart(a, b):
    return max(float(np.abs(x - y).max()) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))

def collectives(text):
    update = compile_learning(learner_on(text)._replace(reference=params), params, batch)[-1].compiled
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    found = re.findall(rf"= (.*?) ({kinds})(?:-start)?\\(", update.as_text())
    return [(kind, re.findall(r"\\w+\\[([\\d,]*)\\]", result)) for result, kind in found]

one, many = learn(""), learn("{mesh}")
# Of metrics above 1 in proportion, as float32 rounds them: a norm of gradients is 2.4.
metrics = max(abs(float(many[1][name] - x)) / max(abs(float(x)), 1) for name, x in one[1].items())
out = {
    "apart": [apart(many[0], one[0]), metrics],
    "learned": apart(one[0], jax.device_get(params)),
    "collectives": collectives("{compiled}"),
    "tokens": sum(level.source[0, 0, 0].size for level in many[2].levels),
}
"""
EXPERTS = """
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxrl_llm.models.layers import moe as experts

config, random = policy.config, np.random.default_rng(1)
layer = {name: np.array(params["layers"][name][0]) for name in experts.WEIGHTS if name in params["layers"]}
layer["router"][0, 2:] = 90.0  # each token, whose first number is positive, goes to the last two of four experts
x = np.abs(random.normal(size=(4, 6, config.hidden_size))).astype(np.float32)
weights = random.normal(size=x.shape).astype(np.float32)

gated = lambda gate, up: jax.nn.silu(gate) * up

def run(x, layer):
    loss = lambda x, layer: jnp.sum(weights * experts.expert_mlp(x, layer, config, gated))
    return jax.jit(jax.value_and_grad(loss, (0, 1)))(x, layer)

expected = jax.device_get(run(*jax.device_put((x, layer), jax.devices()[0])))
largest = max(np.abs(x).max() for x in jax.tree.leaves(expected))
out["skewed"] = {}
for text, rows, most in (
    ("expert=4", P("expert"), 2**16), ("expert=4", P("expert"), 1), ("expert=4", P(), 2**16),
    ("data=2,expert=2", P(("data", "expert")), 1),
):
    mesh, experts.MAX_ROUTED = mesh_of(text), most
    places = fully_sharded({"layers": layer}, config, mesh)["layers"]
    found = run(jax.device_put(x, NamedSharding(mesh, rows)), jax.device_put(layer, places))
    out["skewed"][f"{text} {rows} {most}"] = float(apart(jax.device_get(found), expected) / largest)

# What the compiler says that the experts and their moments take on a device.
state = init_state(params, optimizer)
state = jax.device_put(state, fully_sharded(state, config, mesh_of("expert=4")))
own = [x for path, x in jax.tree_util.tree_leaves_with_path(state) if str(path[-1])[2:-2] in ("gate", "up", "down")]
compiled = jax.jit(lambda xs: [2 * x for x in xs]).lower(own).compile()
out["bytes"] = compiled.memory_analysis().argument_size_in_bytes, sum(x.nbytes for x in own)
"""
TPU = """
import dataclasses, json
from jax.experimental import topologies
from jaxrl_llm.distributed import mesh_of
from jaxrl_llm.learner.setup import compile_learning
from jaxrl_llm.learner.step import Learner

mesh = mesh_of("{mesh}", list(topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices))
learner = Learner(dataclasses.replace(policy, mesh=mesh), algorithm, optimizer, mesh, reference=params)
text = compile_learning(learner, params, batch)[-1].compiled.as_text()
print("RESULT" + json.dumps([kind for kind in ("all-gather", "reduce-scatter", "all-to-all") if kind in text]))
"""


def found_by(program: str, model: str, mesh: str, compiled: str, environment: dict[str, str]) -> Any:
    """What a program of COMMON and `program` prints as JSON after RESULT."""
    program = program.replace("{mesh}", mesh).replace("{compiled}", compiled)
    return json.loads(run_program(program, VECTORS / model, **environment).split("RESULT")[1])


def on_four_devices(program: str, model: str, mesh: str, compiled: str) -> Any:
    program += '\nprint("RESULT" + json.dumps(out))'
    found = found_by(program, model, mesh, compiled, {"XLA_FLAGS": with_devices(4)})
    parameters, metrics = found["apart"]
    assert parameters < 1e-6 < 1e-5 < found["learned"]
    assert metrics < 1e-5
    return found, [(kind, shape.split(",")) for kind, shapes in found["collectives"] for shape in shapes]


@pytest.mark.heavy
def test_a_mixture_on_the_axis_expert() -> None:
    found, collectives = on_four_devices(LEARN + EXPERTS, "mixtral", "fsdp=2,expert=2", "expert=4")
    for case, error in found["skewed"].items():
        assert error < 1e-5, case
    # The tokens of all devices are gathered, and their sums scattered. Experts, the only weights with 112 inner units,
    # stay where they are.
    assert ("all-gather", [str(found["tokens"]), "64"]) in collectives
    assert ("reduce-scatter", [str(found["tokens"] // 4), "64"]) in collectives
    assert not [shape for _, shape in collectives if "112" in shape]
    here, everywhere = found["bytes"]
    assert 4 * here == everywhere


@pytest.mark.heavy
def test_long_rows_on_the_axis_sequence() -> None:
    found, collectives = on_four_devices(LEARN, "llama", "sequence=2,tensor=2", "sequence=4")
    # Tokens and heads change places: queries, keys, values and results, of four heads, and their gradients. Nothing
    # else of tokens travels, and nothing of all of them.
    exchanged = [shape for kind, shape in collectives if kind == "all-to-all"]
    assert len(exchanged) == 8 * 4
    assert {tuple(n for n in shape if n != "1") for shape in exchanged} == {(str(found["tokens"] // 4), "16")}
    assert not [shape for _, shape in collectives if str(found["tokens"]) in shape]


def test_gradients_of_weights_are_asked_for_in_shards(vectors: Any) -> None:
    """Weights are gathered over "fsdp"; their gradients go where the weights are stored."""
    model, mesh = vectors("llama"), AbstractMesh((2, 2), ("fsdp", "tensor"))
    layer = jax.tree.map(lambda x: x[0], model.params["layers"])
    weights = placement(model.policy.config, mesh).weights
    stored = fully_sharded({"layers": model.params["layers"]}, model.policy.config, mesh)["layers"]

    def axes(function: Any) -> set[str]:
        specs = re.findall(r"spec=P\((.*?)\)", str(jax.make_jaxpr(function)(layer)))
        return {axis for spec in specs for axis in re.findall("'(.*?)'", spec)}

    assert axes(weights) == {"tensor"}
    assert axes(lambda layer: jax.vjp(weights, layer)[1](layer)) == {"tensor", "fsdp"}
    # The same axis as that of the array with all layers.
    for name, x in layer.items():
        if x.ndim > 1:
            assert tuple(stored_spec(name, x.shape, model.policy.config, mesh)) == tuple(stored[name].spec[1:])


KERNEL = """
from jaxrl_llm.models import packed_states, placement

packed_states.takes_kernels = placement.takes_kernels = lambda mesh: True
"""


@pytest.mark.heavy
@pytest.mark.parametrize("mesh", ["sequence=2,tensor=2", "fsdp=2,tensor=2", "data=2,sequence=2"])
def test_the_kernel_for_packed_rows_sees_the_same_on_every_mesh(mesh: str) -> None:
    """All tokens of a shard as one sequence, rows and heads on their devices; gemma2 has windows."""
    for model in ("llama", "gemma2"):
        on_four_devices(KERNEL + LEARN, model, mesh, mesh)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("model", "mesh", "kinds"),
    [("qwen3_moe", "expert=4", {"all-gather", "reduce-scatter"}), ("llama", "sequence=4", {"all-to-all"})],
)
def test_the_update_compiles_for_tpus(model: str, mesh: str, kinds: set[str]) -> None:
    assert kinds <= set(found_by(TPU, model, mesh, "", tpu_environment()))


def test_what_the_axes_must_divide(vectors: Any) -> None:
    dense, mixture = vectors("llama").policy.config, vectors("qwen3_moe").policy.config
    check_mesh(mixture, AbstractMesh((1, 4), ("data", "expert")))
    check_mesh(dense, AbstractMesh((1, 2, 2), ("data", "sequence", "tensor")))
    with pytest.raises(InputError, match="expert=4, but the model has no experts: use other axes"):
        check_mesh(dense, AbstractMesh((1, 4), ("data", "expert")))
    with pytest.raises(InputError, match="expert=3, which does not divide the model's 4 experts: choose"):
        check_mesh(mixture, AbstractMesh((1, 3), ("data", "expert")))
    with pytest.raises(InputError, match="sequence=4 x tensor=2, which does not divide the model's 4 query heads"):
        check_mesh(dense, AbstractMesh((1, 4, 2), ("data", "sequence", "tensor")))
