"""Products of bfloat16 factors: values, gradients, what the CPU compiler makes of them, and what TPUs get."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxrl_kernels.half_products import by_rows, matmul, over_rows, put_slice

from jaxrl_llm.training.config.auto_dtype import half_instructions

HALF, FULL = jnp.bfloat16, jnp.float32
SIZES = [(300, 64, 96), (5, 64, 96), (1, 33, 7)]


def drawn(seed: int, *shape: int, dtype: Any = FULL) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), FULL).astype(dtype)


def exact(x: jax.Array) -> np.ndarray:
    return np.asarray(x.astype(FULL), np.float64)


def relative(found: jax.Array, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(exact(found) - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("dtype", "rounding"), [(HALF, 2.0**-8), (FULL, 2.0**-15)])
def test_products_are_those_of_float64_but_for_the_rounding_of_their_dtype(
    sizes: tuple[int, int, int], dtype: Any, rounding: float
) -> None:
    M, K, N = sizes
    x, w = drawn(0, M, K, dtype=dtype), drawn(1, K, N, dtype=HALF)
    found = jax.jit(matmul)(x, w)
    assert found.dtype == dtype
    assert relative(found, exact(x) @ exact(w)) < rounding
    of_rows = jax.jit(by_rows)(x, w.T)
    assert of_rows.dtype == FULL
    assert relative(of_rows, exact(x) @ exact(w)) < 2.0**-15
    y = drawn(2, M, N, dtype=HALF)
    summed = jax.jit(over_rows)(x.astype(HALF), y)
    assert summed.dtype == FULL
    assert relative(summed, exact(x).T @ exact(y)) < 2.0**-8


@pytest.mark.parametrize("dtype", [HALF, FULL])
def test_gradients_are_products_of_factors_rounded_to_bfloat16(dtype: Any) -> None:
    x, w, dy = drawn(0, 40, 64, dtype=dtype), drawn(1, 64, 24, dtype=HALF), drawn(2, 40, 24, dtype=dtype)
    d_x, d_w = jax.jit(lambda x, w, dy: jax.vjp(matmul, x, w)[1](dy))(x, w, dy)
    assert (d_x.dtype, d_w.dtype) == (dtype, HALF)
    assert relative(d_x, exact(dy) @ exact(w).T) < 2.0**-7
    assert relative(d_w, exact(x).T @ exact(dy)) < 2.0**-7


def test_other_dtypes_are_plain_products() -> None:
    x, w = drawn(0, 5, 6), drawn(1, 6, 7)
    assert "custom_vjp" not in str(jax.make_jaxpr(matmul)(x, w))
    np.testing.assert_array_equal(matmul(x, w), x @ w)
    whole = jnp.arange(6)[None] @ jnp.arange(12).reshape(6, 2)
    np.testing.assert_array_equal(matmul(jnp.arange(6)[None], jnp.arange(12).reshape(6, 2)), whole)


def products(text: str) -> list[tuple[str, str, str]]:
    """The dtypes of each product in a compiled program: of its result, and of both factors."""
    named = dict(re.findall(r"%([\w.\-]+) = (\w+)\[", text))
    named |= {name: kind for name, kind in re.findall(r"([\w.\-]+): (\w+)\[", text)}
    found = re.findall(r"= (\w+)\[[^\n]*? dot\(%?([\w.\-]+), %?([\w.\-]+)\)", text)
    return [(result, named[a], named[b]) for result, a, b in found]


@pytest.mark.skipif(
    jax.default_backend() != "cpu" or not half_instructions(), reason="only processors that have instructions for it"
)
@pytest.mark.parametrize("dtype", [HALF, FULL])
def test_every_product_on_a_cpu_is_of_bfloat16_factors_with_a_float32_result(dtype: Any) -> None:
    x, w, dy = drawn(0, 256, 128, dtype=dtype), drawn(1, 128, 192, dtype=HALF), drawn(2, 256, 192, dtype=dtype)

    def three(x: jax.Array, w: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
        y, pull = jax.vjp(matmul, jnp.tanh(x), w * 2)
        return y, *pull(dy)

    found = products(jax.jit(three).lower(x, w, dy).compile().as_text())
    assert found == [("f32", "bf16", "bf16")] * 3


def test_tpus_get_the_plain_products() -> None:
    x, w, dy = drawn(0, 256, 128, dtype=HALF), drawn(1, 128, 192, dtype=HALF), drawn(2, 256, 192, dtype=HALF)

    def text(product: Any) -> list[str]:
        def three(x: jax.Array, w: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
            y, pull = jax.vjp(product, x, w)
            return y, *pull(dy)

        lowered = jax.jit(three).trace(x, w, dy).lower(lowering_platforms=("tpu",)).as_text()
        return sorted(re.findall(r"stablehlo.dot_general.*", re.sub(r"%\w+", "%", lowered)))

    own = text(matmul)
    assert len(own) == 3
    assert own == text(jnp.matmul)
    assert not any("f32" in line for line in own)


def test_products_under_vmap_are_those_of_each() -> None:
    x, w = drawn(0, 3, 40, 64, dtype=HALF), drawn(1, 64, 24, dtype=HALF)

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(matmul(x, w).astype(FULL)))

    both = jax.vmap(jax.grad(loss, (0, 1)), (0, None))(x, w)
    one = [jax.grad(loss, (0, 1))(each, w) for each in x]
    for found, wanted in zip(both, map(jnp.stack, zip(*one, strict=True)), strict=True):
        np.testing.assert_allclose(found.astype(FULL), wanted.astype(FULL), rtol=2e-2, atol=2e-1)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.int8, jnp.int32])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("start", [0, 3, 9])
def test_slices_are_written_as_by_dynamic_update_slice(dtype: Any, axis: int, start: int) -> None:
    old = jnp.asarray(np.arange(48).reshape(6, 8) - 20, dtype)
    new = jnp.asarray(np.arange(6).reshape(2, 3) + 31, dtype)
    wanted = jax.lax.dynamic_update_slice_in_dim(old, new if axis == 0 else new.T, start, axis)
    found = jax.jit(put_slice, static_argnums=3)(old, new if axis == 0 else new.T, start, axis)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="others write slices of bfloat16 themselves")
def test_cpus_write_the_bits() -> None:
    old, new = jnp.zeros((64, 32), jnp.bfloat16), jnp.full((1, 32), jnp.nan, jnp.bfloat16)
    text = jax.jit(put_slice, static_argnums=3).lower(old, new, 5, 0).compile().as_text()
    assert "u16[64,32]" in text
    assert "f32[64,32]" not in text


def test_other_platforms_get_the_plain_operation() -> None:
    old, new = jnp.zeros((64, 32), jnp.bfloat16), jnp.ones((1, 32), jnp.bfloat16)
    for platform in ("tpu", "cuda"):
        traced = jax.jit(put_slice, static_argnums=3).trace(old, new, 5, 0)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert "bitcast_convert" not in text
