"""Records with random access: every format gives the rows that reading the files in order gives."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from record_files import FORMATS, write_lines, write_parquet

from jaxrl_llm.data import load_prompts
from jaxrl_llm.data.sources import random_access
from jaxrl_llm.data.sources.random_access import RandomAccess, RecordFiles, index_lines, open_records, row_of
from jaxrl_llm.utils.errors import InputError

ROWS = [{"prompt": f"{i} + {i}?", "answer": {"value": 2 * i, "steps": ["add"] * (i % 3)}} for i in range(23)]
ORDER = [22, 0, 7, 7, 11, 10, 3, 21]


def rows_at(records: RecordFiles, indices: Sequence[int]) -> list[dict]:
    return [row_of(record, records.where(i)) for i, record in zip(indices, records.read(indices), strict=True)]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_rows_in_any_order_and_one_after_the_other(tmp_path: Path, name: str) -> None:
    source = FORMATS[name](tmp_path / name, ROWS)
    records = open_records(str(source))
    assert records is not None
    assert isinstance(records, RandomAccess)
    assert len(records) == len(ROWS)
    assert rows_at(records, ORDER) == [ROWS[i] for i in ORDER]
    assert row_of(records[4], "") == ROWS[4]
    assert records.read([]) == []
    assert load_prompts(source) == ROWS
    assert load_prompts(source, limit=12) == ROWS[:12]


def test_grain_reads_records(tmp_path: Path) -> None:
    """`RecordFiles` is a source of grain's, which reads its batches together."""
    grain = pytest.importorskip("grain")
    records = open_records(str(FORMATS["of_parquet"](tmp_path / "folder", ROWS)))
    assert isinstance(records, grain.sources.RandomAccessDataSource)
    taken = grain.MapDataset.source(records).shuffle(seed=3).map(lambda row: row["prompt"])
    assert sorted(taken[i] for i in range(len(taken))) == sorted(row["prompt"] for row in ROWS)
    assert list(taken._getitems([5, 1])) == [taken[5], taken[1]]


def test_records_say_where_they_are(tmp_path: Path) -> None:
    folder = FORMATS["of_lines"](tmp_path / "folder", ROWS)
    records = open_records(str(folder))
    assert records is not None
    assert records.where(9) == f"{folder}/data/train-00001-of-00003.jsonl, line 1"
    assert records.where(22) == f"{folder}/data/train-00002-of-00003.jsonl, line 13"
    for index in (-1, 23):
        with pytest.raises(IndexError, match="indices 0 to 22"):
            records[index]


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 16, 4096])
@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1}\n{"a": 2}\n',
        '{"a": 1}\n{"a": 2}',
        '\ufeff{"a": 1}\r\n\r\n  \r\n{"a": "\u00e9"}\n\n',
        '\n\n {"a": 1}\n\t\n{"a": 2}\n   ',
        "{}\n \n",
        "\n",
        "",
    ],
)
def test_an_index_has_the_lines_that_are_not_blank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, chunk: int
) -> None:
    monkeypatch.setattr(random_access, "_CHUNK", chunk)
    path = tmp_path / "a.jsonl"
    path.write_bytes(text.encode())
    starts, numbers = index_lines(path)
    lines = text.removeprefix("\ufeff").split("\n")
    expected = [number for number, line in enumerate(lines, start=1) if line.strip()]
    found = path.read_bytes()
    assert [json.loads(found[start:].split(b"\n")[0]) for start in starts] == [
        json.loads(lines[number - 1]) for number in expected
    ]
    assert (list(range(1, len(starts) + 1)) if numbers is None else numbers.tolist()) == expected


def test_only_the_row_groups_of_the_wanted_rows_are_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    from pyarrow.parquet import ParquetFile

    records = open_records(str(write_parquet(tmp_path / "a.parquet", ROWS)))
    assert records is not None
    decoded: list[int] = []
    inner = ParquetFile.iter_batches

    def watched(self: Any, batch_size: int, row_groups: Sequence[int]) -> Any:
        decoded.extend(row_groups)
        return inner(self, batch_size, row_groups=row_groups)

    monkeypatch.setattr(ParquetFile, "iter_batches", watched)
    assert rows_at(records, [21, 6, 8, 20]) == [ROWS[21], ROWS[6], ROWS[8], ROWS[20]]
    assert decoded == [1, 4]
    monkeypatch.setattr(random_access, "_BATCH", 2)
    assert rows_at(records, [19, 15, 17, 16]) == [ROWS[19], ROWS[15], ROWS[17], ROWS[16]]


def test_a_pattern_names_some_files_of_a_folder(tmp_path: Path) -> None:
    for name, rows in (("train-00000-of-00002", ROWS[:4]), ("train-00001-of-00002", ROWS[4:9]), ("test", ROWS[9:])):
        write_lines(tmp_path / f"{name}.jsonl", rows)
    assert load_prompts(str(tmp_path / "train-*.jsonl")) == ROWS[:9]
    records = open_records(str(tmp_path / "train-*.jsonl"))
    assert records is not None
    assert rows_at(records, range(9)) == ROWS[:9]
    with pytest.raises(InputError, match=r"has files of several splits: give one of .*/test\.jsonl, .*/train-0000\*$"):
        load_prompts(tmp_path)
    with pytest.raises(InputError, match="no file matches the pattern"):
        load_prompts(str(tmp_path / "valid-*.jsonl"))
    (tmp_path / "train-notes.txt").touch()
    with pytest.raises(InputError, match=r"matches .*train-notes\.txt: all its files must be"):
        load_prompts(str(tmp_path / "train-*"))


def test_a_folder_of_two_formats_is_refused(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", ROWS)
    (tmp_path / "a.parquet").touch()
    with pytest.raises(InputError, match=r"several formats: give one of .*a\.jsonl, .*a\.parquet$"):
        load_prompts(tmp_path)


def test_formats_without_random_access_have_none(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    assert open_records(str(tmp_path / "a.json")) is None


@pytest.mark.parametrize("name", ["lines.jsonl", "table.parquet", "records.array_record"])
def test_a_file_that_has_changed_is_refused(tmp_path: Path, name: str) -> None:
    path = FORMATS[name](tmp_path / name, ROWS)
    records = open_records(str(path))
    assert records is not None
    with path.open("ab") as file:
        file.write(b" ")
    with pytest.raises(InputError, match=rf"{name} has changed since the run began"):
        records.read([0])
    path.unlink()
    with pytest.raises(InputError, match=rf"cannot read .*{name}: No such file"):
        records.read([0])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.parquet", r"a\.parquet is not a valid Parquet file: "),
        ("a.array_record", r"a\.array_record is not a valid array_record file: "),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, message: str) -> None:
    pytest.importorskip("pyarrow" if name == "a.parquet" else "array_record")
    (tmp_path / name).write_bytes(b"nonsense" * 100)
    for read in (open_records, load_prompts):
        with pytest.raises(InputError, match=message) as caught:
            read(str(tmp_path / name))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (b"{", "here: not JSON"),
        (b"[1]", "here: a row is a JSON object, found list"),
        (b'{"a": "\xff"}', "here is not UTF-8 text"),
        (np.int64(3), "here: a row is a JSON object, found int64"),
        (None, "here: a row is a JSON object, found null"),
    ],
)
def test_a_record_that_is_no_row_is_refused(record: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        row_of(record, "here")
