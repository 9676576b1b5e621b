"""Set-level credit in closed form against an enumeration of all sets."""

from __future__ import annotations

from itertools import combinations
from math import comb

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.advantages.sets import (
    best_of_sets,
    best_of_sets_advantage,
    diverse_sets,
    diverse_sets_advantage,
    sets_within,
)  # fmt: skip
from jaxrl_llm.utils.errors import InputError

COMPILED = jax.jit(best_of_sets_advantage, static_argnames=("k", "scale"))


def test_shares_of_sets_are_exact_where_binomials_are_large() -> None:
    part, size = np.array([0, 3, 4, 60, 150, 199]), np.array([1, 4, 4, 0, 20, 30])
    expected = [comb(p, k) / comb(200, k) for p, k in zip(part.tolist(), size.tolist(), strict=True)]
    found = sets_within(jnp.asarray(part, jnp.float32), 200.0, jnp.asarray(size, jnp.float32), 30)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert sets_within(jnp.float32(-1), 5.0, jnp.float32(2), 4) == 0


def test_members_of_the_best_of_four_worked_example() -> None:
    """The example's numbers are k / n times the mean over the sets that contain a member."""
    member, deviation = best_of_sets(jnp.array([1.0, 1, 0, 0, 0, 0, 0, 0]), jnp.zeros(8, jnp.int32), 4)
    np.testing.assert_allclose(member * 4 / 8, [0.5] * 2 + [0.357143] * 6, atol=1e-6)
    np.testing.assert_allclose(deviation, 0.410326, atol=1e-6)


def test_unscored_samples_and_ties() -> None:
    values = np.array([0.5, np.nan, 0.5, 0.2, 0.9, 0.2])
    known = [0, 2, 3, 4, 5]
    member, deviation = best_of_sets(jnp.asarray(values, jnp.float32), jnp.zeros(6, jnp.int32), 3)
    best = {s: values[list(s)].max() for s in combinations(known, 3)}
    for i in known:
        assert member[i] == pytest.approx(np.mean([x for s, x in best.items() if i in s]), abs=1e-6)
    np.testing.assert_allclose(deviation, np.std(list(best.values())), atol=1e-6)
    assert member[1] == 0


@pytest.mark.heavy
def test_nothing_to_compare_with_has_no_credit() -> None:
    one, equal, keys = jnp.array([0.3]), jnp.full(5, 1 / 3), jnp.zeros(5, jnp.int32)
    for scale in ("std", "none", "unbiased"):
        found = COMPILED(jnp.append(equal, one), jnp.append(keys, 7), 4, scale)
        assert (found == 0).all()
    assert (diverse_sets_advantage(one, keys[:1], keys[:1], 4) == 0).all()
    np.testing.assert_allclose(diverse_sets_advantage(equal, keys, keys, 2), 0, atol=1e-7)
    with pytest.raises(InputError, match="k is"):
        best_of_sets_advantage(equal, keys, 0)


def test_diverse_sets_of_pairs_by_hand() -> None:
    """Rewards 1, 1, 0 of answers a, a, b: the pairs have rewards 1 * 1/2, 1/2 * 1 and 1/2 * 1."""
    rewards, answers, keys = jnp.array([1.0, 1, 0]), jnp.array([4, 4, 7]), jnp.zeros(3, jnp.int32)
    np.testing.assert_allclose(diverse_sets(rewards, answers, keys, 2), [0.5, 0.5, 0.5], atol=1e-6)
    np.testing.assert_allclose(diverse_sets(rewards, answers, keys, 2, "zero_based"), [0.25, 0.25, 0.5], atol=1e-6)
    np.testing.assert_allclose(diverse_sets(rewards, answers, keys, 1), rewards, atol=1e-6)
