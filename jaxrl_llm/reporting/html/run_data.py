"""A run's files as data for the report: settings, summary, curves, and an index of its completions."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxrl_llm.reporting.logging.files import is_number, iterate_jsonl, read_json, read_jsonl
from jaxrl_llm.reporting.statistics import as_number
from jaxrl_llm.utils.errors import InputError, shown

CORRECT = 1.0 - 1e-6  # a reward of 1, up to rounding, marks a correct answer
_VALUES = ("advantage", "logp", "entropy")  # of a completion: each a number per token, or null


class Row(NamedTuple):
    """The part of a line of completions.jsonl that is kept in memory; the rest is read when it is shown."""

    step: int
    phase: str
    prompt_id: int
    reward: float  # NaN if unknown
    correct: bool | None  # whether the judging reward is 1; None if there is no reward
    length: int  # in tokens
    truncated: bool
    signal: float  # the largest absolute advantage; NaN if none was logged
    offset: int  # in bytes
    replayed: bool = False
    group: int = 0  # of the step
    row: int = 0  # of its episode, from 0


class RunData:
    """What a run's folder holds; any of the files but not all may be missing or empty.

    Raises InputError if there is no run, or a file is damaged (a half-written last line is not damage).
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.name = self.folder.resolve().name
        self.config_file, self.summary_file = self.folder / "config.json", self.folder / "summary.json"
        self.metrics_file, self.completions_file = self.folder / "metrics.jsonl", self.folder / "completions.jsonl"
        files = (self.config_file, self.summary_file, self.metrics_file, self.completions_file)
        if not any(file.exists() for file in files):
            raise InputError(f"no run in {folder}: it has neither config.json nor metrics.jsonl")
        self.config, self.summary = read_json(self.config_file), read_json(self.summary_file)
        logged = read_jsonl(self.metrics_file) if self.metrics_file.exists() else []
        for row in logged:
            at = row.get("step", 0)
            if not isinstance(at, int) or isinstance(at, bool) or not 0 <= at < 2**53:
                raise InputError(
                    f"{self.metrics_file}: a step is {shown(at)}, but must be a whole number; repair or remove that "
                    "line"
                )
        # Each step's metrics in order; of a step that was logged twice, the last.
        rows = sorted({row["step"]: row for row in logged if "step" in row}.items())
        self.steps = np.array([step for step, _ in rows], dtype=np.float64)
        keys = sorted(set().union(*(row for _, row in rows)) - {"step"})
        columns = {key: np.array([as_number(row.get(key)) for _, row in rows]) for key in keys}
        # f64[steps] of each metric that is finite in some step, and the names of the others.
        self.metrics = {key: values for key, values in columns.items() if np.isfinite(values).any()}
        self.undrawn = sorted(columns.keys() - self.metrics.keys())

    @cached_property
    def rows(self) -> list[Row]:
        """The index of all logged completions, in the order of the file."""
        if not self.completions_file.exists():
            return []
        judge = self.config.get("eval_reward")
        return [_row(line, offset, judge) for offset, line in iterate_completions(self.completions_file)]

    def read(self, rows: Iterable[Row]) -> dict[int, dict[str, Any]]:
        """The whole lines of some completions, by offset."""
        chosen = sorted({row.offset for row in rows})
        if not chosen:
            return {}
        with open(self.completions_file, "rb") as file:
            return {offset: json.loads(file.readline()) for offset in chosen if file.seek(offset) == offset}

    def metric(self, *names: str) -> npt.NDArray[np.float64]:
        """f64[steps]: the finite values of the first of these metrics that there is; empty if there is none."""
        values = next((self.metrics[name] for name in names if name in self.metrics), np.zeros(0))
        return values[np.isfinite(values)]

    def evaluations(self) -> dict[str, Mapping[str, Any]]:
        """Results with pass@k, by name: those in summary.json, and files eval*.json that `jaxrl eval` wrote here."""
        found = {name: value for name, value in self.summary.items() if name.startswith("eval_")}
        found |= {file.stem: read_json(file) for file in sorted(self.folder.glob("eval*.json"))}
        return {name: value for name, value in found.items() if isinstance(value, dict) and _has_pass_at(value)}


