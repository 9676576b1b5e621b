"""Programs that repair failed groups, and those with several prompts, over an engine that decodes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import fake_engine
import numpy as np
import pytest
from fake_engine import Ran, Words, begin, length_of
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.algorithms.guidance.icpo_in_context import reaches
from jaxrl_llm.core.rollout import Rollout, Task
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.guidance.hints import (
    Hints,
    beginnings,
    from_column,
    levels_of,
    list_in,
    own_hint,
    own_levels,
    problem_of,
)
from jaxrl_llm.rollouts.guidance.prompted import in_context, taught, with_budgets
from jaxrl_llm.rollouts.guidance.repair import HARDER, fenced, rescued, retried, rewritten, succeeds
from jaxrl_llm.rollouts.programs import group
from jaxrl_llm.rollouts.runtime.admission import Rule
from jaxrl_llm.rollouts.runtime.collate import program_metrics, to_batch
from jaxrl_llm.sampling.sampler import SamplingConfig
from jaxrl_llm.utils.errors import InputError

Judge = Callable[[Episode], float]
BARE: dict[str, Any] = {"text": "{}"}  # hints are written as they are
ROW = {"hint": ["7", "8", "9"], "solution": "1 2 3 4", "answer": "6"}


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> Callable[[Judge], None]:
    """Sets the reward of an episode."""

    def set_reward(judge: Judge) -> None:
        async def score(task: Task, episodes: Sequence[Episode]) -> list[Episode]:
            return [e.scored(judge(e), {"right": judge(e), "form": 0.5}) for e in episodes]

        monkeypatch.setattr(fake_engine, "score", score)

    return set_reward


def run(rollout: Rollout, samples: int = 4, row: dict[str, Any] | None = None, step: int = 0) -> list[Episode]:
    """The episodes of one group of prompt 5, whose token ids are (5, 1)."""
    (one,) = Ran(begin([5], samples, step), Rule(), rollout, row=ROW if row is None else row, step=step).found.groups
    assert not one.failed
    return one.episodes


def told(word: int, *, sample: int | None = None) -> Judge:
    """1 for episodes with this word last in their prompt, of one sample or all."""
    return lambda e: float(e.prompt[-1] == word and sample in (None, e.sample))


def plain(episodes: Sequence[Episode]) -> list[tuple[Any, ...]]:
    """What is the same as in a group."""
    return [(e.prompt, e.sample, e.own.token.tolist(), e.own.logp.tolist(), e.ended, e.truncated) for e in episodes]


REPAIRS = {
    "retried": lambda start=0: retried(from_column(**BARE), succeeds(), start=start),
    "plain": lambda start=0: retried(from_column(**BARE), succeeds(), plain=1, start=start),
    "rescued": lambda start=0: rescued(from_column(**BARE), succeeds(), start),
}


@pytest.mark.parametrize("name", REPAIRS)
def test_a_group_with_a_success_or_without_hints_stays_as_it_is(name: str, judged: Any) -> None:
    """So does one before the first step with hints: the episodes are those of the plain program."""
    expected = plain(run(group()))
    judged(lambda e: float(e.sample == 2))
    found = run(REPAIRS[name]())
    assert plain(found) == expected
    judged(lambda e: 0.0)
    for hintless in (run(REPAIRS[name](), row={}), run(REPAIRS[name](), row={"hint": []})):
        assert plain(hintless) == expected
        assert [(e.info["guided"], e.info["unhinted"]) for e in hintless] == [(0.0, 1.0)] * 4
    early = run(REPAIRS[name](3), step=2)
    assert [(e.info["guided"], e.info["unhinted"]) for e in early] == [(0.0, 0.0)] * 4
    assert {e.prompt for e in early} == {(5, 1)}
    assert {e.prompt for e in run(REPAIRS[name](3), step=3)} != {(5, 1)} or name == "rescued"


def test_hints_come_one_after_the_other_until_one_helps(judged: Any) -> None:
    judged(told(8, sample=9))
    ran = Ran(begin([5], 4), Rule(), REPAIRS["retried"](), row=ROW)
    episodes = ran.found.groups[0].episodes
    assert {e.prompt for e in episodes} == {(5, 1, 8)}, "the prompt with the hint is that of the update"
    assert [e.trained_prompt for e in episodes] == [None] * 4
    assert [e.sample for e in episodes] == [8, 9, 10, 11]
    assert [e.info["guided"] for e in episodes] == [1.0] * 4
    assert [e.reward for e in episodes] == [0.0, 1.0, 0.0, 0.0]
    assert [r.prompt[-1] for r in ran.requests] == [1] * 4 + [7] * 4 + [8] * 4, "the third hint is not used"
    judged(lambda e: 0.0)
    assert {e.prompt for e in run(REPAIRS["retried"]())} == {(5, 1, 9)}, "the last group is used as it is"


def test_a_group_in_which_all_succeed_is_made_harder(judged: Any) -> None:
    """Likewise, with texts of its own: until a sample fails. Groups that differ or fail know no such text."""
    rollout = retried(from_column(**BARE), succeeds(), harder=from_column("harder", **BARE))
    row = {**ROW, "harder": ["11", "22", "33"]}

    def judge(e: Episode) -> float:
        return float(e.prompt[-1] != 22 or e.sample == 9)

    judged(judge)
    ran = Ran(begin([5], 4), Rule(), rollout, row=row)
    found = ran.found.groups[0].episodes
    assert [r.prompt[-1] for r in ran.requests] == [1] * 4 + [11] * 4 + [22] * 4
    assert [e.prompt for e in found] == [(5, 1, 22)] * 4
    assert [e.reward for e in found] == [0.0, 1.0, 0.0, 0.0]
    assert [(e.info["harder"], e.info["guided"], e.info["unhinted"]) for e in found] == [(1.0, 0.0, 0.0)] * 4
    assert program_metrics(ran.found.groups)["rollout/harder"] == 1
    judged(lambda e: 1.0)
    assert {e.prompt for e in run(rollout, row=row)} == {(5, 1, 33)}, "the last group is used as it is"
    assert plain(run(rollout)) == plain(run(group())), "a row without such a text"
    assert plain(run(retried(from_column(**BARE), succeeds()), row=row)) == plain(run(group())), "no such rule"
    judged(lambda e: float(e.sample == 2))
    assert [e.info["harder"] for e in run(rollout, row=row)] == [0.0] * 4
    judged(told(7))
    failed = run(rollout, row=row)
    assert [(e.prompt[-1], e.info["guided"], e.info["harder"]) for e in failed] == [(7, 1.0, 0.0)] * 4
    assert rollout.columns == ("hint", "harder")
    with pytest.raises(InputError, match="retried's harder"):
        retried(from_column(), succeeds(), harder="harder")  # type: ignore[arg-type]


def test_the_policy_makes_a_solved_problem_harder(judged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Asked(Writes):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            asked.append(text)
            return super().encode(text, add_special_tokens)

    writing(monkeypatch, {8: "```\n3 3\n```"})
    monkeypatch.setattr(fake_engine, "Words", Asked)
    judged(lambda e: float(e.prompt == (5, 1) or e.sample == 10))
    found = run(rewritten(succeeds(), harder="9 {solution}"), samples=8)
    assert [(e.info["rewritten"], e.info["hard"]) for e in found] == [(1.0, 0.0)] * 8, "the old group teaches nothing"
    assert "9 6" in asked
    judged(lambda e: float(e.sample != 3 if e.prompt == (5, 1) else e.sample == 10))
    assert [e.info["rewritten"] for e in run(rewritten(succeeds(), harder=HARDER), samples=8)] == [0.0] * 8, "7 of 8"


def test_some_of_the_new_group_get_no_hint(judged: Any) -> None:
    judged(told(7))
    found = run(REPAIRS["plain"]())
    assert [e.prompt for e in found] == [(5, 1, 7)] * 3 + [(5, 1)]
    assert [e.info["guided"] for e in found] == [1.0] * 3 + [0.0]
    assert [e.sample for e in found] == [4, 5, 6, 7], "all are drawn anew"
    A = np.array([e.reward for e in found])
    np.testing.assert_allclose((A - A.mean()) / A.std(), [1 / 3**0.5] * 3 + [-(3**0.5)])
    assert [e.prompt for e in run(REPAIRS["plain"](), samples=1)] == [(5, 1, 7)]


@pytest.mark.parametrize(("helps", "level"), [({7, 9}, 7), ({8, 9}, 8), ({9}, 9), (set(), None)])
def test_the_weakest_hint_that_helps_rescues_one_sample(helps: set[int], level: int | None, judged: Any) -> None:
    judged(lambda e: float(e.prompt[-1] in helps))
    found = run(REPAIRS["rescued"]())
    assert plain(found)[1:] == plain(run(group()))[1:]
    assert found[0].prompt == ((5, 1) if level is None else (5, 1, level))
    assert [e.info["guided"] for e in found] == [float(level is not None), 0.0, 0.0, 0.0]
    A = np.array([e.reward for e in found])
    assert A.sum() == (level is not None)


def test_a_component_may_decide(judged: Any) -> None:
    judged(told(7))
    assert run(retried(from_column(**BARE), succeeds(0.4, "form")))[0].prompt == (5, 1), "0.5 for form"
    assert run(retried(from_column(**BARE), succeeds(0.4, "right")))[0].prompt == (5, 1, 7)
    with pytest.raises(InputError, match="accuracy is 'wrong', but the rewards are form, right: name one of them"):
        succeeds(0.0, "wrong")(Episode((1,)).scored(1.0, {"right": 1.0, "form": 0.5}))


def test_levels_of_a_column() -> None:
    assert levels_of([["a", "b"], ["c"]]) == ["a", "a\nb", "c"]
    assert levels_of("one") == ["one"]
    assert levels_of(None) == levels_of("") == levels_of([]) == []
    for wrong in (3, [3], [["a"], [3]]):
        with pytest.raises(InputError, match=r"hints are|a tier of hints"):
            levels_of(wrong)


def test_the_beginning_of_a_solution_grows(judged: Any) -> None:
    """A quarter, a half and three quarters of 7 characters, rounded."""
    judged(lambda e: 0.0)
    ran = Ran(begin([5], 2), Rule(), retried(beginnings(text=" {}"), succeeds()), row=ROW)
    found = [request.prompt[2:] for request in ran.requests[2::2]]
    assert found == [(1,), (1, 2), (1, 2, 3)]
    assert [r[: round(w * 7)] for w in (0.25, 0.5, 0.75) for r in ["1 2 3 4"]] == ["1 ", "1 2 ", "1 2 3"]


class Writes(Words):
    """A tokenizer whose decoder says what the policy writes: by the tenth part of the second of its token ids."""

    said: dict[int, str] = {}  # noqa: RUF012

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.said.get(ids[0] // 100 % 10, "") if ids else ""


def writing(monkeypatch: pytest.MonkeyPatch, said: dict[int, str]) -> None:
    """By the number of the sample."""
    monkeypatch.setattr(fake_engine, "Words", Writes)
    monkeypatch.setattr(Writes, "said", said)


def test_the_policy_writes_the_hints(judged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first answer cannot be read, the second has three levels, of which the second helps."""
    judged(told(22))
    writing(monkeypatch, {4: "no list", 5: 'So: ["11", "22", "33"]'})
    ran = Ran(begin([5], 4), Rule(), retried(own_levels(**BARE), succeeds()), row=ROW)
    episodes = ran.found.groups[0].episodes
    assert {e.prompt for e in episodes} == {(5, 1, 22)}
    assert [e.sample for e in episodes] == [11, 12, 13, 14], "after 4 samples, 3 answers and 4 with the first hint"
    asked = [r for r in ran.requests if r.prompt[:2] != (5, 1)]
    assert [r.sample for r in asked] == [4, 5]
    assert asked[0].prompt == asked[1].prompt
    writing(monkeypatch, {})
    found = run(retried(own_levels(**BARE), succeeds()))
    assert [e.info["unhinted"] for e in found] == [1.0] * 4
    assert run(retried(own_levels(**BARE), succeeds()), row={})[0].info["unhinted"] == 1.0


