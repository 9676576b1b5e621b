"""Runs whose prompts are read as they are drawn are those of runs that read them all at the start."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_runs as runs
from record_files import FORMATS

from jaxrl_llm.data import load
from jaxrl_llm.data.prompt_rows import PromptRows
from jaxrl_llm.models import load_policy
from jaxrl_llm.rollouts.runtime.sources import draw_prompts, shuffled_epochs
from jaxrl_llm.training import loop
from jaxrl_llm.training.inputs import evaluation_rows, prompt_sets, read_inputs, split_prompts
from jaxrl_llm.utils.errors import InputError


@pytest.fixture
def few_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "LISTED", 4)
    monkeypatch.setattr(loop, "write_report", lambda folder: folder)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_policy(runs.MODEL)[2]


def rows_of(folder: Path, count: int = 12) -> list[dict]:
    return runs.lines_of(runs.write_prompts(folder / "rows.jsonl", count))


def answers(run: Path) -> list[dict]:
    return runs.reproducible(run / "metrics.jsonl")


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_prompts_ids_and_order_of_a_list(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    listed = runs.small_config(tmp_path, seed=5)
    config = runs.small_config(tmp_path, seed=5, prompts=str(FORMATS[name](tmp_path / name, rows_of(tmp_path))))
    expected, their_held_out = prompt_sets(listed, tokenizer, 0)
    monkeypatch.setattr(load, "LISTED", 4)
    found, held_out = prompt_sets(config, tokenizer, 0)
    assert found.ahead is not None
    assert held_out._replace(encode=None) == their_held_out._replace(encode=None)
    one, other = shuffled_epochs(expected.rows, config.seed), shuffled_epochs(found.rows, config.seed)
    state, same = one.init(), other.init()
    for _ in range(4):  # two epochs
        ids, state, _ = draw_prompts(one, expected, state, 4)
        drawn, same, _ = draw_prompts(other, found, same, 4)
        assert (drawn, same) == (ids, state)
        assert [found.rows[i] for i in drawn] == [expected.rows[i] for i in ids]
        assert [found.ids[i] for i in drawn] == [expected.ids[i] for i in ids]


@pytest.mark.heavy
@pytest.mark.usefixtures("few_listed")
def test_a_run_and_its_resumption_are_those_of_a_list(tmp_path: Path) -> None:
    folder = FORMATS["of_parquet"](tmp_path / "folder", rows_of(tmp_path))
    config = runs.small_config(tmp_path, prompts=str(folder))
    summary = runs.train(config)
    assert answers(tmp_path / "run") == answers(runs.finished_run())
    runs.assert_equal_trees(runs.final_params(tmp_path / "run"), runs.final_params(runs.finished_run()))
    assert summary["prompts"] == {"training": 8, "skipped": 0, "truncated": 0, "conflicting": 0}
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "run", other)
    shutil.rmtree(other / "checkpoints" / "4")
    loop.resume(str(other))
    assert answers(other) == answers(tmp_path / "run")
    runs.assert_equal_trees(runs.final_params(other), runs.final_params(tmp_path / "run"))
    shard = next((folder / "data").glob("train-00002*"))
    FORMATS["table.parquet"](shard, [*rows_of(tmp_path)[10:], {"prompt": "one more", "answer": "0"}])
    shutil.rmtree(other / "checkpoints" / "4")
    with pytest.raises(InputError, match="the prompts"):
        loop.resume(str(other))


@pytest.mark.usefixtures("few_listed")
@pytest.mark.heavy
def test_a_run_drops_long_prompts_as_it_draws_them_and_takes_any_source_of_grain(tmp_path: Path) -> None:
    rows = [{**row, "prompt": row["prompt"] + "x" * 20 * (i % 3 == 1)} for i, row in enumerate(rows_of(tmp_path))]
    reads: list[int] = []

    class Source:
        def __len__(self) -> int:
            return len(rows)

        def __getitem__(self, index: int) -> bytes:
            reads.append(index)
            return json.dumps(rows[index]).encode()

    config = runs.small_config(tmp_path, eval_size=0, max_prompt_tokens=20, steps=3, checkpoint_every=1)
    with read_inputs(config, source=Source()) as inputs:
        summary = loop.train(config, inputs=inputs)
    epoch = shuffled_epochs(rows, config.seed)
    every = epoch.select(epoch.init(), 30)[0].tolist()
    expected = [i for i in every if i % 3 != 1][:12]
    last = every.index(expected[-1], 12)  # in the second epoch
    lines = runs.lines_of(tmp_path / "run" / "completions.jsonl")
    seen = list(dict.fromkeys((line["step"], line["prompt"]) for line in lines))
    assert [prompt for _, prompt in seen] == [rows[i]["prompt"] for i in expected]
    assert summary["prompts"]["skipped"] == last + 1 - 12 > 0
    assert answers(tmp_path / "run")[0]["prompts/dropped"] > 0
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "run", other)
    shutil.rmtree(other / "checkpoints" / "3")
    again = loop.RunFolder(other).read_config()
    with read_inputs(again, resume=True, source=Source()) as inputs:
        assert loop.train(again, resume=True, inputs=inputs)["prompts"] == summary["prompts"]
    assert answers(other) == answers(tmp_path / "run")


@pytest.mark.usefixtures("few_listed")
def test_held_out_prompts_of_a_file_of_their_own_are_not_drawn(tokenizer: Any, tmp_path: Path) -> None:
    theirs = runs.write_prompts(tmp_path / "eval.jsonl", count=3, first=8)
    config = runs.small_config(tmp_path, eval_prompts=str(theirs))
    training, held_out, *_ = split_prompts(config)
    assert isinstance(training, PromptRows)
    assert len(training) == 12
    found, _ = prompt_sets(config, tokenizer, 0)
    assert [i for i in range(12) if not found.ids[i]] == [8, 9, 10]
    assert evaluation_rows(config, size=2) == held_out[:2]
    with pytest.raises(InputError, match="12 training prompts, too many to compare"):
        evaluation_rows(config, size=5)


@pytest.mark.usefixtures("few_listed")
def test_too_few_prompts_to_hold_any_out(tmp_path: Path) -> None:
    path = runs.write_prompts(tmp_path / "few.jsonl", 6)
    with pytest.raises(InputError, match="has 6 different prompts, too few to hold 6 out"):
        split_prompts(runs.small_config(tmp_path, prompts=str(path), eval_size=6))


@pytest.mark.usefixtures("few_listed")
def test_a_curriculum_may_choose_any_prompts(tokenizer: Any, tmp_path: Path) -> None:
    """The prompts that are read ahead are a guess, which changes nothing when it is wrong."""
    config = runs.small_config(tmp_path, eval_size=0)
    found, _ = prompt_sets(config, tokenizer, 0)
    random = np.random.default_rng(0)
    order = shuffled_epochs(found.rows, 0)._replace(
        select=lambda state, count: (random.integers(0, 12, count).astype(np.int32), state)
    )
    rows = rows_of(tmp_path)
    for _ in range(5):
        ids, _, _ = draw_prompts(order, found, None, 6)
        assert [found.rows[i] for i in ids] == [rows[i] for i in ids]
        assert [found.ids[i] for i in ids] == [list(rows[i]["prompt"].encode()) for i in ids]
