"""A device's memory that is too small ends a run in one line, with the phase, the largest arrays and what to do."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_runs as runs

from jaxrl_llm.cli.options import parse_config
from jaxrl_llm.cli.program import main
from jaxrl_llm.training import step as learning
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.health.goodput import Clock
from jaxrl_llm.training.health.oom import Held, OutOfMemoryError, changed_options, explained, largest, message

GPU = (
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.: "
    "while running replica 0 and partition 0 of a replicated computation (other replicas may have failed as well)."
)
TPU = (
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 22.59G of 15.75G "
    "hbm. Exceeded hbm capacity by 6.85G.\n\nTotal hbm usage >= 23.10G:\n    reserved        528.00M\n"
)


def test_a_run_ends_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: Any) -> Any:
        raise jax.errors.JaxRuntimeError(GPU)

    monkeypatch.setattr(learning, "learn_batch", fail)
    monkeypatch.setattr(jax, "live_arrays", list)  # those of other tests
    config = runs.small_config(tmp_path, eval_size=0, hyperparameters={"clip_high": 0.25}, stop=("two words",))
    assert main(["train", *runs.as_arguments(config)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    begins = "error: out of device memory in update of step 1: Out of memory while trying to allocate 17179869184 bytes"
    assert line.startswith(begins)
    sizes = {x.nbytes for x in jax.tree.leaves(runs.load_policy(runs.MODEL)[1])}
    found = re.findall(r"(\S+) float32\[([\d,]+)\] ([\d.]+) MiB[.;]", line)
    assert len(found) == 4
    assert all(name.startswith(("params/", "optimizer/", "reference/")) for name, _, _ in found)
    assert {4 * math.prod(map(int, shape.split(","))) for _, shape, _ in found} == {max(sizes)}
    command = shlex.split(line[line.index("jaxrl plan") :])
    assert command[:4] == ["jaxrl", "plan", "--topology", "v5e:4x4"]
    planned = parse_config(command[4:])
    assert planned.hyperparameters["clip_high"] == 0.25
    assert {**vars(planned), "output": "", "tensorboard": False, "hyperparameters": {}} == {
        **vars(config), "output": "", "hyperparameters": {},
    }  # fmt: skip


def test_it_names_arrays_by_their_place_in_the_run() -> None:
    named = {
        "params": {"embed": jnp.zeros((512, 1024)), "norm": jnp.zeros(4)},
        "optimizer": [jnp.zeros((256, 1024), jnp.bfloat16), None],
        "host": np.zeros(10**7),
        "key": jax.random.key(0),
    }
    named["reference"] = named["params"]
    caches = [jnp.zeros((3, 701, 1000)) for _ in range(2)]
    found = largest(named, most=10**6)  # other tests' arrays among them
    sizes = [held.bytes for held in found]
    assert sizes == sorted(sizes, reverse=True)
    embed = Held("params/embed", "float32[512,1024]", 1, 2**21)
    cache = Held("other", "float32[3,701,1000]", 2, 4 * 2 * 3 * 701 * 1000)
    assert {embed, cache, Held("optimizer/0", "bfloat16[256,1024]", 1, 2**19)} < set(found)
    assert str(embed) == "params/embed float32[512,1024] 2.0 MiB"
    assert str(cache) == "other 2 x float32[3,701,1000] 16.0 MiB"
    assert not any(held.name.startswith(("host", "key", "reference")) for held in found)
    named["params"]["embed"].delete()  # as an update that failed has done
    assert embed in largest(named, most=10**6)
    assert len(caches) == 2


def test_what_xla_says_is_cut() -> None:
    clock = Clock()
    clock.failed, clock.step = "update", 2
    said = message(TrainConfig(), clock, TPU, [])
    assert said.startswith("out of device memory in update of step 3: XLA:TPU compile permanent error. Ran out of ")
    assert "capacity by 6.85G. See what a step needs" in said
    assert said.endswith(": jaxrl plan --topology v5e:4x4")
    assert len(message(TrainConfig(), clock, "RESOURCE_EXHAUSTED: " + 1000 * "long ", [])) < 400


def test_of_a_real_allocation() -> None:
    clock = Clock()
    with pytest.raises(OutOfMemoryError, match="out of device memory in sample: ") as caught:  # noqa: SIM117
        with explained(TrainConfig(), clock, dict), clock("sample"):
            jnp.zeros(2**46).block_until_ready()
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value.__cause__, jax.errors.JaxRuntimeError)


def test_other_errors_are_left_alone() -> None:
    for error in (jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK failure"), ValueError("RESOURCE_EXHAUSTED:")):
        with pytest.raises(type(error)) as caught, explained(TrainConfig(), Clock(), dict):
            raise error
        assert caught.value is error


def test_options_of_a_method_are_those_that_are_not_its_defaults() -> None:
    given = parse_config(["--algorithm", "dapo", "--group-size", "4", "--optimizer.learning-rate", "1e-7"])
    assert len(given.hyperparameters) > 1
    assert changed_options(given) == ["--group-size=4", "--algorithm=dapo", "--optimizer.learning-rate=1e-07"]
