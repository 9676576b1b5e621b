"""A run's JSON files: round trips, half-written ends, and damage that is named with its place."""

import json
import math
import os

import pytest

from jaxrl_llm.reporting.logging.writers import iterate_jsonl, read_json, read_jsonl, truncate_jsonl
from jaxrl_llm.utils.errors import InputError

DEEP = b"[" * 100_000
DAMAGED = {  # as an object in a file, and what is said of it
    "": "it is empty",
    "[1]": "a list, not a",
    "12": "a number, not a",
    "null": "null, not a",
    '{"a":': "not JSON",
    '{"a": ' + "9" * 10_000 + "}": "a number of more than 4300 digits",
    '{"a": ' + "[" * 100_000: "nested deeper than 64 levels",
    '{"a": ' + "[" * 70 + "]" * 70 + "}": "nested deeper than 64 levels",
}


@pytest.mark.parametrize(
    "half", [b'{"step": 2, "rew', '{"step": 2, "é'.encode()[:-1], b"\x00\x00", b"12", b'{"step": 2', DEEP]
)
def test_a_half_written_last_line_is_ignored_and_then_dropped(tmp_path, half):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0, "a": 1}\n\n{"step": 1, "a": 2}\n' + half)
    assert [row["step"] for row in read_jsonl(path)] == [0, 1]
    truncate_jsonl(path, math.inf)
    assert path.read_text() == '{"step": 0, "a": 1}\n{"step": 1, "a": 2}\n'


def test_a_last_line_that_was_written_whole_is_not_lost_without_a_word(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n{"step": 1, "x" 2}\n')
    with pytest.raises(InputError, match=r"metrics\.jsonl, line 2: not JSON"):
        read_jsonl(path)


@pytest.mark.parametrize("end", [b"", b'{"step": 9}\n'])
@pytest.mark.parametrize(
    "line, reason",
    [
        (b'{"step": 1, "re{"step": 1}', "not JSON"),
        (b"[1]", "a list, not a JSON object"),
        (DEEP, "nested deeper than 64 levels"),
        (b'{"step": ' + b"9" * 10_000 + b"}", "more than 4300 digits"),
        (b'{"step": 1, "a": "\xff"}', "not UTF-8 text"),
        (b'{"step": 1}\0', "it has NUL bytes"),
    ],
)
def test_damage_is_an_error_with_its_place(tmp_path, line, reason, end):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n' + line + b"\n" + end)
    before = path.read_bytes()
    for read in (read_jsonl, lambda path: truncate_jsonl(path, 5)):
        with pytest.raises(InputError, match=rf"metrics\.jsonl, line 2: .*{reason}.*; repair or remove that line"):
            read(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("step", ['"5"', "null", "NaN", "true", "[]"])
def test_a_step_that_is_no_number_is_not_kept_by_chance(tmp_path, step):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 0}}\n{{"step": {step}}}\n')
    with pytest.raises(InputError, match=r"line 2: its step is .*; repair or remove that line"):
        truncate_jsonl(path, 5)
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_truncation_keeps_the_bytes_of_earlier_steps(tmp_path):
    path = tmp_path / "metrics.jsonl"
    kept = b'{"step":0,"x":1e-7}\n{"note":"no step"}\n{"step": 4, "text": "\\u00e9"}\n'
    path.write_bytes(kept + b'{"step": 5}\n{"step": 6}\n{"step": 7, "ha')
    truncate_jsonl(path, 5)
    assert path.read_bytes() == kept
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]
    truncate_jsonl(path, 0)
    assert path.read_bytes() == b'{"note":"no step"}\n'


def test_truncation_of_a_missing_file_does_nothing(tmp_path):
    truncate_jsonl(tmp_path / "metrics.jsonl", 3)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InputError, match="cannot read"):
        read_jsonl(tmp_path / "metrics.jsonl")


def test_what_is_no_file_is_refused_and_never_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "folder.json").mkdir()
    for read in (read_json, read_jsonl, lambda path: truncate_jsonl(path, 0)):
        with pytest.raises(InputError, match=r"pipe\.json: it is a pipe or a device"):
            read(tmp_path / "pipe.json")
        with pytest.raises(InputError, match=r"folder\.json: it is a folder"):
            read(tmp_path / "folder.json")


def test_offsets_find_each_line_again(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": "é"}\n\n{"a": 2}\n', encoding="utf-8")
    with open(path, "rb") as file:
        for offset, row in iterate_jsonl(path):
            file.seek(offset)
            assert json.loads(file.readline()) == row


def test_read_json(tmp_path):
    path = tmp_path / "config.json"
    assert read_json(path) == {}
    path.write_bytes('\ufeff{"a": "é"}'.encode())
    assert read_json(path) == {"a": "é"}


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_object_is_one_line_that_names_the_file(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(InputError, match=rf"config\.json.* is not a JSON object: .*{DAMAGED[text]}") as caught:
        read_json(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "data, reason",
    [
        ('{"a": 1}'.encode("utf-16"), "UTF-16"),
        ('{"a": 1}'.encode("utf-16-le"), "NUL bytes"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b"\x1f\x8b\x08rest", "gzip"),
    ],
)
def test_other_encodings_are_named(tmp_path, data, reason):
    (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(InputError, match=rf"config\.json.*{reason}"):
        read_json(tmp_path / "config.json")


def test_a_file_that_cannot_be_opened_is_named(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    path.write_text("{}")

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.read_bytes", refuse)
    monkeypatch.setattr("builtins.open", refuse)
    for read in (read_json, read_jsonl):
        with pytest.raises(InputError, match=r"cannot read .*config\.json: Permission denied"):
            read(path)
