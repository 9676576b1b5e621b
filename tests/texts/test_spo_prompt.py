"""SPO: the judge in both orders, its majority, and the winner that stays."""

from __future__ import annotations

import re

import pytest
from spoken import Spoken, tasks

from jaxrl_llm.texts import Verdicts, compare, get
from jaxrl_llm.texts.proposer import verdict

PAIRS = [(f"q{n}", "old", "new") for n in range(5)]


def prefers(word: str, but: int = 0) -> Spoken:
    """A judge for whom the answer with this word is better, except for the first `but` questions."""

    def reply(question: str, number: int) -> str:
        first = re.search("Answer A: (.*)", question)[1]  # type: ignore[index]
        for_it = not any(f"q{n}\n" in question for n in range(but))
        return "A" if (first == word) == for_it else "Answer B is better."

    return Spoken(reply=reply)


@pytest.mark.parametrize(
    ("reply", "letter"),
    [("A", "A"), ("b.", "B"), ("**B**: short", "B"), ("The answer is A", "A"), ("Answer B", "B"), ("", None),
     ("A better one is short", None), ("Both are good", None)],
)  # fmt: skip
def test_a_verdict_is_a_letter(reply: str, letter: str | None) -> None:
    assert verdict(reply) == letter


def test_votes_are_by_content_in_both_orders() -> None:
    engine = prefers("new")
    assert compare(engine, PAIRS, 4) == Verdicts(20, 0, 0)
    firsts = [re.search("Answer A: (.*)", one)[1] for one in engine.asked]  # type: ignore[index]
    assert sorted(firsts) == ["new"] * 5 + ["old"] * 5, "each pair in each order; two votes of either"
    assert compare(prefers("old"), PAIRS, 3) == Verdicts(0, 15, 0)


def test_a_judge_that_only_reads_places_decides_nothing() -> None:
    found = compare(Spoken(reply=lambda question, number: "A"), PAIRS, 4)
    assert found == Verdicts(10, 10, 0)
    assert not found.wins


def test_unreadable_verdicts_are_no_votes_and_equal_answers_are_not_asked_about() -> None:
    engine = Spoken(reply=lambda question, number: "Both." if number else "A")
    found = compare(engine, [*PAIRS, ("q", "same", "same")], 4)
    assert found == Verdicts(5, 5, 10)
    assert engine.counts == {"judge/verdicts": 20, "judge/unreadable": 10}


@pytest.mark.parametrize(("against", "wins"), [(1, True), (2, False), (3, False)])
def test_the_winner_stays_by_majority(against: int, wins: bool) -> None:
    """Of four questions, `against` are judged the other way; two and two is no majority."""
    judge = prefers("new", against)
    engine = Spoken(
        lambda text, question, sample: ("new" if text == "Better." else "old", 0.25),
        lambda question, number: "Better." if "instruction" in question else judge.replies([question])[0][0],
    )
    method = get("spo_prompt", votes=2)
    state = method.step(method.init("First."), tasks("q0", "q1", "q2", "q3"), engine)
    assert method.text(state) == ("Better." if wins else "First.")
    (best,) = state.candidates
    assert (best.total, best.count) == (1.0, 4)
    assert engine.counts["texts/accepted"] == wins
    assert len(engine.answered) == 8
