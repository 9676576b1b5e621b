"""Load prompts from files, data set folders and generated tasks, as a list of rows or as they are drawn.

A row is a dict with "prompt" (a string or a list of messages) and the other columns of the data, such as "answer",
which are passed to reward functions by name.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl_llm.data.chat.encode import fault_of, is_conversation, preview, whole_text
from jaxrl_llm.data.columns import PromptColumns, find, has, prompt_column_of
from jaxrl_llm.data.generate import PREFIX, generate
from jaxrl_llm.data.prompt_rows import PromptRows, canonical, rows_as_drawn
from jaxrl_llm.data.sources.files import Row, file_format, lacking, read_rows, source_files
from jaxrl_llm.data.sources.hub import is_hub_data
from jaxrl_llm.data.sources.random_access import RandomAccess, open_records, row_of
from jaxrl_llm.data.stream import whole_number
from jaxrl_llm.data.template import Template, fill, read_template, template_columns
from jaxrl_llm.utils.errors import InputError, shown, unknown
from jaxrl_llm.utils.storage import is_url, naming_url

LISTED = 2**16  # most rows that `open_prompts` reads into a list
_PLAIN = "{prompt}"
_TOGETHER = 1024  # records read at a time
Same = Callable[[Mapping[str, Any]], str]  # maps the rows of one task to one text


def load_prompts(
    source: str | Path,
    *,
    limit: int | None = None,
    seed: int = 0,
    prompt_column: str | None = None,
    prompt_template: str = _PLAIN,
    task_options: dict[str, Any] | None = None,
    answer_column: str | None = None,
    say: Callable[[str], object] = lambda text: None,
) -> list[Row]:
    """The rows of a source of prompts. All rows have the same columns; missing values are None.

    source: a .jsonl or .json file (an object per line, or one array of objects); a .parquet file; an .array_record file
        of JSON objects; a pattern of such files (data/train-*.parquet), or a folder of them; a folder written by
        `datasets.Dataset.save_to_disk`; a data set of the Hugging Face hub, OWNER/NAME, OWNER/NAME:SPLIT or
        OWNER/NAME:CONFIG/SPLIT; or `reasoning-gym:TASK`, which generates items of that task.
    limit: most rows, from the start; for a task, the number of items (None: the task's default).
    seed: of a generated task, 0 to 2^32 - 1. Rows of files keep their order.
    prompt_column: the column to use as "prompt"; None: the first of `columns.PROMPTS` that there is. Of a conversation
        in the column "messages" that ends with the assistant, the last message is the answer.
    answer_column: the column, or entry of one, to use as "answer"; None: the first of `columns.ANSWERS`, if any.
    say: called with a line about the columns, if they are not named prompt and answer.
    prompt_template: `str.format` text over the row's columns, where {prompt} is the prompt. For string prompts only.
    task_options: options of a generated task, such as {"max_digits": 3}.

    Generated rows have the columns prompt, answer, reasoning_gym_task and reasoning_gym_entry, which the reward
    `reasoning_gym` needs.

    Raises InputError, naming the file and the line or row, if the source does not exist, is empty or malformed, lacks
    the column, contains an invalid prompt (see `data.chat.encode.fault_of`), or names an unknown task or option; if an
    argument has the wrong type; and if the package that reads the source is not installed.
    """
    source = _text("source", os.fspath(source) if isinstance(source, os.PathLike) else source)
    _tell_of_shards(source, say)
    finish = _finisher(prompt_column, prompt_template, answer_column)
    limit = None if limit is None else whole_number("limit", limit, 1)
    seed = whole_number("seed", seed, 0, 2**32 - 1)
    generated = source.startswith(PREFIX)
    if task_options and not generated:
        raise InputError(f"task options are for {PREFIX}TASK sources, found the source {shown(source)}")
    if not isinstance(task_options or {}, dict) or not all(isinstance(name, str) for name in task_options or {}):
        raise InputError(f"task_options is {shown(task_options)}, but must be a dict of options by name")
    raw: Iterable[Row] = (
        generate(source.removeprefix(PREFIX), limit, seed, task_options or {}) if generated else _rows_of(source, limit)
    )
    return _listed(itertools.islice(raw, limit), source, finish, say)


def open_prompts(
    source: str | Path | RandomAccess,
    *,
    limit: int,
    prompt_column: str | None = None,
    prompt_template: str = _PLAIN,
    answer_column: str | None = None,
    say: Callable[[str], object] = lambda text: None,
    **of_tasks: Any,
) -> list[Row] | PromptRows:
    """The rows of `load_prompts`; if there are more than `LISTED` and the source has random access, as they are drawn.

    source: as in `load_prompts`, where .json files and generated tasks have no random access; or any source of grain
        (`__len__` and `__getitem__`), whose records are dicts or JSON objects as text.
    of_tasks: seed and task_options of `load_prompts`.

    Of rows that are read as they are drawn, `prompt_rows.SAMPLED` are checked here and the others when they are drawn.
    """
    limit, finish = whole_number("limit", limit, 1), _finisher(prompt_column, prompt_template, answer_column)
    records: RandomAccess | None
    if isinstance(source, str | os.PathLike):
        name = os.fspath(source)
        records = None if limit <= LISTED or name.startswith(PREFIX) else open_records(name)
        if records is None or min(len(records), limit) <= LISTED:
            return load_prompts(
                name, limit=limit, prompt_column=prompt_column, prompt_template=prompt_template,
                answer_column=answer_column, say=say, **of_tasks,
            )  # fmt: skip
        _tell_of_shards(name, say)
    elif isinstance(source, RandomAccess):
        records, name = source, type(source).__name__
    else:
        raise InputError(f"prompts is {shown(source)}, but must be a path or have __len__ and __getitem__, as in grain")
    count = min(len(records), limit)
    if count <= LISTED:
        return _listed((row_of(records[i], f"{name}, row {i + 1}") for i in range(count)), name, finish, say)
    rows = rows_as_drawn(records, name, count, finish.row)
    if rows.sample:
        _, first = rows.sample[0]
        finish.tell(name, {column: first.get(column) for column in rows.columns}, say)
    return rows


def _tell_of_shards(source: str, say: Callable[[str], object]) -> None:
    """Say which shards of a pattern or a folder are missing."""
    if source.startswith(PREFIX) or is_hub_data(source) or is_url(source):
        return
    found = source_files(source)
    if isinstance(found, list) and (missing := lacking(found)):
        say(f"{source} lacks {missing}, whose rows are not read: fetch what is missing if it should be there")


def _rows_of(source: str, limit: int | None) -> Iterator[Row]:
    if not is_hub_data(source):
        with naming_url(source):
            found = source_files(source)
            if isinstance(found, list) and file_format(found[0]) != "array_record":
                yield from read_rows(found)
                return
    records = open_records(source)
    assert records is not None
    count = len(records) if limit is None else min(limit, len(records))
    for start in range(0, count, _TOGETHER):
        some = range(start, min(start + _TOGETHER, count))
        yield from (row_of(x, records.where(i)) for i, x in zip(some, records.read(some), strict=True))


def _listed(raw: Iterable[Row], source: str, finish: _Finish, say: Callable[[str], object]) -> list[Row]:
    raw = list(raw)
    if not raw:
        raise InputError(f"{source!r} has no rows: there is nothing to train on")
    columns = list(dict.fromkeys(name for row in raw for name in row))
    whole = [{name: row.get(name) for name in columns} for row in raw]
    rows = [finish.row(row, f"{source}, row {number}") for number, row in enumerate(whole, start=1)]
    finish.tell(source, whole[0], say)
    return rows


def _content_of(prompt: Any) -> str:
    """A canonical text of a prompt, the same for prompts that `without` takes for equal."""
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if is_conversation(prompt):
        # Struct columns fill in the fields that a message does not have with None.
        prompt = [{name: _stripped(value) for name, value in one.items() if value is not None} for one in prompt]
    return canonical(prompt)


def _stripped(value: Any) -> Any:
    return value.strip() if isinstance(value, str) else value


def same_prompt(row: Mapping[str, Any]) -> str:
    """A text that rows share whose prompts have the same content.

    A string equals a single user message of that string, and leading and trailing white space is ignored. A row that is
    a whole text has no prompt: it is its own.
    """
    return _content_of(whole_text(row) or row["prompt"])


def same_row(row: Mapping[str, Any]) -> str:
    """A text that rows share which are equal in all columns, prompts as in `same_prompt`."""
    return canonical({**row, "prompt": _content_of(row["prompt"])})


def without(rows: Iterable[Row], held_out: Iterable[Row], same: Same = same_prompt) -> list[Row]:
    """The rows whose task is not in `held_out`, without repeated tasks: the first row of each is kept.

    same: what is equal for rows of one task, `same_prompt` or `same_row`. Raises InputError for a row without a prompt.
    """
    held = {content for content, _ in _by_content(held_out, same)}
    first: dict[str, Row] = {}
    for content, row in _by_content(rows, same):
        first.setdefault(content, row)
    return [row for content, row in first.items() if content not in held]


def conflicting(rows: Iterable[Row], columns: Iterable[str] | None = None) -> int:
    """The number of rows that have the prompt of an earlier row but differ in another column, e.g. the answer.

    Prompts are compared as in `same_prompt`, where `without` keeps only the first row of each.
    columns: the columns to compare; by default all but the prompt and reasoning_gym_entry.

    >>> conflicting([{"prompt": "a", "answer": 1}, {"prompt": "a", "answer": 2}, {"prompt": "a", "answer": 1}])
    1
    """
    wanted = None if columns is None else frozenset(columns)
    first: dict[str, str] = {}
    count = 0
    for content, row in _by_content(rows):
        compared = row.keys() - {"prompt", "reasoning_gym_entry"} if wanted is None else row.keys() & wanted
        others = canonical({name: row[name] for name in compared})
        count += first.setdefault(content, others) != others
    return count


def _by_content(rows: Iterable[Row], same: Same = same_prompt) -> Iterator[tuple[str, Row]]:
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict) or "prompt" not in row:
            raise InputError(f"row {number} is {preview(row)}, but must be a dict with a prompt")
        yield same(row), row


@dataclass(frozen=True)
class _Finish:
    """Makes rows of prompts from the rows of a source."""

    prompt_column: str | None
    answer_column: str | None
    template: Template | None

    def row(self, row: Row, where: str) -> Row:
        """The row with its "prompt" and, if there is one, its "answer"."""
        found = self.found(row, where)
        prompt, column = found.prompt, self.prompt_column or "prompt"
        whole = whole_text({**found.answer, "prompt": prompt})
        if self.template is not None:
            if not isinstance(prompt, str):
                raise InputError(
                    f"{where}: the prompt is a list of messages, for which there can be no prompt_template"
                )
            prompt = fill(self.template, {**row, **found.answer, "prompt": prompt}, where)
        elif not isinstance(prompt, str) and not is_conversation(prompt) and whole is None:
            raise InputError(f"{where}: {column!r} must be a string or a list of messages, found {preview(prompt)}")
        if fault := fault_of(prompt):
            raise InputError(f"{where}: {column!r} is not a valid prompt: {fault}")
        return {**row, **found.answer, "prompt": prompt}

    def found(self, row: Row, where: str) -> PromptColumns:
        """The prompt of a row before the template, and its answer."""
        for name in (self.prompt_column, self.answer_column):
            if name is not None and not has(row, name):
                raise unknown("column", name, row)
        if self.template is None:
            return find(row, where, self.prompt_column, self.answer_column)
        # A template says itself which columns are in the prompt.
        if self.prompt_column is None and "prompt" not in template_columns(self.template):
            found = find({**row, "prompt": ""}, where, "prompt", self.answer_column)
            return found._replace(said=found.said.replace("the column prompt", "prompt_template"))
        return find(row, where, self.prompt_column or prompt_column_of(row, where), self.answer_column)

    def tell(self, source: str, row: Row, say: Callable[[str], object]) -> None:
        """Say which columns were chosen, if they have other names."""
        if text := self.found(row, source).said:
            say(f"{source}: {text}")


def _finisher(prompt_column: Any, prompt_template: str, answer_column: Any = None) -> _Finish:
    prompts = None if prompt_column is None else _text("prompt_column", prompt_column)
    answers = None if answer_column is None else _text("answer_column", answer_column)
    return _Finish(prompts, answers, None if prompt_template == _PLAIN else read_template(prompt_template))


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise InputError(f"{name} is {shown(value)}, but must be non-empty text")
    return value
