"""What recipes share: the command of each, and the settings of its run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.loop import train

Row = dict[str, Any]


def write_rows(path: Path, rows: Sequence[Row]) -> str:
    """A file of rows, JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def config_of(folder: Path, model: str, rows: Sequence[Row], rewards: Sequence[str], **settings: Any) -> TrainConfig:
    """The settings of a run on made rows. rewards: functions of the recipe's file, and of the registry.

    settings: others than the usual ones.
    """
    prompts = write_rows(Path(f"{folder}.jsonl"), rows)
    usual: dict[str, Any] = {"algorithm": "grpo", "steps": 50, "prompts_per_step": 8, "max_new_tokens": 256}
    return TrainConfig(
        model=model, output=str(folder), prompts=prompts, rewards=tuple(rewards), **{**usual, **settings}
    )  # fmt: skip


def main(about: str | None, rows: Callable[[int, int], list[Row]], config: Callable[..., TrainConfig]) -> None:
    """The command of a recipe. about: its docstring; rows: (seed, count) -> rows; config: (folder, model, rows)."""
    parser = argparse.ArgumentParser(description=(about or "").split("\n\n")[0])
    parser.add_argument("--rows", type=Path, help="write the rows to this file, and train nothing")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--count", type=int, default=512)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    made = rows(given.seed, given.count)
    if given.rows is not None:
        print(write_rows(given.rows, made))
        return
    if given.output is None:
        sys.exit("--output is missing: name the run's folder, or --rows for the data alone")
    more = {} if given.steps is None else {"steps": given.steps}
    train(config(given.output, given.model, made, seed=given.seed, **more))
