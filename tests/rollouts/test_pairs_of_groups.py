"""The best and the worst of a group, win rates within it, and opponents, against loops."""

from __future__ import annotations

import fake_engine
import numpy as np
import pytest
from fake_engine import Ran, begin, length_of
from test_judged import PAIRS as TEMPLATE
from test_judged import Speaker, biased, scripted

from jaxrl_llm.algorithms.online_preferences.sppo import ends_by_win_rate
from jaxrl_llm.core.rollout import Rollout
from jaxrl_llm.rewards.specs import JUDGE
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.judges.comparisons import pair_judge
from jaxrl_llm.rollouts.judges.judged import by_win_rate, judged
from jaxrl_llm.rollouts.pairs import (
    against_opponent,
    best_and_worst_of,
    best_and_worst_place,
    bradley_terry,
    higher,
    rates_of,
    with_win_rates,
)
from jaxrl_llm.rollouts.runtime.admission import Rule


def episodes_of(rollout: Rollout, samples: int = 4) -> list[Episode]:
    (one,) = Ran(begin([3], samples), Rule(), rollout).found.groups
    assert not one.failed
    return one.episodes


def test_rates_by_loop() -> None:
    scores = [2.0, 0.5, float("nan"), 2.0, -1.0]
    for oracle, win in ((bradley_terry, lambda d: 1 / (1 + np.exp(-d))), (higher, lambda d: (1 + np.sign(d)) / 2)):
        for itself in (False, True):
            found = rates_of(scores, oracle, itself)
            for i, own in enumerate(scores):
                wins = [win(own - other) for j, other in enumerate(scores) if j != i and not np.isnan(other)]
                wins += [0.5] if itself else []
                assert found[i] == pytest.approx(np.mean(wins), nan_ok=True), (oracle, itself, i)
    card = rates_of([2, 1, 0.5, 0, -1], bradley_terry, itself=True)
    np.testing.assert_allclose(card, [0.776401, 0.600651, 0.5, 0.399349, 0.223599], atol=1e-6)
    assert np.isnan(rates_of([1.0], higher)).all()


def test_ends_of_scores_are_two_places() -> None:
    nan = float("nan")
    assert best_and_worst_place([nan, nan, nan]) == (0, 1)
    assert best_and_worst_place([nan, 1.0, nan, 2.0]) == (3, 1)
    with_one = best_and_worst_place([nan, nan, 1.0])
    assert with_one[0] == 2
    assert with_one[1] != 2


def test_the_best_and_the_worst_of_a_group_are_a_pair() -> None:
    lengths = [float(min(length_of(3, i), 64)) for i in range(6)]
    found = episodes_of(best_and_worst_of(), 6)
    assert [one.sample for one in found] == [int(np.argmax(lengths)), int(np.argmin(lengths))]
    assert [one.reward for one in found] == [max(lengths), min(lengths)]
    assert found[0].info["rollout/sampled_reward"] == pytest.approx(np.mean(lengths))
    assert best_and_worst_of().rows(6) == 2


def test_win_rates_of_rewards_and_of_a_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [float(min(length_of(3, i), 64)) for i in range(4)]
    found = episodes_of(with_win_rates(oracle=higher))
    np.testing.assert_allclose([one.info["win_rate"] for one in found], rates_of(lengths, higher))

    async def score(task: object, episodes: list[Episode]) -> list[Episode]:
        return [one.scored(10 * one.rewards[JUDGE], one.rewards) for one in episodes]

    monkeypatch.setattr(fake_engine, "Words", Speaker)
    monkeypatch.setattr(fake_engine, "score", score)
    own = judged(by_win_rate(pair_judge(scripted(lambda q: biased(q, 0.0)), TEMPLATE)))
    rates = [(1 + 1 + 0.5) / 3, 0.0, 1 / 3, (1 + 1 + 0.5) / 3]  # of the qualities 2, 1/2, 1 and 2
    found = episodes_of(with_win_rates(own))
    np.testing.assert_allclose([one.info["win_rate"] for one in found], rates)
    ends = episodes_of(ends_by_win_rate(own))
    assert [one.sample for one in ends] == [0, 1]
    np.testing.assert_allclose([one.info["win_rate"] for one in ends], [(3 * rates[0] + 0.5) / 4, 0.5 / 4])
    wrapped = ends_by_win_rate().wrap
    assert wrapped is not None
    assert wrapped(own).rows(4) == 2


def test_opponents_are_drawn_from_the_reference() -> None:
    ran = Ran(begin([3], 2), Rule(), against_opponent(trained=True))
    (one,) = ran.found.groups
    assert sorted(draws.reference for draws in ran.draws) == [False, True]
    assert [(e.sample, e.part, e.info["opponent"]) for e in one.episodes] == [
        (0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1),
    ]  # fmt: skip
    lengths = [min(length_of(3, i), 64) for i in range(4)]
    wins = [1 / (1 + np.exp(lengths[2 + i] - lengths[i])) for i in range(2)]
    np.testing.assert_allclose([e.info["win_rate"] for e in one.episodes], [*wins, *(1 - np.asarray(wins))])
    plain = episodes_of(against_opponent(), 2)
    assert [e.sample for e in plain] == [0, 1], "opponents are not trained on"
    np.testing.assert_allclose([e.info["win_rate"] for e in plain], wins)


def test_opponents_before_a_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    async def score(task: object, episodes: list[Episode]) -> list[Episode]:
        return [one.scored(one.rewards[JUDGE], one.rewards) for one in episodes]

    monkeypatch.setattr(fake_engine, "Words", Speaker)
    monkeypatch.setattr(fake_engine, "score", score)
    judge = pair_judge(scripted(lambda q: biased(q, 0.75)), TEMPLATE)
    found = episodes_of(against_opponent(judge, trained=True), 2)  # 2 against 1, 1/2 against 2
    assert [one.reward for one in found] == [1.0, 0.0, 0.0, 1.0]
    assert JUDGE in against_opponent(judge).provides
