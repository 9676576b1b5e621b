"""Prompts that are the common beginning of two responses, and rows of preference data that are left out."""

from __future__ import annotations

from typing import Any

import pytest

from jaxrl_llm.data.columns import find
from jaxrl_llm.data.preference_rows import is_implicit, that_teach, with_prompt
from jaxrl_llm.utils.errors import InputError


def says(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt", "answers"),
    [
        ("Q I like tea", "Q I love tea", "Q I", (" like tea", " love tea")),  # not in the middle of the word
        ("Q: yes", "Q: no", "Q:", (" yes", " no")),
        ("Q yes", "Q yes sir", "Q", (" yes", " yes sir")),
        ("Q yes", "Q yes", "Q", (" yes", " yes")),
        ("Q\n\n A: it is", "Q\n\n A: it was", "Q\n\n A: it", (" is", " was")),
        ("Q  yes ", "Q  yes", "Q", ("  yes ", "  yes")),
    ],
)
def test_of_texts(chosen: str, rejected: str, prompt: str, answers: tuple[str, str]) -> None:
    found = with_prompt({"chosen": chosen, "rejected": rejected}, "row 1")
    assert (found["prompt"], found["chosen"], found["rejected"]) == (prompt, *answers)


def test_of_messages() -> None:
    hi, yes, no, more = says("user", "hi"), says("assistant", "yes"), says("assistant", "no"), says("user", "and?")
    cases = [
        ([hi, yes], [hi, no], [hi]),
        ([hi, yes], [hi, yes], [hi]),
        ([hi, yes, more, yes], [hi, yes, more, no], [hi, yes, more]),
        ([hi, yes, more, no], [hi, no], [hi]),
        ([hi, yes, more, no], [hi, yes], [hi]),
        ([hi, yes, more, no], [hi, yes, says("user", "why?"), no], [hi]),
        ([says("user", "hi", name=None), yes], [hi, no], [says("user", "hi", name=None)]),
    ]
    for chosen, rejected, prompt in cases:
        found = with_prompt({"chosen": chosen, "rejected": rejected}, "row 1")
        assert (found["prompt"], found["chosen"]) == (prompt, chosen[len(prompt) :])
        assert found["rejected"] == rejected[len(prompt) :]


def test_which_rows_have_implicit_prompts() -> None:
    talk = [says("user", "hi"), says("assistant", "yes")]
    assert is_implicit({"chosen": "a b", "rejected": "a c"})
    assert is_implicit({"prompt": "hi", "chosen": talk, "rejected": talk}), "as in UltraFeedback"
    assert not is_implicit({"prompt": "hi", "chosen": "a b", "rejected": "a c"})
    assert not is_implicit({"prompt": talk[:1], "chosen": talk[1:], "rejected": talk[1:]})
    found = find({"chosen": "a b", "rejected": "a c"}, "row 1", None, None)
    assert (found.prompt, found.answer) == ("a", {"chosen": " b", "rejected": " c"})


@pytest.mark.parametrize(("chosen", "rejected"), [("yes", "no"), ("a", ["b"]), (["a"], ["a"]), ("", "")])
def test_rows_without_a_common_beginning_are_refused(chosen: Any, rejected: Any) -> None:
    with pytest.raises(InputError, match=r"row 7: "):
        with_prompt({"chosen": chosen, "rejected": rejected}, "row 7")


def test_rows_that_teach_nothing_are_counted() -> None:
    rows = [{"prompt": "a", "chosen": "x", "rejected": y} for y in "xyx"]
    kept, notes = that_teach(rows, "pairs.jsonl")
    assert kept == rows[1:2]
    assert notes == ["pairs.jsonl: 2 pairs left out of 3, because chosen and rejected are equal"]
    with pytest.raises(InputError, match="equal in every row"):
        that_teach(rows[:1], "pairs.jsonl")
    verdicts = [{"prompt": "a", "completion": "b", "label": True}] * 2
    one_class = "v.jsonl: every label is true, so that nothing is told apart"
    assert that_teach(verdicts, "v.jsonl") == (verdicts, [one_class])
    assert that_teach([*verdicts, {**verdicts[0], "label": False}], "v.jsonl")[1] == []
    nothing: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    empty = [
        {"prompt": "a", "chosen": "", "rejected": "b"},
        {"prompt": "a", "completion": nothing},
        {"completion": "c"},
    ]
    kept, (note,) = that_teach(empty, "e.jsonl")
    assert kept == empty
    assert note.startswith("e.jsonl: 2 rows with an empty response, of which the token that ends it is all that counts")
