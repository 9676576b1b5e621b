"""Rows that are read as they are drawn: the same prompts, and no others are read."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import record_files

from jaxrl_llm.core.source import Curriculum
from jaxrl_llm.data import load as prompts
from jaxrl_llm.data import load_prompts
from jaxrl_llm.data.load import open_prompts
from jaxrl_llm.data.prompt_rows import SAMPLED, PromptRows
from jaxrl_llm.data.prompt_set import Ahead, PromptSet, encode_as_drawn, encode_rows
from jaxrl_llm.rollouts.runtime.sources import draw_prompts, shuffled_epochs
from jaxrl_llm.utils.errors import InputError

ROWS = [{"prompt": "x" * (1 + i % 7) + str(i), "answer": i} for i in range(100)]


class Counted:
    """A source of grain's protocol that counts its reads; rows of prompts as long as `length` says."""

    def __init__(self, count: int) -> None:
        self.count, self.reads = count, list[int]()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads.append(index)
        return {"prompt": f"number {index}", "answer": index}


class Letters:
    """A tokenizer with a token for each character."""

    chat_template = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}


@pytest.fixture
def few_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even small sources are read as they are drawn."""
    monkeypatch.setattr(prompts, "LISTED", 4)


def write_lines(path: Path, rows: Sequence[dict]) -> str:
    return str(record_files.write_lines(path, rows))


def encoded(rows: Any, workers: int = 2, **settings: Any) -> PromptSet:
    how = {"max_tokens": 99, "long_prompts": "skip", "system_prompt": None, **settings}
    if isinstance(rows, PromptRows):
        return encode_as_drawn(Letters(), rows, workers=workers, **how)
    return encode_rows(Letters(), rows, **how)


def test_ten_million_rows_are_opened_by_reading_few() -> None:
    source = Counted(10_000_000)
    rows = open_prompts(source, limit=10**9)
    assert isinstance(rows, PromptRows)
    assert len(rows) == 10_000_000
    assert len(source.reads) == SAMPLED
    assert (min(source.reads), max(source.reads)) == (0, 9_999_999)
    drawn = encoded(rows)
    order = shuffled_epochs(drawn.rows, seed=0)
    assert len(source.reads) == SAMPLED, "the order of an epoch reads no row"
    ids, _, dropped = draw_prompts(order, drawn, order.init(), 5)
    assert dropped == 0
    assert [drawn.rows[i]["answer"] for i in ids] == ids
    assert drawn.ids[ids[0]] == [ord(letter) for letter in f"number {ids[0]}"]
    drawn.ids[ids[-1]]
    ahead, _ = order.select(order.init(), 10)
    assert all(drawn.ids[i] for i in ahead)  # waits for the threads
    assert sorted(source.reads[SAMPLED:]) == sorted(ahead.tolist()), "each row that is drawn is read once"


@pytest.mark.usefixtures("few_listed")
def test_rows_are_those_of_a_list(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", ROWS)
    how = {"prompt_template": "{prompt} of {answer}", "limit": 90}
    drawn, listed = open_prompts(path, **how), load_prompts(path, **how)  # type: ignore[arg-type]
    assert isinstance(drawn, PromptRows)
    assert list(drawn) == drawn[:] == listed
    order = np.random.default_rng(0).permutation(90)[10:]
    assert drawn.take(order)[:] == [listed[i] for i in order]
    assert drawn.take(order).take(order[:3] % 80)[2] == listed[order[order[2] % 80]]
    assert drawn[-1] == listed[-1]
    assert drawn.where(7) == f"{path}, line 8"
    few = open_prompts(path, limit=4)
    assert few == load_prompts(path, limit=4)
    assert open_prompts(ROWS[:4], limit=9) == ROWS[:4], "few rows of a source of grain's are a list, too"


@pytest.mark.usefixtures("few_listed")
def test_rows_have_the_columns_of_the_sample(tmp_path: Path) -> None:
    rows = [{"prompt": str(i), **({"hint": "h"} if i % 2 else {})} for i in range(10)]
    drawn = open_prompts(write_lines(tmp_path / "a.jsonl", rows), limit=10)
    assert drawn[:] == [{"prompt": str(i), "hint": "h" if i % 2 else None} for i in range(10)]


@pytest.mark.usefixtures("few_listed")
def test_a_fingerprint_depends_on_the_data_and_not_on_its_place(tmp_path: Path) -> None:
    def fingerprint(rows: Sequence[dict], name: str, **options: Any) -> str:
        found = open_prompts(write_lines(tmp_path / name, rows), limit=1000, **options)
        assert isinstance(found, PromptRows)
        return found.fingerprint

    first = fingerprint(ROWS, "a.jsonl")
    assert fingerprint(ROWS, "b.jsonl") == first
    assert fingerprint(ROWS[:-1], "c.jsonl") != first
    assert fingerprint([*ROWS[:-1], {"prompt": "y" + ROWS[-1]["prompt"][1:], "answer": 99}], "d.jsonl") != first
    assert fingerprint([ROWS[0], {"prompt": "longer than it was", "answer": 1}, *ROWS[2:]], "e.jsonl") != first
    assert fingerprint(ROWS, "a.jsonl", prompt_template="Q: {prompt}") != first


@pytest.mark.usefixtures("few_listed")
def test_a_malformed_row_is_named_when_it_is_drawn_and_not_before(tmp_path: Path) -> None:
    lines = [json.dumps(row) for row in ROWS]
    lines[2], lines[5] = "nonsense", json.dumps({"prompt": 3})  # neither is sampled
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    rows = open_prompts(str(tmp_path / "a.jsonl"), limit=100)
    drawn = encoded(rows)
    assert drawn.ahead is not None
    drawn.ahead(range(10))
    assert drawn.rows[0] == ROWS[0], "one of those that were read together with the malformed ones"
    assert drawn.ids[3] == [ord(letter) for letter in ROWS[3]["prompt"]]
    with pytest.raises(InputError, match=r"a\.jsonl, line 3: not JSON"):
        drawn.ids[2]
    with pytest.raises(InputError, match=r"a\.jsonl, line 6: 'prompt' must be a string or a list of messages"):
        drawn.rows[5]
    lines[0] = "nonsense"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(InputError, match=r"a\.jsonl, line 1: not JSON"):
        open_prompts(str(tmp_path / "a.jsonl"), limit=100)


def test_errors_of_a_source_are_one_line() -> None:
    class Broken(Counted):
        def __getitem__(self, index: int) -> dict[str, Any]:
            if index == 5:
                raise OSError("gone\naway")
            return super().__getitem__(index)

    rows = open_prompts(Broken(100_000), limit=100_000)
    drawn = encoded(rows)
    assert drawn.rows[4]["answer"] == 4
    with pytest.raises(InputError, match=r"^cannot read Broken, row 6: OSError: gone away$"):
        drawn.rows[5]
    with pytest.raises(InputError, match="prompts is 3, but must be a path or have __len__ and __getitem__"):
        open_prompts(3, limit=1)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="no rows"):
        open_prompts([], limit=1)


@pytest.mark.usefixtures("few_listed")
@pytest.mark.parametrize("workers", [1, 3])
def test_long_and_held_out_prompts_are_dropped_and_the_order_is_that_of_the_others(
    tmp_path: Path, workers: int
) -> None:
    rows = open_prompts(write_lines(tmp_path / "a.jsonl", ROWS), limit=100)
    held_out = [{"prompt": f" {ROWS[i]['prompt']}\n"} for i in (0, 50)]
    drawn = encoded(rows, workers, max_tokens=5, held_out=held_out)
    kept = [i for i in range(100) if len(ROWS[i]["prompt"]) <= 5 and i not in (0, 50)]
    order = shuffled_epochs(drawn.rows, seed=3)
    every, _ = order.select(order.init(), 300)
    expected = [i for i in every.tolist() if i in kept]
    state, taken, dropped = order.init(), list[int](), 0
    for count in (7, 0, 16, 1, 30):
        state = json.loads(json.dumps(state))  # as in a checkpoint
        ids, state, lost = draw_prompts(order, drawn, state, count)
        assert len(ids) == count
        taken, dropped = taken + ids, dropped + lost
    assert taken == expected[:54]
    assert 54 + dropped == [place for place, i in enumerate(every) if i in kept][53] + 1
    assert all(drawn.ids[i] == [ord(letter) for letter in ROWS[i]["prompt"]] for i in taken)


@pytest.mark.usefixtures("few_listed")
def test_long_prompts_are_truncated_or_refused_when_they_are_drawn(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [*ROWS, {"prompt": "z" * 20, "answer": 0}, ROWS[0]])
    rows = open_prompts(path, limit=102).take(np.arange(101))  # type: ignore[union-attr]
    cut = encoded(rows, max_tokens=5, long_prompts="truncate")
    listed = encoded(load_prompts(path), max_tokens=5, long_prompts="truncate")
    assert cut.ids[:] == listed.ids[:101]
    assert cut.shortened is None
    refused = encoded(rows, max_tokens=9, long_prompts="error")
    assert refused.ids[0] == listed.ids[0]
    with pytest.raises(InputError, match=r"a\.jsonl, line 101, 'zzz.*: a prompt has 20 tokens, more than max_prompt_"):
        refused.ids[100]
    with pytest.raises(InputError, match=r"prompts that were sampled from .* have more than 1 tokens"):
        encoded(rows, max_tokens=1)


def test_a_set_of_which_nearly_all_is_dropped_is_refused() -> None:
    rows = open_prompts(Counted(10**6), limit=10**6)
    order = Curriculum(lambda: 0, lambda at, count: (np.arange(at, at + count), at + count), lambda state, step: state)
    none = encoded(rows)._replace(ids=[[]] * 10**6)
    with pytest.raises(InputError, match=r"of 12000 prompts drawn, 12000 are held out or too long"):
        draw_prompts(order, none, 0, 2000)


def test_what_a_list_gives_is_not_looked_ahead() -> None:
    """Curricula see one call a step, as those of sets that are read at the start always did."""
    calls: list[int] = []

    def select(state: Any, count: int) -> tuple[np.ndarray, Any]:
        calls.append(count)
        return np.arange(count), state

    listed = encoded(ROWS)
    assert draw_prompts(Curriculum(lambda: None, select, lambda state, step: state), listed, None, 3) == (
        [0, 1, 2],
        None,
        0,
    )
    assert calls == [3]


def test_values_ahead_are_those_that_loading_gives_and_the_last_are_kept() -> None:
    loads, release = list[list[int]](), threading.Event()

    def load(numbers: list[int]) -> list[int]:
        loads.append(numbers)
        release.wait(10)
        return [n * n for n in numbers]

    ahead = Ahead(load, 2, lambda number: -number)
    ahead.start([1, 2, 3, 2])
    release.set()
    assert [ahead[n] for n in (3, 1, 2)] == [9, 1, 4]
    assert sorted(loads) == [[1], [3, 2]], "neighbours together, each once"
    ahead.start([])
    for n in range(4, 13):
        assert ahead[n] == n * n
    assert len(loads) == 11
    assert ahead[2] == 4, "kept: twelve are, four times the most that were asked for"
    assert len(loads) == 11
    for n in range(13, 24):
        assert ahead[n] == n * n
    assert ahead[1] == 1
    assert len(loads) == 23, "read again"
