"""Proposers: what the policy is asked, what is read from its replies, and which proposals are left out."""

from __future__ import annotations

import pytest
from spoken import Spoken

from jaxrl_llm.texts import Answer, get, worked_example
from jaxrl_llm.texts.proposer import accepted, brief_of, fill_template, instruction_of, join_text, propose, split_text
from jaxrl_llm.utils.errors import InputError

ANSWERS = [Answer({"prompt": f"{n} + 1"}, f"It is {n + 1}.", float(n % 2)) for n in range(6)]


def test_texts_are_an_instruction_and_worked_examples() -> None:
    examples = [worked_example("1 + 1 ", " 2"), worked_example("2 + 2", "4\n\nreally")]
    text = join_text("Answer.", examples)
    assert text == "Answer.\n\nUser: 1 + 1\nAssistant: 2\n\nUser: 2 + 2\nAssistant: 4\n\nreally"
    assert split_text(text) == ("Answer.", examples)
    assert split_text(examples[0]) == ("", examples[:1])
    assert join_text("", examples[:1]) == examples[0]


@pytest.mark.parametrize(
    ("reply", "instruction"),
    [
        ('"Add the tens."', "Add the tens."),
        ("**Better instruction:** Add\nthe tens.\n\nWhy? Because.", "Add the tens."),
        ("\n\nInstructions: go", "go"),
        (' "" \n\n', ""),
        ("", ""),
    ],
)
def test_an_instruction_is_the_first_paragraph_of_a_reply(reply: str, instruction: str) -> None:
    assert instruction_of(reply) == instruction


def test_slots_are_filled_once_and_other_braces_stay() -> None:
    assert fill_template("{a} {b} {{c}} {d", a="{b}", b="x", c="y") == "{b} x {y} {d"


def test_in_words_the_policy_is_told_right_and_wrong_answers_and_examples_stay() -> None:
    example = worked_example("q", "a")
    engine = Spoken(reply=lambda question, number: ["Instruction: Be brief.", ""][number])
    brief = brief_of(join_text("Old.", [example]), ANSWERS, "It is known.")
    assert propose(engine, [brief], 2, "words", 1) == [join_text("Be brief.", [example]), ""]
    (asked,) = engine.asked
    for part in ("Old.", "It is known.", "- 1 + 1 -> It is 2.", "- 0 + 1 -> It is 1."):
        assert part in asked
    assert asked.index("It is 2.") < asked.index("Wrong") < asked.index("It is 1.")


def test_examples_are_right_answers_to_different_questions() -> None:
    engine = Spoken()
    brief = brief_of(join_text("Old.", [worked_example("q", "a")]), [*ANSWERS, ANSWERS[1]])
    (text,) = propose(engine, [brief], 1, "examples", 2)
    instruction, examples = split_text(text)
    assert instruction == "Old."
    assert len(set(examples)) == 2
    assert set(examples) <= {worked_example(f"{n} + 1", f"It is {n + 1}.") for n in (1, 3, 5)}
    assert propose(engine, [brief_of("Old.", ANSWERS[:1])], 1, "examples", 2) == [""]
    assert engine.asked == []


def test_both_alternate_and_proposals_are_counted() -> None:
    engine = Spoken(reply=lambda question, number: f"New {number}.", longest=40)
    found = propose(engine, [brief_of("Old.", ANSWERS)], 4, "both", 1)
    assert [bool(split_text(one)[1]) for one in found] == [True, False, True, False]
    kept = accepted(engine, [*found[1::2], " ", "Old.", found[1], "x" * 41], ["Old."])
    assert kept == ["New 0.", "New 1."]
    assert dict(engine.counts) == {"texts/proposed": 4, "texts/empty": 1, "texts/duplicates": 2, "texts/too_long": 1}


def test_a_template_without_its_slots_is_refused() -> None:
    with pytest.raises(InputError, match=r"the template rewrite is 'Go\.', without \{text\}: put it in"):
        get("polca", rewrite="Go.")
    with pytest.raises(InputError, match=r"the template judge is .*, without \{first\} and \{second\}"):
        get("spo_prompt", judge="{question}?")
    with pytest.raises(InputError, match="unknown by of polca"):
        get("polca", by="luck")
