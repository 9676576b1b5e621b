"""How sampling runs beside updates, which runs cannot have it so, and the order of such a run.

The order says before which turns weights and groups came in, how many, and what each step took. What an asynchronous
run computes depends on nothing else, so that a run which repeats the order of another is the same bit by bit.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from jaxrl_llm.rollouts.runtime.replay_log import GroupKey
from jaxrl_llm.rollouts.runtime.source_setup import Experience
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


@dataclass(frozen=True)
class Asynchrony:
    """How sampling runs beside updates."""

    bound: int
    """Most staleness, at least 1: the learner's step less that of the weights with which a group was admitted."""
    steps: int  # of the run
    record: Path | None = None  # the file of the order in which weights came in and groups were taken
    repeat: Sequence[StepOrder] = ()  # such an order, which is repeated
    keep: bool = False  # whether caches outlive the weights that filled them; else they are computed again
    turns: bool = False  # whether sampler and learner take turns, since both run programs on the same several devices


def check_asynchronous(setup: Experience, keep: bool) -> None:
    """InputError for a run whose sampling cannot go on beside its updates. keep: see `Asynchrony`."""
    units, what = setup.hosts.units, ""
    if setup.hosts.together > 1:
        what = "needs hosts that sample alone, but several of them sample as one here"
    elif setup.prompts_per_step % units:
        what = f"gives each of {units} hosts as many groups, which prompts_per_step = {setup.prompts_per_step} does not"
    elif setup.partial is not None:
        what = "leaves unfinished groups to later steps itself"
    elif setup.stream_rewards:
        what = "scores groups when a step takes them, so that stream_rewards changes nothing"
    elif setup.rollout.demands.given:
        what = "samples, but all episodes of this rollout are given"
    elif setup.rollout.demands.league:
        what = "has the weights of one policy, but this rollout draws from a league"
    elif setup.rollout.hook is not None and not setup.rollout.hook.lasting:
        what = f"continues episodes under new weights, but the hook {setup.rollout.hook.name} is of one step"
    elif setup.rollout.population is not None:
        what = f"continues episodes under new weights, but the members of {setup.rollout.name} are of one step"
    elif keep and setup.policy.config.unmasking is not None:
        what = "of a masked-diffusion model has no caches that stale_cache could keep"
    if what:
        raise InputError(f"max_staleness is above 0, but asynchronous sampling {what}: leave one of the two out")
