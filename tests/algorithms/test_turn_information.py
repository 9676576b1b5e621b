"""Credit by information: worked examples, slow loops, and the limits in which the methods are GRPO."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from batches import prepared, random_batch
from turn_episodes import assert_close, episodes, of_turns

from jaxrl_llm.algorithms import get
from jaxrl_llm.core.trajectory import Trajectories

BATCH, _ = random_batch(3)


def gaining(gains: list[list[float]], score: list[float], group: list[int] | None = None) -> Trajectories:
    """Episodes whose answer is more probable by so much after each turn but the last; NaN for those without answer."""
    batch = episodes([[1] * (len(row) + 1) for row in gains], [[0.0] * (len(row) + 1) for row in gains], score, group)
    logp = np.full(batch.state_key.shape, np.nan)
    for row, own in zip(logp, gains, strict=True):
        row[: len(own) + 1] = np.log(0.3 + np.cumsum([0.0, *own]))
    return batch.with_info(answer_logp=jnp.asarray(logp, jnp.float32))


def test_igpo_worked_example() -> None:
    p = np.exp([np.mean([-1.2, -0.7]), np.mean([-0.5, -0.3])])
    np.testing.assert_allclose([*p, p[1] - p[0]], [0.386741, 0.670320, 0.283579], atol=1e-6)
    batch = gaining([[0.1, 0.25], [-0.05]], [1.0, 0.0])
    transform = get("igpo_information_gain").transform
    wanted = [[1.327914, 1.700662, 1.723959], [-1.327914, -0.605715]]
    assert_close(of_turns(batch, transform), wanted, 1e-5)
    # The same with a discount, in another group, and a row without a score that counts in no moment.
    batch = gaining([[0.1, 0.25], [9.0], [-0.05]], [1.0, np.nan, 0.0])
    z = [[-0.372748, -0.023297, 1.723959], [0.0, 0.0], [-0.722199, -0.605715]]
    wanted = [[sum(0.5 ** (u - t) * row[u] for u in range(t, len(row))) for t in range(len(row))] for row in z]
    assert_close(of_turns(batch, get("igpo_information_gain", gamma=0.5).transform), wanted, 1e-5)


def test_igpo_without_an_answer_has_the_outcome_alone() -> None:
    batch = gaining([[0.1, 0.2], [0.3]], [1.0, 0.0])
    batch = batch.with_info(answer_logp=jnp.full(batch.state_key.shape, jnp.nan))
    half = 1 / np.sqrt(2)
    assert_close(of_turns(batch, get("igpo_information_gain").transform), [[half] * 3, [-half] * 2], 1e-5)


def test_igpo_of_one_turn_is_grpo() -> None:
    batch = BATCH.with_info(answer_logp=jnp.full((len(BATCH.group), 1), -1.0))
    found = prepared(get("igpo_information_gain"), batch).advantages
    np.testing.assert_allclose(found, prepared(get("grpo"), BATCH).advantages, atol=2e-6)


def informed(gains: list[list[float]], score: list[float], group: list[int] | None = None) -> Trajectories:
    """Episodes whose observations raise the mean log-probability of the next turn's two tokens by so much."""
    batch = episodes([[1] * (len(row) + 1) for row in gains], [[0.0] * (len(row) + 1) for row in gains], score, group)
    old, turn = np.full(batch.turn.shape, -1.0), np.asarray(batch.turn)
    blank = old.copy()
    for i, row in enumerate(gains):
        for k, gain in enumerate(row):
            first, second = np.flatnonzero(turn[i] == k + 1)
            blank[i, first], blank[i, second] = -1.0 - gain - 0.25, -1.0 - gain + 0.25
    return batch.replace(old_logp=jnp.asarray(old)).with_info(blanked_logp=jnp.asarray(blank))


def test_infopo_worked_example() -> None:
    """Four episodes of one observation each, of gains 0.8, 0.1, 0.3 and 0.2 for each of their first turn's tokens."""
    gains = np.asarray([0.8, 0.1, 0.3, 0.2])
    own = np.asarray([1.447347, -0.804082, -0.160816, -0.482449])
    # Each turn has two tokens with the same value, so that the unbiased deviation is that of eight.
    own *= np.sqrt((8 - 1) / 8 * 4 / 3)
    transform = get("infopo").transform
    batch = informed([[2 * x] for x in gains], [0.5] * 4)
    spread = np.std([*np.repeat(own, 2), *np.zeros(8)], ddof=1)
    assert spread < 1, "so that the scale is 1"
    assert_close(of_turns(batch, transform), [[0.1 * 0.5 * x, 0.0] for x in own], 2e-6)
    # Where outcomes differ the gate is shut.
    mixed = informed([[2 * x] for x in gains], [1.0, 0, 0, 0])
    outcome = np.asarray([1.499997, -0.499999, -0.499999, -0.499999])
    wanted = [[a + 0.1 * 4.53979e-05 * x, a] for a, x in zip(outcome, own, strict=True)]
    assert_close(of_turns(mixed, transform), wanted, 2e-6)


def loop(gains: list[list[float]], score: list[float], group: list[int], beta: float, heat: float) -> list[Any]:
    """InfoPO token by token: two of each turn."""
    out: list[Any] = [None] * len(gains)
    outer = {}
    for g in set(group):
        rows = [i for i in range(len(gains)) if group[i] == g]
        R = np.asarray([score[i] for i in rows])
        values = [x / 2 for i in rows for x in gains[i] if x for _ in range(2)]
        mean, std = (np.mean(values), np.std(values, ddof=1)) if len(values) > 1 else (0.0, 1.0)
        for i in rows:
            outer[i] = (score[i] - R.mean()) / (R.std(ddof=1) + 1e-6)
            own = [(x / 2 - mean) / (std + 1e-6) if x else 0.0 for x in [*gains[i], 0.0]]
            out[i] = (own, 1 / (1 + np.exp(R.std(ddof=1) / heat)))
    A = [outer[i] for i, (own, _) in enumerate(out) for _ in own for _ in range(2)]
    B = [x for own, _ in out for x in own for _ in range(2)]
    scale = min(1.0, max(np.std(A, ddof=1), 1.0) / np.std(B, ddof=1))
    return [[outer[i] + beta * gate * scale * x for x in own] for i, (own, gate) in enumerate(out)]


def test_infopo_is_the_loop() -> None:
    random = np.random.default_rng(1)
    gains = [list(random.normal(size=random.integers(3, 6)).round(2)) for _ in range(7)]
    gains[2][1] = 0.0
    score, group = [1.0, 0.9, 1.0, 0.0, 0.05, 0.0, 0.0], [0, 0, 0, 4, 4, 4, 4]
    wanted = loop(gains, score, group, 0.7, 0.05)
    found = of_turns(informed(gains, score, group), get("infopo", beta=0.7).transform)
    assert_close(found, wanted, 1e-5)


def test_infopo_without_gains_is_grpo() -> None:
    batch = BATCH.replace(old_logp=BATCH.behaviour_logp).with_info(blanked_logp=BATCH.behaviour_logp)
    found = prepared(get("infopo"), batch).advantages
    np.testing.assert_array_equal(found, prepared(get("grpo"), BATCH).advantages)
