"""Rewards in processes: whatever they do to their process, the trainer goes on."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxrl_llm.rewards import Reward, close_rewards, get_reward, require_columns, score
from jaxrl_llm.rewards.workers import process
from jaxrl_llm.rewards.workers.process import ProcessFunction
from jaxrl_llm.utils.errors import InputError

SOURCE = '''
import ctypes, os, re, signal, subprocess, sys, time

calls = 0

def reward(completions, what):
    """Scores 1, 2, 3 ... a call, or does what the first sample's `what` says."""
    global calls
    calls += 1
    action = what[0]
    if action == "regex":
        re.match(r"(a+)+b", "a" * 60)
    elif action == "exit":
        os._exit(3)
    elif action == "exit 0":
        os._exit(0)
    elif action == "segfault":
        ctypes.string_at(0)
    elif action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "closed":
        os.closerange(3, 64)
        time.sleep(60)
    elif action == "garbage":
        for descriptor in range(3, 64):
            try:
                os.write(descriptor, bytes([0, 0, 0, 0, 0, 0, 0, 3, 1, 2, 3]))
            except OSError:
                pass
        time.sleep(60)
    elif action == "memory":
        held = []
        while True:
            held.append(bytearray(10**6))
    elif action == "memory of a child":
        subprocess.run([sys.executable, "-c", "x = b'x' * 10**9; import time; time.sleep(60)"])
    elif action == "child, then exit":
        if os.fork() == 0:
            time.sleep(60)
        os._exit(5)
    elif action == "endless":
        return iter(int, 1)
    elif action == "sys.exit":
        sys.exit(0)
    elif action == "slow":
        time.sleep(0.4)
    return [float(calls)] * len(completions)


def pid(completions):
    return [float(os.getpid())] * len(completions)


def stopped(completions, **columns):
    """Never takes another message after the first."""
    os.kill(os.getpid(), signal.SIGSTOP)
    return [1.0]


