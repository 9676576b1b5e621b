"""The gated delta rule in chunks against a loop over its tokens: outputs, states and gradients, in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxrl_kernels.delta_rule import DeltaInputs, delta_rule
from jaxrl_kernels.delta_rule.chunk import inverse_of_one_plus, solved, solved_by_substitution

from jaxrl_llm.models.layers.delta import in_rows, one_step

N, L, H, K, V = 2, 11, 4, 4, 5
KEYS = 2  # heads of keys


@pytest.fixture(autouse=True)
def _wide() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def drawn(seed: int, rows: int, tokens: int) -> DeltaInputs:
    random = np.random.default_rng(seed)
    k = random.normal(size=(rows, tokens, KEYS, K))
    each = (
        random.normal(size=(rows, tokens, KEYS, K)), k / np.linalg.norm(k, axis=-1, keepdims=True),
        random.normal(size=(rows, tokens, H, V)), -random.gamma(1, 0.3, (rows, tokens, H)),
        random.random((rows, tokens, H)),
    )  # fmt: skip
    return DeltaInputs(*map(jnp.asarray, each))


def state_of(seed: int, *lead: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(*lead, H, K, V)))


def loop(x: DeltaInputs, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    out = []
    for t in range(x.g.shape[1]):
        one, state = one_step(jax.tree.map(lambda y, t=t: y[:, t], x), state)
        out.append(one)
    return jnp.stack(out, axis=1), state


def gradients(function: Callable[..., Any], x: DeltaInputs, state: jax.Array) -> Any:
    """Of a random sum of outputs and states."""

    def total(x: DeltaInputs, state: jax.Array) -> jax.Array:
        found = jax.tree.leaves(function(x, state))
        return sum(
            (jnp.vdot(jnp.asarray(np.random.default_rng(i).normal(size=y.shape)), y) for i, y in enumerate(found)),
            start=jnp.float64(0),
        )

    return jax.grad(total, argnums=(0, 1))(x, state)


def agree(found: Any, expected: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12), found, expected)


def test_one_step_by_hand() -> None:
    """One head, keys and values of one number: S = 2, a = 1/2, b = 1/4, k = 1, v = 3 make 1 + (3 - 1) / 4."""

    def one(value: float) -> jax.Array:
        return jnp.full((1, 1, 1), value)

    rate = DeltaInputs(one(2.0), one(1.0), one(3.0), jnp.log(jnp.full((1, 1), 0.5)), jnp.full((1, 1), 0.25))
    out, state = one_step(rate, jnp.full((1, 1, 1, 1), 2.0))
    assert state.item() == pytest.approx(1.5)
    assert out.item() == pytest.approx(3.0)


@pytest.mark.heavy
@pytest.mark.parametrize("size", [1, 3, 4, 16])
def test_chunks_of_any_size_are_the_loop(size: int) -> None:
    x, state = drawn(0, N, L), state_of(1, N)
    agree(in_rows(x, size, state), loop(x, state))
    agree(in_rows(x, size), loop(x, jnp.zeros_like(state)))
    if size == 4:
        agree(gradients(lambda x, s: in_rows(x, size, s), x, state), gradients(loop, x, state))


@pytest.mark.parametrize("size", [1, 2, 5, 16])
def test_inverse_of_lower_triangles(size: int) -> None:
    """Also where all keys are the same, whose powers grow."""
    random = np.random.default_rng(size)
    for a in (random.normal(size=(3, size, size)), np.ones((1, size, size))):
        lower = np.tril(a, -1)
        found = np.asarray(inverse_of_one_plus(jnp.asarray(lower)))
        np.testing.assert_allclose(found @ (np.eye(size) + lower), np.broadcast_to(np.eye(size), a.shape), atol=1e-9)
        right = jnp.asarray(random.normal(size=(*a.shape[:2], 3)))
        both = [jax.vjp(solve, jnp.asarray(lower), right) for solve in (solved, solved_by_substitution)]
        (x, pull), (expected, other) = both
        agree(x, expected)
        agree([jnp.tril(pull(x)[0], -1), pull(x)[1]], [jnp.tril(other(x)[0], -1), other(x)[1]])


def test_segments_begin_with_nothing() -> None:
    """Several in a row, longer and shorter than a chunk, with padding between them."""
    segments = np.array([[1, 1, 1, 0, 2, 2, 2, 2, 3, 0, 0], [0, 0, 4, 4, 4, 4, 4, 5, 5, 5, 5]])
    real = jnp.asarray(segments > 0)[..., None]
    x = drawn(2, N, L)
    x = x._replace(g=jnp.where(real, x.g, 0), beta=jnp.where(real, x.beta, 0))
    out, _ = in_rows(x, 4, None, jnp.asarray(segments))
    for row in range(N):
        for segment in set(segments[row]) - {0}:
            at = np.flatnonzero(segments[row] == segment)
            own = jax.tree.map(lambda y, row=row, at=at: y[row : row + 1, at], x)
            np.testing.assert_allclose(out[row, at], loop(own, jnp.zeros((1, H, K, V)))[0][0], atol=1e-12)


@pytest.mark.heavy
def test_paths_that_branch() -> None:
    """Chunks 1 and 2 continue chunk 0, which continues a given state, and chunk 3 continues chunk 1."""
    x, state, entry = drawn(3, 1, 12), state_of(4, 1), jnp.asarray([[4, 0, 0, 1]])

    def in_chunks(x: DeltaInputs, state: jax.Array) -> Any:
        cut = jax.tree.map(lambda y: y.reshape(1, 4, 3, *y.shape[2:]), x)
        return delta_rule(cut, entry, state[:, None], branches=2)

    def by_loop(x: DeltaInputs, state: jax.Array) -> Any:
        after, out = {-1: state}, []
        for chunk, before in enumerate([-1, 0, 0, 1]):
            own = jax.tree.map(lambda y, c=chunk: y[:, 3 * c : 3 * c + 3], x)
            found, after[chunk] = loop(own, after[before])
            out.append(found)
        return jnp.stack(out, axis=1), after[3]

    agree(in_chunks(x, state), by_loop(x, state))
    agree(gradients(in_chunks, x, state), gradients(by_loop, x, state))


def test_memory_is_linear_in_tokens() -> None:
    """Of the gradient: twice the tokens take twice the memory, but for what does not depend on them."""

    def bytes_of(tokens: int) -> int:
        shapes = jax.eval_shape(lambda: drawn(0, 1, tokens))
        program = jax.jit(jax.grad(lambda x: jnp.sum(in_rows(x, 16)[0]))).lower(shapes).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert bytes_of(1024) < 2.2 * bytes_of(512)
