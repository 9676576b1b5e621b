"""The Pallas kernels of `fused_logprob` in interpret mode, against its reference, and where it may be called."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import optimised
from heavy import few
from jaxrl_kernels import fused_logprob

# V is no multiple of a tile of 128 tokens, nor M of a row block. D is none of 128 lanes in the first shape: the kernels
# then read the unembedding transposed.
M, V = 37, 300
SMALL = {"block_size": 128, "row_block": 32}  # three tiles, two row blocks; going back a scan of two blocks and a rest
STATIC = ("softcap", "block_size", "row_block", "implementation")


def drawn(seed: int, rows: int = M, width: int = 20, vocabulary: int = V) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    hidden, unembedding = random.normal(size=(rows, width)), random.normal(size=(vocabulary, width)) / width**0.5
    return (3 * hidden).astype(np.float32), unembedding.astype(np.float32), random.integers(0, vocabulary, rows)


@partial(jax.jit, static_argnames=STATIC)
def evaluate(hidden: Any, unembedding: Any, targets: Any, cotangents: Any, **settings: Any) -> tuple[Any, Any]:
    """(logp, entropy), and the gradients of their products with the cotangents f32[2, M]."""
    found, pull = jax.vjp(lambda *arrays: fused_logprob(*arrays, targets, **settings), hidden, unembedding)
    return found, pull((cotangents[0], cotangents[1]))


def assert_near(found: Any, wanted: Any, relative: float) -> None:
    """Largest error relative to the largest entry."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape
        assert np.abs(a - b).max() <= relative * max(np.abs(b).max(), 1e-3)


def floors(hidden: Any, unembedding: Any, temperature: Any, softcap: float) -> np.ndarray:
    """f32[M]: log-probabilities half-way between the 20th and the 21st token, away from rounding."""
    z = hidden.astype(np.float64) @ unembedding.astype(np.float64).T
    z = (softcap * np.tanh(z / softcap) if softcap else z) / np.broadcast_to(temperature, len(z))[:, None]
    logp = np.sort(z - np.logaddexp.reduce(z, axis=1, keepdims=True), axis=1)
    return ((logp[:, -20] + logp[:, -21]) / 2).astype(np.float32)


def cotangents(seed: int, rows: int = M) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(2, rows)).astype(np.float32)


@pytest.mark.parametrize("width", [20, 128])
@pytest.mark.parametrize("softcap", few([0.0, 4.0], [4.0]))
@pytest.mark.parametrize("truncated", [False, True])
def test_kernels_are_the_reference(width: int, softcap: float, truncated: bool) -> None:
    hidden, unembedding, targets = drawn(1, width=width)
    temperature = np.linspace(0.4, 2.0, M).astype(np.float32)
    floor = jnp.asarray(floors(hidden, unembedding, temperature, softcap)) if truncated else None
    call = partial(
        evaluate,
        hidden,
        unembedding,
        targets,
        cotangents(2),
        temperature=temperature,
        softcap=softcap,
        support_floor=floor,
    )
    wanted = call(implementation="reference")
    assert_near(call(implementation="pallas", **SMALL), wanted, 1e-5)
    assert_near(call(implementation="pallas"), wanted, 1e-5)


@optimised
@pytest.mark.parametrize(
    "rows, vocabulary, sizes",
    [(1, 3, {}), (1, V, SMALL), (5, 128, SMALL), (33, 129, SMALL), (64, 512, {"block_size": 256, "row_block": 32})],
)
def test_any_number_of_rows_and_tokens(rows: int, vocabulary: int, sizes: dict[str, int]) -> None:
    arrays = drawn(3, rows, 24, vocabulary)
    call = partial(evaluate, *arrays, cotangents(4, rows), temperature=0.7)
    assert_near(call(implementation="pallas", **sizes), call(implementation="reference"), 1e-5)


def test_gradients_are_finite_differences() -> None:
    hidden, unembedding, targets = drawn(5, rows=3, width=4, vocabulary=140)
    weights, floor = cotangents(6, 3), floors(*drawn(5, rows=3, width=4, vocabulary=140)[:2], 0.8, 4.0)
    settings = {"temperature": 0.8, "softcap": 4.0, "support_floor": jnp.asarray(floor)}
    slopes = evaluate(hidden, unembedding, targets, weights, **settings, implementation="pallas", **SMALL)[1]

    def value(hidden: np.ndarray, unembedding: np.ndarray) -> float:
        z = 4.0 * np.tanh(hidden @ unembedding.T / 4.0) / 0.8
        logp = z - np.logaddexp.reduce(z, axis=1, keepdims=True)
        kept = (logp >= floor[:, None]) | (np.arange(140) == targets[:, None])
        z = np.where(kept, z, -np.inf)
        logp = z - np.logaddexp.reduce(z, axis=1, keepdims=True)
        entropy = -np.sum(np.exp(logp) * np.where(kept, logp, 0), axis=1)
        return float(np.sum(weights * [logp[np.arange(3), targets], entropy]))

    exact = hidden.astype(np.float64), unembedding.astype(np.float64)
    for which, slope in enumerate(slopes):
        wanted = np.zeros(slope.shape)
        for index in np.ndindex(*slope.shape):
            ends = []
            for step in (1e-5, -1e-5):
                moved = [array.copy() for array in exact]
                moved[which][index] += step
                ends.append(value(*moved))
            wanted[index] = (ends[0] - ends[1]) / 2e-5
        assert_near(slope, wanted, 2e-5)


