"""Runs and chunks of packed rows against the tries that they were made of, followed token by token."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from jaxrl_llm.learner.packing import pack
from jaxrl_llm.learner.prefix_trie import TokenRows
from jaxrl_llm.models.layers.paths import CHUNK, Paths, in_chunks, out_of_chunks, paths_of, runs_of
from jaxrl_llm.models.packing import PackedRows


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


def parent_of(enter: int, leave: int, rows: list[tuple[np.ndarray, np.ndarray]]) -> tuple[int, int] | None:
    """Level and place of the token that one continues: of those whose interval holds its own, the latest."""
    best: tuple[int, int, int] | None = None
    for level, (enters, leaves) in enumerate(rows):
        for place in np.flatnonzero((enters > 0) & (enters < enter) & (leaves >= leave)):
            if best is None or enters[place] > best[0]:
                best = int(enters[place]), level, int(place)
    return None if best is None else best[1:]


@pytest.mark.heavy  # each example compiles
@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**20), st.integers(2, 5), st.integers(1, 3), st.sampled_from([20, 60]))
def test_tokens_follow_each_other_as_in_the_tries(seed: int, members: int, groups: int, length: int) -> None:
    rows = rows_of(seed, members, groups, length)
    packing = jax.tree.map(lambda x: x[0], pack(rows, [np.arange(members * groups)], runs=True))
    prefixes, suffixes = packing.prefixes, packing.suffixes
    first = paths_of(jax.tree.map(jnp.asarray, prefixes), packing.runs)
    check(first, prefixes, None, None)
    if suffixes is None:
        return
    of_parents = lambda x: jnp.asarray(x)[packing.parent]  # noqa: E731
    parents, known = jax.tree.map(of_parents, prefixes), jax.tree.map(of_parents, first)
    check(paths_of(jax.tree.map(jnp.asarray, suffixes), packing.runs, parents, known), suffixes, parents, known)


def check(paths: Paths, rows: PackedRows, parents: Any, known: Any) -> None:
    R, W = rows.enter.shape
    found = jax.tree.map(np.asarray, paths)
    n = found.entry.shape[1]
    values = np.arange(R * W, dtype=np.float32).reshape(R, W) + 1
    back = np.asarray(out_of_chunks(in_chunks(jnp.asarray(values), paths), paths))
    for r in range(R):
        levels = [(rows.enter[r], rows.leave[r])]
        levels += [] if parents is None else [(np.asarray(parents.enter[r]), np.asarray(parents.leave[r]))]
        for w in np.flatnonzero(rows.enter[r]):
            assert back[r, w] == values[r, w]
            parent = parent_of(rows.enter[r, w], rows.leave[r, w], levels)
            expected = -1 if parent is None else parent[1] + W * parent[0]
            assert found.before[r, w] == expected
            chunk, lane = divmod(int(found.of_token[r, w]), CHUNK)
            assert found.chunk[r, chunk, lane] == w
            if lane:
                assert parent == (0, found.chunk[r, chunk, lane - 1])
                continue
            entry = int(found.entry[r, chunk])
            if parent is None:
                assert entry == -1
            elif parent[0] == 0:
                assert entry == found.of_token[r, parent[1]] // CHUNK
                assert last_of(found.chunk[r, entry], W) == parent[1]
            else:
                entry = int(found.starts[r, entry - n])
                assert last_of(np.asarray(known.chunk[r, entry]), parents.enter.shape[1]) == parent[1]


def last_of(chunk: np.ndarray, width: int) -> int:
    """The last token of a chunk, whose state is the one after it."""
    return int(chunk[chunk < width][-1])


def test_runs_by_hand() -> None:
    """A path of three, of which the second branches: the third begins a run, as does the other branch; padding none."""
    enter, leave = np.array([[1, 2, 3, 4, 0, 0]]), np.array([[5, 5, 4, 5, 0, 0]])
    for array in (np, jnp):
        found = np.asarray(runs_of(array.asarray(enter), array.asarray(leave), array))
        assert found.tolist() == [[True, False, True, True, False, False]]
