"""Samples that are divided among the prompts of a step in rounds, against a loop; examples where none succeeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import fake_engine
import numpy as np
import pytest
from fake_engine import Ran, begin
from scipy import stats

from jaxrl_llm.core.rollout import Task
from jaxrl_llm.rollouts.adaptive import by_confidence, confidence_width, exploration_priority, in_rounds
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.guidance.repair import succeeds
from jaxrl_llm.rollouts.runtime.admission import Rule
from jaxrl_llm.utils.errors import InputError

Judge = Callable[[int, int], float | None]  # (prompt, sample number) -> reward


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> Callable[[Judge], None]:
    """Sets the reward of a sample."""

    def set_reward(judge: Judge) -> None:
        async def score(task: Task, episodes: Sequence[Episode]) -> list[Episode]:
            known = [judge(one.prompt_id, one.sample) for one in episodes]
            return [e.scored(float("nan") if r is None else r) for e, r in zip(episodes, known, strict=True)]

        monkeypatch.setattr(fake_engine, "score", score)

    return set_reward


def mixed(prompt: int, sample: int) -> float:
    """Prompt 0 is never solved, prompt 1 always, the others at random."""
    if prompt < 2:
        return float(prompt)
    return float(np.random.default_rng([prompt, sample]).random() < 0.4)


def test_the_worked_example() -> None:
    assert confidence_width(0.577350, 4) == pytest.approx(0.918693, abs=1e-6)
    assert confidence_width(0.577350, 5) == pytest.approx(0.716875, abs=1e-6)
    assert exploration_priority(0.577350, 4, 8, exploration=0) == pytest.approx(0.201818, abs=1e-6)
    assert exploration_priority(0.0, 4, 8) == pytest.approx(0.074115, abs=1e-6)
    assert exploration_priority(0.577350, 4, 8) == pytest.approx(0.275933, abs=1e-6)
    assert exploration_priority(7.0, 1, 8, 0.1) == pytest.approx(0.1 * np.log(9) ** 0.5), "the width of one is unknown"


def by_loop(rewards: list[list[float]], budget: int, exploration: float = 0.1, level: float = 0.05) -> list[int]:
    """Each sample goes where it is worth most, with quantiles and deviations of other functions."""
    count, spent = [len(one) for one in rewards], sum(len(one) for one in rewards)

    def worth(place: int) -> float:
        n, values = count[place], rewards[place]
        mean = sum(values) / max(len(values), 1)
        s = (sum((x - mean) ** 2 for x in values) / max(len(values) - 1, 1)) ** 0.5
        t = [float(stats.t.ppf(1 - level / 2, m - 1)) * s / m**0.5 if n > 1 else 0.0 for m in (n, n + 1)]
        return t[0] - t[1] + exploration * (np.log(1 + spent) / max(n, 1)) ** 0.5

    for _ in range(budget):
        best = max(worth(place) for place in range(len(rewards)))
        equal = [place for place in range(len(rewards)) if worth(place) > best - 1e-12]
        count[min(equal, key=lambda place: (count[place], place))] += 1
    return [n - len(one) for n, one in zip(count, rewards, strict=True)]


@pytest.mark.parametrize("exploration", [0.0, 0.1, 2.0])
def test_the_most_valuable_sample_comes_first(exploration: float) -> None:
    random = np.random.default_rng(5)
    for _ in range(10):
        rewards = [random.integers(0, 3, size=random.integers(2, 6)).tolist() for _ in range(6)]
        found = by_confidence(exploration)([np.asarray(one, float) for one in rewards], 11)
        assert list(found) == by_loop(rewards, 11, exploration)
    alike = [np.array([1.0, 1.0])] * 3
    assert by_confidence(exploration)(alike, 4) == [2, 1, 1], "ties go round"


@pytest.mark.parametrize("slots", [2, 1000])
def test_rounds_against_a_loop(judged: Callable[[Judge], None], slots: int) -> None:
    judged(mixed)
    program = in_rounds(by_confidence(0.1), 3, 2)
    found = Ran(begin(range(6), 8), Rule(), program, slots=slots).found.groups
    drawn = {prompt: [mixed(prompt, i) for i in range(3)] for prompt in range(6)}
    for budget in (15, 15):
        for prompt, more in zip(range(6), by_loop(list(drawn.values()), budget), strict=True):
            size = len(drawn[prompt])  # beyond the 8 samples of its task, the numbers of a prompt begin at 48
            drawn[prompt] += [mixed(prompt, i if i < 8 else 48 + i - 8) for i in range(size, size + more)]
    assert [[one.reward for one in group.episodes] for group in found] == list(drawn.values())
    assert sum(map(len, drawn.values())) == 48, "the samples of a step are as many as without rounds"
    assert len(drawn[0]) == len(drawn[1]) < 8 < max(map(len, drawn.values())), "what is certain gets fewer"


def test_two_groups_of_a_prompt_never_draw_the_same_sample(judged: Callable[[Judge], None]) -> None:
    """Whoever gets more than the task's samples."""
    judged(lambda prompt, sample: float(sample % 3 == 0))

    def divide(rewards: Sequence[np.ndarray], budget: int, favoured: int) -> list[int]:
        return [budget if i == favoured else 0 for i in range(len(rewards))]

    for favoured in (0, 1):
        ran = Ran(begin([7, 7], 6), Rule(), in_rounds(partial(divide, favoured=favoured), 2, 3))
        numbers = [request.sample for request in ran.requests]
        assert len(set(numbers)) == len(numbers) == 12
        assert [len(one.episodes) for one in ran.found.groups] == [10, 2][:: 1 - 2 * favoured]


