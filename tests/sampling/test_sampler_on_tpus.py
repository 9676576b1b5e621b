"""The sampler's programs compile for real TPUs, ahead of time and without one, and fit their memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from other_process import result_of
from tpu_environment import tpu_environment

PROGRAM = """
import json, math, re, sys
from functools import partial

import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.distributed import make_mesh, named_shardings
from jaxrl_llm.models import ModelConfig, Policy, init_params
from jaxrl_llm.models.config.rope import Rope
from jaxrl_llm.sampling.decode import DrawSettings, begin, decode, empty_ring_cache, ends_of_prompts
from jaxrl_llm.sampling.rows import no_rows
from jaxrl_llm.sampling.filters import Filters
from jaxrl_llm.sampling.prefill import empty_prefix_cache, prefill
from jaxrl_llm.sampling.weights.layouts import abstract_weights
from jaxrl_llm.sampling.weights.layouts import shardings

sys.path.insert(0, sys.argv[2])
from tpu_traffic import loop_traffic

asked = json.loads(sys.argv[1])
chips = topologies.get_topology_desc(platform="tpu", topology_name=asked["topology"]).devices
chips = list(chips)[: asked["data"] * asked["tensor"]]
mesh = make_mesh(asked["data"], asked["tensor"], devices=chips)
layers = asked["model"]["num_layers"]
shape = asked["model"] | {"ropes": (Rope(asked["model"]["ropes"]),), "rope_of_layer": (0,) * layers}
config = ModelConfig(**shape, window_of_layer=(0,) * layers, norm_epsilon=1e-6, max_positions=40960)
policy = Policy(config, jnp.dtype(jnp.bfloat16), mesh=mesh)

def place(tree, where):
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, where)

def spread(make):
    tree = jax.eval_shape(make)
    return place(tree, shardings(tree, mesh))

def number(shape, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

B, P, prompt, new = asked["rows"], asked["rows"] // asked["group"], asked["prompt"], asked["new"]
weights = abstract_weights(policy, jax.eval_shape(partial(init_params, config=config), jax.random.key(0)), mesh)
prefix_cache = spread(lambda: empty_prefix_cache(policy, P, prompt, jnp.bfloat16))
ring = spread(lambda: empty_ring_cache(policy, B, new, jnp.bfloat16))
filters = Filters(*(number((), t) for t in (jnp.int32, jnp.float32, jnp.float32))) if asked["filters"] else None
settings = DrawSettings(number((), jnp.uint32), number((), jnp.float32), filters, None, number((2,)))
at_once = asked["data"]
tokens = spread(lambda: jnp.zeros((at_once, prompt), jnp.int32))
one = spread(lambda: jnp.zeros(at_once, jnp.int32))
rows = spread(lambda: no_rows(B))
by_row = NamedSharding(mesh, PartitionSpec(*rows.own.sharding.spec[:1]))
ends = jax.eval_shape(ends_of_prompts, prefix_cache, None, rows)
ends = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=by_row), ends)
out = {}
programs = {
    "prefill": lambda: prefill.lower(policy, weights, prefix_cache, tokens, one, one),
    "begin": lambda: begin.lower(policy, weights, ends, ring.drawn, number(()), rows, settings),
    "decode": lambda: decode.lower(
        policy, weights, prefix_cache, None, ring, rows, settings, number(()), number(())
    ),
}
for name in asked["programs"]:
    compiled = programs[name]().compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    moved = re.findall(r"= [^=]*? (?:all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter)[^(]*\\(", text)
    sizes = [eval("*".join(dims.split(","))) for op in moved for dims in re.findall(r"\\[([0-9,]+)\\]", op)]
    out[name] = {
        "bytes": memory.argument_size_in_bytes + memory.temp_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "reused": memory.alias_size_in_bytes,
        "kernels": len(re.findall("custom_call_target=.tpu_custom_call.", text)),
        "largest_moved": max(sizes, default=0),
        "traffic": loop_traffic(text),
        "counted": compiled.cost_analysis()["bytes accessed"],
    }
if config.tie_embeddings and "head" in weights:
    weights.pop("embed")  # for prompts only
