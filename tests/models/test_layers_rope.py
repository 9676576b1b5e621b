"""Rotation frequencies against loops over the papers' formulas, and rotations against complex numbers."""

from __future__ import annotations

import math
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.models.config.rope import Rope, frequencies
from jaxrl_llm.models.layers.parts import rotate, rotation

# What transformers 5.23.0 computes with PyTorch 2.13.0, of heads of 16, for ROPES[2] and ROPES[4].
LLAMA3_REFERENCE = [
    *(1.0, 0.0242403448, 0.00470075384, 0.000911583134),
    *(0.000176776681, 3.42810235e-05, 6.64786967e-06, 1.28917316e-06),
]
YARN_REFERENCE = [
    *(1.0, 0.316227764, 0.100000001, 0.025693506),
    *(0.00624999963, 0.00138349656, 0.000250000012, 7.90569466e-05),
]


def by_loop(rope: Rope, head_dim: int) -> list[float]:
    """Frequencies one pair of dimensions at a time."""
    out = []
    for pair in range(head_dim // 2):
        rate = 1.0 / rope.theta ** (2 * pair / head_dim)
        turns = rope.original_length * rate / (2 * math.pi)
        if rope.kind == "linear":
            rate /= rope.factor
        elif rope.kind == "llama3":
            if turns < rope.low_freq_factor:
                rate /= rope.factor
            elif turns <= rope.high_freq_factor:
                part = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
                rate = (1 - part) * rate / rope.factor + part * rate
        elif rope.kind == "yarn":

            def dimension(rotations: float) -> float:
                return (
                    head_dim * math.log(rope.original_length / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))
                )

            low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
            if rope.truncate:
                low, high = float(math.floor(low)), float(math.ceil(high))
            low, high = max(low, 0.0), min(high, head_dim - 1.0)
            if low == high:
                high += 0.001
            part = min(max((pair - low) / (high - low), 0.0), 1.0)
            rate = rate / rope.factor * part + rate * (1 - part)
        elif rope.kind == "factors":
            rate /= rope.factors[pair]
        out.append(rate)
    return out


ROPES = [
    Rope(theta=10_000.0),
    Rope(theta=500_000.0, kind="linear", factor=4.0),
    Rope(theta=500_000.0, kind="llama3", factor=8.0, original_length=32),
    Rope(theta=500_000.0, kind="llama3", factor=32.0, original_length=8192),
    Rope(theta=10_000.0, kind="yarn", factor=4.0, original_length=2048),
    Rope(theta=1_000_000.0, kind="yarn", factor=4.0, original_length=32768, truncate=False, beta_fast=16.0),
    Rope(theta=100.0, kind="factors", factors=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)),
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: f"{rope.kind}-{rope.original_length}")
def test_frequencies(rope: Rope) -> None:
    rate, scale = frequencies(rope, 16)
    assert rate.dtype == np.float32
    np.testing.assert_allclose(rate, by_loop(rope, 16), rtol=1e-6)
    np.testing.assert_allclose(scale, 0.1 * math.log(4) + 1 if rope.kind == "yarn" else 1.0, rtol=1e-12)


@settings(max_examples=50, deadline=None)
@given(
    kind=st.sampled_from(["linear", "llama3", "yarn"]),
    theta=st.floats(50, 1e7),
    factor=st.floats(1, 64),
    original_length=st.integers(16, 65_536),
    truncate=st.booleans(),
)
def test_frequencies_of_any_setting(
    kind: str, theta: float, factor: float, original_length: int, truncate: bool
) -> None:
    rope = Rope(theta=theta, kind=kind, factor=factor, original_length=original_length, truncate=truncate)
    rate, _ = frequencies(rope, 32)
    np.testing.assert_allclose(rate, by_loop(rope, 32), rtol=1e-5)
    plain, _ = frequencies(Rope(theta=theta), 32)
    assert (rate <= plain * 1.000001).all()
    assert (rate >= plain / factor * 0.999999).all()


