"""Prompt sources: what comes in as a file comes out as rows, and what is wrong with it is said."""

from __future__ import annotations

import doctest
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl_llm.data import conflicting, load, load_prompts, without
from jaxrl_llm.data.chat import encode as chat
from jaxrl_llm.data.sources import files
from jaxrl_llm.utils.errors import InputError

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
        ({"prompt_template": "\\boxed{}{prompt}"}, "write {{ and }} for literal braces"),
        ({"prompt_template": "{prompt"}, "prompt_template '{prompt' is not valid"),
        ({"prompt_column": "level"}, "row 1: 'level' must be a string or a list of messages, found int"),
        ({"prompt_template": "Q: {prompt}"}, "row 2: the prompt is a list of messages"),
        ({"limit": 0}, "limit must be at least 1"),
        ({"limit": 1.5}, r"limit is 1\.5, but must be a whole number"),
        ({"limit": True}, "limit is True"),
        ({"limit": "5"}, "limit is '5'"),
        ({"seed": 2**70}, "seed must be at least 0 and at most 4294967295, found 1180591620717411303424"),
        ({"seed": 0.0}, r"seed is 0\.0"),
        ({"prompt_column": ""}, "prompt_column is '', but must be non-empty text"),
        ({"prompt_column": 3}, "prompt_column is 3"),
        ({"prompt_template": None}, "prompt_template is None, but must be text"),
        ({"task_options": {"size": 3}}, "task options are for reasoning-gym"),
        ({"source": None}, "source is None, but must be non-empty text"),
        ({"source": 3}, "source is 3"),
        ({"source": ""}, "source is '', but must be non-empty text"),
        ({"source": b"data.jsonl"}, r"source is b'data\.jsonl'"),
        ({"source": "x" * 5000}, "no data at .*: .*File name too long"),
        ({"source": "~nobody-of-that-name/x.jsonl"}, "no data at"),
    ],
)
def test_bad_options(tmp_path: Path, options: dict, message: str) -> None:
    options = dict(options)
    source = options.pop("source", write_lines(tmp_path / "data.jsonl", ROWS))
    with pytest.raises(InputError, match=message) as caught:
        load_prompts(source, **options)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.jsonl", b'{"prompt": "a"}\n\n{"prompt": \n', "a.jsonl, line 3: not JSON"),
        ("a.jsonl", b'{"prompt": "a"}\n["b"]\n', "line 2: a row is a JSON object, found list"),
        ("a.json", b'[{"prompt": "a"},\n {"prompt" "b"}]', "a.json, line 2: not JSON"),
        ("a.json", b'[{"prompt": "a"}, "b"]', "entry 2: a row is a JSON object, found text"),
        ("a.jsonl", b"", "has no rows"),
        ("a.jsonl", b"\n \n\n", "has no rows"),
        ("a.json", b"[]", "has no rows"),
        ("a.jsonl", b'{"prompt": "a"}\n{"prompt": "\xff"}', "a.jsonl, line 2 is not UTF-8"),
        ("a.jsonl", '{"prompt": "a"}\n'.encode("utf-16"), "a.jsonl is not JSON: it is UTF-16 text: save it as UTF-8"),
        ("a.jsonl", '{"prompt": "a"}\n'.encode("utf-16-le"), "it has NUL bytes"),
        ("a.jsonl", b'{"prompt": "a\0b"}\n', "it has NUL bytes"),
        ("a.jsonl", gzip.compress(b'{"prompt": "a"}\n', mtime=0), "it is a gzip file: unpack it first"),
        ("a.jsonl", b"PAR1 and so on", "it is a Parquet file: name it .parquet"),
        ("a.jsonl", b'{"prompt": "a"}\n{"prompt": "\\ud800"}\n', "line 2: half of a surrogate pair"),
        ("a.jsonl", b'{"prompt": "a", "b": {"\\uDC00": 1}}\n', "line 1: half of a surrogate pair"),
        ("a.json", b'[{"prompt": "\\ud800"}]', "a.json: half of a surrogate pair"),
        ("a.jsonl", b'{"prompt": "a"}\n{"prompt": "b", "c": ' + b"[" * 100_000, "line 2: it is nested deeper than 64"),
        ("a.jsonl", b'{"prompt": "a", "c": ' + b"[" * 70 + b"]" * 70 + b"}", "line 1: it is nested deeper than 64"),
        ("a.jsonl", b'{"prompt": "a", "c": ' + b"9" * 10_000 + b"}", "line 1: a number of more than 4300 digits"),
        ("a.json", b'[{"prompt": "a"},\n{"prompt": "a", "c": ' + b"9" * 10_000 + b"}]", "line 2: a number of more"),
        ("a.jsonl", b'{"prompt": "a"}\n{"prompt": "a", "c": NaN}', "line 2: NaN is no JSON number: write null"),
        ("a.jsonl", b'{"prompt": "a", "c": -Infinity}', "-Infinity is no JSON number"),
        ("a.jsonl", b'{"prompt": "a", "c": 1e999}', "the number 1e999 is beyond the range of floats"),
        ("a.jsonl", b'{"prompt": null}', "row 1: 'prompt' must be a string or a list of messages, found None"),
        ("a.jsonl", b'{"prompt": []}', "found an empty list"),
        (
            "a.jsonl",
            b'{"prompt": [{"role": null, "content": "a"}]}',
            "row 1: 'prompt' is not a valid prompt: message 1: its role",
        ),
        (
            "a.jsonl",
            b'{"prompt": [{"role": "user", "content": 3}]}',
            "message 1: its content is int 3, but must be",
        ),
        ("a.csv", b"prompt\na\n", "must end in .jsonl, .json or .parquet"),
        ("a.parquet", b"PAR0 nothing", "not a valid Parquet file"),
        ("a.parquet", b"", "not a valid Parquet file"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else None,
)
def test_bad_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        load_prompts(tmp_path / name)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_missing_files(tmp_path: Path) -> None:
    for name in ("none.jsonl", "none.parquet", "none"):
        with pytest.raises(InputError, match="no data at"):
            load_prompts(str(tmp_path / name))


