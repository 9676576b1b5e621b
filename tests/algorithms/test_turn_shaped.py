"""Methods that shape or choose episodes: worked examples, loops, and the limits in which they are GRPO or GSPO."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from batches import advantages, batch_of, gradient_of, loss_of, prepared, random_batch
from reward_loops import assert_like_loop, group_scores
from turn_episodes import episodes, of_turns

from jaxrl_llm.advantages.turns import episode_returns
from jaxrl_llm.algorithms import get
from jaxrl_llm.utils.errors import InputError

BATCH, LOGP = random_batch(3)
N = 11
MASK = np.asarray(BATCH.action_mask)


def assert_same(mine: Any, batch: Any, same: Any, other: Any = BATCH) -> None:
    """Bit by bit: advantages, loss and gradient."""
    np.testing.assert_array_equal(prepared(mine, batch).advantages, prepared(same, other).advantages)
    assert loss_of(mine, batch, LOGP) == loss_of(same, other, LOGP)
    np.testing.assert_array_equal(gradient_of(mine, batch, LOGP), gradient_of(same, other, LOGP))


def returns(batch: Any, **options: Any) -> list[float]:
    return [float(x) for x in episode_returns(prepared(get("g_ra", **options), batch))]


def test_g_ra_worked_example() -> None:
    """Turns of 0.5, 0.3 and -0.1 count if the outcome is above 0.1."""
    batch = episodes([[1, 2, 3]] * 3, [[0.5, 0.3, -0.1]] * 3, score=[0.0, 0.2, 1.0])
    np.testing.assert_allclose(returns(batch, thresholds="0.1"), [0.0, 0.9, 1.7], rtol=1e-6)
    assert returns(batch, thresholds="1") == [0.0, pytest.approx(0.2), 1.0], "the comparison is strict"
    np.testing.assert_allclose(
        [row[0] for row in of_turns(batch, get("g_ra", thresholds="0.1", scale="none").transform)],
        np.asarray([0.0, 0.9, 1.7]) - 2.6 / 3, atol=1e-6,
    )  # fmt: skip
    # Three levels: tests, then form, then turns.
    batch = batch.replace(rewards={"tests": jnp.asarray([0.0, 1.0, 1.0]), "form": jnp.asarray([1.0, 0.5, 1.0])})
    found = returns(batch, thresholds="0,0.7", order="tests, form")
    np.testing.assert_allclose(found, [0.0, 1.5, 2.7], rtol=1e-6)
    with pytest.raises(InputError, match="no component 'judge'"):
        returns(batch, order="judge")
    with pytest.raises(InputError, match="thresholds are 3 numbers for 2 levels"):
        get("g_ra", thresholds="0,1,2", order="tests,form")


def test_g_ra_without_rewards_of_turns_is_grpo() -> None:
    same = get("grpo", kl_coefficient=0.0, average="token")
    assert_same(get("g_ra"), BATCH.replace(turn_rewards=jnp.ones((N, 1)) * 0.0), same)
    assert_same(get("g_ra"), BATCH, same)


def test_deeptravel_by_hand() -> None:
    """A failed check of the whole makes checks of turns needless; a turn fails below the threshold."""
    batch = episodes([[1, 2, 3]] * 4, [[0.0, 0.0, 0.0], [0.0, -1.0, 0.0], [-1.0, 0.0, 0.0], [0.5, 0.0, 0.0]],
                     score=[1.0, 1.0, 0.0, 1.0])  # fmt: skip
    assert prepared(get("deeptravel"), batch).reward.tolist() == [1.0, 0.0, 0.0, 1.0]
    found = prepared(get("deeptravel", combine="mean"), batch).reward
    np.testing.assert_allclose(found, [1.0, 2 / 3, 0.0, 1.0], rtol=1e-6)
    # The first two rows are one episode, so that the turn that failed in the second fails both.
    both = batch.with_info(episode=jnp.asarray([7.0, 7.0, 8.0, 9.0]))
    assert prepared(get("deeptravel"), both).reward.tolist() == [0.0, 0.0, 0.0, 1.0]
    assert prepared(get("deeptravel", threshold=-1.0), both).reward.tolist() == [1.0, 1.0, 0.0, 1.0]
    np.testing.assert_allclose(
        [row[0] for row in of_turns(batch, get("deeptravel").transform)], np.asarray([1, -1, -1, 1]) * 0.5 / 3**-0.5,
        atol=1e-5,
    )  # fmt: skip


def test_deeptravel_without_failed_turns_is_grpo() -> None:
    same = get("grpo", kl_coefficient=0.0, average="token")
    assert_same(get("deeptravel"), BATCH.replace(turn_rewards=jnp.zeros((N, 1))), same)


def test_grpo_tcr_worked_example_and_loop() -> None:
    """Episodes of 2, 4, 8 and 12 messages have 0, 1, 3 and 5 calls."""
    paths = [[0] * (calls + 1) for calls in (0, 1, 3, 5, 3)]
    batch = episodes(paths, paths, score=[0, 0, 0, 0, 1.0])
    shaped = prepared(get("grpo_tcr"), batch).reward
    np.testing.assert_allclose(shaped, [-1.0, -0.9, -0.7, -0.6, 1.0], rtol=1e-6)
    # A second row of an episode whose first had two turns.
    later = batch.with_info(first_turn=jnp.asarray([2.0, np.nan, 0.0, 0.0, 0.0]))
    np.testing.assert_allclose(prepared(get("grpo_tcr"), later).reward[:2], [-0.8, -0.9], rtol=1e-6)
    np.testing.assert_allclose(prepared(get("grpo_tcr", call_credit=0.0), batch).reward[:3], -1.0)
    # Overlong: 8 tokens of at most 10, with a buffer of 4.
    long = prepared(get("grpo_tcr", longest=10, overlong_buffer=4), batch).reward
    np.testing.assert_allclose(long, [-1.0, -0.9, -0.7 - 0.5, -0.6 - 1.0, 1.0 - 0.5], rtol=1e-6)
    turns = np.where(MASK, np.arange(6) // 2, -1)
    batch = BATCH.replace(turn=jnp.asarray(turns, jnp.int32))
    score = [1.0 if r > 0 else min(-0.6, -1 + 0.1 * row.max()) for r, row in zip(BATCH.reward, turns, strict=True)]
    assert_like_loop(get("grpo_tcr"), batch, LOGP, group_scores(score, BATCH.group), high=0.28)


def test_grpo_tcr_of_one_turn_is_grpo_on_signs() -> None:
    signs = BATCH.replace(reward=2 * BATCH.reward - 1)
    assert_same(get("grpo_tcr"), BATCH, get("grpo", clip_high=0.28, kl_coefficient=0.0, average="token"), signs)


def group_of(wrong: int, right: int, **info: Any) -> Any:
    rows = wrong + right
    reward = np.asarray([0.0] * wrong + [1.0] * right)
    calls = {"calls": np.full(rows, 4.0), "failed_calls": np.arange(rows) % 5.0, **info}
    return batch_of(
        np.ones((rows, 2), bool), reward, -1.0 - np.arange(rows)[:, None] * np.ones((1, 2)), np.zeros(rows), info=calls
    )


@pytest.mark.parametrize(
    "given, kept", [((30, 2), (14, 2)), ((20, 12), (10, 6)), ((2, 30), (2, 14)), ((0, 32), (0, 16))]
)
def test_grpo_roc_worked_example(given: tuple[int, int], kept: tuple[int, int]) -> None:
    batch = group_of(*given)
    ready = prepared(get("grpo_roc"), batch)
    there = ~np.isnan(np.asarray(ready.reward))
    right = np.asarray(batch.reward) > 0
    assert (int((there & ~right).sum()), int((there & right).sum())) == kept
    failed = np.asarray(batch.info["failed_calls"])
    if kept[1] < given[1]:
        assert failed[there & right].max() <= failed[~there & right].min(), "the cleanest of the right ones"
    reward = np.where(there, batch.reward, np.nan)
    np.testing.assert_allclose(ready.advantages[:, 0], group_scores(reward, batch.group), atol=2e-6)
    weights = np.asarray(ready.loss_weights)[:, 0]
    np.testing.assert_array_equal(weights, there if min(kept) else np.zeros(len(there)))


def test_grpo_roc_penalties() -> None:
    """No calls count as half failed, and the form counts as much as all calls."""
    info = {"calls": np.asarray([0.0, 0, 4, 4, 2, 0]), "failed_calls": np.asarray([0.0, 0, 1, 4, 0, 0])}
    batch = group_of(2, 4, **info)
    batch = batch.replace(rewards={"form": jnp.asarray([0, 0, 0.0, 1, 0.25, 1])})

    def right(**options: Any) -> list[int]:
        found = np.asarray(prepared(get("grpo_roc", least_wrong=1, **options), batch).reward)
        return [i for i in range(2, 6) if not np.isnan(found[i])]

    assert right() == [2, 4], "penalties 0.25, 1, 0 and 0.5"
    assert right(component="form") == [4, 5], "penalties 1.25, 1, 0.75 and 0.5"
    with pytest.raises(InputError, match="no component 'shape'"):
        right(component="shape")


def test_grpo_roc_that_keeps_all_is_grpo() -> None:
    batch = BATCH.with_info(calls=jnp.zeros(N), failed_calls=jnp.zeros(N))
    same = get("grpo", clip_high=0.28, kl_coefficient=0.0, average="token")
    assert_same(get("grpo_roc", keep=1.0), batch, same)


def rounds(lengths: list[int], scores: list[float], order: Any = None) -> Any:
    """Rows of rounds, of episodes of one group."""
    rows = [(e, t, s) for e, (T, s) in enumerate(zip(lengths, scores, strict=True)) for t in range(T)]
    rows = [rows[i] for i in order] if order is not None else rows
    episode, first, score = (np.asarray(x, np.float64) for x in zip(*rows, strict=True))
    return batch_of(
        np.ones((len(rows), 2), bool), score, -np.ones((len(rows), 2)), np.zeros(len(rows)),
        info={"episode": episode, "first_turn": first},
    )  # fmt: skip


def test_eapo_iterresearch_worked_example() -> None:
    shaped = prepared(get("eapo_iterresearch"), rounds([5], [1.0])).reward
    np.testing.assert_allclose(shaped, [0.980150, 0.985075, 0.990025, 0.995, 1.0], atol=1e-6)
    batch = rounds([2, 3], [1.0, 0.0])
    wanted = [1.090864, 1.100015, -0.730293, -0.730293, -0.730293]
    np.testing.assert_allclose(advantages(get("eapo_iterresearch"), batch)[:, 0], wanted, atol=3e-6)
    # Whatever the order of the rows.
    order = [3, 1, 4, 0, 2]
    found = advantages(get("eapo_iterresearch"), rounds([2, 3], [1.0, 0.0], order))[:, 0]
    np.testing.assert_allclose(found, np.asarray(wanted)[order], atol=3e-6)
    # GSPO's loss of these, by a loop over rounds.
    logp = -1 + 1e-4 * np.asarray([[3.0, 8], [1, -9], [0, 2], [9, 1], [-7, -8]])
    A, s = np.asarray(wanted), np.exp((logp + 1).mean(axis=1))
    loop = -np.mean([min(x * a, min(max(x, 1 - 3e-4), 1 + 4e-4) * a) for x, a in zip(s, A, strict=True)])
    assert abs(loss_of(get("eapo_iterresearch"), batch, logp) - loop) < 2e-6


def test_eapo_iterresearch_of_one_round_is_gspo() -> None:
    batch = BATCH.with_info(episode=jnp.arange(11.0), first_turn=jnp.zeros(11))
    assert_same(get("eapo_iterresearch"), batch, get("gspo"))
    assert_same(get("eapo_iterresearch"), BATCH, get("gspo"))