@pytest.mark.parametrize("implementation", ["pallas", "xla"])
@pytest.mark.parametrize("floor", [None, -3.0])
def test_extreme_logits(implementation: str, floor: float | None) -> None:
    # The likeliest two are in different tiles; all others lie 1e4 and 2e4 lower.
    unembedding = jnp.full((V, 1), -1e4).at[140].set(1e4).at[2].set(1e4 - 2).at[299].set(0.0)
    targets = jnp.array([140, 2, 299, 5, -1, V])
    support_floor = None if floor is None else jnp.full(6, floor)
    call = partial(evaluate, jnp.ones((6, 1)), unembedding, targets, support_floor=support_floor, **SMALL)
    (logp, entropy), slopes = call(np.ones((2, 6), np.float32), implementation=implementation)
    top = -np.log1p(np.exp(-2.0))  # the others have probability zero
    np.testing.assert_allclose(logp[:4], [top, top - 2, top - 1e4, top - 2e4], rtol=1e-6)
    np.testing.assert_array_equal(logp[4:], [-np.inf, -np.inf])
    np.testing.assert_allclose(entropy, np.full(6, -top + 2 * np.exp(top - 2)), rtol=1e-5)
    for slope in slopes:
        assert np.isfinite(slope).all()


@pytest.mark.heavy
def test_bfloat16_and_mixed_inputs_sum_in_float32() -> None:
    hidden, unembedding, targets = drawn(7)
    low = jnp.asarray(hidden, jnp.bfloat16), jnp.asarray(unembedding, jnp.bfloat16)
    rounded = [np.asarray(array, np.float32) for array in low]
    wanted, slopes = evaluate(*rounded, targets, cotangents(8), implementation="reference")
    for pair in (low, (rounded[0], low[1]), (low[0], rounded[1])):
        found, found_slopes = evaluate(*pair, targets, cotangents(8), implementation="pallas", **SMALL)
        assert_near(found, wanted, 1e-5)
        assert [slope.dtype for slope in found_slopes] == [array.dtype for array in pair]
        assert_near(found_slopes, slopes, 1e-2)


@pytest.mark.heavy
@pytest.mark.parametrize("implementation", ["pallas", "xla"])
def test_within_grad_of_scan_of_checkpoint_and_vmap(implementation: str) -> None:
    hidden, unembedding, targets = drawn(9, rows=12, width=8, vocabulary=200)
    floor = jnp.asarray(floors(hidden, unembedding, 1.0, 0.0))

    rows = jnp.reshape(targets, (3, 4)), floor.reshape(3, 4)

    def loss(how: str, unembedding: Any, hidden: Any, targets: Any, floor: Any) -> jax.Array:
        sizes = {} if how == "reference" else SMALL
        logp, entropy = fused_logprob(hidden, unembedding, targets, support_floor=floor, implementation=how, **sizes)
        return jnp.sum(jnp.sin(logp) + 0.3 * entropy)

    def scanned(hidden: Any, unembedding: Any) -> jax.Array:
        of_part = jax.checkpoint(partial(loss, implementation, unembedding))
        parts = hidden.reshape(3, 4, -1), *rows
        return jax.lax.scan(lambda total, part: (total + of_part(*part), None), 0.0, parts)[0]

    def mapped(hidden: Any, unembedding: Any) -> jax.Array:
        return jnp.sum(jax.vmap(partial(loss, implementation, unembedding))(hidden.reshape(3, 4, -1), *rows))

    def whole(hidden: Any, unembedding: Any) -> jax.Array:
        return loss("reference", unembedding, hidden, targets, floor)

    wanted, found, again = (
        jax.jit(jax.value_and_grad(way, argnums=(0, 1)))(hidden, unembedding) for way in (whole, scanned, mapped)
    )
    assert_near(found, wanted, 1e-5)
    assert_near(again, wanted, 1e-5)