def test_an_array_may_begin_with_white_space(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes("\ufeff\n  ".encode() + json.dumps(ROWS).encode())
    assert load_prompts(path) == ROWS


def test_what_is_no_file_is_refused_and_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(InputError, match=r"pipe\.jsonl: it is a pipe or a device"):
        load_prompts(tmp_path / "pipe.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(InputError, match=r"folder\.jsonl is not a folder written by .*: it has no dataset_info"):
        load_prompts(tmp_path / "folder.jsonl")


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), FileNotFoundError(2, "No such file")])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    source = write_lines(tmp_path / "data.jsonl", ROWS)

    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(InputError, match=rf"cannot read .*data\.jsonl: {error.strerror}"):
        load_prompts(source)


def test_a_line_that_never_ends_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_LONGEST_LINE", 100)
    monkeypatch.setattr(files, "_LARGEST_ARRAY", 100)
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n' + json.dumps({"prompt": "a" * 200}))
    with pytest.raises(InputError, match=r"a\.jsonl, line 2: more than 100 characters"):
        load_prompts(tmp_path / "a.jsonl")
    (tmp_path / "a.json").write_text(json.dumps([{"prompt": "a" * 200}]))
    with pytest.raises(InputError, match=r"a\.json is an array of \d+ bytes: write one object a line"):
        load_prompts(tmp_path / "a.json")


def test_a_prompt_without_bounds_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MOST_CHARACTERS", 100)
    source = write_lines(tmp_path / "a.jsonl", [{"prompt": "a"}, {"prompt": "a" * 101}])
    with pytest.raises(InputError, match="row 2: 'prompt' is not a valid prompt: it has 101 characters"):
        load_prompts(source)


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


