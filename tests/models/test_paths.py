"""Runs and chunks of packed rows against the tries that they were made of, followed token by token."""

from __future__ import annotations

import itertools
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from jaxrl_llm.learner.packing import pack_rows
from jaxrl_llm.learner.prefix_trie import TokenRows
from jaxrl_llm.models.layers.delta import CHUNK
from jaxrl_llm.models.packing import convolve_paths, paths_of, runs_of


def rows_of(seed: int, members: int, groups: int, length: int) -> TokenRows:
    """Rows of groups that share prompts, and of which some go on alike for a while."""
    random = np.random.default_rng(seed)
    tokens, real, action, group = (np.zeros((groups * members, length), np.int32) for _ in range(4))
    for g in range(groups):
        texts = [random.integers(1, 50, length)]
        for _ in range(members - 1):
            text = texts[random.integers(len(texts))].copy()
            text[random.integers(4, length) :] = random.integers(50, 99)
            texts.append(text)
        for m, text in enumerate(texts):
            n = random.integers(6, length + 1)
            row = g * members + m
            tokens[row, :n], real[row, :n], action[row, 4:n], group[row] = text[:n], 1, 1, g
    return TokenRows(**dict(zip(TokenRows._fields, [None] * len(TokenRows._fields), strict=True)))._replace(
        tokens=tokens, token_mask=real > 0, action_mask=action > 0, group=group[:, 0]
    )


def parent_of(enter: np.ndarray, leave: np.ndarray, token: int) -> int:
    """The place of the token that one continues: of those whose interval holds its own, the latest; -1: none."""
    above = np.flatnonzero((enter > 0) & (enter < enter[token]) & (leave >= leave[token]))
    return int(above[np.argmax(enter[above])]) if len(above) else -1


@pytest.mark.heavy  # each example compiles
@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**20), st.integers(2, 5), st.integers(1, 3), st.sampled_from([20, 60]))
def test_tokens_follow_each_other_as_in_the_tries(seed: int, members: int, groups: int, length: int) -> None:
    rows = rows_of(seed, members, groups, length)
    packing = jax.tree.map(lambda x: x[0], pack_rows(rows, [np.arange(members * groups)], runs=True))
    enter, leave = (
        np.concatenate([getattr(level, name).reshape(-1) for level in packing.levels]) for name in ("enter", "leave")
    )
    runs = packing.runs * sum(len(level.source) for level in packing.levels)
    paths = jax.tree.map(lambda x: np.asarray(x)[0], paths_of(jnp.asarray(enter[None]), jnp.asarray(leave[None]), runs))
    tokens = np.flatnonzero(enter)
    parents = {int(token): parent_of(enter, leave, token) for token in tokens}
    for chunk in range(len(enter) // CHUNK):
        own = [token for token in tokens if token // CHUNK == chunk]
        for before, token in itertools.pairwise(own):
            assert parents[token] == before
        if own:  # it begins with the state after its first token's parent, the last token of a chunk
            parent = parents[own[0]]
            assert paths.entry[chunk] == parent // CHUNK
            assert not [token for token in tokens if token > parent and token // CHUNK == parent // CHUNK]
    assert {int(token): int(paths.before[token]) for token in tokens} == parents
    # A convolution along each path, token by token.
    random = np.random.default_rng(seed)
    x, weight = random.normal(size=(1, len(enter), 3)).astype(np.float32), random.normal(size=(4, 3)).astype(np.float32)

    def convolved(x: Any) -> jax.Array:
        return convolve_paths(x, jnp.asarray(weight), jax.tree.map(lambda y: jnp.asarray(y)[None], paths))[0, tokens]

    out, pull = jax.vjp(convolved, jnp.asarray(x))
    d_out = random.normal(size=out.shape).astype(np.float32)
    expected, d_x = np.zeros((len(enter), 3)), np.zeros_like(x)
    for d, token in zip(d_out, tokens, strict=True):
        at = token
        for tap in weight[::-1]:
            if at >= 0:
                expected[token] += tap * x[0, at]
                d_x[0, at] += tap * d
                at = parents[at]
    np.testing.assert_allclose(out, expected[tokens], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(pull(jnp.asarray(d_out))[0], d_x, rtol=1e-5, atol=1e-5)


def test_runs_by_hand() -> None:
    """A path of three, of which the second branches: the third begins a run, as does the other branch; padding none."""
    enter, leave = np.array([[1, 2, 3, 4, 0, 0]]), np.array([[5, 5, 4, 5, 0, 0]])
    for array in (np, jnp):
        found = np.asarray(runs_of(array.asarray(enter), array.asarray(leave), array))
        assert found.tolist() == [[True, False, True, True, False, False]]
