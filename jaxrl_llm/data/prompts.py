"""Where prompts come from: files, data set folders and generated tasks, all as a list of rows.

A row is a dict with "prompt" (a string or a list of messages) and the other columns of the data, such as "answer",
which reward functions get by name.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.data.chat import is_conversation
from jaxrl_llm.errors import InputError, need, unknown

Row = dict[str, Any]

_GENERATED = "reasoning-gym:"
_PLAIN = "{prompt}"


def load_prompts(
    source: str | Path,
    *,
    limit: int | None = None,
    seed: int = 0,
    prompt_column: str = "prompt",
    prompt_template: str = _PLAIN,
    task_options: dict[str, Any] | None = None,
) -> list[Row]:
    """The rows of a source of prompts. All rows have the same columns; what a row does not have is None.

    source: a file .jsonl or .json (an object per line, or one array of objects) or .parquet; a folder that
        `datasets.Dataset.save_to_disk` wrote; or `reasoning-gym:TASK`, which generates items of that task.
    limit: at most so many rows, from the start; of a task, so many items (its own default number if None).
    seed: of a generated task; files keep their order.
    prompt_column: the column that becomes "prompt".
    prompt_template: `str.format` text over the row's columns, where {prompt} is the prompt. For string prompts only.
    task_options: settings of a generated task, such as {"max_digits": 3}.

    Generated rows have the columns prompt, answer, reasoning_gym_task and reasoning_gym_entry, as the reward
    `reasoning_gym` needs them.

    Raises InputError if the source does not exist, is empty or malformed, has no such column, or names an unknown task
    or option, and if the package that reads it is not installed.
    """
    if limit is not None and limit < 1:
        raise InputError(f"limit must be at least 1, found {limit}")
    source = str(source)
    generated = source.startswith(_GENERATED)
    if task_options and not generated:
        raise InputError(f"task options are for {_GENERATED}TASK sources, found the source {source!r}")
    raw = (
        _generate(source.removeprefix(_GENERATED), limit, seed, task_options or {})
        if generated
        else _read(source, limit)
    )
    raw = list(itertools.islice(raw, limit))
    if not raw:
        raise InputError(f"{source!r} has no rows: there is nothing to train on")
    columns = list(dict.fromkeys(name for row in raw for name in row))
    return [
        _finish({name: row.get(name) for name in columns}, prompt_column, prompt_template, f"{source}, row {number}")
        for number, row in enumerate(raw, start=1)
    ]


def without(rows: Iterable[Row], held_out: Iterable[Row]) -> list[Row]:
    """The rows whose prompt is not in `held_out`, and of rows with the same prompt only the first.

    Prompts are compared by content: a string is the same as one user message of that string, and white space around
    a text does not count.
    """
    seen = {_content(row["prompt"]) for row in held_out}
    kept = []
    for row in rows:
        content = _content(row["prompt"])
        if content not in seen:
            seen.add(content)
            kept.append(row)
    return kept


def _content(prompt: Any) -> str:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    stripped = [
        # Columns of structs spell out the fields that a message does not have as None.
        {key: value.strip() if isinstance(value, str) else value for key, value in message.items() if value is not None}
        for message in messages
    ]
    return json.dumps(stripped, sort_keys=True, default=str)


def _finish(row: Row, prompt_column: str, template: str, where: str) -> Row:
    """The row with its "prompt" in place."""
    prompt = row.get(prompt_column)
    if prompt_column not in row:
        raise unknown("column", prompt_column, row)
    if not isinstance(prompt, str) and not is_conversation(prompt):
        found = type(prompt).__name__
        raise InputError(f"{where}: {prompt_column!r} must be a string or a list of messages, found {found}")
    if template != _PLAIN:
        if not isinstance(prompt, str):
            raise InputError(f"{where}: the prompt is a list of messages, for which there can be no prompt_template")
        try:
            prompt = template.format(**{**row, "prompt": prompt})
        except KeyError as error:
            raise unknown("column", str(error.args[0]), {*row, "prompt"}) from error
        except (ValueError, IndexError, AttributeError, TypeError) as error:
            reason = f"{error}; write {{{{ and }}}} for braces that are text"
            raise InputError(f"prompt_template {template!r} does not work: {reason}") from error
    return {**row, "prompt": prompt}


def _read(source: str, limit: int | None) -> Iterator[Row]:
    path = Path(source).expanduser()
    if not path.exists():
        raise InputError(
            f"no data at {source!r}: give a .jsonl, .json or .parquet file, a data set folder or reasoning-gym:TASK"
        )
    if path.is_dir():
        return _read_folder(path, limit)
    if path.suffix in (".jsonl", ".json"):
        return _read_json(path)
    if path.suffix == ".parquet":
        return _read_parquet(path)
    raise InputError(f"cannot read {source!r}: it must end in .jsonl, .json or .parquet, or be a data set folder")


def _read_json(path: Path) -> Iterator[Row]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            if path.suffix == ".json" and file.read(1) == "[":
                file.seek(0)
                yield from _objects(path, enumerate(_parse(path, 0, file.read()), start=1), "entry")
                return
            file.seek(0)
            lines = ((number, line) for number, line in enumerate(file, start=1) if line.strip())
            yield from _objects(path, ((number, _parse(path, number, line)) for number, line in lines), "line")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: {error}") from error


def _parse(path: Path, line: int, text: str) -> Any:
    """The value of the JSON text, which starts at that line of the file (0: it is the whole file)."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{path}, line {line or error.lineno}: not JSON: {error.msg} at column {error.colno}"
        ) from error


