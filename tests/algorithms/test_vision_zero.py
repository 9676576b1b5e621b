"""Vision-Zero: rewards of a game by hand, who says and sees what, and stages and baselines against a loop."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batches import batch_of
from method_step import arrays, assert_matches_loop, learn

from jaxrl_llm.algorithms.agents.vision_zero import (
    clue_and_decision,
    clue_games,
    clue_rewards,
    vision_zero,
    vote_in,
    vote_reward,
)

sys.path += [str(Path(__file__).parents[1] / "rollouts")]
from speaking import TEMPLATES, run_agents, tokenizer_of


@pytest.mark.parametrize("seed", range(5))
def test_rewards_of_clues_are_those_of_a_loop(seed: int) -> None:
    random = np.random.default_rng(seed)
    votes, spy = random.integers(0, 6, 5).tolist(), int(random.integers(5))
    mean = sum(v for j, v in enumerate(votes) if j != spy) / 4
    expected = [
        -0.2 * (v - mean) if j == spy else 0.2 / 4 * (votes[spy] - mean) - 0.3 * (v - mean) for j, v in enumerate(votes)
    ]
    found = clue_rewards(votes, spy, 0.2, 0.3)
    np.testing.assert_allclose(found, expected, atol=1e-12)
    assert found.sum() == pytest.approx(0, abs=1e-12)


def test_votes() -> None:
    said = ("[[2]]", "[[player 2]]", "[[N/A]]", "[[1]]", "?", "[[12345]]")
    assert [vote_reward(vote_in(text), 1) for text in said] == [1.0, 1.0, -0.5, -1.0, -1.0, -1.0]


def test_a_game_is_played_by_its_rules() -> None:
    """Clues hear those before; all see their own scene; votes are of civilians, on all clues."""
    tokenizer, end = tokenizer_of("plain"), TEMPLATES["plain"][1]
    asked: dict[int, str] = {}

    def says(text: str, sample: int) -> str:
        asked[sample] = text
        return (f"clue {sample}" if sample >= 6 else ["[[1]]", "[[1]]", "[[n/a]]", "[[2]]", "?", "[[1]]"][sample]) + end

    row = {"prompt": "", "scene": "a red cube", "spy_scene": "a blue cube"}
    found, _ = run_agents(clue_games(3, 2), tokenizer, says, [row], samples=6)
    one = found.groups[0]
    kinds = [int(episode.info.get("part", 0)) for episode in one.episodes]
    assert kinds == [0] * 6 + [1] * 4 + [2] * 2
    sees_blue = [sample for sample in range(6, 12) if "a blue cube" in asked[sample]]
    spy = (sees_blue[0] - 6) % 3
    assert sees_blue == [6 + spy, 9 + spy]
    for sample in range(6, 12):
        assert [f"clue {before}" in asked[sample] for before in range(6, 12)] == [
            before < sample for before in range(6, 12)
        ]
    for sample in range(6):
        assert all(f"clue {clue}" in asked[sample] for clue in range(6, 12))
        assert "a red cube" in asked[sample]
    votes = [3, 1, 0]
    expected = clue_rewards(votes, spy)
    assert [episode.reward for episode in one.episodes[6:]] == pytest.approx(
        [expected[p] for _ in range(2) for p in range(3) if p != spy] + [expected[spy]] * 2
    )
    named = [0, 0, None, 1, -1, 0]
    assert [episode.reward for episode in one.episodes[:6]] == [vote_reward(vote, spy) for vote in named]
    assert clue_games(3, 2).demands.max_episodes(6) == 12  # type: ignore[misc]


def rows_of(random: np.random.Generator, right: float, unknown: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rewards, kinds and groups of two games with four votes, four clues of civilians and two of a spy each."""
    kind = np.tile([0] * 4 + [1] * 4 + [2] * 2, 2)
    drawn = random.random(20)
    votes = np.where(drawn < right, 1.0, np.where(drawn < right + unknown, -0.5, -1.0))
    reward = np.where(kind == 0, votes, random.normal(size=20).round(3))
    return reward, kind, np.repeat(np.arange(6), [4, 4, 2, 4, 4, 2])


