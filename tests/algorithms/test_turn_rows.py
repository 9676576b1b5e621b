"""Methods whose turns may be rows: worked examples, loops over episodes and turns, and both layouts of one episode."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from batches import advantages, batch_of, loss_of, prepared, random_batch

from jaxrl_llm.algorithms import get
from jaxrl_llm.algorithms.agents.ui_s1 import broken_returns
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.utils.errors import InputError

LENGTHS = (2, 1, 3, 2, 1, 2)  # of turns, of which the first is an episode and the others are two


def rounds(turns: Any, scores: Any, own: Any, group: Any = None, order: Any = None) -> Trajectories:
    """A row for each turn of episodes of so many turns, of uneven lengths. own: rewards of turns, a list for each."""
    episode = np.repeat(np.arange(len(turns)), turns)
    first = np.concatenate([np.arange(n) for n in turns])
    N = len(episode)
    order = np.arange(N) if order is None else np.asarray(order)
    mask = np.arange(3) < np.asarray([LENGTHS[i % 6] for i in range(N)])[:, None]
    numbers = np.zeros(len(turns), int) if group is None else np.asarray(group)
    batch = batch_of(
        mask[order], np.asarray(scores, float)[episode][order], np.where(mask, -1.0, 0.0)[order],
        numbers[episode][order], turn_rewards=np.concatenate([np.asarray(x, float) for x in own])[order, None],
        info={"episode": episode[order].astype(float), "first_turn": first[order].astype(float)},
    )  # fmt: skip
    return batch.replace(turn=jnp.asarray(np.where(mask[order], 0, -1), jnp.int32))


def test_flow_grpo_worked_example_and_loop() -> None:
    """The card's: episodes of one and three turns, the first right."""
    batch = rounds([1, 3], [1.0, 0.0], [[0.0], [0.0, 0, 0]])
    wanted = [0.707106, -0.707106, -0.707106, -0.707106]
    np.testing.assert_allclose(advantages(get("flow_grpo"), batch)[:, 0], wanted, atol=1e-6)
    found = advantages(get("flow_grpo", preset="code"), batch)[:, 0]
    np.testing.assert_allclose(found, [1.499997, -0.499999, -0.499999, -0.499999], atol=3e-6)
    random = np.random.default_rng(2)
    logp = np.where(np.asarray(batch.action_mask), -1 + 0.3 * random.normal(size=(4, 3)), 0.0)

    def clipped(i: int) -> list[float]:
        ratio, A = np.exp(logp[i, : LENGTHS[i]] + 1), wanted[i]
        return [min(r * A, min(max(r, 0.8), 1.3) * A) for r in ratio]

    loop = -(np.mean(clipped(0)) + np.mean([np.mean(clipped(i)) for i in (1, 2, 3)])) / 2
    assert loss_of(get("flow_grpo", kl_coefficient=0.0), batch, logp) == pytest.approx(loop, abs=1e-6)


def test_flow_grpo_of_turns_in_one_row() -> None:
    """The same turns with one context have the same loss."""
    logp = np.array([[-1.2, -0.9, 0, 0, 0, 0, 0], [-0.8, -1.1, -1.3, -0.7, -1.2, -1.0, 0]])
    mask = logp != 0
    turn = np.array([[0, 0, -1, -1, -1, -1, -1], [0, 1, 1, 1, 2, 2, -1]])
    whole = batch_of(mask, [1.0, 0.0], np.where(mask, -1.0, 0.0)).replace(turn=jnp.asarray(turn, jnp.int32))
    apart = rounds([1, 3], [1.0, 0.0], [[0.0], [0.0, 0, 0]])
    split = np.array([[-1.2, -0.9, 0], [-0.8, 0, 0], [-1.1, -1.3, -0.7], [-1.2, -1.0, 0]])
    one = loss_of(get("flow_grpo", kl_coefficient=0.0), whole, logp)
    assert one == pytest.approx(loss_of(get("flow_grpo", kl_coefficient=0.0), apart, split), abs=1e-6)


