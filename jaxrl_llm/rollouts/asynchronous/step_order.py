"""The order of an asynchronous run: before which turns weights and groups came in, how many, and what each step took.

What an asynchronous run computes depends on nothing else, so that a run which repeats the order of another is the same
bit by bit.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jaxrl_llm.rollouts.runtime.replay_log import GroupKey
from jaxrl_llm.utils.errors import InputError, error_line, several

FILE = "order.jsonl"  # in the folder of a run
NEVER = sys.maxsize  # the turn of what does not come in


class StepOrder(NamedTuple):
    """What happened in a step."""

    step: int
    admitted: list[int]  # by host, groups that came in with the weights of the step
    entered: list[list[int]]  # by sampler, the turns before which weights or groups came in, since the step before
    groups: list[list[GroupKey]]  # by host, those that it took, in their order
    began: bool = False  # whether the sampler began with this step


def write_order(path: Path, order: StepOrder) -> None:
    """Append the order of a step to a file; that of a step at which the sampler began replaces what comes after it."""
    if order.began:
        kept = [line for line in _lines(path) if json.loads(line)["step"] < order.step] if path.exists() else []
        path.write_text("".join(kept))
    with path.open("a") as file:
        file.write(json.dumps(order._asdict()) + "\n")


def read_order(run: str | Path, steps: int) -> list[StepOrder]:
    """The order of the first `steps` steps of a run.

    InputError if it has fewer, is not asynchronous, or was resumed: what was in flight then is not repeated.
    """
    path = Path(run) / FILE
    if not path.exists():
        raise InputError(f"{run} has no {FILE}, which asynchronous runs write: name the folder of one")
    try:
        orders = [
            StepOrder(
                one["step"],
                list(map(int, one["admitted"])),
                [list(map(int, turns)) for turns in one["entered"]],
                [[GroupKey(*key) for key in keys] for keys in one["groups"]],
                one["began"],
            )
            for one in map(json.loads, _lines(path))
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is no order of steps: {error_line(error)}") from None
    orders = orders[:steps]
    if [one.step for one in orders] != list(range(steps)):
        raise InputError(f"{run} has the order of {len(orders)} steps, but this run has {steps}: lower steps")
    if again := [one.step for one in orders[1:] if one.began]:
        raise InputError(f"{run} was resumed after step {again[0]}, so that its order can be repeated until there only")
    return orders


def of_host(orders: Sequence[StepOrder], host: int) -> list[list[GroupKey]]:
    """The groups that each step took of a host. InputError if the run had fewer."""
    if orders and host >= len(orders[0].groups):
        raise InputError(f"the order to repeat is of {several(len(orders[0].groups), 'host')}: start as many")
    return [one.groups[host] for one in orders]


def turns_of(orders: Sequence[StepOrder], host: int, samplers: int) -> list[list[int]]:
    """For each of so many samplers of a host, the turns before which weights or groups came in.

    InputError if the hosts had another number of them.
    """
    known = len(orders[0].entered) // len(orders[0].groups)
    if known != samplers:
        raise InputError(f"the order to repeat is of {several(known, 'sampler')} on each host: start as many")
    own = range(host * samplers, (host + 1) * samplers)
    return [[turn for one in orders for turn in one.entered[number]] for number in own]


def _lines(path: Path) -> Sequence[str]:
    """The lines that were written whole: a kill may leave a part of the last."""
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