out["weights"] = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(weights))
one_layer = weights["layers"][0], ring.layers[0], prefix_cache.layers[0]
shards = [(math.prod(x.sharding.shard_shape(x.shape)), x.dtype.itemsize) for x in jax.tree.leaves(one_layer)]
out["layer"] = sum(size * each for size, each in shards)
out["prompts"] = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(prefix_cache.layers))
out["caches"] = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((ring.layers, prefix_cache.layers)))
print("RESULT" + json.dumps(out))
"""

SMOLLM2 = {
    "family": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_layers": 30,
    "num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "tie_embeddings": True, "ropes": 1e5, "query_scale": 0.125,
}  # fmt: skip
QWEN3_8B = {
    "family": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_layers": 36,
    "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "tie_embeddings": False, "ropes": 1e6,
    "query_scale": 128**-0.5, "qk_norm": True,
}  # fmt: skip
GIB = 2**30
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "SmolLM2-135M on v5e:2x2": (16, {
        "topology": "v5e:2x2", "data": 4, "tensor": 1, "model": SMOLLM2, "rows": 64, "group": 8, "prompt": 256,
        "new": 256,
    }),
    "six layers of SmolLM2-135M with filters on v5e:2x2": (16, {
        "topology": "v5e:2x2", "data": 4, "tensor": 1, "model": SMOLLM2 | {"num_layers": 6}, "rows": 64,
        "group": 8, "prompt": 256, "new": 256, "filters": True, "programs": ["decode"],
    }),
    "Qwen3-8B on v5e:4x4": (16, {
        "topology": "v5e:4x4", "data": 4, "tensor": 4, "model": QWEN3_8B, "rows": 256, "group": 16, "prompt": 1024,
        "new": 1024,
    }),
    "Qwen3-8B, twelve of its layers compiled, on v6e:4x4": (32, {
        "topology": "v6e:4x4", "data": 4, "tensor": 4, "model": QWEN3_8B | {"num_layers": 12}, "rows": 512,
        "group": 16, "prompt": 1024, "new": 1024, "programs": ["decode"], "more_layers": 24,
    }),
}  # fmt: skip


def compiled(**asked: Any) -> dict[str, Any]:
    """What the compiler says of the programs."""
    asked = {"programs": ["prefill", "begin", "decode"], "filters": False} | asked
    found: dict[str, Any] = result_of(
        PROGRAM, json.dumps(asked), str(Path(__file__).parent), environment=tpu_environment()
    )
    return found


@pytest.mark.heavy
@pytest.mark.parametrize("case", CASES)
def test_prefill_and_decode_compile_and_fit(case: str) -> None:
    memory, asked = CASES[case]
    found = compiled(**asked)
    programs = {name: found[name] for name in ("prefill", "begin", "decode") if name in found}
    # Weights and caches of a layer that was not compiled are known exactly; 1 GiB more is left for its temporaries.
    others = asked["more_layers"] * found["layer"] + GIB if "more_layers" in asked else 0
    for program in programs.values():
        assert program["bytes"] + others < memory * GIB, found
    # The caches stay where they are: the ring in the loop, the prompts in prefill.
    held = {"prefill": found["prompts"], "decode": found["caches"] - found["prompts"]}
    for name in held.keys() & programs.keys():
        assert programs[name]["reused"] >= held[name] / (asked["data"] * asked["tensor"])
    if asked.get("filters"):
        return
    # One kernel for the draw, and two for each layer, at the prompts and at own tokens, with two more that norm and
    # rotate heads of 128 lanes; no device sees logits of another, or of the whole vocabulary.
    of_layer = 2 if asked["model"]["head_dim"] % 128 else 4
    kernels = {"begin": 1, "decode": 1 + of_layer * asked["model"]["num_layers"]}
    rows = asked["rows"] // asked["data"]
    for name in kernels.keys() & programs.keys():
        assert programs[name]["kernels"] == kernels[name]
        assert programs[name]["largest_moved"] < rows * asked["model"]["vocab_size"] / asked["tensor"]
        assert programs[name]["temporaries"] < GIB


@pytest.mark.heavy
def test_shared_prompts_are_read_once() -> None:
    """64 rows as 4 groups of 16 over prompts of 1,024 tokens, against a prompt for each row: a step's main memory."""
    model = SMOLLM2 | {"num_layers": 20}
    one_chip = {"topology": "v5e:2x2", "data": 1, "tensor": 1, "model": model, "programs": ["decode"]}
    shared, alone = (
        compiled(**one_chip, rows=64, group=group, prompt=1024, new=64) for group in (16, 1)
    )  # fmt: skip
    assert shared["prompts"] * 16 == alone["prompts"]
    for found in (shared, alone):
        needed = found["weights"] + found["caches"]
        # The count is of the right size: everything once, and not much more.
        assert 0.95 * needed < found["decode"]["traffic"] < 1.3 * needed
    # By the program's text, which is the chip's main memory, and by XLA, which counts copies into the core's memories
    # too: it makes more of them since the kernel that draws declares its cost (260 MB), and main memory moves the same.
    for count, most in (("traffic", 0.3), ("counted", 0.32)):
        assert shared["decode"][count] <= most * alone["decode"][count], count


