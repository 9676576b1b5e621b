"""Direct Advantage Policy Optimization: its loss by the worked example, and its states, lines and values."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batches import batch_of, outputs_of, prepared

from jaxrl_llm.algorithms import get

sys.path += [str(Path(__file__).resolve().parents[1] / "rollouts")]

import fake_engine
from fake_engine import Ran, begin

from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.runtime.admission import Rule
from jaxrl_llm.sampling.requests import Tokens

U = np.array([0.1, 0.0, -0.4])


@pytest.mark.parametrize(("beta", "expected"), [(0.5, 0.048333), (0.02, 72.528333)])
@pytest.mark.parametrize("length", [1, 4])
def test_direct_advantage_against_its_worked_example(beta: float, expected: float, length: int) -> None:
    """V = 0.8, 0.5, 0.2, so A = 0.3, 0, -0.3; u is a sum over the tokens, not their mean."""
    old = np.full((3, length), -1.0)
    algorithm = get("dapo_direct_advantage", beta=beta)
    batch = prepared(algorithm, batch_of(np.ones((3, length)), [0.8, 0.5, 0.2], old))
    np.testing.assert_allclose(batch.advantages[:, 0], [0.3, 0.0, -0.3], atol=1e-6)
    loss, _ = algorithm.objective(outputs_of(old + U[:, None] / length), batch)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


@pytest.mark.parametrize(("values", "kept"), [([0.5, 0.6, 0.5], True), ([0.5, 0.55, 0.5], False), ([1.0], False)])
def test_a_state_counts_if_its_values_differ_enough(values: Sequence[float], kept: bool) -> None:
    rows = len(values)
    batch = prepared(get("dapo_direct_advantage"), batch_of(np.ones((rows, 2)), values, -np.ones((rows, 2))))
    assert bool((np.asarray(batch.loss_weights) > 0).all()) is kept
    assert bool((np.asarray(batch.loss_weights) == 0).all()) is not kept


class Lines(fake_engine.Words):
    """Every third place is a line break."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join("\n" if one % 3 == 2 else "x" for one in ids)


def drawn(prompt: int, sample: int, first: int, last: int, step: int) -> Tokens:
    """Samples 1 and 2 write the same; places of a token count from the beginning of the response."""
    ids = np.asarray([300 * (1 if sample == 2 else sample) + place for place in range(first, last)], np.int32)
    zeros = np.zeros(len(ids), np.float32)
    return Tokens(ids, zeros, zeros, zeros, zeros, np.full(len(ids), step, np.int32))


@pytest.mark.parametrize("length", [8, 2])
def test_next_lines_of_a_state_with_the_mean_rewards_of_their_completions(
    monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """Lines of three tokens, or completions shorter than a line, whose value is their own reward."""
    seen: list[Episode] = []

    async def score(task: Any, episodes: Sequence[Episode]) -> list[Episode]:
        seen.extend(episodes)
        return [one.scored(float(one.sample % 2)) for one in episodes]

    monkeypatch.setattr(fake_engine, "score", score)
    monkeypatch.setattr(fake_engine, "Words", Lines)
    monkeypatch.setattr(fake_engine, "tokens_of", drawn)
    monkeypatch.setattr(fake_engine, "length_of", lambda prompt, sample: length)
    rollout = get("dapo_direct_advantage", continuations=3).rollout
    assert rollout is not None
    places = set()
    for prompt in range(1, 9):
        seen.clear()
        found = Ran(begin([prompt], 4), Rule(), rollout, limit=8).found.groups[0]
        assert not found.failed
        assert [one.sample for one in found.episodes] == [1, 3, 4], "the second is the first again"
        (place,) = {int((~one.actions).sum()) for one in found.episodes}
        places.add(place)
        for one in found.episodes:
            assert one.actions.tolist() == [False] * place + [True] * (one.size - place)
            assert one.own.token[:place].tolist() == list(range(place)), "of the solution, sample 0"
            assert one.size == min(place + 3, length)
            whole = [e for e in seen if e.tokens[: len(one.tokens)] == one.tokens]
            assert len(whole) == (1 if one.size == length else 3)
            assert all(bool(e.actions.all()) for e in whole), "rewards read the whole response"
            assert one.reward == pytest.approx(np.mean([e.sample % 2 for e in whole]))
    assert places == ({0} if length == 2 else {0, 3, 6})
