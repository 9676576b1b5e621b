"""Judged groups: win rates without the judge's position bias, anchors, rubrics, and judges that state nothing."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import fake_engine
import numpy as np
import pytest
from fake_engine import Ran, Words, begin, resumed

from jaxrl_llm.core.rollout import Rollout, Task
from jaxrl_llm.rewards.judges.questions import Comparison, Grading
from jaxrl_llm.rewards.specs import JUDGE
from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.judges.answerers import FIRST, Answerer, answerer, policy
from jaxrl_llm.rollouts.judges.comparisons import pair_judge
from jaxrl_llm.rollouts.judges.judged import (
    Criterion,
    against_anchor,
    by_criteria,
    by_grade,
    by_win_rate,
    judged,
    judged_pairs,
    rubric_scores,
)
from jaxrl_llm.rollouts.registry import rollout_by_name
from jaxrl_llm.rollouts.runtime.admission import Rule
from jaxrl_llm.rollouts.runtime.collate import program_metrics
from jaxrl_llm.utils.errors import InputError

QUALITY = [2.0, 0.5, 1.0, 2.0]  # of samples 0 to 3
PAIRS, SINGLE = Comparison("{problem}|{first}|{second}"), Grading("{problem}|{response}|{criterion}")


class Speaker(Words):
    """The text of a completion is the quality of its sample, and a hash of what it is, by its first token."""

    chat_template = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [len(text), *map(len, text.split())]}

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        number = int(ids[0]) % 1000 // 100 if len(ids) else 9
        return f"{QUALITY[number]} by {number}"


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    async def score(task: Task, episodes: Sequence[Episode]) -> list[Episode]:
        return [one.scored(one.rewards[JUDGE], one.rewards) for one in episodes]

    monkeypatch.setattr(fake_engine, "Words", Speaker)
    monkeypatch.setattr(fake_engine, "score", score)


def scripted(says: Callable[[str], str | None], asked: list[str] | None = None) -> Answerer:
    async def answers(tools: Tools, task: Task, questions: Sequence[str], count: int, first: int) -> list[list[str]]:
        (asked if asked is not None else []).extend(questions)
        return [[said] * count if (said := says(one)) is not None else [] for one in questions]

    return Answerer(answers, "scripted")


def biased(question: str, bonus: float = 0.75) -> str:
    """Prefers what is better by more than it favours the place that is shown first."""
    first, second = (float(text.split()[0]) for text in question.split("|")[1:3])
    return "[[A]]" if first + bonus > second else "[[B]]"


def episodes_of(rollout: Rollout, **options: Any) -> list[Episode]:
    (one,) = Ran(begin([3], 4), Rule(), rollout, **options).found.groups
    assert not one.failed
    return one.episodes


def test_a_position_bias_is_measured_and_cancelled() -> None:
    """By hand: of the pairs 0-1, 0-2, 1-2, 1-3, 2-3 those apart by more than the bonus have a winner."""
    asked = list[str]()
    fair = judged(by_win_rate(pair_judge(scripted(lambda q: biased(q, bonus=0.75), asked), PAIRS)))
    ran = Ran(begin([3], 4), Rule(), fair)
    rewards = [one.reward for one in ran.found.groups[0].episodes]
    # 0 and 3 (2.0) beat 1 (0.5) and 2 (1.0) in both orders; 1-2 and 0-3 are whoever is first.
    assert rewards == pytest.approx([(1 + 1 + 0.5) / 3, (0.5 + 0 + 0) / 3, (0.5 + 0 + 0) / 3, (1 + 1 + 0.5) / 3])
    assert len(asked) == 2 * 6
    metrics = program_metrics(ran.found.groups)
    assert metrics["judge/position_bias"] == pytest.approx(2 / 6), "two of six pairs go to the first in both orders"
    assert metrics["judge/consistent"] == pytest.approx(4 / 6)
    assert metrics["judge/ties"] == pytest.approx(2 / 6)
    assert (metrics["judge/asked"], metrics["judge/unparsed"]) == (12, 0)
    blind = episodes_of(judged(by_win_rate(pair_judge(scripted(lambda q: "[[A]]"), PAIRS))))
    assert [one.reward for one in blind] == [0.5] * 4, "a judge that reads nothing but places says nothing"
    assert blind[0].info["judge/position_bias"] == 1.0


def test_several_answers_are_averaged_and_missing_ones_counted() -> None:
    said = iter(["[[A]]", "[[B]]", "none", "[[B]]", "[[B]]", "[[A]]"])

    async def answers(tools: Tools, task: Task, questions: Sequence[str], count: int, first: int) -> list[list[str]]:
        return [[next(said) for _ in range(count)] for _ in questions]

    rollout = judged(against_anchor("best", pair_judge(Answerer(answers, "s"), PAIRS, samples=3)))
    (one,) = Ran(begin([3], 1), Rule(), rollout, row={"best": "1.0"}).found.groups
    assert one.episodes[0].reward == pytest.approx((0.5 + 1 - 1 / 3) / 2)
    assert one.episodes[0].info["judge/unparsed"] == pytest.approx(1 / 6)


def test_a_judge_that_never_states_a_verdict_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    rollout = judged(by_win_rate(pair_judge(scripted(lambda q: "I like both."), PAIRS)))
    with caplog.at_level(logging.WARNING, "jaxrl_llm.rollouts"):
        ran = Ran(begin([3, 4], 3), Rule(), rollout)
    assert all(math.isnan(one.score) for group in ran.found.groups for one in group.episodes), "not 0 in silence"
    lines = [record.getMessage() for record in caplog.records if "no verdict" in record.getMessage()]
    assert len(lines) == 1
    assert "I like both." in lines[0]
    assert program_metrics(ran.found.groups)["judge/unparsed"] == 1
    some = judged(by_grade(scripted(lambda q: None if "by 1" in q else "[[5]]"), SINGLE, samples=2))
    found = [one.score for one in episodes_of(some)]
    assert math.isnan(found[1]), "of a question without an answer"
    assert program_metrics(Ran(begin([3], 4), Rule(), some).found.groups)["judge/unparsed"] == 1


def test_other_rewards_do_not_score_what_the_judge_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    async def with_another(task: Task, episodes: Sequence[Episode]) -> list[Episode]:
        return [one.scored(float(np.nansum([one.rewards[JUDGE], 1.0])), one.rewards) for one in episodes]

    monkeypatch.setattr(fake_engine, "score", with_another)
    some = judged(by_grade(scripted(lambda q: "none" if "by 1" in q else "[[yes]]"), SINGLE))
    found = [one.score for one in episodes_of(some)]
    assert math.isnan(found[1])
    assert found[:1] + found[2:] == [2.0] * (len(found) - 1)


def test_rubrics_of_a_column_and_constraints() -> None:
    def says(question: str) -> str:
        _, response, criterion = question.split("|")
        return "[[yes]]" if criterion in response or criterion == "any" else "[[no]]"

    row = {"rubric": ["any", {"criterion": "2.0", "weight": 3}, {"criterion": "by 3", "weight": -2}]}
    found = episodes_of(judged(by_criteria("rubric", scripted(says), SINGLE)), row=row)
    assert [one.reward for one in found] == pytest.approx([1.0, 0.25, 0.25, 0.5])
    every = episodes_of(judged(by_criteria(["any", Criterion("2.0")], scripted(says), SINGLE, every=True)))
    assert [one.reward for one in every] == [1, 0, 0, 1]
    marks = np.array([[1.0, np.nan], [0.0, 1.0]])
    np.testing.assert_array_equal(rubric_scores(marks, [1, -1]), [np.nan, 0.0])
    np.testing.assert_array_equal(rubric_scores(marks, [1, -1], every=True), [np.nan, 0.0])
    for wrong in ([], [{"weight": 1}], [Criterion("bad", -1.0)]):
        with pytest.raises(InputError, match="criteria"):
            by_criteria(wrong)
    (failed,) = Ran(begin([3], 4), Rule(), judged(by_criteria("rubric", scripted(says), SINGLE))).found.groups
    assert failed.failed, "a row without a rubric"


def test_the_policy_answers_in_the_engine_and_is_replayed_from_the_log() -> None:
    """Samples are those of a plain group; a judge's questions have later numbers, and are not among the episodes."""

    def verdict(text: str) -> float | None:
        return float(len(text) % 2)

    rollout = judged(by_win_rate(pair_judge(policy(tokens=3), Comparison(PAIRS.template, verdict), samples=2)))
    ran = Ran(begin([3], 3), Rule(), rollout)
    assert [one.sample for one in ran.found.groups[0].episodes] == [0, 1, 2]
    numbers = [request.sample for request in ran.requests if request.limit <= 3]
    assert sorted(numbers) == list(range(FIRST, FIRST + 2 * 2 * 3))
    whole = {one.task.prompt_id: one.episodes for one in Ran(begin([3, 5], 3), Rule(), rollout).found.groups}
    parts = resumed(begin([3, 5], 3), rollout)
    for prompt in (3, 5):
        assert [one.reward for one in parts[prompt]] == [one.reward for one in whole[prompt]]


def test_equal_texts_are_ties_and_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()

    class Same(Speaker):
        def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
            return "2.0" if int(ids[0]) % 1000 // 100 < 2 else "1.0"

    monkeypatch.setattr(fake_engine, "Words", Same)
    rollout = judged(by_win_rate(pair_judge(scripted(biased, asked), PAIRS)))
    found = [one.reward for one in episodes_of(rollout)]
    assert found == pytest.approx([2.5 / 3, 2.5 / 3, 0.5 / 3, 0.5 / 3])
    assert len(asked) == 2, "one pair of different texts, in two orders"


def test_judges_by_name() -> None:
    rollout = rollout_by_name("judged_anchor(best, reference, 2)")
    assert rollout.columns == ("best",)
    assert rollout.demands.reference
    assert JUDGE in rollout.provides
    assert not judged_pairs().demands.reference
    assert answerer("http://h/v1#m").name == "m at http://h/v1"
    assert answerer("a/model").name == "a/model"
    with pytest.raises(InputError, match="judge is"):
        answerer(" ")