def orphan(completions, path):
    """Starts a child, says who they are, and hangs with Python's lock held."""
    child = subprocess.Popen(["sleep", "60"])
    with open(path[0] + ".part", "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    os.rename(path[0] + ".part", path[0])
    re.match(r"(a+)+b", "a" * 60)


def noisy(completions):
    print("printed by a reward")
    os.write(1, b"written by a reward\\n")
    sys.stdin.read()
    return [1.0]


def modules(completions):
    return [float("jax" in sys.modules), float(os.environ["JAX_PLATFORMS"] == "cpu")]


async def later(completions):
    import asyncio
    await asyncio.sleep(0.01)
    if "bad" in completions:
        raise KeyError("no such\\nthing")
    return [float(len(c)) for c in completions]


def wide(completions, answer, hint=None, *, more=1, **columns):
    return [float(str(columns) == columns_text) for columns_text in answer]
'''


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rewards") / "hostile.py"
    path.write_text(SOURCE)
    return path


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def eventually(condition: Callable[[], bool]) -> bool:
    for _ in range(1000):
        if condition():
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize(
    ("action", "cause"),
    [
        ("regex", "no result within its time limit of 0.3 s; its process was ended"),
        ("garbage", "no result within its time limit|its process ended"),
        ("closed", "its process ended"),
        ("exit", "its process ended with status 3"),
        ("exit 0", "its process ended with status 0"),
        ("segfault", r"its process ended by signal 11 \(SIGSEGV\)"),
        ("kill", r"its process ended by signal 9 \(SIGKILL\)"),
        ("child, then exit", "its process ended with status 5"),
        ("memory", "its process took more than 0.3 GB and was ended"),
        ("memory of a child", "its process took more than 0.3 GB and was ended"),
    ],
)
def test_what_ends_or_holds_the_process_costs_a_sample(
    source: Path, caplog: pytest.LogCaptureFixture, action: str, cause: str
) -> None:
    limit = 0.3 if action in ("regex", "garbage") else 30.0
    at_limit = action == "regex" or "memory" in action
    reward = replace(get_reward(f"{source}:reward"), time_limit=limit, default=-1.0, memory_limit=3e8)
    assert score([reward], ["a", "b"], {"what": ["", ""]}).total.tolist() == [1.0, 1.0]
    fine = Reward(lambda completions: [2.0, 2.0], name="fine")
    with caplog.at_level(logging.WARNING, logger="jaxrl_llm.rewards"):
        scores = score([reward, fine], ["a", "b"], {"what": [action, ""]})
    lost, found = scores.components["reward"].tolist()
    assert np.isnan(lost) if at_limit else lost == -1.0 or action == "garbage"
    assert found == 1.0, "the next sample has another process, whose variables start anew"
    assert scores.components["fine"].tolist() == [2.0, 2.0]
    assert scores.failures == {"reward": 1, "fine": 0}
    assert len(caplog.messages) == 1
    which = "are not scored" if np.isnan(lost) else "get -1"
    assert re.search(rf"'reward' failed on 1 of 2 samples, which {which}: .*" + cause, caplog.messages[0])
    again = replace(reward, time_limit=30.0)
    assert score([again], ["a", "b"], {"what": ["", ""]}).total.tolist() == [2.0, 2.0]
    close_rewards([reward])


@pytest.mark.parametrize(("action", "cause"), [("endless", "more than 2 values for 2"), ("sys.exit", "SystemExit")])
def test_what_only_fails_leaves_the_process_alone(
    source: Path, caplog: pytest.LogCaptureFixture, action: str, cause: str
) -> None:
    reward = get_reward(f"{source}:reward")
    with caplog.at_level(logging.WARNING, logger="jaxrl_llm.rewards"):
        assert score([reward], ["a", "b"], {"what": [action, action]}).failures == {"reward": 2}
    assert cause in caplog.text
    # The same process: it has counted.
    assert score([reward], ["a"], {"what": [""]}).total[0] >= 2.0


def test_a_result_that_is_late_is_none_though_the_process_lives(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "GRACE", 60.0)
    reward = replace(get_reward(f"{source}:reward"), time_limit=0.2, default=-1.0)
    assert np.isnan(score([reward], ["a"], {"what": ["slow"]}).total[0])
    assert score([replace(reward, time_limit=30.0)], ["a"], {"what": [""]}).total.tolist() == [2.0]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("import sys; sys.exit('no\\nkey')", "SystemExit: no key"),
        ("import os; os._exit(0)", "its process ended with status 0 while it loaded them"),
        ("import ctypes; ctypes.string_at(0)", r"its process ended by signal 11 \(SIGSEGV\) while it loaded them"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("def f(:", "SyntaxError: "),
        ("x = '\\ud800'\nraise ValueError(x)", "ValueError: "),
        ("import re; re.match('(a+)+b', 'a' * 60)", "its process did not load them in 1 s"),
    ],
)
def test_files_that_cannot_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, message: str) -> None:
    if "re.match" in code:
        monkeypatch.setattr(process, "LOAD_LIMIT", 1.0)
    path = tmp_path / "bad.py"
    path.write_text(code)
    with pytest.raises(InputError, match=f"^cannot load rewards from '{path}': {message}") as caught:
        get_reward(f"{path}:f")
    assert "\n" not in str(caught.value)


def test_no_jax_and_no_accelerator_in_the_process(source: Path) -> None:
    assert score([get_reward(f"{source}:modules")], ["a", "b"], {}).total.tolist() == [0.0, 1.0]
    program = (
        "import sys, jaxrl_llm.rewards as r; r.get_reward; print([m for m in ('jax', 'flax') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_function_keeps_its_signature(source: Path) -> None:
    reward = get_reward(f"{source}:wide*2")
    assert (reward.name, reward.weight) == ("wide", 2.0)
    require_columns([reward], ["answer"])
    with pytest.raises(InputError, match="reward 'wide' needs, 'answer'"):
        require_columns([reward], ["hint"])
    columns = {"answer": ["{'b': [3]}"], "hint": [1], "b": [3]}
    assert score([reward], ["x"], columns).components["wide"].tolist() == [1.0]
    assert reward.function(["x"], answer=["{'b': [3]}"], b=[3]) == [1.0]


def test_async_functions_and_single_samples_that_fail(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    reward = replace(get_reward(f"{source}:later"), default=-1.0)
    with caplog.at_level(logging.WARNING, logger="jaxrl_llm.rewards"):
        assert score([reward], ["abc", "bad", ""], {}).total.tolist() == [3.0, -1.0, 0.0]
    assert "KeyError: 'no such\\nthing'" in caplog.text
    with pytest.raises(InputError, match="reward 'later': KeyError"):
        reward.function(["bad"])


def test_prints_and_reads_disturb_nothing(source: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert score([get_reward(f"{source}:noisy")], ["a"], {}).failures == {"noisy": 0}
    out, err = capfd.readouterr()
    assert out == ""
    assert "printed by a reward" in err
    assert "written by a reward" in err


def test_columns_that_cannot_travel(
    source: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    reward = get_reward(f"{source}:reward")
    only_here = types.ModuleType("only_here")
    only_here.Thing = type("Thing", (), {"__module__": "only_here"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "only_here", only_here)
    with caplog.at_level(logging.WARNING, logger="jaxrl_llm.rewards"):
        assert score([reward], ["a"], {"what": [lambda: 1]}).failures == {"reward": 1}
        assert score([reward], ["a"], {"what": [only_here.Thing()]}).failures == {"reward": 1}
    assert "column 'what' cannot be sent to its process: " in caplog.messages[0]
    assert "column 'what' cannot be read in the reward's process: ModuleNotFoundError" in caplog.messages[1]
    columns = {"what": [""], "other": [threading.Lock()]}  # of no interest to this reward
    assert score([reward], ["a"], columns).failures == {"reward": 0}


def test_large_columns_and_a_process_that_takes_none(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    """More than a socket holds: sending stops at the time limit too."""
    large = {"answer": ["x" * 10**7]}
    assert score([get_reward(f"{source}:wide")], ["a"], large).failures == {"wide": 0}
    reward = get_reward(f"{source}:stopped")
    assert isinstance(reward.function, ProcessFunction)
    assert reward.function._worker is not None
    os.kill(reward.function._worker.process.pid, signal.SIGSTOP)
    with caplog.at_level(logging.WARNING, logger="jaxrl_llm.rewards"):
        assert score([replace(reward, time_limit=0.3)], ["a"], large).failures == {"stopped": 1}
    assert "no result within its time limit of 0.3 s; its process was ended" in caplog.text


def test_a_file_that_changed_is_named_when_it_is_loaded_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "own.py"
    path.write_text("def f(completions): return [1.0]")
    reward = get_reward(f"{path}:f")
    close_rewards([reward])
    close_rewards([reward])
    with caplog.at_level(logging.WARNING, logger="jaxrl_llm.rewards"):
        assert score([reward], ["a"], {}).total.tolist() == [1.0]
        assert caplog.messages == []
        close_rewards([reward])
        path.write_text("def f(completions): return [2.0]")
        assert score([reward], ["a"], {}).total.tolist() == [2.0]
        assert [str(path) in message and "has changed" in message for message in caplog.messages] == [True]
        close_rewards([reward])
        path.unlink()
        assert score([reward], ["a"], {}).failures == {"f": 1}
    assert f"cannot load rewards from '{path}': FileNotFoundError" in caplog.messages[-1]


PER_SAMPLE = """
import os, time

def one(completions, **columns):
    assert len(completions) == 1
    if completions[0] == "hang":
        time.sleep(30)
    if completions[0] == "end":
        os._exit(1)
    return {"reward": [1.0], "calls": [float(os.getpid())]}

one.per_sample = True

def own(completions, **columns):
    time.sleep(0.5)
    return [1.0] * len(completions)

own.own_limits = True
"""


def test_functions_say_how_they_are_called(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(PER_SAMPLE)
    reward, own = (replace(get_reward(f"{path}:{name}"), time_limit=0.3) for name in ("one", "own"))
    start = time.monotonic()
    scores = score([reward, own], ["a", "hang", "b", "end", "c", "d"], {})
    assert time.monotonic() - start < 10
    np.testing.assert_array_equal(scores.components["one"], [1.0, np.nan, 1.0, 0.0, 1.0, 1.0])
    assert scores.components["own"].tolist() == [1.0] * 6, "it ends by itself"
    assert scores.failures == {"one": 2, "own": 0}
    pids = scores.entries["calls"]
    assert [one is None for one in pids] == [False, True, False, True, False, False]
    assert len({*pids}) == 3, "None and two processes: what was lost has a successor, and neighbours are apart"
    assert pids[0] == pids[2] == pids[4] != pids[5]


def pids_in(path: Path) -> list[int]:
    assert eventually(path.exists)
    return [int(text) for text in path.read_text().split()]


def test_closing_ends_a_busy_process_and_its_children(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reward = replace(get_reward(f"{source}:orphan"), time_limit=600.0)
    found: list[Any] = []
    columns = {"path": [str(tmp_path / "pids")]}
    thread = threading.Thread(target=lambda: found.append(score([reward], ["a"], columns)))
    thread.start()
    pids = pids_in(tmp_path / "pids")
    with caplog.at_level(logging.WARNING, logger="jaxrl_llm.rewards"):
        close_rewards([reward])
        thread.join(60)
    assert found[0].failures == {"orphan": 1}
    assert "closed while it scored" in caplog.text
    assert len(pids) == 2
    assert eventually(lambda: not any(map(is_alive, pids)))


def test_closing_ends_the_samples_that_are_left_too(source: Path) -> None:
    reward = replace(get_reward(f"{source}:reward"), time_limit=600.0)
    found: list[Any] = []
    columns = {"what": ["regex"] * 5}
    thread = threading.Thread(target=lambda: found.append(score([reward], ["a"] * 5, columns)))
    thread.start()
    time.sleep(0.5)
    start = time.monotonic()
    close_rewards([reward])
    thread.join(60)
    assert time.monotonic() - start < 5
    assert found[0].failures == {"reward": 5}
    assert isinstance(reward.function, ProcessFunction)
    assert reward.function._worker is None


def test_a_time_limit_ends_the_children_too(source: Path, tmp_path: Path) -> None:
    reward = replace(get_reward(f"{source}:orphan"), time_limit=1.0)
    assert score([reward], ["a"], {"path": [str(tmp_path / "pids")]}).failures == {"orphan": 1}
    pids = pids_in(tmp_path / "pids")
    assert eventually(lambda: not any(map(is_alive, pids)))


def test_a_reward_that_nobody_needs_ends(source: Path) -> None:
    reward = get_reward(f"{source}:pid")
    pid = int(score([reward], ["a"], {}).total[0])
    assert is_alive(pid)
    del reward
    assert eventually(lambda: not is_alive(pid))


def test_a_process_that_ended_between_batches_costs_none(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    reward = get_reward(f"{source}:pid")
    pid = int(score([reward], ["a"], {}).total[0])
    os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: not is_alive(pid))
    with caplog.at_level(logging.WARNING, logger="jaxrl_llm.rewards"):
        scores = score([reward], ["a"], {})
    assert scores.failures == {"pid": 0}
    assert scores.total[0] != pid
    assert caplog.messages == ["the process of reward 'pid' ended by signal 9 (SIGKILL); starting another"]


TRAINER = """
import json, os, sys
from dataclasses import replace
from jaxrl_llm.rewards import get_rewards, score
source, path = sys.argv[1:]
idle, busy = get_rewards([source + ":pid", source + ":orphan"])
with open(path + ".idle", "w") as file:
    file.write(str(int(score([idle], ["a"], {}).total[0])))
score([replace(busy, time_limit=600.0)], ["a"], {"path": [path]})
"""


def test_no_process_outlives_a_trainer_that_is_killed(source: Path, tmp_path: Path) -> None:
    """Idle, busy with Python's lock held, and what the reward started itself."""
    path = tmp_path / "pids"
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, str(source), str(path)])
    try:
        pids = pids_in(path) + pids_in(tmp_path / "pids.idle")
        assert len(pids) == 3
        assert all(map(is_alive, pids))
    finally:
        trainer.kill()
        trainer.wait()
    assert eventually(lambda: not any(map(is_alive, pids)))


def test_the_interpreter_ends_with_its_rewards(source: Path) -> None:
    program = (
        "import os, sys\nfrom jaxrl_llm.rewards import get_reward, score\n"
        f"reward = get_reward({str(source)!r} + ':pid')\n"
        "print(int(score([reward], ['a'], {}).total[0]), flush=True)\n"
        "if os.fork() == 0: sys.exit()\n"  # a fork that ends leaves the process alone
        "os.wait()\nprint(int(score([reward], ['a'], {}).total[0]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    first, second = done.stdout.split()
    assert first == second
    assert eventually(lambda: not is_alive(int(first)))


def test_the_kernel_takes_it_first(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text("def f(completions): return [float(open('/proc/self/oom_score_adj').read())]")
    assert score([get_reward(f"{path}:f")], ["a"], {}).total.tolist() == [1000.0]


def test_values_of_data_sets_travel(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text("def f(completions, a, **columns): return [float(repr(v) == c) for v, c in zip(a, completions)]")
    values = [None, {"a": [1, {"b": 2.5}]}, np.float32(1), np.arange(2), b"\x00", 10**30, json.loads('"\\ud800"')]
    assert score([get_reward(f"{path}:f")], list(map(repr, values)), {"a": values}).total.tolist() == [1.0] * 7
