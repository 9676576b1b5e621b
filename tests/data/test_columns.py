"""Which columns are the prompt and the answer, where nobody says so."""

from __future__ import annotations

import doctest
import json
from pathlib import Path
from typing import Any

import pytest

from jaxrl_llm.data import columns, load_prompts
from jaxrl_llm.data.columns import ANSWERS, CONVERSATIONS, PROMPTS, find, is_implicit, that_teach, with_prompt
from jaxrl_llm.data.load import open_prompts
from jaxrl_llm.data.sources.files import lacking
from jaxrl_llm.utils.errors import InputError


def written(folder: Path, *rows: dict[str, Any]) -> str:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_examples_hold() -> None:
    assert doctest.testmod(columns).failed == 0


@pytest.mark.parametrize("prompt", [name for name in PROMPTS if name not in CONVERSATIONS])
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


def test_a_text_without_a_prompt_is_learnt_whole(tmp_path: Path) -> None:
    said: list[str] = []
    path = written(tmp_path, {"text": "Once upon a time.", "id": 3})
    (row,) = load_prompts(path, say=said.append)
    assert (row["prompt"], row["completion"]) == ([], "Once upon a time.")
    assert said == [f"{path}: rows are whole texts, from the column text"]
    (row,) = load_prompts(written(tmp_path, {"text": "An essay.", "question": "Is it good?"}))
    assert (row["prompt"], "completion" in row) == ("Is it good?", False)
    (row,) = load_prompts(written(tmp_path, {"text": "Once"}), prompt_column="text")
    assert (row["prompt"], "completion" in row) == ("Once", False)
    with pytest.raises(InputError, match="'prompt' must be a string or a list of messages, found an empty list"):
        load_prompts(written(tmp_path, {"text": "Once", "prompt": []}))


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
    with pytest.raises(InputError, match=r"row 1: no column is known .* with --prompt-column .*: body, id"):
        load_prompts(written(tmp_path, {"body": "1 + 1?", "id": 3}))


def test_rows_that_are_read_as_they_are_drawn_have_the_same_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"problem": f"{i} + 1?", "solution": str(i + 1)} for i in range(6)]
    path, said = written(tmp_path, *rows), list[str]()
    monkeypatch.setattr("jaxrl_llm.data.load.LISTED", 3)
    drawn = open_prompts(path, limit=5, say=said.append)
    assert not isinstance(drawn, list)
    assert [(row["prompt"], row["answer"]) for row in drawn] == [(f"{i} + 1?", str(i + 1)) for i in range(5)]
    assert said == [f"{path}: prompts are from the column problem, answers from solution"]


def test_an_instruction_is_followed_by_its_input(tmp_path: Path) -> None:
    said: list[str] = []
    path = written(
        tmp_path, {"instruction": "Add.", "input": "1, 2", "output": "3"},
        {"instruction": "Say hi.", "input": "", "output": "hi"},
    )  # fmt: skip
    rows = load_prompts(path, say=said.append)
    assert [(row["prompt"], row["answer"]) for row in rows] == [("Add.\n\n1, 2", "3"), ("Say hi.", "hi")]
    assert said == [f"{path}: prompts are from the columns instruction and input, answers from output"]
    assert load_prompts(path, prompt_column="instruction")[0]["prompt"] == "Add."


@pytest.mark.parametrize(
    ("choices", "answer", "prompt", "letter"),
    [
        (["red", "blue"], 1, "Which?\n\nA. red\nB. blue", "B"),
        (["red", "blue"], "0", "Which?\n\nA. red\nB. blue", "A"),
        (["red", "blue"], "blue", "Which?\n\nA. red\nB. blue", "B"),
        (["red", "blue"], "(B)", "Which?\n\nA. red\nB. blue", "B"),
        ([3, 4], "B", "Which?\n\nA. 3\nB. 4", "B"),
        (["2", "0"], "0", "Which?\n\nA. 2\nB. 0", "B"),  # a choice's text before its number
        ({"text": ["red", "blue"], "label": ["1", "2"]}, "2", "Which?\n\n1. red\n2. blue", "2"),
        ({"A": "red", "B": "blue", "C": None}, "A", "Which?\n\nA. red\nB. blue", "A"),
    ],
)
@pytest.mark.parametrize("column", ["choices", "options"])
def test_choices_follow_their_question_by_letter(
    tmp_path: Path, column: str, choices: Any, answer: Any, prompt: str, letter: str
) -> None:
    said: list[str] = []
    path = written(tmp_path, {"question": "Which?", column: choices, "answer": answer})
    (row,) = load_prompts(path, say=said.append)
    assert (row["prompt"], row["answer"], row[column]) == (prompt, letter, choices)
    assert said == [
        f"{path}: prompts are from the column question with {column} by letter, answers from answer, as a letter"
    ]
    (row,) = load_prompts(path, prompt_template="{prompt} {" + column + "}")
    assert (row["prompt"], row["answer"]) == (f"Which? {choices}", answer)