def test_flow_grpo_of_single_turns_is_grpo() -> None:
    batch, logp = random_batch(5)
    same = get("grpo", clip_high=0.3, kl_coefficient=0.0, average="sequence")
    mine = get("flow_grpo", kl_coefficient=0.0)
    np.testing.assert_allclose(advantages(mine, batch), advantages(same, batch), atol=1e-6)
    assert loss_of(mine, batch, logp) == pytest.approx(loss_of(same, batch, logp), abs=1e-6)


def returns_loop(r: list[float], gamma: float, matched: float) -> list[float]:
    out, R = [0.0] * len(r), 0.0
    for t in reversed(range(len(r))):
        R = r[t] + gamma * R
        out[t] = R if r[t] > matched else r[t]
        R = R if r[t] > matched else 0.0
    return out


def z(x: Any) -> Any:
    x = np.asarray(x, float)
    return (x - x.mean()) / (x.std(ddof=1) + 1e-6) if len(x) > 1 else x * 0


def test_ui_s1_worked_example_and_loop() -> None:
    """The card's returns, then advantages by a loop over the group's steps, whatever the order of the rows."""
    batch = rounds([4], [0.75], [[1, 0.1, 1, 1]])
    np.testing.assert_allclose(broken_returns()(batch)[:, 0], [1.0, 0.1, 1.5, 1.0], atol=1e-6)
    assert returns_loop([1, 0.1, 1, 1], 0.5, 0.8) == [1.0, 0.1, 1.5, 1.0]
    own = [[1, 1, 0.1], [0.55, 1], [1, 1, 1, 1], [0.0]]
    score, group = [0.5, 0.25, 1.0, 0.0], [0, 0, 0, 0]
    G = [returns_loop(r, 0.5, 0.8) for r in own]
    steps = [[g[t] for g in G if len(g) > t] for t in range(4)]
    of_step = [dict(zip([i for i, g in enumerate(G) if len(g) > t], z(x), strict=True)) for t, x in enumerate(steps)]
    of_rows = z([score[i] for i, r in enumerate(own) for _ in r])
    wanted = of_rows + np.array([of_step[t][i] for i, r in enumerate(own) for t in range(len(r))])
    turns = [len(r) for r in own]
    found = advantages(get("ui_s1"), rounds(turns, score, own, group))[:, 0]
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    order = [3, 9, 1, 4, 0, 2, 8, 6, 5, 7]
    found = advantages(get("ui_s1"), rounds(turns, score, own, group, order))[:, 0]
    np.testing.assert_allclose(found, wanted[order], atol=1e-5)
    half = advantages(get("ui_s1", step_weight=0.0, episode_weight=0.5), rounds(turns, score, own, group))[:, 0]
    np.testing.assert_allclose(half, 0.5 * of_rows, atol=1e-5)


def test_groups_that_vary_little_are_dropped() -> None:
    own = [[1, 1], [0.1, 1], [1, 1], [0.9, 1]]
    batch = rounds([2] * 4, [1.0, 0.5, 1.0, 1.0], own, [0, 0, 1, 1])
    G = [returns_loop(r, 0.5, 0.8) for r in own]
    spread = [np.std([*G[0], *G[1]], ddof=1), np.std([*G[2], *G[3]], ddof=1)]
    assert spread[1] < 0.3 < spread[0]
    weights = np.asarray(prepared(get("ui_s1"), batch).loss_weights)
    assert weights[:4].any(axis=1).all()
    assert not weights[4:].any()
    assert np.asarray(prepared(get("ui_s1", least_deviation=0.1), batch).loss_weights)[4:].any()


def test_what_does_not_fit() -> None:
    for name, options, said in (
        ("flow_grpo", {"over": "rows"}, "over"), ("flow_grpo", {"average": "slice"}, "average"),
        ("ui_s1", {"gamma": 2.0}, "gamma"), ("ui_s1", {"patches": -2}, "patches"), ("ui_s1", {"turns": 0}, "turns"),
        ("ui_s1", {"least_deviation": -1.0}, "least"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=said):
            get(name, **options)
