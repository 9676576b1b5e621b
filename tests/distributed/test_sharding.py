"""Tensor parallelism changes where numbers are computed, not what they are; and bytes are counted exactly."""

from __future__ import annotations

import dataclasses
import os
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from compiling import with_devices
from conftest import KINDS
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from other_process import result_of
from tpu_environment import tpu_environment

from jaxrl_llm.distributed import (
    bytes_per_device,
    check_mesh,
    data_mesh,
    describe_sharding,
    make_mesh,
    mesh_of,
    parameter_specs,
    shard_params,
)
from jaxrl_llm.models import ModelConfig, init_params
from jaxrl_llm.models.stacks import unstack
from jaxrl_llm.utils.errors import InputError

FAMILIES = ("llama", "qwen3", "gemma2", "qwen3_moe")
MESHES = ((8, 1), (4, 2), (2, 4))
EVEN = {"even 2x4", "even 1x8", "unstacked 2x4"}
QWEN3_8B = ModelConfig(
    family="qwen3",
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    norm_epsilon=1e-6,
    tie_embeddings=False,
    rope_of_layer=(0,) * 36,
    window_of_layer=(0,) * 36,
    qk_norm=True,
    query_scale=128**-0.5,
)


def abstract(data: int, tensor: int) -> AbstractMesh:
    """A mesh without devices: enough for specs and sizes."""
    return AbstractMesh((data, tensor), ("data", "tensor"))


def shapes_of(config: ModelConfig, dtype: Any = jnp.bfloat16) -> Any:
    return jax.eval_shape(partial(init_params, config=config, dtype=dtype), jax.random.key(0))


def run_program(program: str, environment: dict[str, str]) -> Any:
    """What a program in a process of its own prints as JSON after RESULT."""
    return result_of(program, environment={**os.environ, "JAX_PLATFORMS": "cpu", **environment})


# A model in which everything divides by 4, with every bias; the vocabulary of the tiny models, 257, never divides.
EIGHT = """
import dataclasses, json
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding
from jaxrl_llm import load_policy
from jaxrl_llm.distributed import (
    bytes_per_device, make_mesh, named_shardings, parameter_specs, replicate, reshard, shard_params, to_mesh,
)
from jaxrl_llm.models import ModelConfig, Policy, init_params
from jaxrl_llm.models.critic import Critic, init_critic
from jaxrl_llm.models.policy import positions_of
from jaxrl_llm.models.stacks import unstack

assert len(jax.devices()) == 8
even = ModelConfig(
    family="llama", vocab_size=128, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=8, num_kv_heads=4,
    head_dim=8, norm_epsilon=1e-5, tie_embeddings=False, rope_of_layer=(0, 0), window_of_layer=(0, 0), query_scale=0.35,
    attention_bias=True, output_bias=True, mlp_bias=True, qk_norm=True, post_norms=True,
)

def noisy(params):
    leaves, structure = jax.tree.flatten(params)
    random = np.random.default_rng(1)
    return jax.tree.unflatten(structure, [x + 0.1 * random.normal(size=x.shape).astype(np.float32) for x in leaves])

out, dtype = {}, jnp.float32
"""
WIDE = 'jax.config.update("jax_enable_x64", True)\ndtype = jnp.float64\n'

PARITY = """
def program(policy):
    @jax.jit
    def run(params, tokens, real, coefficients):
        def loss(params):
            hidden, _ = policy.forward(params, tokens, positions_of(real), real, remat=True)
            logits = policy.logits_of(params, hidden)
            seen = jnp.where(real[..., None] > 0, logits, 0)
            return jnp.sum(coefficients * jax.nn.log_softmax(seen, axis=-1)), seen
        (_, logits), gradient = jax.value_and_grad(loss, has_aux=True)(params)
        return logits, gradient
    return run

def error(found, expected):
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    return float(np.abs(found - expected).max() / np.abs(expected).max())

def compare(name, policy, params, shapes, layers=lambda params: params):
    random = np.random.default_rng(0)
    tokens = random.integers(0, min(256, policy.config.vocab_size), (8, 12)).astype(np.int32)
    real = (np.arange(12) < np.array([12, 7, 9, 12, 3, 12, 11, 6])[:, None]).astype(np.int32)
    coefficients = random.normal(size=(8, 12, policy.config.vocab_size)).astype(np.float32)
    rows, params, run = (tokens, real, coefficients), layers(params), program(policy)
    expected = jax.device_get(run(params, *rows))
    for shape in shapes:
        mesh = make_mesh(*shape)
        placed, spread = shard_params(params, policy.config, mesh), to_mesh(rows, mesh)
        logits, gradient = jax.device_get(run(placed, *spread))
        largest = max(map(error, jax.tree.leaves(gradient), jax.tree.leaves(expected[1])))
        first = placed["layers"][0] if isinstance(placed["layers"], tuple) else placed["layers"]
        first = {k: x for k, x in first.items() if not isinstance(x, dict)}
        local = {k: x.addressable_shards[0].data.shape for k, x in (first | {"embed": placed["embed"]}).items()}
        out[f"{name} {shape[0]}x{shape[1]}"] = dict(
            logits=error(logits, expected[0]), gradient=largest, local=local, finite=bool(np.isfinite(logits).all()),
        )

for family in {families}:
    policy, params, _ = load_policy(f"{vectors}/{family}", dtype=dtype)
    compare(family, policy, params, {meshes})
start = noisy(init_params(jax.random.key(0), even))
compare("even", Policy(even), start, [(2, 4), (1, 8)])
compare("unstacked", Policy(even), start, [(2, 4)], lambda p: unstack(p, even))
print("RESULT" + json.dumps(out))
"""