@pytest.mark.parametrize("answer", [2, -1, "C", True, "green", None, 0.0])
def test_answers_that_are_no_choice_are_refused(tmp_path: Path, answer: Any) -> None:
    path = written(tmp_path, {"question": "Which?", "choices": ["red", "blue"], "answer": answer})
    with pytest.raises(InputError, match=r"row 1: answer is .*none of the choices A, B.*--answer-column.*--prompt-"):
        load_prompts(path)


def test_conversations_of_sharegpt(tmp_path: Path) -> None:
    turns = [("system", "Be brief."), ("human", "1 + 1?"), ("gpt", "2"), ("human", "and 3?"), ("gpt", "5")]
    path = written(tmp_path, {"conversations": [{"from": who, "value": text} for who, text in turns]})
    (row,) = load_prompts(path)
    roles = ["system", "user", "assistant", "user"]
    assert row["prompt"] == [{"role": r, "content": t} for r, (_, t) in zip(roles, turns, strict=False)]
    assert row["answer"] == "5"
    path = written(tmp_path, {"conversations": [{"from": "narrator", "value": "x"}]})
    with pytest.raises(InputError, match="from 'narrator', which is none of human"):
        load_prompts(path)


def test_a_template_of_columns_alone(tmp_path: Path) -> None:
    said: list[str] = []
    path = written(tmp_path, {"target": 9, "nums": [4, 5]})
    (row,) = load_prompts(path, prompt_template="Make {target} from {nums}.", say=said.append)
    assert (row["prompt"], row["answer"]) == ("Make 9 from [4, 5].", 9)
    assert said == [f"{path}: prompts are from prompt_template, answers from target"]
    with pytest.raises(InputError, match=r"--prompt-column .*--prompt-template .*'nums {nums}, target {target}'"):
        load_prompts(path)
    with pytest.raises(InputError, match="no column is known to hold the prompt"):
        load_prompts(path, prompt_template="{prompt}: {target}")


def test_shards_that_are_missing_are_said(tmp_path: Path) -> None:
    for number in (0, 2, 3):
        (tmp_path / f"train-0000{number}-of-00005.jsonl").write_text('{"prompt": "a"}\n')
    for source in (str(tmp_path / "train-*.jsonl"), str(tmp_path)):
        said: list[str] = []
        assert len(load_prompts(source, say=said.append)) == 3
        (line,) = said
        assert line.startswith(f"{source} lacks train-00001-of-00005.jsonl, train-00004-of-00005.jsonl, whose rows")
    for number in (1, 4):
        (tmp_path / f"train-0000{number}-of-00005.jsonl").write_text('{"prompt": "a"}\n')
    assert load_prompts(str(tmp_path), say=pytest.fail)


def test_all_missing_shards_are_found() -> None:
    paths = [Path(f"a-{n:05d}-of-00009.parquet") for n in (1, 5, 9)]  # counted from 1
    assert lacking(paths) == "a-00002-of-00009.parquet, a-00003-of-00009.parquet, a-00004-of-00009.parquet and 3 more"
    assert lacking([Path("a-00000-of-00002.jsonl"), Path("b-00000-of-00001.jsonl")]) == "a-00001-of-00002.jsonl"
    assert lacking([Path("a.jsonl"), Path("b-1.jsonl")]) == ""


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
