"""Top-k, top-p and min-p against a sort of each row in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.sampling.filters import Filters, kept_tokens, support_floor

V = 12
find = jax.jit(kept_tokens)


def kept_of(logits: Any, **filters: Any) -> np.ndarray:
    typed = Filters(
        jnp.int32(filters.get("top_k", 0)),
        jnp.float32(filters.get("top_p", 1.0)),
        jnp.float32(filters.get("min_p", 0.0)),
    )
    return np.asarray(find(jnp.asarray(logits, jnp.float32), typed))


def tokens_kept(logits: Any, **filters: Any) -> list[int]:
    return np.flatnonzero(kept_of([logits], **filters)[0]).tolist()


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max())
    return e / e.sum()


def by_sort(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> tuple[np.ndarray, bool]:
    """bool[V], and whether a limit is so near that float32 may decide otherwise. Equal logits stay together."""
    z = logits.astype(np.float64)
    kept, close = np.ones(len(z), bool), False
    if 0 < top_k < len(z):
        kept &= z >= np.sort(z)[-top_k]
    if top_p < 1:
        p = softmax(np.where(kept, z, -np.inf))
        levels = np.unique(z[kept])[::-1]
        masses = np.asarray([p[z >= level].sum() for level in levels])
        close |= bool((np.abs(masses - top_p) < 1e-5).any())
        kept &= z >= levels[min(np.searchsorted(masses, top_p), len(levels) - 1)]
    if min_p > 0:
        limit = z.max() + np.log(min_p)
        close |= bool((np.abs(z - limit) < 1e-5).any() and min_p < 1)
        kept &= z >= limit
    return kept, close


@settings(max_examples=300, deadline=None)
@given(
    logits=st.lists(
        # XLA takes numbers below the least normal one for zero.
        st.one_of(st.floats(-20, 20, width=32, allow_subnormal=False), st.sampled_from([-1.0, 0.0, -0.0, 1.5])),
        min_size=V,
        max_size=V,
    ),
    top_k=st.integers(0, V + 3),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.99)),
    min_p=st.one_of(st.just(0.0), st.just(1.0), st.floats(0.001, 0.9)),
)
def test_against_a_sort(logits: list[float], top_k: int, top_p: float, min_p: float) -> None:
    row = np.asarray(logits, np.float32)
    expected, close = by_sort(row, top_k, top_p, min_p)
    found = kept_of([row], top_k=top_k, top_p=top_p, min_p=min_p)[0]
    assert found[row == row.max()].all()
    if not close:
        assert found.tolist() == expected.tolist()


def test_by_hand() -> None:
    logits = np.log([0.4, 0.1, 0.3, 0.2])
    assert tokens_kept(logits, top_k=2) == [0, 2]
    assert tokens_kept(logits, top_p=0.65) == [0, 2]
    assert tokens_kept(logits, top_p=0.75) == [0, 2, 3]
    assert tokens_kept(logits, top_p=0.01) == [0]
    assert tokens_kept(logits, min_p=0.45) == [0, 2, 3]
    assert tokens_kept(logits, min_p=0.55) == [0, 2]


def test_each_filter_sees_what_the_one_before_kept() -> None:
    """Of the best two, 0.4 and 0.3, the first has 0.57 of the mass: 0.5 stops there; of all four it would not."""
    logits = np.log([0.4, 0.1, 0.3, 0.2])
    assert tokens_kept(logits, top_p=0.5) == [0, 2]
    assert tokens_kept(logits, top_k=2, top_p=0.5) == [0]
    assert tokens_kept(logits, top_k=3, min_p=0.6) == [0, 2]


def test_equal_logits_stay_together() -> None:
    assert tokens_kept([1.0, 3.0, 2.0, 2.0, 2.0], top_k=2) == [1, 2, 3, 4]
    assert tokens_kept([0.0] * 4, top_p=0.1) == [0, 1, 2, 3]
    assert tokens_kept([0.0] * 4, top_k=1) == [0, 1, 2, 3]
    assert tokens_kept([0.0, -0.0, -1.0], top_k=1) == [0, 1]
    assert tokens_kept([-0.0, 0.0, -1.0], top_p=0.01) == [0, 1]


def test_nothing_to_filter() -> None:
    logits = np.random.default_rng(0).normal(size=(3, 1000)) * 20
    assert kept_of(logits).all()
    assert kept_of(logits, top_k=1000).all()
    assert kept_of(logits, top_k=5000, top_p=1.0).all()
    assert kept_of(logits, top_p=np.float32(1.0)).all()


def test_min_p_of_one_is_greedy() -> None:
    assert tokens_kept([1.0, 5.0, 4.999, 5.0], min_p=1.0) == [1, 3]


def test_extreme_floats() -> None:
    big = float(np.finfo(np.float32).max)
    tiny = float(np.finfo(np.float32).tiny)
    assert tokens_kept([-big, big, 0.0, -np.inf], top_k=2) == [1, 2]
    assert tokens_kept([-big, -big / 2, -np.inf], top_k=1) == [1]
    assert tokens_kept([-np.inf, 2.0, -np.inf], top_p=0.5) == [1]
    assert tokens_kept([1e30, 0.0, -1e30], top_p=0.999) == [0]
    assert tokens_kept([tiny, -tiny, 0.0, -1.0], top_k=1) == [0]
    floor = support_floor(jnp.asarray([[big, 0.9 * big, 0.8 * big]]), jnp.asarray([[True, True, False]]))
    assert float(floor[0]) == pytest.approx(-0.15 * big)


def test_rows_are_independent() -> None:
    logits = np.random.default_rng(1).normal(size=(5, V)) * 3
    together = kept_of(logits, top_k=6, top_p=0.8, min_p=0.05)
    for row, kept in zip(logits, together, strict=True):
        np.testing.assert_array_equal(kept_of([row], top_k=6, top_p=0.8, min_p=0.05)[0], kept)
    order = np.random.default_rng(2).permutation(V)
    np.testing.assert_array_equal(kept_of(logits[:, order], top_k=6, top_p=0.8, min_p=0.05), together[:, order])


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}])
def test_the_floor_parts_kept_from_dropped(filters: dict[str, Any]) -> None:
    logits = (np.random.default_rng(3).normal(size=(50, V)) * 2).astype(np.float32)
    kept = kept_of(logits, **filters)
    floor = np.asarray(support_floor(jnp.asarray(logits), jnp.asarray(kept)), np.float64)
    for row, mask, least in zip(logits.astype(np.float64), kept, floor, strict=True):
        logp = row - row.max() - np.log(np.exp(row - row.max()).sum())
        assert not mask.all()
        # Midway, so that a recomputation may err by just under half of the gap.
        gap = logp[mask].min() - logp[~mask].max()
        assert least == pytest.approx(logp[mask].min() - gap / 2, abs=1e-5)
        np.testing.assert_array_equal(logp >= least, mask)


def test_no_floor_where_all_is_kept() -> None:
    logits = jnp.asarray([[1.0, 2.0], [3.0, 0.0]])
    floor = support_floor(logits, jnp.asarray([[True, True], [True, False]]))
    assert floor[0] == -jnp.inf
    assert floor[1] == pytest.approx(1.5 - np.log(np.exp(3) + 1), abs=1e-6)