def test_frequencies_of_transformers() -> None:
    llama3, _ = frequencies(ROPES[2], 16)
    np.testing.assert_allclose(llama3, LLAMA3_REFERENCE, rtol=1e-6)
    yarn, scale = frequencies(ROPES[4], 16)
    np.testing.assert_allclose(yarn, YARN_REFERENCE, rtol=1e-6)
    np.testing.assert_allclose(scale, 1.138629436, rtol=1e-7)


def test_attention_factor_of_yarn() -> None:
    of = partial(Rope, kind="yarn", original_length=64)
    assert frequencies(of(factor=4.0, attention_factor=1.7), 8)[1].tolist() == [1.7] * 4
    assert frequencies(of(factor=1.0), 8)[1].tolist() == [1.0] * 4


@pytest.mark.parametrize("kind", ["yarn", "longrope"])
def test_dimensions_that_are_not_rotated_are_not_scaled(kind: str) -> None:
    """As Phi-4-mini has them: three quarters of a head are rotated and scaled, the rest is left alone."""
    rope = Rope(
        kind=kind, fraction=0.75, factor=4.0, original_length=64, attention_factor=1.5, factors=(1.0, 2.0, 4.0)
    )  # fmt: skip
    cos, sin = rotation((rope,), 8, jnp.asarray([[0, 3, 70]]))
    x = jnp.arange(1.0, 25.0).reshape(1, 3, 1, 8)
    turned = np.asarray(rotate(x, cos[0], sin[0]))[0, :, 0]
    own = np.asarray(x)[0, :, 0]
    np.testing.assert_array_equal(turned[:, [3, 7]], own[:, [3, 7]])
    pairs = [own[:, [0, 4]], own[:, [1, 5]], own[:, [2, 6]]]
    for i, pair in enumerate(pairs):
        length = np.hypot(*turned[:, [i, i + 4]].T)
        np.testing.assert_allclose(length, 1.5 * np.hypot(*pair.T), rtol=1e-6)


def test_rotation_is_multiplication_by_a_complex_number() -> None:
    ropes = (Rope(theta=100.0), Rope(theta=100.0, kind="yarn", factor=4.0, original_length=64))
    positions = np.array([[0, 3, 11], [1, 1, 40]], np.int32)
    x = np.random.default_rng(0).normal(size=(2, 3, 2, 8)).astype(np.float32)
    cos, sin = rotation(ropes, 8, jnp.asarray(positions))
    assert cos.shape == (2, 2, 3, 4)
    for number, rope in enumerate(ropes):
        rate, scale = by_loop(rope, 8), frequencies(rope, 8)[1][0]
        found = np.asarray(rotate(jnp.asarray(x), cos[number], sin[number]))
        for row in range(2):
            for place in range(3):
                for pair in range(4):
                    turn = scale * np.exp(1j * positions[row, place] * rate[pair])
                    z = (x[row, place, :, pair] + 1j * x[row, place, :, pair + 4]) * turn
                    np.testing.assert_allclose(found[row, place, :, pair], z.real, atol=1e-5)
                    np.testing.assert_allclose(found[row, place, :, pair + 4], z.imag, atol=1e-5)


@settings(max_examples=20, deadline=None)
@given(first=st.integers(0, 60), second=st.integers(0, 60), shift=st.integers(0, 1000))
def test_products_depend_on_distance_only(first: int, second: int, shift: int) -> None:
    random = np.random.default_rng(first * 61 + second)
    q, k = (jnp.asarray(random.normal(size=(1, 1, 1, 8)), jnp.float32) for _ in range(2))

    def product(a: int, b: int) -> float:
        turned = []
        for x, place in ((q, a), (k, b)):
            cos, sin = rotation((Rope(theta=1000.0),), 8, jnp.asarray([[place]]))
            turned.append(rotate(x, cos[0], sin[0]))
        return float((turned[0] * turned[1]).sum())

    assert product(first, second) == pytest.approx(product(first + shift, second + shift), abs=2e-3)


def test_the_dtype_is_kept() -> None:
    cos, sin = rotation((Rope(),), 8, jnp.zeros((1, 1), jnp.int32))
    x = jnp.ones((1, 1, 1, 8), jnp.bfloat16)
    assert rotate(x, cos[0], sin[0]).dtype == jnp.bfloat16
    assert (rotate(x, cos[0], sin[0]) == x).all()
