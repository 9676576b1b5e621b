"""Adapters: nothing at first, then W + alpha / r A B wherever they are computed; gradients by the chain rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from jaxrl_llm.distributed import bytes_per_device, parameter_specs
from jaxrl_llm.distributed.sharding import describe_sharding
from jaxrl_llm.models import load_policy, lora, save_policy
from jaxrl_llm.models.parameters import combine
from jaxrl_llm.models.stacks import unstack
from jaxrl_llm.utils.errors import InputError

RANK, ALPHA = 3, 4.5
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 256, (2, 9)), jnp.int32)
KEY = jax.random.key(5)
pytestmark = pytest.mark.usefixtures("quickly")
USUAL = ("query", "key", "value", "out", "gate", "up", "down")  # of a dense model


def trained(model: Any, targets: tuple[str, ...] = (), dtype: Any = jnp.float32) -> tuple[Any, Any]:
    """The frozen part and adapters of which both matrices are random."""
    adapters = lora.init(KEY, model.policy.config, RANK, targets, dtype)
    adapters = jax.tree.map(
        lambda x: 0.2 * jax.random.normal(jax.random.fold_in(KEY, x.size), x.shape, dtype), adapters
    )
    return lora.scaled(model.params, RANK, ALPHA), adapters


def by_hand(model: Any, adapters: Any) -> Any:
    """W + alpha / r A B in double precision, a layer and a projection at a time."""
    layers = {name: np.asarray(w, np.float64).copy() for name, w in model.params["layers"].items()}
    inputs = {"out": 2}
    for name in USUAL:
        if name + "_lora_in" not in adapters["layers"]:
            continue
        for i in range(model.policy.config.num_layers):
            w = layers[name][i]
            size = int(np.prod(w.shape[: inputs.get(name, 1)]))
            a = np.asarray(adapters["layers"][name + "_lora_in"][i], np.float64).reshape(size, RANK)
            b = np.asarray(adapters["layers"][name + "_lora_out"][i], np.float64).reshape(RANK, -1)
            for row in range(size):
                w.reshape(size, -1)[row] += ALPHA / RANK * sum(a[row, k] * b[k] for k in range(RANK))
    return {**model.params, "layers": layers}


def assert_close(found: Any, expected: Any, tolerance: float = 2e-5) -> None:
    """Relative to the largest entry."""
    bound = tolerance * float(np.abs(expected).max())
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=0, atol=bound)


@pytest.mark.heavy
@pytest.mark.parametrize("family", ["llama_tied", "qwen3_moe"])
def test_new_adapters_change_nothing(vectors: Callable[[str], Any], family: str) -> None:
    model = vectors(family)
    adapters = lora.init(KEY, model.policy.config, RANK)
    params = combine(lora.scaled(model.params, RANK, ALPHA), adapters)
    expected = model.policy.logits(model.params, TOKENS)
    assert model.policy.logits(params, TOKENS).tobytes() == expected.tobytes()
    assert all(np.any(x) == name.endswith("_in") for name, x in adapters["layers"].items())


def test_shapes_and_spread_of_new_adapters(vectors: Callable[[str], Any]) -> None:
    config = vectors("qwen2").policy.config
    n, D, H, K, h, F = 2, 64, config.num_heads, config.num_kv_heads, config.head_dim, config.intermediate_size
    found = lora.init(KEY, config, 40, dtype=jnp.bfloat16)["layers"]
    wide = {"query": (H, h), "key": (K, h), "value": (K, h), "gate": (F,), "up": (F,), "out": (D,), "down": (D,)}
    inputs = {"out": (H, h), "down": (F,)}
    assert {name: x.shape for name, x in found.items()} == {
        **{f"{name}_lora_in": (n, *inputs.get(name, (D,)), 40) for name in USUAL},
        **{f"{name}_lora_out": (n, 40, *wide[name]) for name in USUAL},
    }
    assert {x.dtype for x in found.values()} == {jnp.dtype(jnp.bfloat16)}
    for name, size in (("query", D), ("out", H * h), ("down", F)):
        x = np.asarray(found[name + "_lora_in"], np.float64)
        assert np.abs(x).max() <= size**-0.5 * 1.01
        # The variance of a uniform number within b is b^2 / 3; there are some 5,000 of them.
        assert x.var() * 3 * size == pytest.approx(1, abs=0.1)
    assert not np.array_equal(found["gate_lora_in"], found["up_lora_in"])


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("gemma2", ("out", "up")),
        ("mixtral", ()),
        pytest.param("qwen2", (), marks=pytest.mark.heavy),
        *(pytest.param("llama_tied", (name,), marks=pytest.mark.heavy) for name in USUAL),
    ],
)
def test_the_policy_is_that_of_the_merged_weights(
    vectors: Callable[[str], Any], family: str, targets: tuple[str, ...]
) -> None:
    """Biases, soft caps, norms of heads, experts, tied embeddings; layers stacked and apart."""
    model = vectors(family)
    frozen, adapters = trained(model, targets)
    params, hand = combine(frozen, adapters), by_hand(model, adapters)
    assert len(adapters["layers"]) == 2 * (len(targets) or (4 if family == "mixtral" else 7))
    merged = lora.merge(params)
    for name, w in merged["layers"].items():
        assert_close(w, hand["layers"][name], 1e-6)
    assert jax.tree.structure(merged) == jax.tree.structure(model.params)
    expected = np.asarray(model.policy.logits(jax.tree.map(jnp.float32, hand), TOKENS))
    assert np.abs(expected - model.policy.logits(model.params, TOKENS)).max() > 0.1
    assert_close(model.policy.logits(params, TOKENS), expected, 1e-4)
    if not targets:
        assert_close(model.policy.logits(unstack(params, model.policy.config), TOKENS), expected, 1e-4)
        for i, layer in enumerate(lora.merge(unstack(params, model.policy.config))["layers"]):
            for name, w in layer.items():
                assert_close(w, hand["layers"][name][i], 1e-6)
            assert layer.keys() == model.params["layers"].keys()


def test_without_a_factor_it_is_1_and_without_adapters_nothing_is_merged(vectors: Callable[[str], Any]) -> None:
    model = vectors("llama_tied")
    _, adapters = trained(model)
    bare, with_factor = (lora.merge(combine(f, adapters)) for f in (model.params, lora.scaled(model.params, 3, 3.0)))
    jax.tree.map(np.testing.assert_array_equal, bare, with_factor)
    for params in (model.params, lora.scaled(model.params, 2, 1.0)):
        merged = lora.merge(params)
        jax.tree.map(np.testing.assert_array_equal, merged, model.params)
        assert all(merged["layers"][name] is w for name, w in model.params["layers"].items()), "a copy"


@pytest.mark.heavy
@pytest.mark.parametrize("remat", [False, True])
def test_gradients_are_those_of_the_merged_weights_by_the_chain_rule(
    vectors: Callable[[str], Any], remat: bool
) -> None:
    """dL/dA = s dL/dW B^T and dL/dB = s A^T dL/dW, with s = alpha / r and dL/dW at the merged weights."""
    model = vectors("llama")
    policy = model.policy
    frozen, adapters = trained(model)
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(2, 9, policy.config.hidden_size)), jnp.float32)

    def loss(params: Any) -> jax.Array:
        places = jnp.broadcast_to(jnp.arange(9), TOKENS.shape)
        hidden, _ = policy.forward(params, TOKENS, places, jnp.ones_like(TOKENS), remat=remat)
        return jnp.sum(weights * hidden)

    found = jax.jit(jax.grad(lambda a: loss(combine(frozen, a))))(adapters)["layers"]
    of_weights = jax.jit(jax.grad(loss))(lora.merge(combine(frozen, adapters)))["layers"]
    s = ALPHA / RANK
    for name in USUAL:
        axes = 2 if name == "out" else 1
        a, b = (np.asarray(adapters["layers"][name + end], np.float64) for end in ("_lora_in", "_lora_out"))
        for i in range(policy.config.num_layers):
            dw = np.asarray(of_weights[name][i], np.float64)
            dw = dw.reshape(int(np.prod(dw.shape[:axes])), -1)
            assert_close(found[name + "_lora_in"][i].reshape(-1, RANK), s * dw @ b[i].reshape(RANK, -1).T, 1e-4)
            assert_close(found[name + "_lora_out"][i].reshape(RANK, -1), s * a[i].reshape(-1, RANK).T @ dw, 1e-4)


def test_in_bfloat16_the_policy_is_about_the_same(vectors: Callable[[str], Any]) -> None:
    """Whichever of weights and adapters are kept in bfloat16; the computation is."""
    model = vectors("llama_tied")
    policy = dataclasses.replace(model.policy, dtype=jnp.bfloat16)
    frozen, adapters = trained(model)
    params = combine(frozen, adapters)
    expected = np.asarray(jax.nn.log_softmax(model.policy.logits(params, TOKENS)))
    plain = np.asarray(jax.nn.log_softmax(model.policy.logits(model.params, TOKENS)))
    for kept in (params, combine(jax.tree.map(jnp.bfloat16, frozen), adapters)):
        found = np.asarray(jax.nn.log_softmax(policy.logits(kept, TOKENS)))
        assert np.abs(found - expected).mean() < 0.05 * np.abs(plain - expected).mean()


def test_merging_keeps_the_dtype_of_the_weights(vectors: Callable[[str], Any]) -> None:
    model = vectors("llama_tied")
    frozen, adapters = trained(model)
    narrow = jax.tree.map(jnp.bfloat16, frozen) | {"embed": frozen["embed"]}
    merged = lora.merge(combine(narrow, adapters))
    exact = by_hand(model._replace(params=narrow), adapters)
    for name, w in merged["layers"].items():
        assert w.dtype == jnp.bfloat16
        # Half a unit in the last of 8 bits, of each number.
        np.testing.assert_allclose(np.asarray(w, np.float64), exact["layers"][name], rtol=2**-8, atol=1e-6)


def test_join_is_a_deep_union_that_shares_arrays() -> None:
    a, b, c = (np.full(2, i) for i in range(3))
    frozen = {"x": a, "layers": ({"p": a}, {"p": b}), "deep": {"y": {"z": a, "w": c}}}
    found = combine(frozen, {"layers": ({"q": c}, {}), "deep": {"y": {"z": b}}, "new": {"v": c}})
    assert found["layers"][0]["p"] is a
    assert found["layers"][0]["q"] is c
    assert found["layers"][1] == {"p": b}
    assert found["deep"]["y"]["z"] is b
    assert found["deep"]["y"]["w"] is c
    assert found["x"] is a
    assert found["new"]["v"] is c
    assert frozen["deep"]["y"]["z"] is a
    assert combine(None, frozen) is frozen
    with pytest.raises(ValueError, match=r"shorter|longer"):
        combine({"layers": ({}, {})}, {"layers": ({},)})


@pytest.mark.parametrize(
    ("family", "rank", "targets", "said"),
    [
        ("llama", 4, ("query", "keys"), "unknown LoRA target 'keys': did you mean 'key'"),
        ("llama", 0, (), "the LoRA rank is 0, but must be a whole number"),
        ("mixtral", 4, ("query", "latent"), "'latent' is none of this model's matrices: .* embed, unembed, query, key"),
        ("llama_tied", 4, ("embed",), "'embed' is of tied embeddings, .* could not be merged: choose among query, key"),
    ],
)
def test_what_cannot_be_adapted_is_refused(
    vectors: Callable[[str], Any], family: str, rank: int, targets: tuple[str, ...], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        lora.init(KEY, vectors(family).policy.config, rank, targets)


@pytest.mark.parametrize(("rank", "alpha"), [(0, 1.0), (4, 0.0), (4, -1.0), (4, float("nan")), (4, float("inf"))])
def test_a_factor_that_is_none_is_refused(vectors: Callable[[str], Any], rank: int, alpha: float) -> None:
    with pytest.raises(InputError, match=r"the LoRA rank is 0|alpha is .* must be a finite number above 0"):
        lora.scaled(vectors("llama_tied").params, rank, alpha)


def test_each_adapter_is_split_where_its_weight_is(vectors: Callable[[str], Any]) -> None:
    """The axis that a weight has over "tensor" is in one of the two matrices; the other is whole."""
    model = vectors("llama_tied")
    frozen, adapters = trained(model)
    params, mesh = combine(frozen, adapters), AbstractMesh((1, 2), ("data", "tensor"))
    specs = parameter_specs(model.policy.config, mesh, adapted=params)["layers"]
    assert {name: spec for name, spec in specs.items() if "lora" in name and spec != P()} == {
        "query_lora_out": P(None, None, "tensor"),
        "key_lora_out": P(None, None, "tensor"),
        "value_lora_out": P(None, None, "tensor"),
        "out_lora_in": P(None, "tensor"),
        "gate_lora_out": P(None, None, "tensor"),
        "up_lora_out": P(None, None, "tensor"),
        "down_lora_in": P(None, "tensor"),
    }
    sizes = {name: w.shape[s.index("tensor")] for name, w in params["layers"].items() if "tensor" in (s := specs[name])}
    for name in USUAL:
        (split,) = (size for other, size in sizes.items() if other.startswith(name + "_lora"))
        assert split == sizes[name]
    apart = parameter_specs(model.policy.config, mesh, stacked=False, adapted=params)["layers"]
    assert apart[1]["out_lora_in"] == P("tensor")
    assert apart[1]["lora_scale"] == P()
    unrolled = unstack(params, model.policy.config)
    assert apart == parameter_specs(model.policy.config, mesh, stacked=False, adapted=unrolled)["layers"]
    bare = parameter_specs(model.policy.config, mesh)["layers"]
    assert bare.keys() == model.params["layers"].keys()
    shapes = jax.eval_shape(lambda: params["layers"])
    whole = sum(x.nbytes for x in params["layers"].values())
    halved = sum(params["layers"][name].nbytes // 2 for name in sizes)
    assert bytes_per_device(shapes, specs, mesh) == whole - halved
    assert len(describe_sharding(model.policy.config, mesh)) == len(bare) + 2


def test_a_saved_model_holds_the_merged_weights(vectors: Callable[[str], Any], tmp_path: Any) -> None:
    model = vectors("llama_tied")
    params = combine(*trained(model))
    save_policy(tmp_path, model.policy, params, model.tokenizer)
    policy, loaded, _ = load_policy(tmp_path)
    merged = lora.merge(params)
    assert jax.tree.structure(loaded) == jax.tree.structure(merged)
    jax.tree.map(np.testing.assert_array_equal, loaded, merged)
    assert_close(policy.logits(loaded, TOKENS), np.asarray(model.policy.logits(params, TOKENS)), 1e-4)
