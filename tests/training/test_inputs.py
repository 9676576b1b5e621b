"""Which rows are tasks of a run, which of them are held out, and what is said where there are few or none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_runs as runs

from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.inputs import HELD_OUT_SEED, evaluation_rows, read_inputs, split_prompts
from jaxrl_llm.utils.errors import InputError


def written(folder: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> str:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / name)


def coins(*numbers: int) -> list[dict[str, Any]]:
    return [{"prompt": "Have 7 coins.", "coins": number} for number in numbers]


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"environment": "purse.py:Purse"}, 5),
        ({"tools": ("purse.py:add",)}, 5),
        ({"environment": "purse.py:Purse", "same_task": "prompt"}, 1),
        ({}, 1),
        ({"same_task": "row"}, 5),
    ],
)
def test_with_an_environment_the_row_is_the_task(tmp_path: Path, settings: dict[str, Any], kept: int) -> None:
    rows = coins(0, 1, 2, 3, 3, 4)
    config = TrainConfig(prompts=written(tmp_path, rows), eval_size=0, **settings)
    found = split_prompts(config)
    assert len(found.training) == kept
    assert found.conflicting == (5 if kept == 1 else 0)


def test_held_out_tasks_are_other_rows(tmp_path: Path) -> None:
    config = TrainConfig(prompts=written(tmp_path, coins(*range(8))), eval_size=2, environment="purse.py:Purse")
    found = split_prompts(config)
    assert sorted(row["coins"] for row in [*found.training, *found.held_out]) == list(range(8))
    assert len(found.held_out) == 2
    theirs = written(tmp_path, coins(3, 9), "eval.jsonl")
    found = split_prompts(TrainConfig(prompts=config.prompts, eval_prompts=theirs, environment="purse.py:Purse"))
    assert [row["coins"] for row in found.held_out] == [3, 9]
    assert sorted(row["coins"] for row in found.training) == [0, 1, 2, 4, 5, 6, 7]


def test_an_environment_without_prompts_is_played_with_seeds() -> None:
    config = TrainConfig(environment="guess.py:Guess", num_prompts=5, eval_size=3)
    found = split_prompts(config)
    assert [row["prompt"] for row in found.training] == [""] * 5
    seeds = [row["seed"] for row in found.training]
    held_out = [row["seed"] for row in found.held_out]
    assert len({*seeds, *held_out}) == 8
    assert split_prompts(config) == found
    other = TrainConfig(environment="guess.py:Guess", num_prompts=5, eval_size=3, seed=1)
    assert not {row["seed"] for row in split_prompts(other).training} & set(seeds)
    assert [row["seed"] for row in split_prompts(other).held_out] == held_out, f"of {HELD_OUT_SEED}"
    assert [row["seed"] for row in evaluation_rows(config, size=4)][:3] == held_out


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "prompts is missing: give a .jsonl, .*--prompts reasoning-gym:chain_sum"),
        ({"tools": ("a.py:f",)}, "tools are given, but nothing is asked: give prompts, or a system_prompt"),
    ],
)
def test_forgotten_prompts_are_an_error(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = TrainConfig(model=str(runs.MODEL), output=str(tmp_path / "run"), **settings)
    with pytest.raises(InputError, match=message), read_inputs(config):
        pass
    assert not (tmp_path / "run").exists()


def test_tools_with_a_system_prompt_need_no_rows() -> None:
    found = split_prompts(TrainConfig(tools=("a.py:f",), system_prompt="Use f until it says done.", num_prompts=2))
    assert len(found.training) == 2


@pytest.mark.parametrize(("count", "held_out"), [(4, 1), (10, 2), (256, 64), (300, 75), (1023, 255), (1024, 256)])
def test_of_a_small_file_the_default_holds_out_a_quarter(tmp_path: Path, count: int, held_out: int) -> None:
    path = written(tmp_path, [{"prompt": str(number)} for number in range(count)])
    found = split_prompts(TrainConfig(prompts=path))
    assert (len(found.held_out), len(found.training)) == (held_out, count - held_out)
    said = f"{path} has {count} prompts, of which {held_out} are held out"
    assert [note for note in found.notes if note.startswith(said)] == list(found.notes)
    assert len(found.notes) == (count < 1024)


def test_what_was_asked_for_is_held_out_or_refused(tmp_path: Path) -> None:
    path = written(tmp_path, [{"prompt": str(number)} for number in range(10)])
    assert len(split_prompts(TrainConfig(prompts=path, eval_size=9)).held_out) == 9
    with pytest.raises(InputError, match="10 different prompts, too few to hold 10 out"):
        split_prompts(TrainConfig(prompts=path, eval_size=10))
    few = written(tmp_path, [{"prompt": str(number)} for number in range(3)], "few.jsonl")
    with pytest.raises(InputError, match=r"3 different prompts, too few to hold 256 out.*eval_size \(0 is none\)"):
        split_prompts(TrainConfig(prompts=few))
