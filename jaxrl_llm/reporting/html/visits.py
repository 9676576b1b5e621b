"""A run's groups as the report's table of prompts reads them: from groups.jsonl, or else from logged completions."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxrl_llm.reporting.html.run_data import Row, RunData
from jaxrl_llm.reporting.logging.files import iterate_jsonl
from jaxrl_llm.utils.errors import InputError, shown

_NUMBERS = {"prompt": np.int64, "samples": np.int64, "reward": np.float64, "right": np.int64, "equal": np.bool_}


class Visits(NamedTuple):
    """V groups, by step: a visit is a group of a prompt in a step."""

    prompt: npt.NDArray[np.int64]
    step: npt.NDArray[np.int64]
    samples: npt.NDArray[np.int64]
    reward: npt.NDArray[np.float64]
    """Mean reward."""
    right: npt.NDArray[np.int64]
    """How many samples are correct."""
    equal: npt.NDArray[np.bool_]
    """Whether all rewards are equal."""
    why: npt.NDArray[np.int64]
    """Why the step did not train on the group: 0 if it did, else the place in `reasons`, from 1."""
    reasons: tuple[str, ...]
    sampled: bool
    """Whether these are the logged groups of some steps only."""


class LeftOut(NamedTuple):
    """Why a curriculum leaves prompts out, of all P prompts."""

    step: int
    why: npt.NDArray[np.uint8]
    """[P]: places in `words`; 0 for prompts that may be drawn."""
    words: tuple[str, ...]


def read_visits(run: RunData) -> Visits:
    """The groups of a run. InputError for a damaged line."""
    path = run.folder / "groups.jsonl"
    return _of_lines(path) if path.exists() else _of_completions(run.rows)


def read_left_out(folder: Path) -> LeftOut | None:
    """What the run's curriculum left out at its last checkpoint, from left_out.npz; None if it does not say."""
    path = folder / "left_out.npz"
    if not path.exists():
        return None
    try:
        with np.load(path, allow_pickle=False) as found:
            out = LeftOut(int(found["step"]), found["why"], tuple(map(str, found["words"])))
        if out.why.ndim != 1 or out.why.max(initial=0) >= len(out.words):
            raise ValueError("its reasons have no words")
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise InputError(f"{path} cannot be read ({' '.join(str(error).split())[:100]}): remove it") from error
    return out


def _of_lines(path: Path) -> Visits:
    columns: dict[str, list[Any]] = defaultdict(list)
    reasons: dict[str, int] = {}
    for number, (_, line) in enumerate(iterate_jsonl(path), start=1):
        lists = [line.get(name) for name in _NUMBERS]
        why = line.get("left_out") or [None] * len(lists[0] or ())
        step = line.get("step")
        if not isinstance(step, int) or not all(isinstance(x, list) and len(x) == len(why) for x in lists):
            raise InputError(f"{path}, line {number}: {shown(line)} is not a step's groups; repair or remove that line")
        try:
            for name, x in zip(_NUMBERS, lists, strict=True):
                columns[name].append(np.asarray(x, _NUMBERS[name]))
        except (TypeError, ValueError, OverflowError):
            raise InputError(f"{path}, line {number}: groups are numbers; repair or remove that line") from None
        columns["step"].append(np.full(len(why), step, np.int64))
        codes = [0 if one is None else reasons.setdefault(str(one), len(reasons) + 1) for one in why]
        columns["why"].append(np.asarray(codes, np.int64))
    arrays = {name: np.concatenate(columns[name]) if columns[name] else np.zeros(0, kind) for name, kind in
              {**_NUMBERS, "step": np.int64, "why": np.int64}.items()}  # fmt: skip
    return Visits(**arrays, reasons=tuple(reasons), sampled=False)


def _of_completions(rows: Sequence[Row]) -> Visits:
    """The groups of logged training completions; of a run without them, none."""
    found: dict[tuple[int, int, int], list[Row]] = defaultdict(list)
    for row in rows:
        if row.phase == "train" and not row.replayed and not row.row and not np.isnan(row.reward):
            found[row.step, row.prompt_id, row.group].append(row)
    keys = sorted(found)
    groups = [found[key] for key in keys]
    rewards = [[row.reward for row in group] for group in groups]

    def column(values: Sequence[Any], kind: Any = np.int64) -> Any:
        return np.asarray(values, kind)

    return Visits(
        column([prompt for _, prompt, _ in keys]), column([step for step, *_ in keys]),
        column([len(g) for g in groups]),
        column([np.mean(x) for x in rewards], np.float64), column([sum(bool(r.correct) for r in g) for g in groups]),
        column([min(x) == max(x) for x in rewards], np.bool_), np.zeros(len(groups), np.int64), (), True,
    )  # fmt: skip
