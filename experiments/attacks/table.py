"""The table of malformed invocations (invocations.jsonl), and the files that a row asks for.

A row is a JSON object:

    name         unique; what is wrong
    arguments    of the command; "$TRAIN" stands for a training run of a tiny model that would be fine, "$TRAIN -steps
                 -model" for one without these options
    expect       regular expression that the error on stderr matches, or a list: one error line for each
    status       of the exit; default 2
    files        what is made before, path -> content, in this order: a text, or a list [kind, ...], see `BUILDERS`
    needs_model  whether the error can be found only with the model loaded; default false
    without      names of packages that cannot be imported
    limit        seconds, where it is not the default

"$MODEL" in arguments and contents is the folder of the tiny model, "$RUN" and "$RELATIVE" those of two finished runs
(the second was given relative paths), "$HERE" the folder of the case, in which the command runs, "$LONG" a name of
5,000 letters. Beside the row's files there are prompts.jsonl (8 prompts, with answers) and rewards.py (`even`) there,
unless the row says otherwise. A file that is changed twice comes a second time as ./path.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from experiments.attacks.gguf_file import gguf_bytes

TABLE = Path(__file__).with_name("invocations.jsonl")
MODEL = Path(__file__).resolve().parents[2] / "tests" / "vectors" / "llama_tied"
PROMPTS = "".join(json.dumps({"prompt": f"number {i:02d}:", "answer": str(i % 2)}) + "\n" for i in range(8))
REWARDS = """def even(completions, completion_ids):
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]
"""
OPTIONS = {
    "model": "$MODEL",
    "output": "run",
    "prompts": "prompts.jsonl",
    "rewards": "rewards.py:even",
    "steps": "1",
    "prompts-per-step": "2",
    "group-size": "2",
    "max-new-tokens": "4",
    "eval-size": "0",
}
FLAGS = {"tensorboard": "--no-tensorboard", "remat": "--no-remat"}
KEYS = {"name", "arguments", "expect", "status", "files", "needs_model", "without", "limit"}

Row = dict[str, Any]


def read_table(path: Path = TABLE) -> list[Row]:
    """The rows. ValueError for a key that no row has, or a row without name, arguments or expect."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        if row.keys() - KEYS or not {"name", "arguments", "expect"} <= row.keys():
            raise ValueError(f"{path}: the row {row.get('name')!r} has unknown keys, or lacks some: {sorted(row)}")
    return rows


def arguments_of(row: Row, places: dict[str, Path]) -> list[str]:
    """The arguments of the row's command, placeholders replaced; places: name -> folder."""
    out: list[str] = []
    for argument in row["arguments"]:
        if argument.split(" ")[0] == "$TRAIN":
            without = {name.removeprefix("-") for name in argument.split(" ")[1:]}
            given = [[f"--{name}", value] for name, value in OPTIONS.items() if name not in without]
            flags = [flag for name, flag in FLAGS.items() if name not in without]
            out += ["train", *(x for pair in given for x in pair), *flags]
        else:
            out.append(argument)
    return [replaced(argument, places) for argument in out]


def replaced(value: Any, places: dict[str, Path]) -> Any:
    """A value with the placeholders in its texts replaced."""
    if isinstance(value, str):
        for name, path in places.items():
            value = value.replace(f"${name}", str(path))
        return value
    if isinstance(value, list):
        return [replaced(x, places) for x in value]
    if isinstance(value, dict):
        return {name: replaced(x, places) for name, x in value.items()}
    return value


def make_files(row: Row, folder: Path, places: dict[str, Path]) -> None:
    """Make the row's files, and the usual ones, in the folder."""
    files = {"prompts.jsonl": PROMPTS, "rewards.py": REWARDS, **row.get("files", {})}
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        content = replaced(content, places)
        kind, *details = content if isinstance(content, list) else ("text", content)
        BUILDERS[kind](path, *details)


def _text(path: Path, *parts: Any, encoding: str = "utf-8") -> None:
    """Parts one after the other; a part [text, count] is repeated."""
    texts = [part if isinstance(part, str) else part[0] * part[1] for part in parts]
    path.write_bytes("".join(texts).encode(encoding))


def _encoded(path: Path, encoding: str, text: str) -> None:
    _text(path, text, encoding=encoding)


def _bytes(path: Path, digits: str, *more: Any) -> None:
    """Bytes in hexadecimal, then as many zeros as the second value says."""
    path.write_bytes(bytes.fromhex(digits) + bytes(more[0] if more else 0))


def _copy(path: Path, source: str) -> None:
    """A copy of a folder or file, writable, without the reference vectors beside a model."""
    if Path(source).is_dir():
        ignore = shutil.ignore_patterns("vectors.npz")
        shutil.copytree(source, path, ignore=ignore, copy_function=shutil.copyfile, dirs_exist_ok=True)
    else:
        shutil.copyfile(source, path)


def _merge(path: Path, changes: dict[str, Any]) -> None:
    """Change a JSON file; objects are merged."""

    def merged(old: Any, new: Any) -> Any:
        if not (isinstance(old, dict) and isinstance(new, dict)):
            return new
        return {**old, **{name: merged(old.get(name), value) for name, value in new.items()}}

    path.write_text(json.dumps(merged(json.loads(path.read_text()), changes), indent=2))


def _drop(path: Path, *names: str) -> None:
    """Take keys out of a JSON file."""
    raw = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in raw.items() if name not in names}, indent=2))


def _delete(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _tensors(path: Path, changes: dict[str, Any]) -> None:
    """Change a safetensors file: name -> "drop", "nan", "inf", a dtype, or a shape of zeros."""
    from safetensors.numpy import load_file, save_file

    arrays = load_file(path)
    for name, change in changes.items():
        if change == "drop":
            del arrays[name]
        elif isinstance(change, list):
            arrays[name] = np.zeros(change, np.float32)
        elif change in ("nan", "inf"):
            arrays[name] = arrays[name].copy()
            arrays[name].flat[0] = float(change)
        else:
            arrays[name] = arrays[name].astype(change)
    save_file(arrays, path)


def _parquet(path: Path, columns: dict[str, list[Any]]) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path)


def _data_set(path: Path, columns: dict[str, list[Any]], split: str = "") -> None:
    """A folder as `datasets` saves it, with one split or without."""
    from datasets import Dataset, DatasetDict, disable_progress_bars

    disable_progress_bars()
    data = Dataset.from_dict(columns)
    (DatasetDict({split: data}) if split else data).save_to_disk(str(path))


BUILDERS: dict[str, Callable[..., None]] = {
    "text": _text,
    "encoded": _encoded,
    "bytes": _bytes,
    "copy": _copy,
    "merge": _merge,
    "drop": _drop,
    "delete": _delete,
    "cut": lambda path, size: os.truncate(path, size),
    "folder": lambda path: path.mkdir(parents=True, exist_ok=True),
    "link": lambda path, target: path.symlink_to(target),
    "pipe": lambda path: os.mkfifo(path),
    "tensors": _tensors,
    "parquet": _parquet,
    "data set": _data_set,
    "gguf": lambda path, *changes: path.write_bytes(gguf_bytes(*changes)),
}