BYTES = """
mesh = make_mesh(2, 4)
put = lambda *axes, **kind: NamedSharding(mesh, P(*axes), **kind)
one, other = (SingleDeviceSharding(d) for d in jax.devices()[:2])
x = np.arange(128, dtype=np.float32).reshape(8, 16)
for name, old, new in (
    ("same", put("data"), put("data")),
    ("split a copy", put(), put("tensor", "data")),
    ("gather", put("tensor"), put()),
    ("coarse to fine", put("data"), put("tensor")),
    ("other axis", put("data"), put(None, "data")),
    ("one to another", one, other),
    ("one to all", one, put()),
    ("from the host", None, put("data")),
    ("other memory", put(), put(memory_kind="pinned_host")),
):
    for donate in (False, True):
        before = x if old is None else jnp.copy(jax.device_put(x, old))
        after, moved = reshard({"x": before}, new, donate)
        assert after["x"].sharding == new and (np.asarray(after["x"]) == x).all() and moved.seconds > 0
        deleted = old is not None and before.is_deleted()
        assert donate or not deleted
    out[name] = moved.bytes, deleted

# One array twice, of which one place keeps it as it is.
before = jnp.copy(jax.device_put(x, put("data")))
after, moved = reshard([before, {"x": before}], [put("data"), put()], donate=True)
assert moved.bytes == 8 * 256 and all((np.asarray(a) == x).all() for a in jax.tree.leaves(after))

# A whole model there and back, with a sharding for each parameter.
params = shard_params(init_params(jax.random.key(0), even), even, mesh)
specs = parameter_specs(even, mesh)
split, total = bytes_per_device(params, specs, mesh), sum(x.nbytes for x in jax.tree.leaves(params))
whole, moved = reshard(params, put())
assert moved.bytes == 8 * (total - split)
again, moved = reshard(whole, named_shardings(specs, mesh), donate=True)
assert moved.bytes == 0 and whole["embed"].is_deleted() and not params["embed"].is_deleted()
assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding == b.sharding and (a == b).all(), params, again))

# What the compiler says that a program's arguments take on a device.
compiled = jax.jit(lambda p: jax.tree.map(lambda x: 2 * x, p)).lower(params).compile()
out["compiler"], out["counted"], out["total"] = compiled.memory_analysis().argument_size_in_bytes, split, total

# A critic's tower is split like the policy it was copied from, and its head is not; layers unstacked or not.
policy = Policy(even)
tower = init_critic(jax.random.key(1), policy, params, Critic())
for tree in (tower, unstack(tower, even)):
    placed = shard_params(tree, even, mesh)["critic"]
    assert placed["tower"]["layers"]["up"].sharding == put(None, None, "tensor")
    assert placed["tower"]["embed"].sharding == put("tensor") and placed["head"]["weight"].sharding == put()
assert make_mesh(tensor=2).shape == {"data": 4, "tensor": 2} == make_mesh(4, -1).shape
assert make_mesh().shape == {"data": 8, "tensor": 1} and make_mesh(1, 2, jax.devices()[6:]).size == 2
print("RESULT" + json.dumps(out))
"""

