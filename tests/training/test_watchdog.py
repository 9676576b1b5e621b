"""A run that hangs is reported, with the phase and the stacks of its threads."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny_runs as runs

from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.health.goodput import Clock
from jaxrl_llm.training.health.watchdog import HUNG, watched

LIMIT = 0.4  # seconds


@pytest.mark.heavy
def test_a_reward_that_hangs_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = runs.small_config(
        tmp_path, reward="hanging", reward_time_limit=LIMIT / 2, hang_seconds=LIMIT, hang_factor=1.0, steps=1,
        eval_size=0,
    )  # fmt: skip
    with caplog.at_level(logging.WARNING, logger="jaxrl_llm.training"):
        runs.train(config)
    # Where the machine is slow, a phase that compiles may be reported too.
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("score ")]
    assert len(said) == 2, said
    assert re.match(r"score hangs: no progress for [\d.]+ s, step 1 \(process 0 of 1, pid ", said[0])
    assert said[0].endswith(f"stacks of all threads in {config.output}/hang-0.txt")
    assert said[1].startswith("score went on after ")
    assert " s (process 0 of 1, pid " in said[1]
    written = (Path(config.output) / "hang-0.txt").read_text()
    assert "score hangs: no progress" in written
    stacks = written[written.index("score hangs") :]
    assert 'scoring.py", line' in stacks
    assert 'runner.py", line' in stacks


def test_slow_phases_that_are_always_slow_do_not_hang(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, clock = TrainConfig(output=str(tmp_path / "run"), hang_seconds=0.05, hang_factor=1000.0), Clock()
    with clock("score"):
        time.sleep(0.02)
    with watched(config, clock):
        with clock("score"):
            time.sleep(0.5)
        assert caplog.messages == []
        with clock("update"):  # the first, which nothing can be compared with
            time.sleep(0.5)
    assert caplog.messages[0].startswith("update hangs: no progress for ")


def test_nothing_is_watched_where_it_is_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    with watched(TrainConfig(output=str(tmp_path), hang_seconds=0.0), clock), clock("score"):
        time.sleep(0.1)
    assert caplog.messages == []


def test_a_hung_process_ends_where_that_is_asked_for(tmp_path: Path) -> None:
    code = f"""
import time
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.health.goodput import Clock
from jaxrl_llm.training.health.watchdog import watched
clock = Clock()
clock.step = 6
config = TrainConfig(output={str(tmp_path / "run")!r}, hang_seconds=0.1, hang_exit=True)
with watched(config, clock), clock("update"):
    time.sleep(600)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=runs.environment())
    assert done.returncode == HUNG == 75
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("update hangs: no progress for ")
    assert "step 7 (process 0 of 1" in line
    assert line.endswith("; ending with exit code 75")
    assert 'File "<string>", line 10 in <module>' in (tmp_path / "run" / "hang-0.txt").read_text()
