"""Validated reading of completions.jsonl, for reports and comparisons."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxrl_llm.reporting.html.conversations import fault_of_turns
from jaxrl_llm.reporting.logging.files import is_number, iterate_jsonl
from jaxrl_llm.utils.errors import InputError, shown

_VALUES = ("advantage", "logp", "entropy")  # each a number per token, or null


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
    if not _is_whole(line["prompt_id"], 0):
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
    return fault_of_turns(line)


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**31


def _is_reward(value: Any) -> bool:
    return value is None or is_number(value)
