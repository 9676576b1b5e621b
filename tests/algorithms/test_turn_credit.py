"""Methods of multi-turn credit: worked examples of the papers, loops, and the limits in which they are simpler ones."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import batch_of, gradient_of, loss_of, prepared, random_batch
from reward_loops import clipped_loss, group_scores
from turn_episodes import assert_close, episodes, of_turns

from jaxrl_llm.algorithms import get
from jaxrl_llm.utils.errors import InputError

STATES, REWARDS = [[7, 8, 9], [7, 8, 8]], [[0, 0, 1], [0, 0, 0]]
BATCH, LOGP = random_batch(3, turn_rewards=np.zeros((11, 1)), state_key=np.zeros((11, 1), np.uint32))
APART = BATCH.replace(state_key=jnp.arange(11, dtype=jnp.uint32)[:, None])


def credit(name: str, batch: Any, **options: Any) -> list[list[float]]:
    return of_turns(batch, get(name, **options).transform)


def assert_loss(name: str, batch: Any, low: float, high: float, **options: Any) -> None:
    """The loss of a method is the clipped loss of its own advantages, by a loop over tokens, with 0.3 k3."""
    found = np.asarray(prepared(get(name, **options), batch).advantages, np.float64)
    logp = np.asarray(batch.behaviour_logp) + batch.action_mask * np.sin(np.arange(found.size)).reshape(found.shape)
    near = batch.replace(reference_logp=batch.behaviour_logp - 0.1 * batch.action_mask, old_logp=batch.behaviour_logp)
    with_kl = {} if name == "trloo" else {"kl_coefficient": 0.3}
    loop = clipped_loss(logp, near, found, low, high, kl=with_kl.get("kl_coefficient", 0.0))
    assert abs(loss_of(get(name, **options, **with_kl), near, logp) - loop) < 1e-5 * max(1, abs(loop))


def assert_grpo(name: str, batch: Any, same: Any, **options: Any) -> None:
    """Bit by bit: advantages, loss and gradient."""
    method = get(name, **options)
    np.testing.assert_array_equal(prepared(method, batch).advantages, prepared(same, batch).advantages)
    assert loss_of(method, batch, LOGP) == loss_of(same, batch, LOGP)
    np.testing.assert_array_equal(gradient_of(method, batch, LOGP), gradient_of(same, batch, LOGP))


def test_gigpo_worked_example() -> None:
    batch = episodes(STATES, REWARDS)
    assert_close(credit("gigpo", batch), [[0.951250, 1.133333, 0.5], [-0.951250, -0.816667, -0.816667]])
    assert_close(
        credit("gigpo", batch, scale="std"), [[1.414211, 1.861804, 0.707106], [-1.414211, -1.284455, -1.284455]]
    )
    assert_close(credit("gigpo", batch, step_weight=0.0), [[0.5] * 3, [-0.5] * 3])
    assert_loss("gigpo", batch, 0.2, 0.2)
    # The code's moments: an episode counts once a turn.
    uneven = episodes([[1, 2, 3], [4]], [[0, 0, 1], [0]])
    assert_close(credit("gigpo", uneven, over="turns"), [[0.25] * 3, [-0.75]])


@pytest.mark.heavy
def test_hgpo_worked_example() -> None:
    batch = episodes([[1, 2, 3], [1, 2, 4], [1, 5, 3]], [[0, 0, 1], [0, 0, 0], [0, 0, 1]])
    assert_close(credit("hgpo", batch), [[0.300833, 0.475, 0], [-0.601666, -0.475, 0], [0.300833, 0, 0]])
    # With k = 0: (A_E + 2 A_1 + 3 A_2) / (sum of the weights of those that are not 0).
    one, two = 0.9025 / 3, 0.475
    wanted = [
        [(1 / 3 + 2 * one) / 3, (1 / 3 + 5 * two) / 6, 1 / 3],
        [(-2 / 3 - 4 * one) / 3, (-2 / 3 - 5 * two) / 6, -2 / 3],
        [(1 / 3 + 2 * one) / 3, 1 / 3, 1 / 3],
    ]
    assert_close(credit("hgpo", batch, with_episode=True), wanted)
    assert_loss("hgpo", batch, 0.2, 0.2)


def test_salt_worked_example() -> None:
    """The advantages of the episodes are 1.5 and three times -0.5."""
    batch = episodes(
        [[1, 2, 3], [1, 2, 3], [1, 2, 5], [1, 2, 6]], [[0, 0, 0]] * 4, score=[1.0, 0, 0, 0],
        actions=[[1, 5, 7], [1, 5, 8], [1, 6, 9], [1, 7, 9]],
    )  # fmt: skip
    wanted = [[0, 0.5, 1.5], [0, 0.5, -0.5], [0, -0.5, -0.5], [0, -0.5, -0.5]]
    assert_close(credit("salt", batch, epsilon=0.0), wanted)
    # With the state before, all of it: the second turns of 0 and 1 came from the same state, their third turns too.
    assert_close(credit("salt", batch, epsilon=0.0, history=1), wanted)
    assert_loss("salt", batch, 0.2, 0.2)


def test_srgpo_worked_example() -> None:
    batch = episodes([[1, 2], [3, 4]], [[1, 0], [1, 1]], score=[1.0, 0.0])
    assert_close(credit("srgpo", batch, size=0), [[1.116023, 0.116025], [-0.616024, -0.616024]])
    assert_close(credit("srgpo", batch), [[1.116023, 0.116025], [-0.616024, -0.616024]])
    assert_close(credit("srgpo", batch, step_weight=0.0), [[0.866024] * 2, [-0.866024] * 2])
    assert_loss("srgpo", batch, 0.2, 0.2)


@pytest.mark.heavy
def test_trloo_worked_example() -> None:
    batch = episodes([[1, 2], [1, 2], [1]], [[1, 2], [0, 1], [0]])
    assert_close(credit("trloo", batch), [[2.5, 1.0], [-0.5, -1.0], [-2.0]])
    # The only one with a turn has its return.
    alone = episodes([[1, 2], [1], [1]], [[1, 2], [0], [0]])
    assert_close(credit("trloo", alone), [[3.0, 2.0], [-1.5], [-1.5]])
    assert_loss("trloo", batch, 0.2, 0.28)
    # A turn that nothing scored is in no mean, and its episode's return begins before it.
    invalid = batch.replace(turn_rewards=batch.turn_rewards.at[1, 1].set(jnp.nan))
    assert_close(credit("trloo", invalid), [[3.0, 2.0], [-1.5, 0.0], [-1.5]])
    three = episodes([[1], [1], [1]], [[2], [1], [np.nan]])
    assert_close(credit("trloo", three), [[1.0], [-1.0], [0.0]])


def test_trloo_leaves_out_what_another_policy_drew() -> None:
    """The log-ratios of the card, whose geometric mean is 1.001167; a token of a ratio below 1e-4."""
    mask = np.ones((3, 3), bool)
    old = np.array([[0.004, -0.001, 0.0005], [0.002, -0.001, 0.0], [-9.5, 9.5, 0.0]]) - 1
    batch = batch_of(mask, [1.0, 0.0, 0.0], -np.ones((3, 3)), old_logp=old, turn_rewards=np.zeros((3, 1)))
    found = prepared(get("trloo", tolerance=1e-3), batch)
    np.testing.assert_array_equal(np.asarray(found.loss_weights)[:, 0], [0, 1, 0])
    np.testing.assert_allclose(found.advantages[1], -0.5)  # of all three
    near = prepared(get("trloo", tolerance=2e-3, unlikely=1e-5), batch)
    np.testing.assert_array_equal(near.loss_weights, 1.0)


def test_trloo_rejects_right_turns_whose_profile_is_low() -> None:
    """The card's probabilities of PR = 0.25, 0.35 and 0.5, which are 0, 0.5 and 1; by draws of many steps."""
    batch = episodes([[1, 2], [1, 2], [1, 2]], [[1, 0], [2, 1], [3, 1]])
    profile = np.array([[0.25, 0.0], [0.35, 0.35], [0.5, np.nan]])  # of turns; the second turn of the first is wrong
    tokens = np.where(batch.action_mask, np.take_along_axis(profile, np.maximum(batch.turn, 0), axis=1), np.nan)
    batch = batch.with_info(profile=jnp.asarray(tokens, jnp.float32))
    method, plain = get("trloo", profile="share"), get("trloo")
    state, apply, kept = method.transform.init(), jax.jit(method.transform.apply), []
    for _ in range(300):
        state, found = apply(state, batch)
        kept.append([[float(found.loss_weights[i][batch.turn[i] == k].mean()) for k in range(2)] for i in range(3)])
    np.testing.assert_array_equal(found.advantages, prepared(plain, batch).advantages)  # the means have all turns
    share = np.mean(kept, axis=0)
    np.testing.assert_array_equal(share[[0, 0, 2, 2], [0, 1, 0, 1]], [0, 1, 1, 1])
    assert set(np.ravel(kept)) == {0.0, 1.0}  # turns as a whole
    np.testing.assert_allclose(share[1], 0.5, atol=0.1)
    both = np.mean(np.prod(np.asarray(kept)[:, 1], axis=1))
    assert both == pytest.approx(0.25, abs=0.1)  # each turn has a draw of its own
    hard = prepared(get("trloo", profile="share", softness=0.0, least_profile=0.35), batch)
    first = [[float(hard.loss_weights[i][batch.turn[i] == k].mean()) for k in range(2)] for i in range(3)]
    assert first == [[0, 1], [1, 1], [1, 1]]