def test_stages_baselines_and_the_switch() -> None:
    """Against a loop over forty updates, in which the votes become good, unknown and good again."""
    random = np.random.default_rng(0)
    transform = clue_and_decision(0.7, 0.6, 0.8, 0.4, 0.5, 0.2, 2)
    state: Any = transform.init()
    clues, since, b, acc, na, weight, stages = True, 0, {1: 0.0, 2: 0.0}, 0.0, 0.0, 0.0, []
    for update in range(40):
        right, unknown = ((0.9, 0.05), (0.2, 0.7), (1.0, 0.0))[update // 13 if update < 39 else 2]
        reward, kind, group = rows_of(random, right, unknown)
        reward[0] = np.nan  # a vote that is not scored
        one = np.ones((20, 1))
        given = random.normal(size=(20, 1))
        batch = batch_of(
            one, reward, -one, group, advantages=given.astype(np.float32), info={"part": kind.astype(np.float32)}
        )
        state, ready = transform.apply(state, batch)
        for role in (1, 2):
            b[role] = 0.7 * b[role] + 0.3 * np.mean([r for r, k in zip(reward, kind, strict=True) if k == role])
        for i in range(20):
            wanted = given[i, 0] if kind[i] == 0 else reward[i] - b[int(kind[i])]
            assert float(ready.advantages[i, 0]) == pytest.approx(0 if np.isnan(reward[i]) else wanted, abs=1e-5)
            assert float(ready.loss_weights[i, 0]) == float((kind[i] != 0) == clues)
        stages.append(clues)
        votes = [r for r, k in zip(reward, kind, strict=True) if k == 0 and not np.isnan(r)]
        acc = 0.6 * acc + 0.4 * np.mean([r == 1 for r in votes])
        na = 0.6 * na + 0.4 * np.mean([r == -0.5 for r in votes])
        weight, since = 0.6 * weight + 0.4, since + 1
        a, n = acc / weight, na / weight
        said: Any = ready.controls
        assert [float(said["stage/accuracy"]), float(said["stage/unknown"])] == pytest.approx([a, n], abs=1e-5)
        change = (1 - a >= 0.4 or n >= 0.5) if clues else (a >= 0.8 and n <= 0.2)
        if change and since >= 2:
            clues, since = not clues, 0
    assert {True, False} == set(stages)
    assert stages[0]
    assert sum(x != y for x, y in pairwise(stages)) >= 2, "back and forth"


@pytest.mark.parametrize("start", ["clues", "decisions"])
def test_the_loss_is_the_loop(start: Any) -> None:
    random = np.random.default_rng(2)
    reward, kind, group = rows_of(random, 0.5, 0.2)
    mask = np.arange(4) < random.integers(1, 5, 20)[:, None]
    old = np.where(mask, -random.gamma(2.0, 0.5, mask.shape), 0).astype(np.float32)
    reference = old + 0.1 * random.normal(size=mask.shape).astype(np.float32) * mask
    batch = batch_of(mask, reward, old, group, reference_logp=reference, info={"part": kind.astype(np.float32)})
    logp = old + 0.1 * random.normal(size=mask.shape)
    x = arrays(batch)
    A = x.advantages(ddof=0)[:, 0]
    for role in (1, 2):
        own = kind == role
        A[own] = reward[own] - 0.05 * reward[own].mean()
    rows = np.flatnonzero((kind != 0) == (start == "clues"))

    def loop(new: np.ndarray) -> float:
        total = 0.0
        for i in rows:
            kl = sum(
                np.exp(x.reference[i, t] - new[i, t]) - 1 - x.reference[i, t] + new[i, t]
                for t in np.flatnonzero(mask[i])
            )
            total += -A[i] * float(new[i][mask[i]].sum()) + 0.3 * float(kl)
        return total / len(rows)

    assert_matches_loop(learn(vision_zero(kl_coefficient=0.3, start=start), batch, logp), loop, logp, 1e-5)
