"""Prompt sources: what comes in as a file comes out as rows, and what is wrong with it is said."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from jaxrl_llm.data import load_prompts, without
from jaxrl_llm.errors import InputError

ROWS = [
    {"prompt": "1 + 1?", "answer": "2", "level": 1},
    {"prompt": [{"role": "user", "content": "2 + 2?"}], "answer": "4", "level": 2},
    {"prompt": "3 + 3?", "answer": "6", "level": 3},
]


def write_lines(path: Path, rows: list) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_json_lines(tmp_path: Path) -> None:
    for name in ("data.jsonl", "data.json"):
        source = write_lines(tmp_path / name, ROWS)
        assert load_prompts(source) == ROWS
        assert load_prompts(source, limit=2) == ROWS[:2]
        assert load_prompts(Path(source), limit=99) == ROWS


def test_json_array_and_awkward_lines(tmp_path: Path) -> None:
    array = tmp_path / "array.json"
    array.write_text(json.dumps(ROWS, indent=2))
    assert load_prompts(str(array)) == ROWS
    lines = tmp_path / "lines.jsonl"
    # A byte order mark, Windows line ends, blank lines, and no line end at the end.
    lines.write_bytes("\ufeff".encode() + b'{"prompt": "a"}\r\n\r\n  \r\n{"prompt": "\\u00e9"}')
    assert [row["prompt"] for row in load_prompts(lines)] == ["a", "é"]


def test_rows_have_the_same_columns(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", [{"prompt": "a", "answer": 1}, {"prompt": "b", "hint": "h"}])
    assert load_prompts(source) == [
        {"prompt": "a", "answer": 1, "hint": None},
        {"prompt": "b", "answer": None, "hint": "h"},
    ]


def test_prompt_column_and_template(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", [{"question": "1 + 1?", "unit": "apples"}])
    (row,) = load_prompts(source, prompt_column="question", prompt_template="{prompt} In {unit}, {{}}.")
    assert row == {"question": "1 + 1?", "unit": "apples", "prompt": "1 + 1? In apples, {}."}
    braces = write_lines(tmp_path / "b.jsonl", [{"prompt": "a {set} of {}"}])
    assert load_prompts(braces, prompt_template="Q: {prompt}")[0]["prompt"] == "Q: a {set} of {}"
    assert load_prompts(braces)[0]["prompt"] == "a {set} of {}"


@pytest.mark.parametrize(
    "options, message",
    [
        ({"prompt_column": "promt"}, "unknown column 'promt': did you mean 'prompt'"),
        ({"prompt_template": "{promp}"}, "unknown column 'promp': did you mean 'prompt'"),
        ({"prompt_template": "\\boxed{}{prompt}"}, "write {{ and }} for braces"),
        ({"prompt_template": "{prompt"}, "prompt_template '{prompt' does not work"),
        ({"prompt_column": "level"}, "row 1: 'level' must be a string or a list of messages, found int"),
        ({"prompt_template": "Q: {prompt}"}, "row 2: the prompt is a list of messages"),
        ({"limit": 0}, "limit must be at least 1"),
        ({"task_options": {"size": 3}}, "task options are for reasoning-gym"),
    ],
)
def test_bad_options(tmp_path: Path, options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_prompts(write_lines(tmp_path / "data.jsonl", ROWS), **options)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.jsonl", b'{"prompt": "a"}\n\n{"prompt": \n', "a.jsonl, line 3: not JSON"),
        ("a.jsonl", b'{"prompt": "a"}\n["b"]\n', "line 2: a row is a JSON object, found list"),
        ("a.json", b'[{"prompt": "a"},\n {"prompt" "b"}]', "a.json, line 2: not JSON"),
        ("a.json", b'[{"prompt": "a"}, "b"]', "entry 2: a row is a JSON object, found str"),
        ("a.jsonl", b"", "has no rows"),
        ("a.json", b"[]", "has no rows"),
        ("a.jsonl", b'{"prompt": "\xff"}', "not UTF-8"),
        ("a.csv", b"prompt\na\n", "must end in .jsonl, .json or .parquet"),
        ("a.parquet", b"PAR0 nothing", "not a Parquet file"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        load_prompts(tmp_path / name)


def test_missing_files(tmp_path: Path) -> None:
    for name in ("none.jsonl", "none.parquet", "none"):
        with pytest.raises(InputError, match="no data at"):
            load_prompts(str(tmp_path / name))


def test_a_limit_stops_before_a_malformed_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a"}\nnonsense\n')
    assert load_prompts(path, limit=1) == [{"prompt": "a"}]


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [{"prompt": [{"role": "user", "content": "a"}], "answer": 1}, {"prompt": [], "answer": 2}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "data.parquet")
    assert load_prompts(tmp_path / "data.parquet", limit=1) == rows[:1]
    with pytest.raises(InputError, match="row 2: 'prompt' must be a string or a list of messages"):
        load_prompts(tmp_path / "data.parquet")


def test_data_set_folder(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}]
    data = datasets.Dataset.from_list(rows)
    data.save_to_disk(tmp_path / "one")
    assert load_prompts(tmp_path / "one") == rows
    assert load_prompts(str(tmp_path / "one"), limit=1) == rows[:1]
    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(tmp_path / "two")
    assert load_prompts(tmp_path / "two" / "train") == rows
    with pytest.raises(InputError, match=r"several splits: give one of .*two/train"):
        load_prompts(tmp_path / "two")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="is not a folder that"):
        load_prompts(tmp_path / "empty")


def test_generated_tasks_are_deterministic_and_score_full_marks_for_their_answer() -> None:
    pytest.importorskip("reasoning_gym")
    from jaxrl_llm.rewards import Reward, require_columns, score
    from jaxrl_llm.rewards.verifiers import reasoning_gym

    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "operators": ["+"]}
    options |= {"allow_negation": False, "allow_parentheses": False}
    rows = load_prompts("reasoning-gym:basic_arithmetic", limit=5, seed=3, task_options=options)
    assert rows == load_prompts("reasoning-gym:basic_arithmetic", limit=5, seed=3, task_options=options)
    assert rows != load_prompts("reasoning-gym:basic_arithmetic", limit=5, seed=4, task_options=options)
    assert len(rows) == 5
    for row in rows:
        left, right = row["reasoning_gym_entry"]["metadata"]["expression"].split("+")
        assert int(row["answer"]) == int(left) + int(right)
        assert row["prompt"] == row["reasoning_gym_entry"]["question"]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    reward = Reward(reasoning_gym, time_limit=60.0)
    require_columns([reward], columns)
    assert score([reward], columns["answer"], columns).total.tolist() == [1.0] * 5


@pytest.mark.parametrize(
    "task, options, message",
    [
        ("basic_arithmetics", {}, "unknown reasoning-gym task 'basic_arithmetics': did you mean 'basic_arithmetic'"),
        ("basic_arithmetic", {"max_digit": 3}, "'max_digit': did you mean 'max_digits'"),
        ("basic_arithmetic", {"size": 3}, "give it as limit"),
        ("basic_arithmetic", {"seed": 3}, "give it as seed"),
        ("basic_arithmetic", {"min_terms": -1}, "min_terms must be positive"),
    ],
)
def test_bad_tasks(task: str, options: dict, message: str) -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(InputError, match=message):
        load_prompts(f"reasoning-gym:{task}", limit=2, task_options=options)


@pytest.mark.parametrize(
    "name, module, message",
    [
        ("a.parquet", "pyarrow", r"pyarrow.*jaxrl_llm\[data\]"),
        ("folder", "datasets", r"datasets.*jaxrl_llm\[data\]"),
        ("reasoning-gym:basic_arithmetic", "reasoning_gym", r"reasoning-gym.*jaxrl_llm\[verifiers\]"),
    ],
)
def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str, message: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.parquet").touch()
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=message):
        load_prompts(name if ":" in name else str(tmp_path / name))


def test_without_compares_prompts_by_content() -> None:
    def row(prompt: object, answer: int = 0) -> dict:
        return {"prompt": prompt, "answer": answer}

    held_out = [row("a", 9), row([{"role": "user", "content": "b"}])]
    system = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a"}]
    rows = [
        row("a"),
        row(" a\n"),
        row([{"content": "a", "role": "user", "name": None}]),
        row("b"),
        row("c", 1),
        row(system),
        row("c", 2),
        row("A"),
    ]
    assert without(rows, held_out) == [row("c", 1), row(system), row("A")]
    assert without(rows[4:7], []) == [row("c", 1), row(system)]
    assert without([], held_out) == []