def _objects(path: Path, values: Iterable[tuple[int, Any]], unit: str) -> Iterator[Row]:
    for number, value in values:
        if not isinstance(value, dict):
            raise InputError(f"{path}, {unit} {number}: a row is a JSON object, found {type(value).__name__}")
        yield value


def _read_parquet(path: Path) -> Iterator[Row]:
    try:
        from pyarrow import ArrowInvalid
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise need("pyarrow", "data", f"reading {path}") from error
    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except ArrowInvalid as error:
        raise InputError(f"{path} is not a Parquet file: {error}") from error


def _read_folder(path: Path, limit: int | None) -> Iterator[Row]:
    try:
        from datasets import Dataset, load_from_disk
    except ImportError as error:
        raise need("datasets", "data", f"reading the data set folder {path}") from error
    try:
        data = load_from_disk(str(path))
    except Exception as error:
        raise InputError(f"{path} is not a folder that datasets.save_to_disk wrote: {error}") from error
    if not isinstance(data, Dataset):
        raise InputError(f"{path} holds several splits: give one of {', '.join(str(path / name) for name in data)}")
    yield from (data if limit is None else data.select(range(min(limit, len(data)))))


def _generate(task: str, limit: int | None, seed: int, options: dict[str, Any]) -> Sequence[Row]:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise need("reasoning-gym", "verifiers", f"the source {_GENERATED}{task}") from error
    if task not in DATASETS:
        raise unknown("reasoning-gym task", task, DATASETS)
    fields = {field.name for field in dataclasses.fields(DATASETS[task][1])} - {"seed", "size"}
    for option in options:
        if option in ("seed", "size"):
            raise InputError(f"task option {option!r}: give it as {'limit' if option == 'size' else 'seed'}")
        if option not in fields:
            raise unknown(f"option of the task {task!r},", option, fields)
    size = {} if limit is None else {"size": limit}
    try:
        items = list(reasoning_gym.create_dataset(task, seed=seed, **size, **options))
    except Exception as error:
        raise InputError(f"reasoning-gym cannot generate {task!r} with {options}: {error}") from error
    return [
        {
            "prompt": item["question"],
            "answer": item["answer"],
            "reasoning_gym_task": task,
            "reasoning_gym_entry": item,
        }
        for item in items
    ]