@pytest.mark.parametrize("name, options", [("gigpo", {"scale": "std"}), ("salt", {}), ("srgpo", {"step_weight": 0.0})])
def test_one_turn_is_grpo(name: str, options: dict[str, Any]) -> None:
    """With states of their own, or with the turn's term left out."""
    same = get("grpo", kl_coefficient=0.1, average="token")
    assert_grpo(name, APART, same, kl_coefficient=0.1, **options)


def test_one_turn_is_rloo() -> None:
    found = np.asarray(prepared(get("trloo"), BATCH).advantages)
    reward, group = np.asarray(BATCH.reward, np.float64), np.asarray(BATCH.group)
    wanted = [
        r - np.mean([reward[j] for j in range(11) if group[j] == group[i] and j != i]) for i, r in enumerate(reward)
    ]
    np.testing.assert_allclose(found, np.asarray(wanted)[:, None] * np.asarray(BATCH.action_mask), atol=1e-6)


def test_one_state_of_one_turn_is_grpo_without_a_scale() -> None:
    """hgpo: all turns are in the group of the same state, which is GRPO's; only its epsilon remains."""
    found = np.asarray(prepared(get("hgpo"), BATCH).advantages)
    wanted = group_scores(BATCH.reward, BATCH.group, scale=False)
    np.testing.assert_allclose(found, wanted[:, None] * np.asarray(BATCH.action_mask), rtol=1e-5, atol=1e-6)