TPU = """
import json, re
from functools import partial
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxrl_llm.distributed import make_mesh, named_shardings, parameter_specs
from jaxrl_llm.models import ModelConfig, Policy, init_params

devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
config = ModelConfig(
    family="qwen3", vocab_size=1024, hidden_size=512, intermediate_size=1024, num_layers=3, num_heads=8, num_kv_heads=4,
    head_dim=128, norm_epsilon=1e-6, tie_embeddings=True, rope_of_layer=(0,) * 3, window_of_layer=(0,) * 3,
    qk_norm=True, query_scale=0.09,
)
policy = Policy(config, jnp.dtype(jnp.bfloat16))
shapes = jax.eval_shape(partial(init_params, config=config, dtype=jnp.bfloat16), jax.random.key(0))

def collectives(mesh, specs, backward=False):
    places = named_shardings(specs, mesh)
    params = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, places)
    rows = [jax.ShapeDtypeStruct((4, 128), jnp.int32, sharding=NamedSharding(mesh, P("data")))] * 3
    forward = lambda params, *rows: policy.forward(params, *rows, remat=backward)[0].astype(jnp.float32)
    if backward:
        run = jax.jit(jax.grad(lambda params, *rows: jnp.sum(forward(params, *rows) ** 2)), out_shardings=places)
    else:
        run = jax.jit(forward)
    text = run.lower(params, *rows).compile().as_text()
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    found = re.findall(rf"= (.*?) ({kinds})(?:-start)?\\(", text)
    return [(kind, re.findall(r"\\w+\\[([\\d,]*)\\]", result)) for result, kind in found]

tensor = make_mesh(tensor=4, devices=list(devices))
specs = parameter_specs(config, tensor)
# The other way to split weights, of which each device needs all: over the devices that hold different rows.
gathered = jax.tree.map(lambda x: P(None, "data") if len(x.shape) > 2 else P(), shapes)
print("RESULT" + json.dumps({
    "forward": collectives(tensor, specs), "backward": collectives(tensor, specs, True),
    "gathered": collectives(make_mesh(devices=list(devices)), gathered),
}))
"""


def parity(
    families: tuple[str, ...] = FAMILIES, meshes: tuple[tuple[int, int], ...] = MESHES, before: str = ""
) -> dict[str, Any]:
    """What PARITY finds of each family on each mesh."""
    folder = Path(__file__).parents[1] / "vectors"
    program = PARITY.replace("{families}", repr(families)).replace("{meshes}", repr(meshes))
    program = program.replace("{vectors}", str(folder))
    return run_program(EIGHT + before + program, {"XLA_FLAGS": with_devices(8)})


@pytest.fixture(scope="module")
def moved() -> Any:
    return run_program(EIGHT + BYTES, {"XLA_FLAGS": with_devices(8)})


