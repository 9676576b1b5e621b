"""The sampler's view of the weights: no copy where none is needed, the right dtype, padding and places on a mesh."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import with_devices
from conftest import KINDS, quick_compiles
from jax.sharding import AbstractMesh, PartitionSpec

from jaxrl_llm.distributed import make_mesh
from jaxrl_llm.models import Policy, lora
from jaxrl_llm.models.parameters import combine
from jaxrl_llm.models.stacks import unstack
from jaxrl_llm.sampling.draw import DrawSettings
from jaxrl_llm.sampling.filters import Filters
from jaxrl_llm.sampling.prefill import causal_pass
from jaxrl_llm.sampling.requests import Request
from jaxrl_llm.sampling.stream import stream
from jaxrl_llm.sampling.weights import take_weights
from jaxrl_llm.sampling.weights.adapters import replace_adapters
from jaxrl_llm.sampling.weights.layouts import (
    TO_HEADS,
    LoopOptions,
    abstract_weights,
    converter,
    loop_params,
    loop_specs,
    options_for,
)


def test_layers_share_the_memory_of_the_parameters(vectors: Any) -> None:
    model = vectors("qwen3")
    weights = take_weights(model.policy, model.params)
    copied = unstack(model.params, model.policy.config)
    jax.tree.map(np.testing.assert_array_equal, weights.loop["layers"], copied["layers"])
    for name, stacked in model.params["layers"].items():
        step = stacked[0].nbytes
        for i, layer in enumerate(weights.loop["layers"]):
            shared = layer[name].unsafe_buffer_pointer() - stacked.unsafe_buffer_pointer() == i * step
            # JAX places arrays at multiples of 64 bytes; what lies elsewhere it copies.
            assert shared or (stacked.unsafe_buffer_pointer() + i * step) % 64
    embed = model.params["embed"].unsafe_buffer_pointer()
    assert weights.loop["embed"].unsafe_buffer_pointer() == weights.prompts["embed"].unsafe_buffer_pointer() == embed


def test_donated_parameters_do_not_change_what_is_seen(vectors: Any) -> None:
    model = vectors("llama")
    params = jax.tree.map(jnp.copy, model.params)
    weights = take_weights(model.policy, params)
    change = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    jax.block_until_ready(change(params))
    jax.tree.map(
        np.testing.assert_array_equal, weights.loop["layers"], unstack(model.params, model.policy.config)["layers"]
    )


def test_weights_come_in_the_dtype_of_the_computation(vectors: Any) -> None:
    """Weights of norms alone stay in float32, as in the decoder."""
    model = vectors("qwen3")
    policy = Policy(model.policy.config, jnp.dtype(jnp.bfloat16))
    loop = take_weights(policy, model.params).loop
    for layer in loop["layers"]:
        norms = {name for name, x in layer.items() if x.dtype == jnp.float32}
        assert norms == {"attention_norm", "mlp_norm", "query_norm", "key_norm"}
        assert {x.dtype for name, x in layer.items() if name not in norms} == {jnp.dtype(jnp.bfloat16)}
    assert loop["final_norm"].dtype == jnp.float32
    ids = jnp.asarray(model.arrays["ids"])
    ones, positions = jnp.ones_like(ids), jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    expected, _ = policy.forward(unstack(model.params, model.policy.config), ids, positions, ones)
    found, _ = policy.forward(loop, ids, positions, ones)
    np.testing.assert_array_equal(found, expected)


def test_a_critic_stays_behind(vectors: Any) -> None:
    model = vectors("llama")
    weights = take_weights(model.policy, model.params | {"critic": {"head": jnp.ones(3)}})
    assert "critic" not in weights.loop
    assert "critic" not in weights.prompts


def test_the_unembedding_is_padded_to_cut_the_vocabulary(vectors: Any) -> None:
    """257 tokens over 2 devices at multiples of 128: 512 rows, the last 255 zero."""
    for family, owned in (("llama", "unembed"), ("llama_tied", "embed")):
        model = vectors(family)
        loop = jax.eval_shape(lambda p, model=model: loop_params(model.policy, p, LoopOptions(2)), model.params)
        assert loop["head"].shape == (512, model.policy.config.hidden_size)
        assert "unembed" not in loop
        head = np.asarray(loop_params(model.policy, model.params, LoopOptions(2))["head"])
        np.testing.assert_array_equal(head[:257], model.params[owned])
        assert not head[257:].any()
        specs = loop_specs(model.policy, AbstractMesh((4, 2), ("data", "tensor")))
        assert specs["head"] == PartitionSpec("tensor")
        assert jax.tree.structure(specs) == jax.tree.structure(loop)


def test_for_a_tpu_rows_of_the_unembedding_are_padded(vectors: Any) -> None:
    for family, owned in (("llama", "unembed"), ("llama_tied", "embed")):
        model = vectors(family)
        D = model.policy.config.hidden_size
        assert D % 128
        for tensor, rows in ((1, 257), (2, 512)):
            loop = loop_params(model.policy, model.params, LoopOptions(tensor, pad_lanes=True))
            assert loop["head"].shape == (rows, -(-D // 128) * 128)
            np.testing.assert_array_equal(loop["head"][:257, :D], model.params[owned])
            assert not loop["head"][257:].any()
            assert not loop["head"][:, D:].any()
            specs = loop_specs(
                model.policy, AbstractMesh((4, tensor), ("data", "tensor")), options=LoopOptions(pad_lanes=True)
            )
            assert specs["head"] == (PartitionSpec("tensor") if tensor > 1 else PartitionSpec())
            assert jax.tree.structure(specs) == jax.tree.structure(loop)


@pytest.mark.parametrize("stacked", [True, False])
def test_layer_by_layer_or_all_at_once_they_are_the_same(vectors: Any, stacked: bool) -> None:
    model = vectors("llama_tied")
    params = model.params if stacked else unstack(model.params, model.policy.config)
    policy = dataclasses.replace(model.policy, dtype=jnp.dtype(jnp.bfloat16))
    mesh = make_mesh(1, 1, jax.devices()[:1])
    found = converter(policy, params, mesh)(policy, params)
    jax.tree.map(np.testing.assert_array_equal, found, loop_params(policy, params))
    norms = {"attention_norm": "float32", "mlp_norm": "float32"}
    for layer in found["layers"]:
        assert {name: str(x.dtype) for name, x in layer.items()} == dict.fromkeys(layer, "bfloat16") | norms


@pytest.mark.parametrize("rounding", [None, "int8"])
def test_on_tpus_projections_to_heads_lie_with_their_inputs_last(
    vectors: Any, rounding: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As compiled ahead of time; on one device in XLA's own layout."""
    model, mesh = vectors("qwen3"), make_mesh(1, 1, jax.devices()[:1])
    before = converter(model.policy, model.params, mesh, rounding)(model.policy, model.params)
    options = LoopOptions(rounding=rounding, inputs_last=True)
    monkeypatch.setattr("jaxrl_llm.sampling.weights.layouts.options_for", lambda *given: options)
    found = converter(model.policy, model.params, mesh, rounding)(model.policy, model.params)
    jax.tree.map(np.testing.assert_array_equal, found, before)
    shapes = abstract_weights(model.policy, model.params, mesh)
    for layer, of_layer, old in zip(found["layers"], shapes["layers"], before["layers"], strict=True):
        for name, array in layer.items():
            array, shape, default = (jax.tree.leaves(x)[0] for x in (array, of_layer[name], old[name]))
            order = tuple(range(array.ndim))
            assert default.format.layout.major_to_minor == order
            assert array.format.layout.major_to_minor == ((1, 2, 0) if name in TO_HEADS else order)
            assert (shape.format.layout is not None) == (name in TO_HEADS)
    ids, length = jnp.asarray(model.arrays["ids"]), jnp.full(len(model.arrays["ids"]), 4)
    expected, hidden = (
        jax.jit(causal_pass, static_argnums=0)(model.policy, w, ids, length)[0] for w in (before, found)
    )
    np.testing.assert_allclose(hidden, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", KINDS)
def test_so_do_those_of_layers_of_all_kinds(family: str, vectors: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that carry states have projections of their own, and others lack some."""
    monkeypatch.setattr("jaxrl_llm.sampling.weights.layouts.options_for", lambda *given: LoopOptions(inputs_last=True))
    model, mesh = vectors(family), make_mesh(1, 1, jax.devices()[:1])
    layers = abstract_weights(model.policy, model.params, mesh)["layers"]
    for layer in layers:
        for name, x in layer.items():
            assert (x.format.layout is not None) == (name in TO_HEADS)
    assert {"value", "delta_value", "delta_gate"} & TO_HEADS == {"value", "delta_value", "delta_gate"}


def test_only_meshes_of_tpus_have_this_layout() -> None:
    tpu, mesh = SimpleNamespace(platform="tpu"), AbstractMesh((2, 2), ("data", "tensor"))
    options: Any = options_for
    assert options(tpu, mesh).inputs_last
    assert not options(tpu).inputs_last
    assert not options(jax.devices("cpu")[0], mesh).inputs_last


@pytest.mark.heavy
@pytest.mark.parametrize("family, filtered", [("llama", False), ("llama_tied", False), ("llama_tied", True)])
def test_padded_or_not_tokens_are_the_same(vectors: Any, family: str, filtered: bool) -> None:
    model = vectors(family)
    filters = Filters(jnp.int32(40), jnp.float32(0.95), jnp.float32(0.0)) if filtered else None
    settings = DrawSettings(jnp.uint32(3), jnp.float32(1.0), filters, None, jnp.asarray([-1], jnp.int32))
    requests = [Request((5, 9, 200), 12, 0, number) for number in range(3)]
    weights = take_weights(model.policy, model.params)
    assert "head" not in weights.loop
    padded = weights._replace(loop=loop_params(model.policy, model.params, LoopOptions(pad_lanes=True)))
    if family == "llama_tied":
        del padded.loop["embed"]  # not looked at
    with quick_compiles():
        plain, found = (
            sorted(stream(model.policy, w, requests, settings, slots=3), key=lambda done: done.index)
            for w in (weights, padded)
        )
    for a, b in zip(plain, found, strict=True):
        assert a.tokens.token.tolist() == b.tokens.token.tolist()
        np.testing.assert_allclose(a.tokens.logp, b.tokens.logp, atol=2e-5)
        np.testing.assert_allclose(a.tokens.entropy, b.tokens.entropy, atol=2e-5)


def adapters_like(params: Any, seed: int) -> Any:
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(random.normal(size=x.shape), x.dtype), params)


def assert_only_adapters_move(policy: Policy, base: Any, mesh: Any = None) -> None:
    """Weights with other adapters are those that are taken anew, and share what the first ones have of the rest."""
    first, second = (adapters_like(lora.init(jax.random.key(0), policy.config, 2), seed) for seed in (1, 2))
    base, _ = lora.split(lora.scaled(combine(base, first), 2, 4.0))
    before, after = (take_weights(policy, combine(base, adapters), mesh) for adapters in (first, second))
    found = replace_adapters(policy, before, combine(base, second))
    assert found is not None
    for kept, anew, old in zip(found[:2], after[:2], before[:2], strict=True):
        jax.tree.map(np.testing.assert_array_equal, kept, anew)
        assert jax.tree.map(lambda x: x.sharding, kept) == jax.tree.map(lambda x: x.sharding, anew)
        own = {id(x) for x in jax.tree.leaves(old)}
        new = [x for x in jax.tree.leaves(kept) if id(x) not in own]
        number = len(jax.tree.leaves(first)) if isinstance(kept["layers"], dict) else len(kept["layers"])
        assert 0 < len(new) <= number * len(jax.tree.leaves(first))
    size = sum(x.nbytes for x in jax.tree.leaves(second))
    assert found.moved_bytes <= size * (1 if mesh is None else mesh.size)


@pytest.mark.parametrize("name", ["llama_tied", "gemma3"])
def test_of_weights_with_adapters_these_alone_are_taken_again(vectors: Any, name: str) -> None:
    model = vectors(name)
    with quick_compiles():
        assert_only_adapters_move(model.policy, model.params)
        assert replace_adapters(model.policy, take_weights(model.policy, model.params), model.params) is None


APART = """
import sys
import jax
from test_weights import assert_only_adapters_move
from jaxrl_llm.distributed import make_mesh
from jaxrl_llm.models import load_policy
policy, params, _ = load_policy(sys.argv[1], dtype="float32")
assert_only_adapters_move(policy, params, make_mesh(data=2, tensor=2, devices=jax.devices()[4:]))
"""


def test_adapters_reach_other_devices_alone() -> None:
    model = str(Path(__file__).parents[1] / "vectors" / "llama_tied")
    done = subprocess.run(
        [sys.executable, "-c", APART, model],
        env={**os.environ, "XLA_FLAGS": with_devices(8), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


BY_LAYER = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jaxrl_llm.distributed import make_mesh, named_shardings, parameter_specs
from jaxrl_llm.models import load_policy
from jaxrl_llm.models.stacks import unstack
from jaxrl_llm.sampling.weights import take, take_weights

def held(devices):
    each = (part for x in jax.live_arrays() for part in x.addressable_shards if part.device in devices)
    return sum({(part.device, part.data.unsafe_buffer_pointer()): part.data.nbytes for part in each}.values())

policy, params, _ = load_policy(sys.argv[1], dtype="bfloat16", param_dtype="float32")
params = params if sys.argv[2] == "stacked" else unstack(params, policy.config)
mesh, learners = make_mesh(data=2, tensor=2, devices=jax.devices()[4:]), make_mesh(4, devices=jax.devices()[:4])
specs = parameter_specs(policy.config, learners, isinstance(params["layers"], dict), params)
params = jax.device_put(params, named_shardings(specs, learners))
there, before = set(jax.devices()[4:]), held(set(jax.devices()[:4]))
brought, steps = take._brought, []

def watched(places, arrays, number):
    was = held(there)
    found = jax.block_until_ready(brought(places, arrays, number))
    steps.append((was, held(there) - was))
    one = sum(part.data.nbytes for x in jax.tree.leaves(arrays) for part in x.addressable_shards)
    assert held(set(jax.devices()[:4])) <= before + (number is not None) * one
    return found

take._brought = watched
weights = take_weights(policy, params, mesh)
layer = sum(part.data.nbytes for x in jax.tree.leaves(weights.loop["layers"][0]) for part in x.addressable_shards)
whole = held(there)
assert len(steps) == policy.config.num_layers + 1 and steps[0][0] == 0
for number, (was, more) in enumerate(steps[1:]):
    assert was == whole - layer * (policy.config.num_layers - number), "nothing stays but the loop's weights"
    assert more <= 2.1 * layer, "float32 of a layer"
places = named_shardings(parameter_specs(policy.config, mesh, isinstance(params["layers"], dict), params), mesh)
expected = take_weights(policy, jax.device_put(params, places), mesh)
jax.tree.map(np.testing.assert_array_equal, weights.loop, expected.loop)
"""


@pytest.mark.parametrize("how", ["stacked", "unstacked"])
def test_weights_reach_other_devices_layer_by_layer(how: str) -> None:
    """Neither side ever has more than one layer beside its own weights."""
    model = str(Path(__file__).parents[1] / "vectors" / "llama_tied")
    done = subprocess.run(
        [sys.executable, "-c", BY_LAYER, model, how],
        env={**os.environ, "XLA_FLAGS": with_devices(8), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
