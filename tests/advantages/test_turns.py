"""Credit by turn: the worked examples of the papers, slow loops, and limits."""

from __future__ import annotations

from itertools import product
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from turn_episodes import assert_close, episodes, of_turns

from jaxrl_llm.advantages import turns as t
from jaxrl_llm.advantages.group import group_relative
from jaxrl_llm.algorithms.turn_credit.hgpo import nested_states
from jaxrl_llm.algorithms.turn_credit.salt import mean_over_equal
from jaxrl_llm.algorithms.turn_credit.srgpo import random_groups
from jaxrl_llm.algorithms.turn_credit.trloo import same_turn
from jaxrl_llm.utils.errors import InputError

GIGPO = episodes([[7, 8, 9], [7, 8, 8]], [[0, 0, 1], [0, 0, 0]])


def gigpo(scale: Any) -> Any:
    step = t.compared(t.turn_returns(0.95), t.same_state(), scale)
    return t.turn_advantages(t.of_episode(scale), step)


def test_gigpo() -> None:
    """Card gigpo, both modes."""
    assert_close(of_turns(GIGPO, gigpo("none")), [[0.951250, 1.133333, 0.5], [-0.951250, -0.816667, -0.816667]])
    assert_close(of_turns(GIGPO, gigpo("std")), [[1.414211, 1.861804, 0.707106], [-1.414211, -1.284455, -1.284455]])


def test_hgpo() -> None:
    """Card hgpo: K = 2, so that one, two and three last states are compared."""
    batch = episodes([[1, 2, 3], [1, 2, 4], [1, 5, 3]], [[0, 0, 1], [0, 0, 0], [0, 0, 1]])
    nested = t.turn_advantages(nested_states(t.turn_returns(0.95), depth=2))
    assert_close(of_turns(batch, nested), [[0.300833, 0.475, 0], [-0.601666, -0.475, 0], [0.300833, 0, 0]])


def test_salt() -> None:
    """Card salt: a step of all four is neutral, one of two has their mean, others keep theirs."""
    batch = episodes(
        [[1, 2, 3], [1, 2, 4], [1, 2, 5], [1, 2, 6]], [[0, 0, 0]] * 4, score=[2.0, 0, 0, 0],
        actions=[[1, 5, 7], [1, 5, 8], [1, 6, 9], [1, 7, 9]],
    )  # fmt: skip
    batch = batch.replace(state_key=batch.state_key.at[:2, 2].set(3))
    merged = t.turn_advantages(mean_over_equal(t.of_episode()))
    found = of_turns(batch, merged)
    assert_close(found, [[0, 0.5, 1.5], [0, 0.5, -0.5], [0, -0.5, -0.5], [0, -0.5, -0.5]])


def test_srgpo() -> None:
    """Card srgpo: one chunk of all steps, weight 0.5; the episode's moments are over steps."""
    batch = episodes([[1, 2], [3, 4]], [[1, 0], [1, 1]], score=[0.0, -2.0])  # returns 1 and 0
    step = t.compared(t.turn_rewards(), random_groups(0), "std")
    both = t.turn_advantages(t.of_episode("std", "turns"), step, weights=(1.0, 0.5))
    assert_close(of_turns(batch, both), [[1.116023, 0.116025], [-0.616024, -0.616024]])


def test_turn_leave_one_out() -> None:
    """Card trloo: the mean of the others at the same turn; one row has no second turn."""
    batch = episodes([[1, 2], [1, 2], [1]], [[1, 2], [0, 1], [0]])
    credit = t.turn_advantages(t.compared(t.turn_returns(), same_turn(), baseline="leave_one_out"))
    assert_close(of_turns(batch, credit), [[2.5, 1.0], [-0.5, -1.0], [-2.0]])


paths = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=4), min_size=5, max_size=5)


