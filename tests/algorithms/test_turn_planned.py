"""Credit of plans: worked examples, loops over turns and segments, and the limit without plans."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from batches import loss_of, prepared
from turn_episodes import episodes, of_turns

from jaxrl_llm.algorithms import get
from jaxrl_llm.algorithms.turn_credit.hiper import plan_credit
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.utils.errors import InputError

PLAIN: dict[str, Any] = {"whiten": False, "keep_penalty": 0.0, "inconsistency_penalty": 0.0, "kl_coefficient": 0.0}


def test_hiper_worked_example_and_loop() -> None:
    """The card's: gamma and both lambdas 0.95, the segments of turns 0 and 1, and 2 and 3."""
    values = np.zeros((1, 4, 3))
    values[0, :, 0], values[0, [0, 2], 1] = [0.3, 0.4, 0.5, 0.7], [0.35, 0.6]
    r, starts, mask = np.array([[0.0, 0, 0, 1]]), np.array([[False, False, True, False]]), np.ones((1, 4), bool)
    found = plan_credit(*map(jnp.asarray, (r, starts, mask, values)), 0.95, 0.95, 0.95)
    np.testing.assert_allclose(found.action[0], [0.233425, 0.170000, 0.435750, 0.300000], atol=1e-6)
    np.testing.assert_allclose(found.subgoal[0], [0.491581, 0, 0.350000, 0], atol=1e-6)
    np.testing.assert_allclose(found.decision[0], [0.95**2 * 0.6, 0.95 * 0.6, 0.95, 1], atol=1e-6)

    random = np.random.default_rng(3)
    for cut in (False, True):
        N, K = 6, 5
        values, r = random.normal(size=(N, K, 3)), random.normal(size=(N, K))
        starts, mask = random.random((N, K)) < 0.4, np.arange(K) < np.array([5, 4, 1, 0, 3, 5])[:, None]
        ends = jnp.full(N, cut)
        found = plan_credit(*map(jnp.asarray, (r, starts, mask, values)), 0.9, 0.8, 0.7, ends)
        for i in range(N):
            wanted = loop(r[i], starts[i], int(mask[i].sum()), values[i], 0.9, 0.8, 0.7, cut)
            for head, (A, G) in enumerate(zip(found[:3], found[3:], strict=True)):
                np.testing.assert_allclose(A[i], wanted[head], atol=2e-5)
                told = mask[i] if head != 1 else mask[i] & (starts[i] | (np.arange(K) == 0))
                np.testing.assert_allclose(G[i], np.where(told, wanted[head] + values[i, :, head], 0), atol=2e-5)


def loop(r: Any, starts: Any, T: int, V: Any, gamma: float, lam: float, lam_segment: float, cut: bool) -> Any:
    """Segment by segment, as the equations are written."""
    out = np.zeros((3, len(r)))
    begins = [t for t in range(T) if t == 0 or starts[t]]
    bounds = [*begins, T]
    later = 0.0
    for k in reversed(range(len(begins))):
        b, after = bounds[k], bounds[k + 1]
        beyond = V[after, 1] if after < T else 0.0
        carry, G = 0.0, beyond
        for t in reversed(range(b, after)):
            following = V[t + 1, 0] if t + 1 < after else beyond if after < T else V[t, 0] * cut
            carry = r[t] + gamma * following - V[t, 0] + gamma * lam * carry
            G = r[t] + gamma * G
            out[0, t], out[2, t] = carry, G - V[t, 2]
        d = after - b
        R = sum(gamma**j * r[b + j] for j in range(d))
        later = R + gamma**d * beyond - V[b, 1] + gamma**d * lam_segment * later
        out[1, b] = later
    return out


def planned() -> Trajectories:
    """Two episodes of two turns: decision, subgoal, action, then an observation; the second lacks some of them."""
    turn = np.array([[-1, 0, 0, 0, 0, -1, 1, 1, 1, 1], [-1, 0, 0, 0, 0, -1, 1, 1, -1, -1]])
    plan = np.array([[0, 2, 4, 5, 5, 0, 1, 4, 5, 5], [0, 0, 4, 5, 0, 0, 2, 5, 0, 0]])
    acted = turn >= 0
    values = np.random.default_rng(4).normal(size=(2, 10, 3))
    return Trajectories(
        tokens=jnp.ones((2, 10), jnp.int32), token_mask=jnp.ones((2, 10), bool), action_mask=jnp.asarray(acted),
        behaviour_logp=jnp.where(acted, -1.0, 0.0), policy_step=jnp.zeros((2, 10), jnp.int32),
        turn=jnp.asarray(turn, jnp.int32), group=jnp.zeros(2, jnp.int32), prompt_id=jnp.zeros(2, jnp.int32),
        truncated=jnp.zeros(2, bool), reward=jnp.asarray([1.0, 0.0]), values=jnp.asarray(values, jnp.float32),
        turn_rewards=jnp.asarray([[0.5, 0.0], [0.0, 0.25]]), info={"plan": jnp.asarray(plan, jnp.float32)},
    )  # fmt: skip