def test_samples_without_a_score_say_nothing(judged: Callable[[Judge], None]) -> None:
    judged(lambda prompt, sample: None if prompt == 0 or sample == 1 else float(sample))
    seen: list[list[list[float]]] = []

    def divide(rewards: Sequence[np.ndarray], budget: int) -> list[int]:
        seen.append([one.tolist() for one in rewards])
        return by_confidence()(rewards, budget)  # type: ignore[return-value]

    found = Ran(begin(range(2), 4), Rule(), in_rounds(divide, 3, 1)).found
    assert seen == [[[], [0.0, 2.0]]], "once for all programs"
    assert not any(one.failed for one in found.groups)


def test_a_prompt_without_success_gets_examples(judged: Callable[[Judge], None]) -> None:
    judged(mixed)
    program = in_rounds(by_confidence(5.0), 2, 2, solved=succeeds(), column="shown", text="{} ")
    ran = Ran(begin(range(4), 4), Rule(), program, row={"shown": ["71 72", "81"], "prompt": "9"})
    groups = ran.found.groups
    for one in groups:
        rewards = [e.reward for e in one.episodes]
        for place, episode in enumerate(one.episodes):
            # Rounds begin with the samples after the first two; the fake engine's prompts are (i, 1).
            if episode.info["guided"]:
                assert place >= 2
                assert episode.prompt == (71, 72, 81, *one.task.prompt)
                assert episode.trained_prompt == one.task.prompt
                assert episode.info["off_prompt"] == 1.0
                assert not any(rewards[:2])
            else:
                assert episode.prompt == one.task.prompt
                assert episode.trained_prompt is None
        assert {e.info["unhinted"] for e in one.episodes} == {0.0}
    assert all(e.info["guided"] for e in groups[0].episodes[2:])
    assert len(groups[0].episodes) > 2
    assert not any(e.info["guided"] for e in groups[1].episodes)


def test_without_examples_the_prompt_stays_plain(judged: Callable[[Judge], None]) -> None:
    judged(lambda prompt, sample: 0.0)
    for row, context in (({}, 0), ({"solved_examples": []}, 0), ({"solved_examples": "1 2 3"}, 4)):
        rollout = in_rounds(by_confidence(), 2, 1, solved=succeeds())
        (one,) = Ran(begin([1], 4), Rule(), rollout, row=row, context=context).found.groups
        assert {e.info["unhinted"] for e in one.episodes} == {1.0}, "no examples, or no room for them"
        assert {e.prompt for e in one.episodes} == {(1, 1)}
        (off,) = Ran(begin([1], 4), Rule(), in_rounds(by_confidence(), 2, 1), row=row).found.groups
        assert [e.info["unhinted"] for e in off.episodes] == [0.0] * 4


def test_wrong_settings_are_named() -> None:
    with pytest.raises(InputError, match="first of in_rounds is 0, but must be at least 1"):
        in_rounds(by_confidence(), 0)
    with pytest.raises(InputError, match="level of by_confidence is 1, but must be above 0 and below 1"):
        by_confidence(0.1, 1)
    with pytest.raises(InputError, match="divide"):
        in_rounds(3)  # type: ignore[arg-type]
    assert (in_rounds(by_confidence()).demands.min_samples, in_rounds(by_confidence(), 5).demands.min_samples) == (3, 6)


def test_a_rule_that_loses_samples_is_refused(caplog: Any) -> None:
    found = Ran(begin(range(2), 4), Rule(), in_rounds(lambda rewards, budget: [0, 1])).found
    assert all(one.failed for one in found.groups)
    assert "divide gave [0, 1], but must give 2 prompts 2 samples" in caplog.text