@pytest.mark.heavy
@settings(max_examples=25, deadline=None)
@given(paths, st.integers(0, 1000), st.sampled_from(["mean", "leave_one_out"]), st.sampled_from([1, 2]))
def test_keys_against_a_loop(states: list[list[int]], seed: int, baseline: Any, last: int) -> None:
    random = np.random.default_rng(seed)
    rewards = [random.integers(0, 3, len(path)).astype(float).tolist() for path in states]
    score, group = random.integers(0, 2, len(states)).astype(float), (np.arange(len(states)) % 2).tolist()
    batch = episodes(states, rewards, score, group, room=4)
    credit = t.turn_advantages(t.compared(t.turn_returns(0.5), t.same_state(last), baseline=baseline))
    returns = [[0.0] * len(path) for path in states]
    for row, path in enumerate(states):
        after = 0.0
        for k in reversed(range(len(path))):
            after = rewards[row][k] + score[row] * (k + 1 == len(path)) + 0.5 * after
            returns[row][k] = after
    buckets: dict[Any, list[float]] = {}
    for row, path in enumerate(states):
        for k in range(len(path)):
            buckets.setdefault((group[row], tuple(path[max(0, k - last + 1) : k + 1])), []).append(returns[row][k])
    wanted = [[0.0] * len(path) for path in states]
    for row, path in enumerate(states):
        for k in range(len(path)):
            others = buckets[group[row], tuple(path[max(0, k - last + 1) : k + 1])]
            mean = sum(others) / len(others)
            if baseline == "leave_one_out" and len(others) > 1:
                mean = (sum(others) - returns[row][k]) / (len(others) - 1)
            wanted[row][k] = returns[row][k] - mean
    assert_close(of_turns(batch, credit), wanted, 1e-5)


def test_one_turn_is_the_group() -> None:
    """Bit by bit: with one turn, what episodes get is GRPO's."""
    batch = episodes([[1], [1], [1], [2]], [[0.0]] * 4, score=[1.0, 0.0, 0.5, 0.25], group=[0, 0, 1, 1])
    grpo = group_relative("std", epsilon=1e-6)
    _, wanted = grpo.apply(grpo.init(), batch)
    _, found = t.turn_advantages(t.of_episode("std")).apply((), batch)
    np.testing.assert_array_equal(found.advantages, wanted.advantages)


def test_different_states_leave_the_episode_alone() -> None:
    batch = episodes([[1, 2], [3, 4]], [[0, 1], [0, 0]])
    _, alone = t.turn_advantages(t.of_episode()).apply((), batch)
    _, both = gigpo("none").apply((), batch)
    np.testing.assert_array_equal(alone.advantages, both.advantages)


def test_random_groups_do_not_depend_on_the_order_of_rows() -> None:
    states = [[1, 2, 3], [4, 5], [6, 7, 8], [9]]
    batch = episodes(states, [[float(s) for s in path] for path in states])
    credit = t.turn_advantages(t.compared(t.turn_rewards(), random_groups(3)))
    order = jnp.asarray([2, 0, 3, 1])
    import jax

    _, out = credit.apply((), batch)
    _, again = credit.apply((), jax.tree.map(lambda x: x[order], batch))
    np.testing.assert_array_equal(out.advantages[order], again.advantages)
    keys = np.asarray(random_groups(3)(batch))[np.asarray(t.turn_mask(batch))]
    assert sorted(np.bincount(keys).tolist()) == [3, 3, 3]


def test_rows_without_a_score_count_in_no_baseline() -> None:
    batch = episodes([[1, 2], [1, 2], [1, 2]], [[0, 1], [0, 0], [5, 5]], score=[0.0, 0.0, np.nan])
    found = of_turns(batch, gigpo("none"))
    assert_close(found[:2], of_turns(episodes([[1, 2], [1, 2]], [[0, 1], [0, 0]]), gigpo("none")))
    assert found[2] == [0.0, 0.0]


@pytest.mark.parametrize("gamma, lengths", list(product([0.0, 0.9, 1.0], [(3, 1, 2)])))
def test_returns_skip_turns_that_are_not_there(gamma: float, lengths: tuple[int, ...]) -> None:
    mask = jnp.asarray([[k < n for k in range(3)] for n in lengths])
    rewards = jnp.arange(9.0).reshape(3, 3)
    found = np.asarray(t.returns_of_turns(rewards, mask, gamma))
    for row, n in enumerate(lengths):
        for k in range(3):
            wanted = sum(gamma ** (u - k) * float(rewards[row, u]) for u in range(k, n)) if k < n else 0.0
            assert found[row, k] == pytest.approx(wanted)


def test_what_does_not_fit() -> None:
    with pytest.raises(InputError, match="1 terms have 2 weights"):
        t.turn_advantages(t.of_episode(), weights=(1.0, 2.0))
    with pytest.raises(InputError, match="state_key"):
        t.turn_advantages(t.compared(t.turn_returns(), t.same_state())).apply((), GIGPO.replace(state_key=None))


def test_a_turn_alone_keeps_its_value_also_where_others_are_scaled() -> None:
    batch = episodes([[1], [1], [2]], [[0], [2], [5]])
    credit = t.compared(t.turn_returns(), t.same_state(), "std", alone="value")
    deviation = 2**0.5 + 1e-6
    assert_close(of_turns(batch, t.turn_advantages(credit)), [[-1 / deviation], [1 / deviation], [5.0]])
