"""Weights of prompts, and subgroups with targets."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.credit.adora import adora, length_gain
from jaxrl_llm.algorithms.guidance.ampo_multi_guidance import solved_without
from jaxrl_llm.algorithms.rewards.dgrpo_vital import easiness_weight
from jaxrl_llm.algorithms.rewards.hbpo import subgroup_advantage
from jaxrl_llm.core.buckets import joint_key
from jaxrl_llm.utils.errors import InputError

GROUP = jnp.array([0, 0, 1, 1, 2, 2])


def test_easy_groups_weigh_less() -> None:
    reward = jnp.array([0.0, 1.0, 1.0, jnp.nan, 2.0, 4.0])
    assert easiness_weight(reward, GROUP).tolist() == [1, 1, 1, 1, 0.5, 0.5]
    np.testing.assert_allclose(easiness_weight(reward, GROUP, start=0.0, end=1.0, least=0.2)[:2], 0.6, atol=1e-6)


@pytest.mark.parametrize(("edges", "expected"), [("strict", [False, True, True]), ("lenient", [True, False, True])])
def test_edges_of_the_length_gain(edges: str, expected: list[bool]) -> None:
    """A group without a correct sample, one without a wrong one, and one with both."""
    correct = jnp.array([False, False, True, True, True, False])
    wrong = jnp.array([True, True, False, False, False, True])
    lengths = jnp.array([5.0, 7, 3, 4, 9, 2])
    assert length_gain(correct, wrong, lengths, GROUP, edges=edges).tolist() == [x for x in expected for _ in range(2)]


def test_unknown_choices_are_refused() -> None:
    with pytest.raises(InputError, match="edges"):
        adora(edges="sharp")
    with pytest.raises(InputError, match="rule"):
        adora(rule="xor")


def test_a_group_is_solved_by_those_that_were_not_helped() -> None:
    helped = jnp.array([True, False, False, True, False, False])
    reward = jnp.array([1.0, 0.0, 1.0, 0.0, jnp.nan, 0.0])
    assert solved_without(reward, helped, GROUP).tolist() == [False, False, True, True, False, False]


def test_joint_keys_tell_pairs_apart() -> None:
    key = joint_key(GROUP, jnp.array([0.5, 0.5, 0.5, 2.0, 2.0, 2.0]))
    assert len(set(key.tolist())) == 4
    assert key[0] == key[1]
    assert key[4] == key[5]
    assert key[2] != key[3]


def test_a_subgroup_shares_its_first_term() -> None:
    reward, target = jnp.array([1.0, 3.0, 2.0, 2.0, 7.0, jnp.nan]), jnp.full(6, 2.5)
    A = subgroup_advantage(reward, target, GROUP, jnp.array([0, 0, 0, 1, 0, 0]))
    np.testing.assert_allclose(A, [-0.5 - 0.5**0.5, -0.5 + 0.5**0.5, -0.5, -0.5, 0, 0], atol=1e-5)


def test_joint_keys_of_many_rows() -> None:
    """In base 65,536 the index of the first of three keys would be a multiple of 2^32, and so be lost."""
    first, zeros = jnp.zeros(2**16, jnp.int32).at[1].set(1), jnp.zeros(2**16, jnp.int32)
    key = joint_key(first, zeros, zeros)
    assert key[0] != key[1]
    assert key[0] == key[2]