def test_states_that_all_differ_leave_the_episode_alone() -> None:
    batch = episodes([[1, 2], [3, 4], [5, 6]], [[0, 1], [0, 0], [1, 1]])
    for name, options in (("gigpo", {}), ("hgpo", {"with_episode": True})):
        found = credit(name, batch, **options)
        assert_close(found, [[0.0, 0.0], [-1.0, -1.0], [1.0, 1.0]])
    assert_close(credit("hgpo", batch), [[0.0, 0.0]] * 3)
    assert_close(credit("salt", batch, scale="none"), [[0.0, 0.0], [-1.0, -1.0], [1.0, 1.0]])


def test_a_run_that_goes_without_them_has_the_episodes_alone() -> None:
    bare = BATCH.replace(turn_rewards=None, state_key=None)
    wanted = group_scores(BATCH.reward, BATCH.group, scale=False)[:, None] * np.asarray(BATCH.action_mask)
    for name in ("gigpo", "hgpo", "salt", "srgpo"):
        options = {"scale": "none"}
        np.testing.assert_allclose(prepared(get(name, **options), bare).advantages, wanted, atol=1e-6)


def test_what_does_not_fit() -> None:
    with pytest.raises(InputError, match="gamma"):
        get("gigpo", gamma=1.5)
    with pytest.raises(InputError, match="depth"):
        get("hgpo", depth=-1)
    with pytest.raises(InputError, match="history"):
        get("salt", history=0.5)
    with pytest.raises(InputError, match="size"):
        get("srgpo", size=-1)