WEIGHTS = """
import json
from functools import partial

import jax, jax.numpy as jnp
from jax.experimental import topologies

from jaxrl_llm.distributed import fully_sharded, make_mesh
from jaxrl_llm.models import ModelConfig, Policy, init_params
from jaxrl_llm.models.config.rope import Rope
from jaxrl_llm.plan.sampling_programs import compile_sampling
from jaxrl_llm.sampling.capacity import Size
from jaxrl_llm.sampling.scheduler import Shape

config = ModelConfig(
    family="llama", vocab_size=32768, hidden_size=2048, intermediate_size=8192, num_layers=4, num_heads=16,
    num_kv_heads=8, head_dim=128, norm_epsilon=1e-6, tie_embeddings=True, ropes=(Rope(1e4),), rope_of_layer=(0,) * 4,
    window_of_layer=(0,) * 4, query_scale=0.1, max_positions=4096,
)
chips = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
mesh = make_mesh(1, 1, list(chips), fsdp=4)
policy = Policy(config, jnp.dtype(jnp.bfloat16))
params = jax.eval_shape(partial(init_params, config=config), jax.random.key(0))
places = fully_sharded(params, config, mesh)
params = jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), params, places)
size = Size(Shape(4, 4, 1, True), 16, 16)
programs = compile_sampling(policy, params, mesh, size, names=("convert", "convert_layer"))
memory = {name: program.compiled.memory_analysis() for name, program in programs.items()}
print("RESULT" + json.dumps({name: [x.output_size_in_bytes, x.temp_size_in_bytes] for name, x in memory.items()}))
"""


@pytest.mark.heavy
def test_weights_reach_the_sampler_layer_by_layer() -> None:
    """From shards over four chips to all of it on each: besides the result, no more than a layer or the embedding."""
    found = result_of(WEIGHTS, environment=tpu_environment())
    matrices = 2048 * (2 * 16 * 128 + 2 * 8 * 128 + 3 * 8192)
    assert found["convert_layer"][0] == pytest.approx(2 * matrices, rel=0.01)
    assert found["convert"][0] == pytest.approx(2 * 32768 * 2048, rel=0.01)
    for results, temporaries in found.values():
        assert 0 < temporaries <= 1.01 * results


VERIFY = """
import json
from functools import partial

import jax, jax.numpy as jnp
from jax.experimental import topologies

from jaxrl_llm.distributed import make_mesh, named_shardings
from jaxrl_llm.models import ModelConfig, Policy, init_params
from jaxrl_llm.distributed.sharding import parameter_specs
from jaxrl_llm.models.config.rope import Rope
from jaxrl_llm.plan.sampling_programs import compile_sampling, engine_arrays, tail_arrays
from jaxrl_llm.sampling.capacity import Size
from jaxrl_llm.sampling.scheduler import Shape

config = ModelConfig(
    family="llama", vocab_size=32768, hidden_size=1024, intermediate_size=4096, num_layers=2, num_heads=16,
    num_kv_heads=8, head_dim=128, norm_epsilon=1e-6, tie_embeddings=True, ropes=(Rope(1e4),), rope_of_layer=(0, 0),
    window_of_layer=(0, 256), query_scale=0.1, max_positions=4096,
)
chips = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
policy, size = Policy(config, jnp.dtype(jnp.bfloat16)), Size(Shape(64, 8, 8, True), 256, 256)
out = {}
for data, tensor in ((1, 1), (2, 2)):
    mesh = make_mesh(data, tensor, list(chips)[: data * tensor])
    params = jax.eval_shape(partial(init_params, config=config), jax.random.key(0))
    places = named_shardings(parameter_specs(config, mesh, True, params), mesh)
    params = jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), params, places)
    program, = compile_sampling(policy, params, mesh, size, names=("verify",), speculative_tokens=4).values()
    memory, text = program.compiled.memory_analysis(), program.compiled.as_text()
    tail = tail_arrays(engine_arrays(policy, params, mesh, size), size, mesh, 4)
    out[f"{data} x {tensor}"] = {
        "reused": memory.alias_size_in_bytes, "temporaries": memory.temp_size_in_bytes,
        "kernels": len(__import__("re").findall("custom_call_target=.tpu_custom_call.", text)),
        "caches": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tail.layers)) / (data * tensor),
    }
print("RESULT" + json.dumps(out))
"""


@pytest.mark.heavy
def test_speculation_compiles() -> None:
    """Passes of one token and of five: in each a kernel for each layer's cache, and one for the draw."""
    for found in result_of(VERIFY, environment=tpu_environment()).values():
        assert found["kernels"] == 2 * (2 + 1)
        assert found["reused"] >= found["caches"]
        assert found["temporaries"] < 2 * found["caches"] + 64 * 2**20
