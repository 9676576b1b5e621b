"""Files of rows in every format that has random access."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest


def write_lines(path: Path, rows: Sequence[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_parquet(path: Path, rows: Sequence[dict], group: int = 5) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path, row_group_size=group)
    return path


def write_records(path: Path, rows: Sequence[dict]) -> Path:
    module = pytest.importorskip("array_record.python.array_record_module")
    writer = module.ArrayRecordWriter(str(path), "group_size:1")
    for row in rows:
        writer.write(json.dumps(row).encode())
    writer.close()
    return path


def save(path: Path, rows: Sequence[dict]) -> Path:
    pytest.importorskip("datasets").Dataset.from_list(list(rows)).save_to_disk(path)
    return path


def shards(write: Callable[[Path, Sequence[dict]], Path], ending: str) -> Callable[[Path, Sequence[dict]], Path]:
    """Three files of different lengths, in a folder as it is on the Hub."""

    def write_all(folder: Path, rows: Sequence[dict]) -> Path:
        (folder / "data").mkdir(parents=True)
        (folder / "README.md").write_text("---\n")
        for number, (first, last) in enumerate([(0, 9), (9, 10), (10, len(rows))]):
            write(folder / "data" / f"train-{number:05d}-of-00003.{ending}", rows[first:last])
        return folder

    return write_all


FORMATS: dict[str, Callable[[Path, Sequence[dict]], Path]] = {
    "lines.jsonl": write_lines,
    "table.parquet": write_parquet,
    "records.array_record": write_records,
    "records.array_record-00000-of-00001": write_records,
    "saved": save,
    "of_lines": shards(write_lines, "jsonl"),
    "of_parquet": shards(write_parquet, "parquet"),
    "of_records": shards(write_records, "array_record"),
}