def by_hand(batch: Trajectories, extra: Any, whiten: bool) -> tuple[np.ndarray, list[list[tuple[int, int, float]]]]:
    """The advantages of tokens, and of each head the places that train it, with their returns."""
    places = [[{0: 3, 1: 2, 2: 1}, {0: 8, 1: 7, 2: 6}], [{0: 3, 1: 2, 2: None}, {0: 7, 1: None, 2: 6}]]
    spans = {0: [[(3, 4), (8, 9)], [(3,), (7,)]], 1: [[(2,), (7,)], [(2,), ()]], 2: [[(1,), (6,)], [(), (6,)]]}
    V, r = np.asarray(batch.values), np.asarray(batch.turn_rewards) + np.array([[0, 1.0], [0, 0]]) + extra
    told: list[list[tuple[int, int, float]]] = [[], [], []]
    trained: list[list[tuple[int, int, float]]] = [[], [], []]
    for i, starts in enumerate(([True, False], [False, True])):
        first = [1, 6]
        read = np.array([[V[i, places[i][t][h] or first[t], h] for h in range(3)] for t in range(2)])
        A = loop(r[i], starts, 2, read, 1.0, 1.0, 0.95, False)
        for h in range(3):
            for t in range(2):
                if places[i][t][h] is not None and (h != 1 or t == 0 or starts[t]):
                    told[h].append((i, t, A[h, t]))
                    trained[h].append((i, places[i][t][h], A[h, t] + read[t, h]))
    out = np.zeros((2, 10))
    for h in range(3):
        x = np.array([one[2] for one in told[h]])
        x = (x - x.mean()) / (x.std() + 1e-8) if whiten else x
        for (i, t, _), value in zip(told[h], x, strict=True):
            out[i, list(spans[h][i][t])] = value
    return out, trained


@pytest.mark.parametrize("whiten", [False, True])
def test_each_part_of_a_reply_has_its_own_credit(whiten: bool) -> None:
    batch = planned()
    method = get("hiper", **{**PLAIN, "whiten": whiten, "value_clip": None, "value_coefficient": 0.5})
    wanted, trained = by_hand(batch, 0.0, whiten)
    ready = prepared(method, batch)
    np.testing.assert_allclose(ready.advantages, wanted, atol=1e-5)
    # The loss: PPO's clip over the tokens, and each head's squares over the turns that train it.
    mask, V = np.asarray(batch.action_mask), np.asarray(batch.values) + 0.3
    logp = np.where(mask, -1.0 + 0.1, 0.0)
    policy = -np.mean([min(np.exp(0.1) * a, min(np.exp(0.1), 1.2) * a) for a in wanted[mask]])
    critic = sum(np.mean([0.5 * (V[i, at, h] - R) ** 2 for i, at, R in trained[h]]) for h in range(3))
    assert loss_of(method, batch, logp, values=V) == pytest.approx(policy + 0.5 * critic, abs=1e-5)


@pytest.mark.parametrize(
    ("kind", "extra"), [("fixed", [[0, -0.3 - 0.1], [0, 0]]), ("shared", [[0, -0.3 / 2 - 0.1], [0, 0]])]
)
def test_turns_that_keep_their_subgoal_pay(kind: str, extra: Any) -> None:
    """The second turn of the first episode says KEEP and another subgoal."""
    changes = {"keep_penalty": -0.3, "inconsistency_penalty": -0.1, "keep_penalties": kind}
    found = prepared(get("hiper", **{**PLAIN, **changes}), planned()).advantages
    np.testing.assert_allclose(found, by_hand(planned(), np.asarray(extra), False)[0], atol=1e-5)


def test_without_plans_turns_have_generalised_advantages() -> None:
    batch = episodes([[1, 2, 3], [1, 2]], [[0.0, 1.0, 0.5], [1.0, 0.0]], [0.0, 2.0])
    V = np.random.default_rng(5).normal(size=(*batch.tokens.shape, 3))
    batch = batch.replace(values=jnp.asarray(V, jnp.float32))
    method = get("hiper", gamma=0.9, lam_turn=0.8, **PLAIN)
    found = of_turns(batch, method.transform)
    for i, r in enumerate(([0.0, 1.0, 0.5], [1.0, 2.0])):
        carry = following = 0.0
        for t in reversed(range(len(r))):
            value = V[i, 1 + 3 * t, 0]
            carry, following = r[t] + 0.9 * following - value + 0.9 * 0.8 * carry, value
            assert found[i][t] == pytest.approx(carry, abs=1e-5)


def test_what_does_not_fit() -> None:
    with pytest.raises(InputError, match="lam_segment"):
        get("hiper", lam_segment=1.5)
    with pytest.raises(InputError, match="unknown keep_penalties of hiper 'none'"):
        get("hiper", keep_penalties="none")
