"""Episodes of several rows count once in the moments of their group."""

from __future__ import annotations

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from turn_episodes import episodes

from jaxrl_llm.advantages import group_relative
from jaxrl_llm.advantages.multi_reward import variance_weighted
from jaxrl_llm.core.trajectory import Array, Trajectories
from jaxrl_llm.core.transform import Transform

SCORES = np.array([1.0, 0.25, 0.25, 0.25, 0.0, 0.5, 0.5, 3.0])
GROUP = [0, 0, 0, 0, 0, 1, 1, 1]
EPISODE = np.array([0.0, 1, 1, 1, 2, 0, 0, 1])  # numbers within the group
FIRST = np.array([0.0, 0, 2, 3, 0, 0, 1, 0])
ONE_ROW = [0, 1, 4, 5, 7]


def batch_of(rows: list[int] | None = None) -> Trajectories:
    batch = episodes([[1, 2]] * 8, [[0.0, 0.0]] * 8, SCORES, GROUP)
    batch = batch.with_info(episode=jnp.asarray(EPISODE), first_turn=jnp.asarray(FIRST))
    batch = batch.replace(rewards={"one": batch.reward, "two": batch.reward**2})
    return batch if rows is None else batch.replace(action_mask=batch.action_mask.at[jnp.asarray(rows)].set(False))


def of_rows(transform: Transform, batch: Trajectories) -> Array:
    advantages = transform.apply(transform.init(), batch)[1].advantages
    assert advantages is not None
    return jnp.sum(advantages, axis=1) / jnp.maximum(jnp.sum(batch.action_mask, axis=1), 1)


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out", "median"])
def test_all_rows_get_the_advantage_of_their_episode(baseline: str) -> None:
    """By a loop over episodes."""
    found = of_rows(group_relative("none", baseline=baseline), batch_of())
    for group, rewards in ((0, {0.0: 1.0, 1.0: 0.25, 2.0: 0.0}), (1, {0.0: 0.5, 1.0: 3.0})):
        values = list(rewards.values())
        for row in np.flatnonzero(np.asarray(GROUP) == group):
            own = rewards[EPISODE[row]]
            others = [x for number, x in rewards.items() if number != EPISODE[row]]
            below = {"mean": np.mean(values), "leave_one_out": np.mean(others), "median": np.median(values)}[baseline]
            np.testing.assert_allclose(found[row], own - below, atol=1e-6)


@pytest.mark.parametrize(
    "transform", [group_relative(), variance_weighted()], ids=["group_relative", "variance_weighted"]
)
def test_rows_more_change_nothing(transform: Transform) -> None:
    """The advantage is that of the batch where each episode has its first row alone."""
    others = sorted({*range(8)} - {*ONE_ROW})
    alone = of_rows(transform, batch_of(others))
    chex.assert_trees_all_close(of_rows(transform, batch_of())[jnp.asarray(ONE_ROW)], alone[jnp.asarray(ONE_ROW)])
    assert np.ptp(np.asarray(of_rows(transform, batch_of()))[1:4]) == 0


def test_episodes_of_one_row_are_groups_as_ever() -> None:
    batch = batch_of().with_info(episode=jnp.arange(8.0), first_turn=jnp.zeros(8))
    plain = batch.replace(info=None)
    np.testing.assert_array_equal(of_rows(group_relative(), batch), of_rows(group_relative(), plain))


def test_rows_may_count_each() -> None:
    batch = batch_of()
    plain = batch.replace(info=None)
    np.testing.assert_array_equal(of_rows(group_relative(over="rows"), batch), of_rows(group_relative(), plain))
