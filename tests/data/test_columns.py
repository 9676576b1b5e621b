"""Which columns are the prompt and the answer, where nobody says so."""

from __future__ import annotations

import doctest
import json
from pathlib import Path
from typing import Any

import pytest

from jaxrl_llm.data import columns, load_prompts
from jaxrl_llm.data.columns import ANSWERS, PROMPTS
from jaxrl_llm.data.prompts import open_prompts
from jaxrl_llm.errors import InputError


def written(folder: Path, *rows: dict[str, Any]) -> str:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_examples_hold() -> None:
    assert doctest.testmod(columns).failed == 0


@pytest.mark.parametrize("prompt", [name for name in PROMPTS if name != "messages"])
@pytest.mark.parametrize("answer", [name for name in ANSWERS if "." not in name])
def test_usual_names_are_found_and_said(tmp_path: Path, prompt: str, answer: str) -> None:
    said: list[str] = []
    path = written(tmp_path, {"id": 1, answer: "2", prompt: "1 + 1?"})
    (row,) = load_prompts(path, say=said.append)
    assert (row["prompt"], row["answer"], row[prompt], row[answer]) == ("1 + 1?", "2", "1 + 1?", "2")
    plain = (prompt, answer) == ("prompt", "answer")
    assert said == ([] if plain else [f"{path}: prompts are from the column {prompt}, answers from {answer}"])


def test_the_first_of_several_is_taken_unless_another_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, {"input": "context", "question": "1 + 1?", "solution": "1 + 1 = 2", "final_answer": "2"})
    (row,) = load_prompts(path)
    assert (row["prompt"], row["answer"]) == ("1 + 1?", "1 + 1 = 2")
    (row,) = load_prompts(path, prompt_column="input", answer_column="final_answer")
    assert (row["prompt"], row["answer"]) == ("context", "2")
    (row,) = load_prompts(path, prompt_template="{input}: {prompt} ({answer})")
    assert row["prompt"] == "context: 1 + 1? (1 + 1 = 2)"
    with pytest.raises(InputError, match="unknown column 'final_anser': did you mean 'final_answer'"):
        load_prompts(path, answer_column="final_anser")


def test_rows_of_verl_have_their_answer_inside(tmp_path: Path) -> None:
    said: list[str] = []
    path = written(tmp_path, {"prompt": [{"role": "user", "content": "1 + 1?"}], "reward_model": {"ground_truth": "2"}})
    (row,) = load_prompts(path, say=said.append)
    assert row["answer"] == "2"
    assert said == [f"{path}: prompts are from the column prompt, answers from reward_model.ground_truth"]


def test_a_conversation_is_cut_before_the_answer(tmp_path: Path) -> None:
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    said: list[str] = []
    path = written(tmp_path, {"messages": [*asked, {"role": "assistant", "content": "2"}]})
    (row,) = load_prompts(path, say=said.append)
    assert (row["prompt"], row["answer"]) == (asked, "2")
    assert said == [f"{path}: prompts are from the column messages, answers from the last message"]
    (row,) = load_prompts(written(tmp_path, {"messages": asked, "label": 2}))
    assert (row["prompt"], row["answer"]) == (asked, 2)
    (row,) = load_prompts(written(tmp_path, {"messages": [*asked, {"role": "assistant", "content": "2"}], "label": 3}))
    assert (row["prompt"], row["answer"]) == (asked, 3)
    with pytest.raises(InputError, match="row 1: the conversation has only an assistant's message"):
        load_prompts(written(tmp_path, {"messages": [{"role": "assistant", "content": "2"}]}))


def test_a_column_that_is_named_is_left_whole(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    (row,) = load_prompts(written(tmp_path, {"messages": messages}), prompt_column="messages")
    assert row["prompt"] == messages
    assert "answer" not in row


def test_without_a_known_column_the_columns_are_listed(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"row 1: no column is known .* with --prompt-column .*: id, text"):
        load_prompts(written(tmp_path, {"text": "1 + 1?", "id": 3}))


def test_rows_that_are_read_as_they_are_drawn_have_the_same_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"problem": f"{i} + 1?", "solution": str(i + 1)} for i in range(6)]
    path, said = written(tmp_path, *rows), list[str]()
    monkeypatch.setattr("jaxrl_llm.data.prompts.LISTED", 3)
    drawn = open_prompts(path, limit=5, say=said.append)
    assert not isinstance(drawn, list)
    assert [(row["prompt"], row["answer"]) for row in drawn] == [(f"{i} + 1?", str(i + 1)) for i in range(5)]
    assert said == [f"{path}: prompts are from the column problem, answers from solution"]
