"""Second questions about a problem as groups of their own: predictions, judgements and corrections."""

from __future__ import annotations

import re
from typing import Any

import fake_engine
import numpy as np
import pytest
from fake_engine import Ran, Words, begin, length_of, resumed
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from jaxrl_llm.rollouts.auxiliary_prompts import (
    Prediction,
    Question,
    agreement,
    boxed,
    prediction_of,
    recycled,
    recycled_items,
    stated_answer,
    with_predictions,
)
from jaxrl_llm.rollouts.programs import group
from jaxrl_llm.rollouts.runtime.admission import Rule
from jaxrl_llm.rollouts.runtime.collate import to_batch
from jaxrl_llm.sampling.sampler import SamplingConfig
from jaxrl_llm.utils.errors import InputError

many = settings(max_examples=100, deadline=None, derandomize=True, database=None)


class Speaker(Words):
    """Encodes a text as its words' lengths; texts of completions are chosen by the tests, by prompt and sample."""

    said: Any = staticmethod(lambda number: f"it is {number}")
    chat_template = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [len(text), *map(len, text.split())]}

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        return str(type(self).said(int(ids[0]) % 1000 // 100 if len(ids) else 9))


@pytest.fixture
def speaker(monkeypatch: pytest.MonkeyPatch) -> type[Speaker]:
    class Own(Speaker):
        pass

    monkeypatch.setattr(fake_engine, "Words", Own)
    return Own


def test_a_prediction_is_read_line_by_line() -> None:
    text = "Hm.\nLength: 7\n**Length**: 40\nright: 9\nNotions: Circles, mass, , circle."
    assert prediction_of(text, 8) == Prediction(40, None, ("circle", "mass")), "nine of eight is no prediction"
    assert prediction_of("nothing", 8) == Prediction(None, None, None)
    assert prediction_of("Length: about 3\nRight: 0\nNotions:", 8) == Prediction(None, 0.0, None)


def test_the_agreement_of_the_worked_example() -> None:
    """A rate of 3/8 where 1/2 are right, one of two notions, and a length between those of right solutions."""
    right, lengths = [True, True, False, False], [10, 30, 5, 50]
    texts = ["by symmetry", "Symmetry and primes", "primes", "by primes"]
    found = agreement(Prediction(20, 3 / 8, ("symmetry", "prime")), "a problem", right, lengths, texts)
    assert found == pytest.approx(0.687447, abs=1e-6)
    rate = 3 * agreement(Prediction(None, 3 / 8, None), "a problem", right, lengths, texts)
    assert rate == pytest.approx(0.562341, abs=1e-6)
    assert 3 * agreement(Prediction(10, None, None), "", right, lengths, texts) == 0
    assert 3 * agreement(Prediction(10, None, None), "", right, lengths, texts, inclusive=True) == 1
    assert agreement(Prediction(None, None, ("prime",)), "Primes ...", right, lengths, texts) == 0, "in the problem"
    assert agreement(Prediction(20, None, None), "", [False] * 4, lengths, texts) == 0, "none is right"


def test_predictions_are_a_group_beside_the_solutions(speaker: type[Speaker]) -> None:
    speaker.said = staticmethod(lambda number: f"Length: {number}\nRight: 8\nNotions: right")
    ran = Ran(begin([3], 4), Rule(), with_predictions(2, success=0.0), row={"prompt": "a problem"})
    (plain,) = Ran(begin([3], 4), Rule(), group()).found.groups
    (one,) = ran.found.groups
    assert not one.failed
    solved, predicted = one.episodes[:4], one.episodes[4:]
    assert [e.own.token.tolist() for e in solved] == [e.own.token.tolist() for e in plain.episodes]
    assert [e.reward for e in solved] == [e.size for e in solved], "solutions keep the run's reward"
    assert len(predicted) == 2
    assert len({e.prompt for e in one.episodes}) == 2
    assert all(np.isnan(e.rewards["length"]) for e in predicted)
    lengths = [min(length_of(3, i), 64) for i in range(4)]
    for e in predicted:  # sample numbers 4 and 5; all solutions are right and contain the notion
        within = min(lengths) < int(e.own.token[0]) % 1000 // 100 < max(lengths)
        assert e.reward == pytest.approx((within + 1 + 1) / 3)
    batch = to_batch(ran.found.groups, SamplingConfig(), 0)
    np.testing.assert_array_equal(batch.group, [0, 0, 0, 0, 1, 1])
    np.testing.assert_array_equal(batch.prompt_id, [3] * 6)


def test_answers_that_responses_state() -> None:
    assert stated_answer(r"\boxed{1} then \boxed{\frac{1}{2}} .") == r"\frac{1}{2}"
    assert stated_answer("<answer> a b </answer> 7") == "a b"
    assert stated_answer("1,234.5 or -3/4") == "-3/4"
    assert stated_answer(r"\boxed{open 5") == "5"
    assert stated_answer("none") is None
    assert [boxed(t) for t in (r"\boxed{yes}", r"\boxed{\text{A}} ", r"\boxed{a b}", "yes")] == ["yes", "A", None, None]


@many
@drawn(st.integers(0, 10**6), st.lists(st.booleans(), min_size=1, max_size=6))
def test_items_have_the_labels_of_what_they_show(seed: int, right: list[bool]) -> None:
    """Response i states the answer 100 + i."""
    texts = [f"work, so 1{i:02d}" for i in range(len(right))]
    judge, reflect = recycled_items(np.random.default_rng(seed), "The problem", texts, right)
    assert judge is not None, "some response states an answer"
    shown = [int(number) - 100 for number in re.findall(r"\b1[0-9][0-9]\b", judge.text)]
    assert "The problem" in judge.text
    if judge.label in ("yes", "no"):
        (i,) = shown
        assert right[i] == (judge.label == "yes")
        assert not all(right) or i == 0
    else:
        first, second = shown
        assert (right[first], right[second]) == ((True, False) if judge.label == "A" else (False, True))
    assert (reflect is None) == all(right)
    if reflect is not None:
        (i,) = [int(number) - 100 for number in re.findall(r"\b1[0-9][0-9]\b", reflect.text)]
        assert not right[i]
        assert reflect.label is None


def test_the_shares_of_items() -> None:
    random, n = np.random.default_rng(0), 4000
    pairs = [recycled_items(random, "p", ["1", "2"], [True, False]) for _ in range(n)]
    labels = [judge.label for judge, _ in pairs if judge]
    assert np.mean([label in "AB" for label in labels]) == pytest.approx(0.7, abs=0.03)
    assert labels.count("yes") / n == pytest.approx(0.15, abs=0.02)
    assert labels.count("A") / n == pytest.approx(0.35, abs=0.03)
    whole = [recycled_items(random, "p", ["so 1"], [False])[1] for _ in range(n)]
    assert np.mean(["so 1" in item.text for item in whole if item]) == pytest.approx(0.5, abs=0.03)


def test_responses_without_an_answer() -> None:
    random = np.random.default_rng(0)
    judge, reflect = recycled_items(random, "p", ["no idea", "none"], [False, False], whole=0.0)
    assert judge is None
    assert isinstance(reflect, Question), "with the whole text, whatever the share"
    assert recycled_items(random, "p", ["no idea"], [True]) == (None, None)


def test_questions_about_responses_are_groups_of_their_own(speaker: type[Speaker]) -> None:
    speaker.said = staticmethod(lambda number: rf"I say \boxed{{{'yes' if number % 2 else 'no'}}}")
    row, flight = {"prompt": "p"}, begin([3, 4], 2)
    ran = Ran(flight, Rule(), recycled(share=1.0, success=1e9), row=row)
    for one in ran.found.groups:
        assert not one.failed
        assert [e.part for e in one.episodes] == [0, 0, 1, 1, 2, 2]
        judged, corrected = one.episodes[2:4], one.episodes[4:]
        # All are wrong, so that the right judgement is no: sample 2 says so.
        assert [e.reward for e in judged] == [1.0, 0.0]
        assert [e.reward for e in corrected] == [e.size for e in corrected]
        assert len({e.prompt for e in one.episodes}) == 3
        assert len({e.sample for e in one.episodes}) == 6
    np.testing.assert_array_equal(to_batch(ran.found.groups, SamplingConfig(), 0).group, np.repeat(np.arange(6), 2))
    easy = Ran(flight, Rule(), recycled(share=1.0, success=0.0), row=row).found.groups
    assert [e.part for one in easy for e in one.episodes] == [0, 0, 1, 1] * 2, "no correction where all are right"
    none = Ran(flight, Rule(), recycled(share=0.0), row=row).found.groups
    plain = Ran(flight, Rule(), group()).found.groups
    for a, b in zip(none, plain, strict=True):
        assert [e.own.token.tolist() for e in a.episodes] == [e.own.token.tolist() for e in b.episodes]


def test_a_resumed_program_asks_the_same(speaker: type[Speaker]) -> None:
    row = {"prompt": [{"role": "user", "content": "p"}]}
    Own = speaker
    Own.chat_template = "x"
    Own.apply_chat_template = lambda self, messages, **_: self(messages[-1]["content"])["input_ids"]
    for rollout in (recycled(share=0.5, success=3), with_predictions()):
        done = resumed(begin([2, 3], 3), rollout, row=row, limit=20)
        for one in Ran(begin([2, 3], 3), Rule(), rollout, row=row, limit=20).found.groups:
            assert [(e.prompt, e.own.token.tolist(), e.reward) for e in done[one.task.prompt_id]] == [
                (e.prompt, e.own.token.tolist(), e.reward) for e in one.episodes
            ]


def test_settings_out_of_range_are_named() -> None:
    with pytest.raises(InputError, match="share of recycled is 2, but must be at least 0 and at most 1"):
        recycled(share=2)
    with pytest.raises(InputError, match="base of with_predictions is 0, but must be"):
        with_predictions(base=0)
