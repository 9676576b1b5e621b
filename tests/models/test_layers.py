"""The parts of a layer against JAX's own of the same formula, and against differences."""

from __future__ import annotations

from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import optimised
from conftest import needs_wide_vectors
from heavy import few
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

from jaxrl_llm.models.layers.parts import rms_norm, rounded_once, scores, softmax
from jaxrl_llm.models.layers.projections import joined_product, linear


def draw(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def plain_norm(x: jax.Array, weight: jax.Array, epsilon: float, offset: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide / jnp.sqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + epsilon)
    return (wide * (offset + weight.astype(jnp.float32))).astype(x.dtype)


@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5)])
def test_linear(shape: tuple[int, ...]) -> None:
    x, weight, dy = draw(0, *shape), draw(1, 5, 7), draw(2, *shape[:-1], 7)
    expected, backward = jax.vjp(jnp.matmul, x, weight)
    found, ours = jax.vjp(linear, x, weight)
    np.testing.assert_array_equal(found, expected)
    chex.assert_trees_all_close(ours(dy), backward(dy), rtol=1e-5, atol=1e-6)


def test_the_weights_gradient_by_hand() -> None:
    # y = x W, and the loss is the sum of all y: each weight's gradient is the sum of its input.
    x, weight = jnp.asarray([[1.0, 2.0], [3.0, 5.0]]), jnp.zeros((2, 3))
    by_x, by_weight = jax.grad(lambda x, weight: jnp.sum(linear(x, weight)), argnums=(0, 1))(x, weight + 1)
    np.testing.assert_array_equal(by_weight, [[4.0] * 3, [7.0] * 3])
    np.testing.assert_array_equal(by_x, jnp.full((2, 2), 3.0))


def test_an_adapter_that_joins_the_product() -> None:
    """x (W + A B), and the gradients of all four by hand."""
    with jax.enable_x64(True):
        random = np.random.default_rng(0)
        x, into, weight, out, dy = (random.normal(size=n) for n in ((2, 3, 5), (5, 2), (5, 7), (2, 7), (2, 3, 7)))
        found, backward = jax.vjp(joined_product, *map(jnp.asarray, (x, into, weight, out)))
        np.testing.assert_allclose(found, x @ (weight + into @ out), rtol=1e-13)
        rows, by_rows = x.reshape(6, 5), dy.reshape(6, 7)
        by_weight = rows.T @ by_rows
        expected = dy @ (weight + into @ out).T, by_weight @ out.T, by_weight, into.T @ by_weight
        for a, b in zip(backward(jnp.asarray(dy)), expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


SIZES = st.sampled_from([1, 2, 5])  # each is compiled


@pytest.mark.heavy
@settings(deadline=None, derandomize=True)
@given(rows=SIZES, size=SIZES, offset=st.sampled_from([0.0, 1.0]), seed=st.integers(0, 99))
def test_rms_norm_against_jax(rows: int, size: int, offset: float, seed: int) -> None:
    x, weight, dy = draw(seed, 2, rows, size), draw(seed + 1, size), draw(seed + 2, 2, rows, size)
    expected, backward = jax.vjp(lambda x, w: plain_norm(x, w, 1e-3, offset), x, weight)
    found, ours = jax.vjp(lambda x, w: rms_norm(x, w, 1e-3, offset), x, weight)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(ours(dy), backward(dy), rtol=1e-4, atol=1e-5)


def test_gradients_by_differences() -> None:
    with jax.enable_x64(True):
        x, weight, matrix = (draw(i, *shape).astype(jnp.float64) for i, shape in enumerate([(3, 5), (5,), (5, 4)]))
        closely = partial(check_grads, order=1, modes=["rev"], eps=1e-5, rtol=1e-6, atol=1e-6)
        closely(lambda x, w: rms_norm(x, w, 1e-2, 1.0), (x, weight))
        closely(linear, (x, matrix))
        queries, keys = draw(3, 17, 4).astype(jnp.float64), draw(4, 9, 4).astype(jnp.float64)
        closely(scores, (queries, keys))
        closely(softmax, (keys.at[0, :2].set(-1e30),))


@pytest.mark.parametrize(
    ("queries", "keys"), few([(1, 40), (16, 1), (20, 16), (20, 17), (33, 100)], [(1, 40), (20, 17)], unpack=True)
)
def test_scores_and_softmax_against_jax(queries: int, keys: int) -> None:
    q, k, seen = draw(0, 2, 3, queries, 8), draw(1, 2, 3, keys, 8), draw(2, 2, 1, queries, keys) > 0

    def attend(scores: Any, softmax: Any) -> Any:
        return lambda q, k: softmax(jnp.where(seen, scores(q, k), -1e30))

    expected, backward = jax.vjp(attend(partial(jnp.einsum, "nkqh,nksh->nkqs"), jax.nn.softmax), q, k)
    found, ours = jax.vjp(attend(scores, softmax), q, k)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)
    chex.assert_trees_all_close(ours(expected), backward(expected), rtol=1e-4, atol=1e-5)