def _row(line: Mapping[str, Any], offset: int, judge: Any) -> Row:
    advantages = [abs(value) for x in line.get("advantage") or () if not math.isnan(value := as_number(x))]
    return Row(
        line["step"], line["phase"], line["prompt_id"], as_number(line.get("reward")), _correct(line, judge),
        len(line["tokens"]), bool(line.get("truncated")), max(advantages, default=math.nan), offset,
        bool(line.get("replayed")), int(as_number(line.get("group", 0))), int(as_number(line.get("row", 0))),
    )  # fmt: skip


def _correct(line: Mapping[str, Any], judge: Any) -> bool | None:
    """Whether a completion is correct: as logged, else by its judging reward, its only one, or their combination."""
    if isinstance(line.get("correct"), bool):
        return bool(line["correct"])
    rewards = line.get("rewards") or {}
    only = next(iter(rewards.values())) if len(rewards) == 1 else line.get("reward")
    number = as_number(rewards.get(judge, only))
    return None if math.isnan(number) else number >= CORRECT


def _has_pass_at(figures: Mapping[str, Any]) -> bool:
    """Whether an evaluation has numbers of pass@k that can be drawn."""
    found = figures.get("pass_at")
    return isinstance(found, dict) and all(
        k.isdecimal()
        and 0 < int(k[:9]) < 2**20
        and isinstance(value, dict)
        and not any(math.isnan(as_number(value.get(name))) for name in ("value", "low", "high"))
        for k, value in found.items()
    )


def iterate_completions(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each completion with its byte offset in the file. InputError, with the line's number, for an invalid line."""
    for offset, line in iterate_jsonl(path):
        if fault := _fault(line):
            with path.open("rb") as file:
                number = file.read(offset).count(b"\n") + 1
            raise InputError(f"{path}, line {number}: {fault}; repair or remove that line")
        yield offset, line


def _fault(line: dict[str, Any]) -> str | None:
    """Why a line is not a valid completion; None if it is."""
    for name in ("step", "phase", "prompt_id", "tokens"):
        if name not in line:
            return f"it has no {name}"
    tokens, rewards = line["tokens"], line.get("rewards")
    if not _is_whole(line["step"], -1):
        return f"its step is {shown(line['step'])}, but must be a whole number"
    if not _is_whole(line["prompt_id"]):
        return f"its prompt_id is {shown(line['prompt_id'])}, but must be a whole number, at least 0"
    if not isinstance(line["phase"], str):
        return f"its phase is {shown(line['phase'])}, but must be text"
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        return f"its tokens are {shown(tokens)}, but must be a list of texts"
    for name in _VALUES:
        values = line.get(name)
        if values is not None and not (isinstance(values, list) and all(x is None or is_number(x) for x in values)):
            return f"its {name} is {shown(values)}, but must be a list of numbers"
        if values and len(values) != len(tokens):
            return f"it has {len(values)} values of {name} for {len(tokens)} tokens"
    if not _is_reward(line.get("reward")):
        return f"its reward is {shown(line['reward'])}, but must be a number or null"
    if rewards is not None and not (isinstance(rewards, dict) and all(map(_is_reward, rewards.values()))):
        return f"its rewards are {shown(rewards)}, but must be numbers by name"
    if not isinstance(line.get("prompt", ""), str):
        return f"its prompt is {shown(line['prompt'])}, but must be text"
    pairs, turns, begins = line.get("given", []), line.get("turn_rewards", []), line.get("begins")
    if not (isinstance(pairs, list) and all(map(_is_given, pairs))):
        return "its given is not a list of pairs, a number of tokens and a text"
    if any(pair[0] > len(tokens) for pair in pairs):
        return f"its given is behind its {len(tokens)} tokens"
    if not (isinstance(turns, list) and all(map(_is_reward, turns))):
        return "its turn_rewards are not a list of numbers"
    if begins is not None and not (isinstance(begins, list) and len(begins) == 2 and all(map(_is_whole, begins))):
        return "its begins is not a pair, the number of a sample and of tokens"
    return None


def _is_whole(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**31


def _is_given(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and _is_whole(pair[0]) and isinstance(pair[1], str)


def _is_reward(value: Any) -> bool:
    return value is None or is_number(value)