def test_the_policy_explains_before_it_hints(judged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    judged(told(77))
    writing(monkeypatch, {4: "why", 5: "77"})
    templates = {"explain": "1 {solution}", "template": "2 {solution} {explanation}"}
    ran = Ran(begin([5], 4), Rule(), retried(own_hint(**BARE, **templates), succeeds(), plain=1), row=ROW)
    assert [e.prompt for e in ran.found.groups[0].episodes] == [(5, 1, 77)] * 3 + [(5, 1)]
    assert [r.prompt for r in ran.requests if r.prompt[:2] != (5, 1)] == [(1, 6), (2, 6, 3)], "'why' has three letters"
    writing(monkeypatch, {4: "why", 5: " "})
    assert run(retried(own_hint(**BARE, **templates), succeeds()))[0].info["unhinted"] == 1.0


@given(st.lists(st.text(), max_size=4), st.text(max_size=5))
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_a_list_is_found_in_a_text(hints: list[str], before: str) -> None:
    text = before.replace("[", "") + json.dumps(hints) + "]]["
    whole = len(hints) > 0 and all(hint.strip() for hint in hints)
    assert list_in(text, len(hints)) == (hints if whole else [])
    assert list_in(text, len(hints) + 1) == []
    assert list_in("[" * 3000, 3) == []


def test_the_problem_of_a_row() -> None:
    assert problem_of({"prompt": "a"}) == problem_of({"prompt": [{"role": "user", "content": "a"}]}) == "a"
    assert problem_of({"prompt": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}) == "a"
    assert problem_of({"prompt": [1, 2]}) == problem_of({}) == ""


def test_an_example_is_in_the_prompt_that_is_sampled_but_not_in_the_row(judged: Any) -> None:
    judged(lambda e: 1.0)
    ran = Ran(begin([5], 4), Rule(), in_context(samples=2), row={"examples": ["33 44", "55 66"]})
    episodes = ran.found.groups[0].episodes
    assert [e.prompt for e in episodes][:2] == [(5, 1)] * 2
    assert {e.prompt for e in episodes[2:]} <= {(33, 44, 5, 1), (55, 66, 5, 1)}
    assert [e.info["guided"] for e in episodes] == [e.info["off_prompt"] for e in episodes] == [0.0, 0.0, 1.0, 1.0]
    batch = to_batch(ran.found.groups, SamplingConfig(top_p=0.9), 0)
    for row, e in enumerate(episodes):
        length = 2 + e.size
        assert batch.tokens[row, :length].tolist() == [5, 1, *e.own.token.tolist()]
        assert not batch.token_mask[row, length:].any()
        assert batch.action_mask[row].nonzero()[0].tolist() == [*range(2, length)]
        np.testing.assert_array_equal(batch.behaviour_logp[row, 2:length], e.own.logp)
        assert batch.support_floor is not None
        floor = batch.support_floor[row, 2:length]
        np.testing.assert_array_equal(floor, np.full(e.size, -np.inf) if row > 1 else e.own.floor)
    assert batch.info is not None
    assert batch.info["off_prompt"].tolist() == [0, 0, 1, 1]


def test_a_wrong_sample_with_an_example_gives_its_place(judged: Any) -> None:
    judged(lambda e: float(e.prompt[0] == 5))
    rollout, row = in_context(keep=reaches(1.0)), {"examples": "33 44"}
    found = run(rollout, row=row)
    assert [e.sample for e in found] == [0, 1, 2, 4]
    assert {e.prompt for e in found} == {(5, 1)}
    judged(lambda e: float(e.prompt[0] == 33))
    assert [e.prompt[0] for e in run(rollout, row=row)] == [5, 5, 5, 33]
    none = run(rollout, row={"examples": []})
    assert plain(none) == plain(run(group()))
    assert [e.info["unhinted"] for e in none] == [1.0] * 4
    assert rollout.demands.min_samples == 2


def test_an_episode_under_its_own_prompt_is_not_off_it() -> None:
    one = Episode((1, 2)).trained_under((1, 2))
    assert (one.trained_prompt, one.info["off_prompt"]) == (None, 0.0)
    assert Episode((1, 2)).trained_under([2]).trained_prompt == (2,)
    with pytest.raises(InputError, match="a prompt of at least one token"):
        one.trained_under(())


def test_budgets_are_told_in_equal_shares() -> None:
    rollout = with_budgets(10, 20, text="{} 3")
    assert [(e.prompt, e.info["budget"]) for e in run(rollout)] == [((5, 1, 10, 3), 10.0)] * 2 + [
        ((5, 1, 20, 3), 20.0)
    ] * 2
    assert [e.info["budget"] for e in run(rollout, samples=5)] == [10, 10, 10, 20, 20]
    assert rollout.demands.min_samples == 2
    with pytest.raises(InputError, match="with_budgets takes the budgets of tokens, but found none"):
        with_budgets()


def test_teachers_answer_where_all_fail(judged: Any) -> None:
    row = {"answer": "6", "teachers": [{"text": "2 3 6", "quality": 1}, {"text": "6 4 6 9", "quality": 2}, "x"][:2]}
    judged(lambda e: float(e.own.token[0] < 10))
    ran = Ran(begin([5], 4), Rule(), taught(succeeds(0.6)), row=row)
    found = ran.found.groups[0].episodes
    assert [e.sample for e in found] == [2, 3, 4, 5]
    assert [e.own.token.tolist() for e in found[2:]] == [[6, 4, 6, 9], [2, 3, 6]], "the best first"
    assert [e.info["guided"] for e in found] == [e.info["off_prompt"] for e in found] == [0, 0, 1, 1]
    assert [e.info["reference_span"] for e in found[2:]] == [[2.0, 3.0], [2.0, 3.0]]
    assert all(e.actions.all() and not e.own.logp.any() for e in found[2:])
    assert [e.reward for e in found[2:]] == [1.0, 1.0], "teachers are scored too"
    batch = to_batch(ran.found.groups, SamplingConfig(), 0)
    assert batch.action_mask[2, 2:6].all()
    one = run(taught(succeeds(0.6), most=1), row=row)
    assert [e.sample for e in one] == [1, 2, 3, 4]
    judged(lambda e: 1.0)
    assert plain(run(taught(succeeds(0.6)), row=row)) == plain(run(group()))
    judged(lambda e: 0.0)
    long = {"answer": "6", "teachers": ["1 " * 65]}
    nothing: dict[str, Any]
    for nothing in ({}, {"teachers": []}, long):
        assert [e.info["unhinted"] for e in run(taught(succeeds(0.6)), row=nothing)] == [1.0] * 4


def rewriting(monkeypatch: pytest.MonkeyPatch, judged: Any, right: int, new: int, text: str = "```\n3 3\n```") -> Any:
    """The episodes of 8 samples, so many of which are right, and so many of the new prompt's."""
    writing(monkeypatch, {8: text})
    judged(lambda e: float(e.sample < right if e.prompt == (5, 1) else e.sample - 9 < new))
    return run(rewritten(succeeds()), samples=8)


@pytest.mark.parametrize(("right", "kept", "hard", "asked"), [
    (0, False, 1, True), (2, True, 1, True), (4, True, 0, True), (7, True, 0, False), (8, True, 0, False),
])  # fmt: skip
def test_problems_are_graded_and_rewritten(
    right: int, kept: bool, hard: int, asked: bool, judged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example of the method: 0, 2, 4, 7 and 8 of 8 right are hard, hard, medium, easy and easy."""
    found = rewriting(monkeypatch, judged, right, 3)
    old, new = ([e for e in found if e.info["rewritten"] == one] for one in (0.0, 1.0))
    assert (len(old), len(new)) == (8 if kept else 0, 8 if asked else 0)
    assert {e.info["hard"] for e in found} == {float(hard)}
    assert {e.prompt for e in new} <= {(3, 3)}
    assert {e.prompt_id for e in found} == {5}


def test_a_rewritten_problem_must_teach_and_must_not_tell(judged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for new in (0, 8):
        found = rewriting(monkeypatch, judged, 0, new)
        assert [e.info["rewritten"] for e in found] == [0.0] * 8, "no group teaches: the old one stays"
    for text in ("3 3", "```\n\n```", "```\n3 6\n```"):
        found = rewriting(monkeypatch, judged, 2, 3, text)
        assert [(e.info["rewritten"], e.info["unhinted"]) for e in found] == [(0.0, 1.0)] * 8
    writing(monkeypatch, {8: "```\n3 3\n```"})
    judged(lambda e: float(e.sample < 2 or e.sample == 9))
    only = run(rewritten(succeeds(), which="medium_only"), samples=8)
    assert [(e.info["rewritten"], e.info["hard"]) for e in only] == [(0.0, 1.0)] * 8
    assert fenced("a\n```x\nb\n```\n```\nc\n```") == "b"
    assert fenced("```never closed\nb") == ""


PROGRAMS = {
    **{name: make() for name, make in REPAIRS.items()},
    "own": retried(own_levels(**BARE), succeeds()),
    "in_context": in_context(column="hint", keep=reaches(1.0)),
    "taught": taught(succeeds(), "hint"),
    "rewritten": rewritten(succeeds()),
    "with_budgets": with_budgets(3, 5),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_goes_on_from_its_log(name: str, judged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped every three tokens, over several steps, it returns what it returns in one."""
    writing(monkeypatch, {4: '["7", "8", "9"] \n```\n3 3\n```'})
    judged(lambda e: float(e.prompt[-1] in (8, 3) and e.sample % 2 == 0))
    (whole,) = Ran(begin([5], 4), Rule(), PROGRAMS[name], row=ROW).found.groups
    pool, steps = begin([5], 4), 0
    while pool:
        ran = Ran(pool, Rule(None, 3, train_unfinished=True), PROGRAMS[name], row=ROW)
        pool, steps = ran.pool, steps + 1
    (one,) = ran.found.groups
    assert steps > 1 + (name != "with_budgets")
    assert plain(one.episodes) == plain(whole.episodes)
    assert [(e.info, e.trained_prompt, e.reward) for e in one.episodes] == [
        (e.info, e.trained_prompt, e.reward) for e in whole.episodes
    ]


def test_groups_without_a_hint_are_counted(judged: Any) -> None:
    judged(lambda e: 0.0)
    ran = Ran(begin([5, 6], 2), Rule(), REPAIRS["retried"](), row={})
    assert program_metrics(ran.found.groups) == {"rollout/guided": 0.0, "rollout/unhinted": 1.0}
    ran = Ran(begin([5, 6], 2), Rule(), REPAIRS["retried"](), row=ROW)
    assert program_metrics(ran.found.groups) == {"rollout/guided": 1.0, "rollout/unhinted": 0.0}


def test_a_column_of_another_kind_fails_the_group() -> None:
    (one,) = Ran(begin([5], 2), Rule(), in_context(), row={"examples": 3}).found.groups
    assert one.failed
    with pytest.raises(InputError, match="retried's hints"):
        retried(from_column, succeeds())  # type: ignore[arg-type]
    with pytest.raises(InputError, match="a source of hints is 3"):
        Hints(3)  # type: ignore[arg-type]
    assert length_of(5, 0) > 0
