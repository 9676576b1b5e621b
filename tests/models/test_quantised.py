"""Rounded projections: the quantiser by hand and by loops, products with them, and straight-through gradients."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import FAMILIES
from heavy import few
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, PartitionSpec

from jaxrl_llm.models.layers import products
from jaxrl_llm.models.layers.products import matrix_product, ragged_product
from jaxrl_llm.models.layers.ragged import groups_of
from jaxrl_llm.models.parameters import parameter_shapes
from jaxrl_llm.models.quantised import KINDS, Quantised, dequantised, kind_of, quantise, straight_through
from jaxrl_llm.models.quantised.layers import NAMES, cast, quantised_layer, quantised_specs
from jaxrl_llm.utils.errors import InputError

# All numbers of E4M3 but NaN by their bits, from the format's definition: bias 7, subnormals below 2^-6.
E4M3 = np.asarray([
    sign * (m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7))
    for sign, e, m in itertools.product((1, -1), range(16), range(8)) if (e, m) != (15, 7)
])  # fmt: skip


def nearest(x: float) -> float:
    """The nearest number of E4M3, of two the one whose last bit is 0."""
    distance = np.abs(E4M3 - x)
    at = np.flatnonzero(distance == distance.min())
    return float(E4M3[at[0] if at.size == 1 else next(i for i in at if i % 127 % 2 == 0)])


def test_worked_example() -> None:
    """Of Jet-RL: 3.5 / 448 = 0.0078125; 1.28 rounds to 1.25, as numbers of E4M3 from 1 to 2 are 1/8 apart."""
    w = jnp.asarray([[0.5], [-2.0], [3.5], [0.01]])
    eight = quantise(w, "float8")
    assert eight.values.dtype == jnp.float8_e4m3fn
    np.testing.assert_array_equal(eight.scale, [[0.0078125]])
    np.testing.assert_array_equal(eight.values.astype(jnp.float32)[:, 0], [64, -256, 448, 1.25])
    whole = quantise(w, "int8")  # in steps of 3.5 / 127 = 0.02756: 18.1, -72.6, 127, 0.36
    np.testing.assert_array_equal(whole.values[:, 0], [18, -73, 127, 0])
    np.testing.assert_allclose(whole.scale, [[3.5 / 127]], rtol=1e-7)


def test_by_loops() -> None:
    random = np.random.default_rng(0)
    w = (random.normal(size=(7, 5)) * np.exp(random.normal(size=5) * 3)).astype(np.float32)
    w[:, 2] = 0.0
    int8, float8 = (quantise(jnp.asarray(w), kind) for kind in ("int8", "float8"))
    for column in range(5):
        largest = max(abs(float(x)) for x in w[:, column])
        steps = [np.float32(largest) / np.float32(most) if largest else np.float32(1) for most in (127, 448)]
        np.testing.assert_allclose([int8.scale[0, column], float8.scale[0, column]], steps, rtol=2e-7)
        for row in range(7):
            scaled = [np.float32(w[row, column]) / np.asarray(q.scale)[0, column] for q in (int8, float8)]
            assert int8.values[row, column] == np.round(scaled[0])
            assert float(float8.values[row, column].astype(jnp.float32)) == nearest(float(scaled[1]))


@settings(max_examples=50, deadline=None)
@given(
    st.integers(0, 1000), st.sampled_from([(1, 1), (1, 30), (30, 1), (17, 6)]), st.floats(-20, 8), st.booleans()
)  # fmt: skip
def test_errors_are_bounded(seed: int, shape: tuple[int, int], size: float, narrow: bool) -> None:
    random = np.random.default_rng(seed)
    w = (random.normal(size=shape) * 10.0**size).astype(jnp.bfloat16 if narrow else np.float32)
    exact = np.asarray(w, np.float64)
    for kind in KINDS:
        q = quantise(jnp.asarray(w), kind)
        scale = np.asarray(q.scale, np.float64)
        error = np.abs(np.asarray(q.values.astype(jnp.float32), np.float64) * scale - exact)
        bound = scale / 2 if kind == "int8" else np.maximum(np.abs(exact) / 16, scale / 1024)
        assert (error <= bound * (1 + 1e-5)).all()


def test_scales_are_of_outputs_whatever_the_axes() -> None:
    """A projection of heads, one to several axes and one of several inputs, as matrices of the same numbers."""
    w = jax.random.normal(jax.random.key(0), (6, 2, 4))
    layer = {"query": w, "out": w, "router": w[..., 0], "attention_norm": w[0, 0]}
    found = quantised_layer(layer, "int8")
    assert found["router"] is layer["router"]
    assert found["attention_norm"] is layer["attention_norm"]
    for name, shape in (("query", (6, 8)), ("out", (12, 4))):
        flat = quantise(w.reshape(shape), "int8")
        np.testing.assert_array_equal(found[name].values.reshape(shape), flat.values)
        np.testing.assert_array_equal(found[name].scale.reshape(1, -1), flat.scale)
        x = jax.random.normal(jax.random.key(1), (3, shape[0]))
        np.testing.assert_allclose(matrix_product(x, found[name]), x @ dequantised(flat), rtol=1e-5, atol=1e-5)
    stacked = quantised_layer(jax.tree.map(lambda x: jnp.stack([x, 2 * x]), layer), "int8")
    for name in ("query", "out"):
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[0], b), stacked[name], found[name])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype, tolerance", [(jnp.float32, 1e-6), (jnp.bfloat16, 2.0**-8)])
def test_products_in_blocks(kind: str, dtype: Any, tolerance: float) -> None:
    """Few rows on a CPU, of a matrix of several blocks of which the last overlaps, against a product in float64."""
    K, N = 300, 1000
    assert K * N > products.BLOCK
    assert N % (products.BLOCK // K // 64 * 64)
    keys = jax.random.split(jax.random.key(0))
    x, w = jax.random.normal(keys[0], (5, K)).astype(dtype), jax.random.normal(keys[1], (K, N))
    q = quantise(w, kind)
    exact = np.asarray(x, np.float64) @ (
        np.asarray(q.values.astype(jnp.float32), np.float64) * np.asarray(q.scale, np.float64)
    )
    found = jax.jit(matrix_product)(x, q)
    assert found.dtype == dtype
    assert np.abs(np.asarray(found, np.float64) - exact).max() <= tolerance * np.abs(exact).max()
    many = jax.jit(matrix_product)(jnp.tile(x, (40, 1)), q)  # more rows are not multiplied in blocks
    assert np.abs(np.asarray(many, np.float64)[:5] - exact).max() <= tolerance * np.abs(exact).max()


def test_float8_by_its_bits() -> None:
    values = jnp.asarray(E4M3, jnp.float32).astype(jnp.float8_e4m3fn)
    bits = jax.lax.bitcast_convert_type(values, jnp.uint8)
    for dtype in (jnp.float32, jnp.bfloat16):
        np.testing.assert_array_equal(products._widened(bits, dtype).astype(jnp.float32), E4M3)


@pytest.mark.parametrize("kind", KINDS)
def test_straight_through_gradients(kind: str) -> None:
    """Of y = x R(W), with the rounded matrix for x, and as if R was the identity for W: x^T dy."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, w, dy = (jax.random.normal(k, s) for k, s in zip(keys, ((5, 6), (6, 2, 4), (5, 8)), strict=True))
    y, back = jax.vjp(lambda x, w: matrix_product(x, straight_through(w, kind, (0,))), x, w)
    rounded = dequantised(quantise(w.reshape(6, 8), kind))
    assert np.abs(rounded - w.reshape(6, 8)).max() > 1e-3
    np.testing.assert_allclose(y, x @ rounded, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(y, matrix_product(x, quantise(w, kind, (0,))))
    dx, dw = back(dy)
    np.testing.assert_allclose(dx, dy @ rounded.T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dw, (x.T @ dy).reshape(w.shape), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_straight_through_gradients_of_experts(kind: str) -> None:
    """By a loop over experts, one of which has no rows."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, w, dy = (jax.random.normal(k, s) for k, s in zip(keys, ((9, 6), (4, 6, 5), (9, 5)), strict=True))
    sizes = np.asarray([2, 0, 4, 3])
    groups = groups_of(jnp.repeat(jnp.arange(4), sizes), 4)
    y, back = jax.vjp(lambda x, w: ragged_product(x, straight_through(w, kind), groups), x, w)
    np.testing.assert_array_equal(y, ragged_product(x, quantise(w, kind), groups))
    dx, dw = back(dy)
    ends = np.cumsum(sizes)
    for expert, (start, end) in enumerate(zip(ends - sizes, ends, strict=True)):
        rounded, rows = dequantised(quantise(w[expert], kind)), slice(start, end)
        np.testing.assert_allclose(y[rows], x[rows] @ rounded, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(dx[rows], dy[rows] @ rounded.T, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(dw[expert], x[rows].T @ dy[rows], rtol=1e-5, atol=1e-5)


@pytest.mark.heavy
@pytest.mark.parametrize("family", few(FAMILIES, ("llama", "qwen3_moe")))  # matrices of layers, and of experts
@pytest.mark.parametrize("kind", few(KINDS, ("int8",)))
def test_a_policy_that_rounds_is_the_policy_of_the_rounded_weights(
    vectors: Any, rollouts: Any, family: str, kind: str
) -> None:
    """Log-probabilities, entropies, and gradients, which straight-through are those at the rounded weights."""
    from conftest import probe_outputs

    model, batch = vectors(family), rollouts(family, "plain")
    kept = {name: w for name, w in model.params["layers"].items() if name not in NAMES}
    layers = quantised_layer(model.params["layers"], kind)
    plain = model._replace(
        params={**model.params, "layers": kept | {name: dequantised(layers[name]) for name in layers if name in NAMES}}
    )
    rounding = model._replace(policy=dataclasses.replace(model.policy, rounding=kind))
    ones = (np.asarray(batch.action_mask, np.float32), np.full(batch.tokens.shape, 0.3, np.float32))
    unrounded, expected, found = (probe_outputs(m, batch, weights=ones) for m in (model, plain, rounding))
    np.testing.assert_allclose(found.logp, expected.logp, atol=2e-4)
    np.testing.assert_allclose(found.entropy, expected.entropy, atol=2e-4)
    assert np.abs(found.logp - unrounded.logp).max() > 1e-3

    def close(a: jax.Array, b: jax.Array) -> None:
        np.testing.assert_allclose(a, b, atol=2e-3 * max(float(jnp.abs(b).max()), 1e-3))

    jax.tree.map(close, found.gradient, expected.gradient)


def test_specs_of_scales(vectors: Any) -> None:
    """Values are split as the weight, scales where outputs are split."""
    mesh = AbstractMesh((2, 2), ("expert", "tensor"))
    for family in ("llama", "qwen3_moe"):
        config = vectors(family).policy.config
        shapes = {path[1]: shape[1:] for path, shape in parameter_shapes(config).items() if path[0] == "layers"}
        given_specs = {name: PartitionSpec(None, "tensor") for name in shapes}
        found = quantised_specs(config, mesh, given_specs, "int8")
        assert {name for name, spec in found.items() if isinstance(spec, Quantised)} == NAMES & set(shapes)
        assert found["query"] == Quantised(given_specs["query"], PartitionSpec(None, "tensor"))  # type: ignore[arg-type]
        lead = ("expert",) if config.num_experts else ()
        assert found["down"].scale == PartitionSpec(*lead)
        assert found["gate"].scale == PartitionSpec(*(lead or (None,)), *([None] if lead else []), "tensor")
        assert found["out"].scale == PartitionSpec()
        of_blocks = quantised_specs(config, mesh, given_specs, "float8_blocks")["query"]
        assert (of_blocks.values, of_blocks.scale) == (given_specs["query"], PartitionSpec())


def test_casts_leave_what_is_rounded() -> None:
    w = jnp.ones((4, 4))
    found = cast({"gate": quantise(w, "int8"), "norm": w}, jnp.bfloat16)
    assert (found["gate"].values.dtype, found["gate"].scale.dtype) == (jnp.int8, jnp.float32)
    assert found["norm"].dtype == jnp.bfloat16


def test_names_of_dtypes() -> None:
    assert [kind_of(x) for x in (None, "int8", "float8", jnp.int8, jnp.float8_e4m3fn, "float8_e4m3fn")] == [
        None, "int8", "float8", "int8", "float8", "float8",
    ]  # fmt: skip
    assert kind_of("float8_blocks") == "float8_blocks"
    for wrong in ("int4", jnp.int32, 8, object()):
        with pytest.raises(InputError, match=r"weight_dtype is .*, but must be int8, float8, .*, or None"):
            kind_of(wrong)
