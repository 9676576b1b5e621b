"""Training-Free GRPO: operations on the list of experiences, and the groups that teach."""

from __future__ import annotations

import math

import pytest
from spoken import Spoken, tasks

from jaxrl_llm.texts import Answer, Experience, get, worked_example
from jaxrl_llm.texts.methods.training_free_grpo import (
    Operation,
    consolidated,
    contrasts,
    operations_of,
    with_experiences,
)

BEFORE = [Experience("a"), Experience("b"), Experience("c")]


@pytest.mark.parametrize(
    ("reply", "after"),
    [
        ("ADD: d", "abcd"),
        ("- **MODIFY 2:** x\n", "axc"),
        ("modify 2: x\nMODIFY 2: y", "ayc"),
        ("DELETE 1", "bc"),
        ("DELETE 2\nMODIFY 2: x\nADD: a", "ac"),
        ("KEEP", "abc"),
        ("MODIFY 9: x\nDELETE 0", "abc"),
        ("ADD: d\nADD: e\nADD: f", "cdef"),
    ],
)
def test_operations_by_hand(reply: str, after: str) -> None:
    """The list after each of training_free_grpo's operations; of more than four lessons the newest stay."""
    operations = operations_of(reply)
    assert operations
    assert "".join(one.text for one in consolidated(BEFORE, operations, 4)) == after


def test_other_lines_are_no_operations() -> None:
    assert operations_of("I would ADD a lesson.\nKEEP going\nADD:") == []
    assert operations_of("KEEP.") == [Operation("keep")]


def test_only_groups_of_different_rewards_teach() -> None:
    def group(*rewards: float) -> list[Answer]:
        return [Answer({"prompt": "q"}, "x" * (9 - n), reward) for n, reward in enumerate(rewards)]

    assert contrasts([group(0, 0), group(1, 1), group(math.nan, 1), []]) == []
    ((best, worst),) = contrasts([group(1, 0, 1, math.nan, 0)])
    assert (best.reward, len(best.text), worst.reward, len(worst.text)) == (1, 7, 0, 5)


def test_the_policy_writes_lessons_from_summaries_of_both() -> None:
    def reply(question: str, number: int) -> str:
        if "in one sentence" in question:
            return f"by {question.split('Answer: ')[1][:5]}"
        return "ADD: Count." if "right (by right)" in question and "wrong (by wrong)" in question else "?"

    engine = Spoken(lambda text, question, sample: (("right", 1.0), ("wrong", 0.0))[sample], reply)
    method = get("training_free_grpo")
    state = method.step(method.init("Go."), tasks("q0", "q1"), engine)
    assert method.text(state) == "Go.\n1. Count."
    assert "Lessons so far:\nnone" in engine.asked[-1]
    state = method.step(state, tasks("q2"), engine)
    assert state.experiences == (Experience("Count."),)
    assert engine.counts["texts/unreadable"] == 0
    engine = Spoken(lambda text, question, sample: (str(sample), float(sample)), lambda question, number: "Hm.")
    assert method.step(state, tasks("q"), engine).experiences == state.experiences
    assert engine.counts["texts/unreadable"] == 1


def test_small_policies_learn_from_their_own_right_answers() -> None:
    def answer(text: str, question: str, sample: int) -> tuple[str, float]:
        return ("short" if "short" not in text else "s", 1.0) if sample == 1 else ("a long one", float(sample > 1))

    engine = Spoken(answer, samples=3)
    method = get("training_free_grpo", lessons="examples", most=2)
    state = method.step(method.init("Go."), tasks("q0"), engine)
    assert method.text(state) == f"Go.\n\n{worked_example('q0', 'short')}"
    state = method.step(state, tasks("q0", "q1", "q2"), engine)  # the first is replaced, and then the oldest left out
    assert [one.text for one in state.experiences] == [worked_example("q1", "s"), worked_example("q2", "s")]
    assert engine.asked == []


def test_lessons_are_listed_and_the_oldest_leave_where_there_is_no_room() -> None:
    example = worked_example("q", "a")
    assert with_experiences("Go.", [Experience("x"), Experience(example), Experience("y")]) == (
        f"Go.\n1. x\n2. y\n\n{example}"
    )
    engine = Spoken(
        lambda text, question, sample: (str(sample), float(sample)),
        lambda question, number: f"ADD: {question.split('Question: ')[1][:2] * 5}",
        longest=31,
    )
    method = get("training_free_grpo", summarise=False)
    state = method.step(method.init("Go."), tasks("q0", "q1", "q2"), engine)
    assert method.text(state) == "Go.\n1. q1q1q1q1q1\n2. q2q2q2q2q2"
    assert engine.counts["texts/too_long"] == 1
