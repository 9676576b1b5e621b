"""PPO on episodes of several turns: worked examples, loops, and the limits in which it is plain PPO."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from batches import batch_of, gradient_of, loss_of, prepared, random_batch

from jaxrl_llm.algorithms import get
from jaxrl_llm.utils.errors import InputError

PLAIN: dict[str, Any] = {"kl_coefficient": 0.0, "whiten": False}


def rows(mask: Any, turn: Any, values: Any, turn_rewards: Any, score: Any = 0.0) -> Any:
    """Episodes with the environment's tokens between the turns, whose values must not matter."""
    mask, values = np.asarray(mask, bool), np.asarray(values, np.float64)
    N = len(mask)
    batch = batch_of(
        mask, np.broadcast_to(score, (N,)), np.where(mask, -1.0, 0.0), values=values,
        turn_rewards=np.asarray(turn_rewards, np.float64),
    )  # fmt: skip
    return batch.replace(token_mask=jnp.ones(mask.shape, bool), turn=jnp.asarray(np.where(mask, turn, -1), jnp.int32))


def test_multi_turn_recipe_worked_example() -> None:
    """The card's: rewards 0.5 and 1 at the ends of turns of an episode that is won, which are 1 and 2 over 2."""
    mask = [[1, 1, 0, 0, 1, 1]] * 2
    batch = rows(mask, [0, 0, -1, -1, 1, 1], [[0.2, 0.3, 9, 9, 0.4, 0.6]] * 2, [[1.0, 2.0], [1.0, 0.0]])
    found = np.asarray(prepared(get("multi_turn_recipe", lam=0.95, **PLAIN), batch).advantages)
    np.testing.assert_allclose(found[0], [1.193450, 1.151, 0, 0, 0.58, 0.4], atol=1e-6)
    # The second is lost: its reward is divided by the most that the task gives, here 2 turns, or 4.
    for options, reward in (({}, 0.5), ({"most": 4}, 0.25)):
        found = np.asarray(prepared(get("multi_turn_recipe", lam=1.0, **options, **PLAIN), batch).advantages)
        np.testing.assert_allclose(found[1], [reward - 0.2, reward - 0.3, 0, 0, -0.4, -0.6], atol=1e-6)
    sparse = np.asarray(prepared(get("multi_turn_recipe", rewards="sparse", lam=1.0, **PLAIN), batch).advantages)
    np.testing.assert_allclose(sparse[0], [2.8, 2.7, 0, 0, 2.6, 2.4], atol=1e-6)


def gae_loop(batch: Any, reward: Any, gamma: float, lam: float) -> np.ndarray:
    """The reward of each token, by turn: discounted by gamma at the ends of turns alone."""
    mask, turn, V = (np.asarray(x) for x in (batch.action_mask, batch.turn, batch.values))
    out = np.zeros(mask.shape)
    for i in range(len(mask)):
        value = carry = 0.0
        following = None
        for t in reversed(range(mask.shape[1])):
            if not mask[i, t]:
                continue
            ends = turn[i, t] != following
            g = gamma if ends else 1.0
            carry = (reward[i, turn[i, t]] if ends else 0.0) + g * value - V[i, t] + g * lam * carry
            value, following, out[i, t] = V[i, t], turn[i, t], carry
    return out


def test_poad_worked_example_and_loop() -> None:
    batch = rows(
        [[1, 1, 1, 0, 1, 1], [1, 0, 1, 1, 0, 1]], [[0, 0, 0, -1, 1, 1], [0, -1, 1, 1, -1, 2]],
        [[0.5, 0.6, 0.4, 9, 0.7, 0.8], [0.1, 9, 0.2, 0.3, 9, -0.4]], [[0.0, 1.0, 0.0], [0.5, 0.0, 1.0]],
    )  # fmt: skip
    ready = prepared(get("poad", whiten=False), batch)
    np.testing.assert_allclose(ready.advantages[0], [0.385369, 0.300389, 0.526725, 0, 0.29, 0.2], atol=1e-6)
    loop = gae_loop(batch, np.asarray(batch.turn_rewards), 0.95, 0.95)
    np.testing.assert_allclose(ready.advantages, loop, atol=1e-6)
    np.testing.assert_allclose(ready.returns, (loop + np.asarray(batch.values)) * batch.action_mask, atol=1e-6)
    # The card's naive PPO of tokens.
    plain = np.asarray(prepared(get("ppo", gamma=0.95, **PLAIN), batch).advantages)
    np.testing.assert_allclose(plain[0], [0.264084, 0.215051, 0.482051, 0, 0.2405, 0.2], atol=1e-6)
    # Clipped policy loss, Huber loss of a critic that is far off (20), less the entropy.
    mask = np.asarray(batch.action_mask)
    logp = np.asarray(batch.behaviour_logp) + 0.5 * mask
    V = np.asarray(ready.returns) + 20.0
    H = np.where(mask, 0.7, 0.0)
    wanted = [-min(np.exp(0.5) * a, 1.2 * a) + (10 * 20 - 50) - 0.01 * 0.7 for a in loop[mask]]
    found = loss_of(get("poad", whiten=False, value_clip=None), batch, logp, H, values=np.asarray(V))
    assert abs(found - np.mean(wanted)) < 1e-4


def test_without_a_discount_poad_is_ppo() -> None:
    values = np.random.default_rng(2).normal(size=(11, 6))
    batch, logp = random_batch(5, values=values)
    mine = get("poad", gamma=1.0, huber_width=1e6, entropy_coefficient=0.0)
    same = get("ppo", kl_coefficient=0.0)
    np.testing.assert_array_equal(prepared(mine, batch).advantages, prepared(same, batch).advantages)
    found = gradient_of(mine, batch, logp, values=values)
    np.testing.assert_array_equal(found, gradient_of(same, batch, logp, values=values))


@pytest.mark.parametrize("rewards", ["dense", "sparse"])
def test_one_turn_without_rewards_of_turns_is_ppo(rewards: str) -> None:
    values = np.random.default_rng(2).normal(size=(11, 6))
    batch, logp = random_batch(5, values=values)
    mine, same = get("multi_turn_recipe", rewards=rewards), get("ppo", lam=1.0, kl_coefficient=0.01)
    for one in (batch, batch.replace(turn_rewards=jnp.zeros((11, 1)))):
        np.testing.assert_array_equal(prepared(mine, one).advantages, prepared(same, batch).advantages)
    found = gradient_of(mine, batch, logp, values=values)
    np.testing.assert_array_equal(found, gradient_of(same, batch, logp, values=values))


def test_what_does_not_fit() -> None:
    with pytest.raises(InputError, match="gamma"):
        get("poad", gamma=-0.1)
    with pytest.raises(InputError, match="most"):
        get("multi_turn_recipe", most=0)