def test_softmax_by_hand() -> None:
    """Weights 1 : 3, and a row that sees nothing stays finite."""
    x = jnp.asarray([[0.0, -1e30, np.log(3.0)], [-1e30] * 3])
    np.testing.assert_allclose(softmax(x), [[0.25, 0.0, 0.75], [1 / 3] * 3], rtol=1e-6)


@optimised
@needs_wide_vectors
@pytest.mark.parametrize("between", [1, 7, 16, 31, 64])
def test_strangers_in_between_change_no_bit_of_attention(between: int) -> None:
    """A token sees 70 others, or the same 70 with those of other sequences before, among and behind them."""
    q, k, v, strange = draw(0, 20, 64), draw(1, 70, 64), draw(2, 70, 64), draw(3, between, 64)
    place = np.concatenate([np.arange(30) + between, np.arange(30, 70) + 2 * between])

    def among(own: jax.Array) -> jax.Array:
        return jnp.concatenate([strange, own[:30], strange, own[30:], strange])

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array) -> jax.Array:
        return softmax(jnp.where(seen, scores(q, k), -1e30)) @ v

    seen = jnp.zeros(len(k) + 3 * between, bool).at[place].set(True)
    alone = jax.jit(attend)(q, k, v, jnp.ones(len(k), bool))
    np.testing.assert_array_equal(jax.jit(attend)(q, among(k), among(v), seen), alone)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dtypes_stay(dtype: Any) -> None:
    x, weight, matrix = (draw(i, *shape).astype(dtype) for i, shape in enumerate([(2, 3, 4), (4,), (4, 6)]))

    def loss(x: jax.Array, weight: jax.Array, matrix: jax.Array) -> jax.Array:
        out = linear(rms_norm(x, weight, 1e-5), matrix)
        assert out.dtype == dtype
        return jnp.sum(out.astype(jnp.float32))

    for gradient, value in zip(jax.grad(loss, (0, 1, 2))(x, weight, matrix), (x, weight, matrix), strict=True):
        assert (gradient.dtype, gradient.shape) == (value.dtype, value.shape)


def test_a_gradient_of_rows_that_are_zero_is_finite() -> None:
    x = jnp.zeros((2, 4)).at[1].set(1.0)
    for gradient in jax.grad(lambda x, w: jnp.sum(rms_norm(x, w, 1e-6) ** 2), (0, 1))(x, jnp.ones(4)):
        assert jnp.all(jnp.isfinite(gradient))


def test_elementwise_functions_round_once() -> None:
    """In bfloat16 results and gradients are those of float64, rounded; in float32 the function is as it was."""

    def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
        return jax.nn.silu(gate) * up

    arrays = [draw(seed, 4, 300).astype(jnp.bfloat16) for seed in range(3)]
    out, backward = jax.vjp(rounded_once(gated), *arrays[:2])
    gate, up, dy = (np.asarray(x, np.float64) for x in arrays)
    gates = 1 / (1 + np.exp(-gate))
    wanted = gate * gates * up, dy * up * gates * (1 + gate * (1 - gates)), dy * gate * gates
    for found, value in zip((out, *backward(arrays[2])), wanted, strict=True):
        assert found.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(found, np.float64), value, rtol=2.0**-8, atol=1e-6)
    wide = [x.astype(jnp.float32) for x in arrays]
    assert str(jax.make_jaxpr(rounded_once(gated))(*wide[:2])) == str(jax.make_jaxpr(gated)(*wide[:2]))


@optimised
def test_a_gated_mlps_gradient_moves_fewer_bytes() -> None:
    """Than of products with three axes, for which XLA on CPU writes transposed copies."""

    def bytes_of(product: Any) -> float:
        def out(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
            return product(jax.nn.silu(product(x, gate)) * product(x, up), down)

        def gradients(dy: jax.Array, *inputs: jax.Array) -> Any:
            return jax.vjp(out, *inputs)[1](dy)

        shapes = [(4, 512, 576), (4, 512, 576), (576, 1536), (576, 1536), (1536, 576)]
        arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        return float(jax.jit(gradients).lower(*arguments).compile().cost_analysis()["bytes accessed"])

    assert bytes_of(linear) < 0.9 * bytes_of(jnp.matmul)