@pytest.mark.parametrize(
    "column, found",
    [
        ([b"a"], "found bytes b'a'"),
        ([None], "found None"),
        ([["a", "b"]], r"found list \['a', 'b'\]"),
        ([{"a": {"b": 1}}], "found dict"),
        ([1.5], r"found float 1\.5"),
        ([[{"role": "user", "content": None}]], "message 1: its content is None"),
    ],
)
def test_parquet_columns_that_are_no_prompts(tmp_path: Path, column: list, found: str) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"prompt": column}), tmp_path / "data.parquet")
    with pytest.raises(InputError, match=rf"data\.parquet, row 1: 'prompt'.*{found}"):
        load_prompts(tmp_path / "data.parquet")


def test_parquet_that_is_damaged(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "data.parquet"
    parquet.write_table(pyarrow.table({"prompt": ["abc" * i for i in range(100)]}), path)
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:4] + bytes(len(whole) // 2) + whole[4 + len(whole) // 2 :]):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=r"data\.parquet is not a valid Parquet file: ") as caught:
            load_prompts(path)
        assert "\n" not in str(caught.value)


def test_data_set_folder_that_is_damaged(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    folder = tmp_path / "data"
    datasets.Dataset.from_list([{"prompt": "a"}] * 9).save_to_disk(folder)
    state, arrow = (folder / "state.json").read_text(), next(folder.glob("*.arrow"))
    for text, message in (
        ("{", r"state\.json.* is not a JSON object"),
        ("[]", r"state\.json.* is not a JSON object"),
        (json.dumps(json.loads(state) | {"_data_files": 3}), "is not a valid folder of datasets"),
        (json.dumps(json.loads(state) | {"_data_files": [{"filename": "none.arrow"}]}), "is not a valid folder of"),
        ("{}", "is not a valid folder of"),
    ):
        (folder / "state.json").write_text(text)
        with pytest.raises(InputError, match=message) as caught:
            load_prompts(folder)
        assert "\n" not in str(caught.value)
    (folder / "state.json").write_text(state)
    arrow.write_bytes(arrow.read_bytes()[:100])
    with pytest.raises(InputError, match="is not a valid folder of"):
        load_prompts(folder)


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
    with pytest.raises(InputError, match="is not a folder written by"):
        load_prompts(tmp_path / "empty")


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
    for file in ("dataset_info.json", "state.json"):
        (tmp_path / "folder" / file).write_text("{}")
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


def test_rows_that_have_no_prompt_are_named() -> None:
    for rows in ([{"prompt": "a"}, {"answer": 1}], [{"prompt": "a"}, "a"], [{"prompt": "a"}, None]):
        for count in (lambda rows: without(rows, []), conflicting):
            with pytest.raises(InputError, match=r"row 2 is .*, but must be a dict with a prompt"):
                count(rows)


def test_prompts_with_different_answers_are_counted() -> None:
    assert doctest.testmod(load) == (0, 1)
    rows = [
        {"prompt": "a", "answer": "1", "id": 1},
        {"prompt": [{"role": "user", "content": " a"}], "answer": "1", "id": 2},
        {"prompt": "b", "answer": "1", "id": 3},
        {"prompt": "a", "answer": "2", "id": 4},
    ]
    assert conflicting(rows) == 2
    assert conflicting(rows, ["answer"]) == 1
    assert conflicting(rows, ["none"]) == 0
    items = [{"prompt": "a", "answer": "1", "reasoning_gym_entry": {"index": index}} for index in range(2)]
    assert conflicting(items) == 0
    assert conflicting([]) == 0


def test_reading_prompts_needs_no_jax(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "data.jsonl", ROWS)
    code = "import sys; from jaxrl_llm.data import load_prompts; load_prompts(sys.argv[1]); print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, source], capture_output=True, text=True, timeout=120)
    assert done.stdout == "False\n"
