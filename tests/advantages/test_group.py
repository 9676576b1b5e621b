"""Group-relative advantages against a numpy loop, and their invariances."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.advantages import drop_uniform_groups, group_relative, on_actions
from jaxrl_llm.advantages.functional import group_advantage, uniform_groups
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.core.transform import chain
from jaxrl_llm.utils.errors import InputError

N = 9
EIGHTHS = st.integers(-40, 40).map(lambda i: i / 8)  # exact in float32, and never nearly equal
REWARDS = st.lists(st.one_of(EIGHTHS, st.just(float("nan"))), min_size=N, max_size=N)
GROUPS = st.lists(st.integers(0, 3), min_size=N, max_size=N)
few = settings(max_examples=50, deadline=None, derandomize=True)
compiled = jax.jit(group_advantage, static_argnames=("scale", "ddof", "epsilon"))


def by_loop(reward: Any, group: Any, scale: str = "std", ddof: int = 1, epsilon: float = 1e-6) -> np.ndarray:
    reward, group, out = np.asarray(reward, np.float64), np.asarray(group), np.zeros(len(reward))
    for name in set(group.tolist()):
        members = [i for i in range(len(reward)) if group[i] == name and not np.isnan(reward[i])]
        if len(members) < 2 or len({reward[i] for i in members}) == 1:
            continue
        mean = sum(reward[i] for i in members) / len(members)
        std = (sum((reward[i] - mean) ** 2 for i in members) / (len(members) - ddof)) ** 0.5
        for i in members:
            out[i] = (reward[i] - mean) / (std + epsilon if scale == "std" else 1.0)
    return out


def advantage(reward: Any, group: Any, **options: Any) -> np.ndarray:
    return np.asarray(compiled(jnp.asarray(reward, jnp.float32), jnp.asarray(group, jnp.int32), **options))


def batch_of(reward: Any, group: Any, mask: Any, **fields: Any) -> Trajectories:
    mask = jnp.asarray(mask, bool)
    zeros = jnp.zeros(mask.shape, jnp.int32)
    row = jnp.zeros(mask.shape[0], jnp.int32)
    reward = None if reward is None else jnp.asarray(reward, jnp.float32)
    return Trajectories(
        zeros, mask, mask, jnp.zeros(mask.shape), zeros, zeros, jnp.asarray(group, jnp.int32), row,
        jnp.zeros(mask.shape[0], bool), reward=reward, **fields,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({}, 0.866024),
        ({"epsilon": 1e-4}, 0.865875),
        ({"ddof": 0}, 0.999998),
        ({"scale": "none"}, 0.5),
    ],
)
def test_four_samples_by_hand(options: dict[str, Any], size: float) -> None:
    np.testing.assert_allclose(
        advantage([1, 0, 0, 1], [0] * 4, **options), [size, -size, -size, size], rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("scale", ["std", "none"])
@few
@given(reward=REWARDS, group=GROUPS)
def test_it_is_the_loop(ddof: int, scale: str, reward: list[float], group: list[int]) -> None:
    expected = by_loop(reward, group, scale, ddof)
    np.testing.assert_allclose(advantage(reward, group, scale=scale, ddof=ddof), expected, rtol=1e-5, atol=2e-6)


@few
@given(reward=REWARDS, group=GROUPS, order=st.permutations(range(N)))
def test_the_order_of_samples_does_not_matter(reward: list[float], group: list[int], order: list[int]) -> None:
    moved = advantage(np.array(reward)[order], np.array(group)[order])
    np.testing.assert_allclose(moved, advantage(reward, group)[order], rtol=1e-5, atol=1e-6)


@few
@given(
    reward=REWARDS, group=GROUPS, names=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=4, max_size=4, unique=True)
)
def test_the_names_of_groups_do_not_matter(reward: list[float], group: list[int], names: list[int]) -> None:
    renamed = advantage(reward, [names[g] for g in group])
    np.testing.assert_allclose(renamed, advantage(reward, group), rtol=1e-5, atol=1e-6)


@few
@given(reward=REWARDS, group=GROUPS, constant=st.integers(-64, 64))
def test_a_constant_does_not_matter(reward: list[float], group: list[int], constant: int) -> None:
    moved = advantage(np.array(reward) + constant, group)
    np.testing.assert_allclose(moved, advantage(reward, group), rtol=1e-4, atol=1e-4)


@few
@given(reward=REWARDS, group=GROUPS, factor=st.sampled_from([0.01, 0.5, 3.0, 1000.0]))
def test_the_unit_of_the_reward_does_not_matter(reward: list[float], group: list[int], factor: float) -> None:
    scaled = advantage(np.array(reward) * factor, group, epsilon=1e-12)
    np.testing.assert_allclose(scaled, advantage(reward, group, epsilon=1e-12), rtol=1e-4, atol=1e-4)
    plain = advantage(np.array(reward) * factor, group, scale="none")
    np.testing.assert_allclose(
        plain, factor * advantage(reward, group, scale="none"), rtol=1e-4, atol=1e-5 * max(factor, 1)
    )


@few
@given(reward=REWARDS, group=GROUPS)
def test_a_group_sums_to_zero_and_does_not_depend_on_others(reward: list[float], group: list[int]) -> None:
    found = advantage(reward, group)
    for name in set(group):
        mine = np.array(group) == name
        assert abs(found[mine].sum()) < 1e-4
        others_changed = np.where(mine, reward, 77.0)
        np.testing.assert_allclose(advantage(others_changed, group)[mine], found[mine], rtol=1e-5, atol=1e-6)


@few
@given(reward=REWARDS, group=GROUPS)
def test_a_sample_that_was_not_scored_is_as_if_it_were_not_there(reward: list[float], group: list[int]) -> None:
    scored = ~np.isnan(reward)
    found = advantage(reward, group)
    assert (found[~scored] == 0).all()
    # In a group of its own a sample affects the others no more than one of another batch.
    apart = np.where(scored, group, 100 + np.arange(N))
    np.testing.assert_allclose(advantage(np.where(scored, reward, 7.0), apart), found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", ["std", "none"])
@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("epsilon", [1e-6, 0.0])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -1e-20, 123456.7, 1e9 / 7, 3e38])
def test_equal_rewards_teach_nothing(scale: str, ddof: int, epsilon: float, value: float) -> None:
    for size in (1, 3, 64):
        assert (advantage(np.full(size, value), np.zeros(size), scale=scale, ddof=ddof, epsilon=epsilon) == 0).all()


def test_rewards_that_differ_by_rounding_teach_nothing() -> None:
    nearly = np.float32(0.3) + np.array([0, 2**-25, 0, 2**-25], np.float32)
    assert len(set(nearly.tolist())) == 2
    assert (advantage(nearly, np.zeros(4), epsilon=0.0) == 0).all()


def test_all_scores_missing_gives_zero() -> None:
    assert advantage([np.nan] * 3, [0, 0, 1]).tolist() == [0, 0, 0]


def test_group_relative_writes_the_advantage_on_actions_alone() -> None:
    mask = [[0, 1, 1], [1, 0, 0], [0, 0, 0]]
    transform = group_relative("none")
    state, batch = transform.apply(transform.init(), batch_of([1, 0, 2], [4, 4, 4], mask))
    assert state == ()
    assert batch.advantages.tolist() == [[0, 0.5, 0.5], [-0.5, 0, 0], [0, 0, 0]]
    _, batch = transform.apply((), batch_of([1, 0, 5], [4, 4, 4], mask))
    assert batch.advantages.tolist() == [[0, 0.5, 0.5], [-0.5, 0, 0], [0, 0, 0]], "a row without actions has no score"


def test_group_relative_passes_its_options_on_and_compiles() -> None:
    reward, group = [1.0, 0.0, 0.5, 3.0], [0, 0, 0, 1]
    apply = jax.jit(group_relative("std", ddof=0, epsilon=0.25).apply)
    _, batch = apply((), batch_of(reward, group, np.ones((4, 2))))
    np.testing.assert_allclose(batch.advantages[:, 1], by_loop(reward, group, "std", 0, 0.25), rtol=1e-5)


def test_on_actions() -> None:
    _, batch = on_actions(lambda b: b.reward * 2).apply((), batch_of([1, 3], [0, 1], [[1, 0], [1, 1]]))
    assert batch.advantages.tolist() == [[2, 0], [6, 6]]


def test_an_unknown_scale_is_refused_when_it_is_given() -> None:
    with pytest.raises(InputError, match=r"'stdd'.*std, none"):
        group_relative("stdd")
    with pytest.raises(InputError, match="'mad'"):
        group_advantage(jnp.zeros(2), jnp.zeros(2, jnp.int32), scale="mad")


def test_a_batch_without_rewards_is_refused() -> None:
    batch = batch_of(None, [0, 0], np.ones((2, 2)))
    for transform in (group_relative(), drop_uniform_groups()):
        with pytest.raises(InputError, match="no rewards"):
            transform.apply((), batch)


def test_uniform_groups() -> None:
    reward = [1.0, 1.0, 0.0, 1.0, 5.0, np.nan, 2.0, np.nan, np.nan]
    group = [0, 0, 1, 1, 2, 3, 3, 4, 4]
    batch = batch_of(reward, group, np.ones((9, 1)))
    expected = [True, True, False, False, True, True, True, True, True]
    assert uniform_groups(batch).tolist() == expected
    assert uniform_groups(jax.tree.map(jnp.asarray, batch)).tolist() == expected  # and as programs compute it
    assert uniform_groups(jax.tree.map(np.asarray, batch)).tolist() == expected  # and on the host


def test_dropping_uniform_groups_multiplies_the_weights() -> None:
    reward, group, mask = [1.0, 1.0, 0.0, 1.0], [0, 0, 1, 1], np.ones((4, 2))
    _, batch = drop_uniform_groups().apply((), batch_of(reward, group, mask))
    assert batch.weights.tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]
    weights = jnp.array([[1.0, 1.0], [1.0, 1.0], [0.5, 0.0], [2.0, 1.0]])
    _, batch = drop_uniform_groups().apply((), batch_of(reward, group, mask, weights=weights))
    assert batch.weights.tolist() == [[0, 0], [0, 0], [0.5, 0], [2, 1]]
    _, batch = chain(drop_uniform_groups(), group_relative()).apply(((), ()), batch_of([3.0] * 4, group, mask))
    assert batch.weights.tolist() == [[0, 0]] * 4
    assert batch.advantages.tolist() == [[0, 0]] * 4