@pytest.mark.heavy
def test_logits_and_gradients_are_those_of_one_device() -> None:
    """Of every family on every mesh; and of a model with biases and a vocabulary that splits."""
    results = parity()
    assert set(results) == {f"{name} {data}x{tensor}" for name in FAMILIES for data, tensor in MESHES} | EVEN
    for case, found in results.items():
        assert found["finite"], case
        assert found["logits"] < 1e-5, case
        assert found["gradient"] < 1e-5, case
        name, local, tensor = case.split()[0], found["local"], int(case[-1])
        if case in EVEN:
            assert local["embed"] == [128 // tensor, 32], case
            # Four key-value heads do not split in eight, so the eight query heads stay together too.
            heads = (1, 2) if tensor == 4 else (4, 8)
            assert (local["key_bias"][-2], local["query_bias"][-2], local["out"][-3]) == (*heads, heads[1]), case
            assert local["up_bias"][-1] == 48 // tensor, case
            assert local["down_bias"][-1] == local["out_bias"][-1] == 32, case
        else:
            # Two key-value heads and four query heads of 64 inputs: split in two at most, a whole group each.
            assert local["query"][2] == (2 if tensor == 2 else 4), case
            assert local["key"][2] == (1 if tensor == 2 else 2), case
            inner = 48 if name == "qwen3_moe" else 112
            assert local["gate"][-1] == local["down"][-2] == inner // tensor, case


@pytest.mark.heavy
@pytest.mark.parametrize("family", [*KINDS, "gemma4_moe", "glm4_moe", "qwen3_5_moe"])
def test_kinds_of_layers_are_those_of_one_device(family: str) -> None:
    """States and compressed keys, sinks, shared keys, and experts beside an MLP, over rows and tensor, in float64."""
    for case, found in parity((family,), ((4, 2), (2, 4)), WIDE).items():
        assert found["finite"], case
        if case not in EVEN:
            assert max(found["logits"], found["gradient"]) < 1e-9, case


def test_specs_of_qwen3_8b() -> None:
    specs = parameter_specs(QWEN3_8B, abstract(2, 4))
    layers = {name: spec for name, spec in specs["layers"].items() if spec}
    assert layers == {
        "query": P(None, None, "tensor"),
        "key": P(None, None, "tensor"),
        "value": P(None, None, "tensor"),
        "out": P(None, "tensor"),
        "gate": P(None, None, "tensor"),
        "up": P(None, None, "tensor"),
        "down": P(None, "tensor"),
    }
    assert {name: specs[name] for name in specs if name != "layers"} == {
        "embed": P("tensor"),
        "unembed": P("tensor"),
        "final_norm": P(),
    }
    assert jax.tree.structure(specs) == jax.tree.structure(shapes_of(QWEN3_8B))


def test_specs_of_unstacked_layers_and_of_experts() -> None:
    config = dataclasses.replace(QWEN3_8B, num_experts=8, experts_per_token=2, num_layers=2, intermediate_size=768)
    specs = parameter_specs(config, abstract(1, 4), stacked=False)
    assert jax.tree.structure(specs) == jax.tree.structure(
        jax.eval_shape(lambda p: unstack(p, config), shapes_of(config))
    )
    for layer in specs["layers"]:
        assert layer["query"] == P(None, "tensor")
        assert layer["out"] == P("tensor")
        assert layer["gate"] == layer["up"] == P(None, None, "tensor")
        assert layer["down"] == P(None, "tensor")
        assert layer["router"] == P()


def test_specs_of_biases() -> None:
    config = dataclasses.replace(QWEN3_8B, attention_bias=True, output_bias=True, mlp_bias=True)
    layers = parameter_specs(config, abstract(1, 4))["layers"]
    assert {name: spec for name, spec in layers.items() if name.endswith("bias")} == {
        "query_bias": P(None, "tensor"),
        "key_bias": P(None, "tensor"),
        "value_bias": P(None, "tensor"),
        "out_bias": P(),  # added once, after the sum over devices
        "gate_bias": P(None, "tensor"),
        "up_bias": P(None, "tensor"),
        "down_bias": P(),
    }


@pytest.mark.parametrize("mesh", [abstract(8, 1), AbstractMesh((8,), ("data",))])
def test_without_a_tensor_axis_all_is_replicated(mesh: AbstractMesh) -> None:
    assert set(jax.tree.leaves(parameter_specs(QWEN3_8B, mesh))) == {P()}
    assert all(line.endswith(": replicated") for line in describe_sharding(QWEN3_8B, mesh))


def test_what_does_not_divide_is_said() -> None:
    config = dataclasses.replace(QWEN3_8B, vocab_size=151938)
    lines = dict(line.split(" ", 1) for line in describe_sharding(config, abstract(1, 16)))
    assert len(lines) == 14
    assert lines["embed"] == "[151938, 4096]: replicated, because 16 does not divide 151938 tokens of the vocabulary"
    query = "[36, 4096, 32, 128]: replicated, because 16 does not divide 8 key-value heads"
    assert lines["layers/query"] == query
    assert lines["layers/down"] == "[36, 12288, 4096]: inner over tensor=16, [36, 768, 4096] a device"
    assert lines["layers/query_norm"] == "[36, 128]: replicated"


def test_bytes_of_qwen3_8b_over_four() -> None:
    attention = 4096 * 32 * 128 * 2 + 4096 * 8 * 128 * 2
    split = 36 * (attention + 3 * 4096 * 12288) + 2 * 151936 * 4096
    norms = 36 * (2 * 4096 + 2 * 128) + 4096
    shapes = shapes_of(QWEN3_8B)
    assert split + norms == 8_190_735_360  # the model's parameters
    for data in (1, 8):
        mesh = abstract(data, 4)
        assert bytes_per_device(shapes, parameter_specs(QWEN3_8B, mesh), mesh) == 2 * (split // 4 + norms)
    assert bytes_per_device(shapes, P(), abstract(2, 4)) == 2 * 8_190_735_360


def test_bytes_are_those_of_the_compiler(moved: Any) -> None:
    assert moved["counted"] == moved["compiler"]
    assert moved["counted"] < 0.3 * moved["total"]


def test_an_array_that_does_not_split_is_refused() -> None:
    with pytest.raises(InputError, match=r"\[6, 2\] does not split"):
        bytes_per_device(jax.ShapeDtypeStruct((6, 2), jnp.float32), P("tensor"), abstract(1, 4))


# Of float32[8, 16], 512 bytes, on a mesh of data=2 x tensor=4.
@pytest.mark.parametrize(
    ("case", "expected", "deleted"),
    [
        ("same", 0, False),
        ("split a copy", 0, True),
        ("gather", 8 * 384, True),  # each of 8 devices has two of the eight rows
        ("coarse to fine", 4 * 128, True),  # half the devices have their two rows among the four that they held
        ("other axis", 8 * 128, True),  # each keeps a quarter, [4, 8], and lacks another
        ("one to another", 512, True),
        ("one to all", 7 * 512, False),
        ("from the host", 8 * 256, False),
        ("other memory", 8 * 512, True),
    ],
)
def test_bytes_moved(moved: Any, case: str, expected: int, deleted: bool) -> None:
    # Donated arrays are deleted, where no device has its part in the new array too.
    assert moved[case] == [expected, deleted]


@pytest.mark.heavy
def test_on_tpus_no_weight_travels() -> None:
    found = run_program(TPU, tpu_environment())
    # One sum after the embedding, and in the scanned layer one after attention and one after the MLP.
    assert found["forward"] == [["all-reduce", ["4,128,512"]]] * 3
    # Backward: activations again, and the gradients of the norms of heads, of which each device has a share.
    # 512,512 are states too, those of 4 x 128 tokens as a matrix: the gradients that a product of a layer gives.
    assert {kind for kind, _ in found["backward"]} == {"all-reduce"}
    states, others = [], []
    for _, shapes in found["backward"]:
        (states if set(shapes) <= {"4,128,512", "512,512"} else others).append(shapes)
    assert len(states) == 6
    assert others == [["3,128", "3,128"]]
    # The same search does find weights where they are gathered.
    assert ["all-gather", ["1,512,1024"]] in found["gathered"]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((3, 2), "data=3 x tensor=2 does not fit 8 devices"),
        ((-1, 3), "data=-1 x tensor=3 does not fit 8 devices"),
        ((2, 2), "does not fit 8 devices"),
        ((16, 1), "does not fit 8 devices"),
        ((0, 1), "axis data is 0"),
        ((-1, -2), "axis tensor is -2"),
        ((-1, -1), "axes data and tensor are -1"),
    ],
)
def test_meshes_that_do_not_fit_are_refused(sizes: tuple[int, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_mesh(*sizes, devices=list(range(8)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data=2,pipeline=4", "mesh is 'data=2,pipeline=4': give numbers of devices along data, fsdp, expert"),
        ("fsdp=2,fsdp=4", "each once"),
        ("fsdp", "mesh is 'fsdp'"),
        ("fsdp=two", "mesh is 'fsdp=two'"),
        ("fsdp=3", "data=-1 x fsdp=3 x tensor=1 does not fit 8 devices"),
        ("fsdp=-1,tensor=-1", "axes fsdp and tensor are -1"),
        ("data=2,fsdp=2,tensor=0", "axis tensor is 0"),
    ],
)
def test_words_that_name_no_mesh_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        mesh_of(text, list(range(8)))


def test_a_mesh_must_divide_the_heads(vectors: Any) -> None:
    config = vectors("llama_tied").policy.config  # of 2 key-value heads and 112 inner units
    check_mesh(config, AbstractMesh((2, 2), ("data", "tensor")))
    with pytest.raises(InputError, match="tensor=4, which does not divide the model's 2 key-value heads: choose"):
        check_mesh(config, AbstractMesh((2, 4), ("data", "tensor")))


def test_one_device_is_a_mesh_of_two_axes_too(vectors: Any) -> None:
    model = vectors("llama")
    mesh = make_mesh(devices=jax.devices()[:1])
    assert dict(mesh.shape) == {"data": 1, "tensor": 1}
    assert mesh.axis_types == (jax.sharding.AxisType.Auto,) * 2
    assert data_mesh().axis_names == ("data",)
    placed = shard_params(model.params, model.policy.config, mesh)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), placed, model.params)))


def test_parameters_of_another_model_are_refused(vectors: Any) -> None:
    model = vectors("llama")
    mesh = make_mesh(devices=jax.devices()[:1])
    for config in (vectors("qwen3").policy.config, dataclasses.replace(model.policy.config, tie_embeddings=True)):
        with pytest.raises(InputError, match="not those of a"):
            shard_params(model.params, config, mesh)
