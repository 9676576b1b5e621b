"""`jaxrl plan --max-staleness`: how many devices should sample, and how many learn."""

from __future__ import annotations

import dataclasses
import json
import shlex
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import tiny_runs as runs
from compiling import with_devices
from tpu_environment import tpu_environment

from jaxrl_llm.distributed.chips import GPUS, Topology
from jaxrl_llm.plan.choose_mesh import with_chosen_meshes
from jaxrl_llm.plan.plan import SAMPLING, estimated_plan
from jaxrl_llm.plan.split import best, splits
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.utils.errors import InputError

CONFIG = TrainConfig(
    model=str(runs.MODEL), prompts_per_step=8, group_size=4, max_prompt_tokens=10, max_new_tokens=32, eval_size=0,
    max_staleness=2, algorithm="dr_grpo",
)  # fmt: skip


@dataclass(frozen=True)
class Gpu:
    """A device that is not there."""

    id: int
    process_index: int
    platform: str = "gpu"
    device_kind: str = "H100"


def of_gpus(count: int, hosts: int = 1) -> Topology:
    """H100s, which need not be there."""
    devices: list[Any] = [Gpu(number, number * hosts // count) for number in range(count)]
    return Topology(GPUS["h100"], devices, "cuda")


def test_each_part_is_planned_as_a_run_on_its_devices() -> None:
    found = splits(CONFIG, of_gpus(8))
    assert [(one.devices, one.learner.devices) for one in found] == [(4, 4), (6, 2), (7, 1)]  # rows divide over these
    alone = dataclasses.replace(CONFIG, max_staleness=0)
    for one in found:
        there = of_gpus(8 - one.devices)
        plan = estimated_plan(with_chosen_meshes(alone, there), there)
        learning = {name: seconds for name, seconds in plan.seconds.items() if name not in SAMPLING}
        assert one.learning == pytest.approx(sum(max(each) for each in learning.values()))
        assert one.bytes[1] == sum(plan.held.values()) + max(
            sum(parts.values()) for name, parts in plan.phases.items() if name == "update"
        )
        assert one.seconds == max(1.3 * one.sampling, one.learning)
    assert best(found).seconds == min(one.seconds for one in found)
    assert [one.learning for one in found] == sorted(one.learning for one in found), "fewer devices learn more slowly"


def test_hosts_split_their_devices_alike_and_a_named_split_is_planned_alone() -> None:
    assert [one.devices for one in splits(CONFIG, of_gpus(8, hosts=2))] == [4, 6]
    (only,) = splits(dataclasses.replace(CONFIG, sampler_devices=4), of_gpus(8, hosts=2))
    assert (only.devices, only.learner.devices, only.sampler.devices) == (4, 4, 4)


def test_what_fits_comes_before_what_is_fast() -> None:
    found = splits(CONFIG, of_gpus(8))
    fast = min(found, key=lambda one: one.seconds)
    tight = fast.learner._replace(chip=fast.learner.chip._replace(memory=0))
    changed = [one._replace(learner=tight) if one is fast else one for one in found]
    assert best(changed).seconds > fast.seconds


def test_what_cannot_be_split_is_refused() -> None:
    with pytest.raises(InputError, match="1 devices of 1 hosts cannot be split: plan without max_staleness"):
        splits(CONFIG, of_gpus(1))


def test_a_part_of_a_tpu_slice_is_planned_and_the_command_of_the_best_split_told() -> None:
    """JAX arranges no mesh of the far half of a slice, whose corner is not the slice's."""
    options = [
        "--model", str(runs.MODEL), "--prompts-per-step", "8", "--group-size", "4", "--max-new-tokens", "32",
        "--eval-size", "0", "--max-staleness", "2",
    ]  # fmt: skip
    command = [sys.executable, "-m", "jaxrl_llm.cli", "plan", "--topology", "v5e:2x4", *options]
    done = subprocess.run(command, env=tpu_environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    last = shlex.split(done.stdout.splitlines()[-1])
    assert last[:-1] == ["jaxrl", "train", *options, "--sampler-devices"]
    again = subprocess.run(
        [*command, "--json", "--sampler-devices", last[-1]],
        env={**tpu_environment(), "XLA_FLAGS": with_devices(1)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert again.returncode == 0, again.stderr[-2000:]
    found = json.loads(again.stdout)
    assert found["sampler_devices"] == int(last[-1])
    assert [one["sampler_devices"] + one["learning_devices"] for one in found["splits"]] == [8]
