"""Rewards, environments and tools that a program gives to a run as values."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import tiny_runs as runs
from test_agent_runs import WORLDS, calling, config_of
from test_resume import assert_same_run
from worlds import Purse, double

from jaxrl_llm import TrainConfig
from jaxrl_llm.rewards import Reward, close_rewards, score
from jaxrl_llm.training import loop
from jaxrl_llm.training.folder.files import RunFolder
from jaxrl_llm.training.health.first_checks import make_rewards
from jaxrl_llm.utils.errors import InputError

__all__ = ["calling"]


def made_of(**settings: Any) -> tuple[list[Reward], dict[str, Any]]:
    """The rewards of a configuration, and what they say of two completions."""
    rewards = make_rewards(TrainConfig(**settings))
    try:
        found = score(rewards, ["a", "bcd"], {"answer": ["1", "2"]})
        assert found.failures == dict.fromkeys(found.components, 0)
        return rewards, {name: x.tolist() for name, x in found.components.items()}
    finally:
        close_rewards(rewards)


def test_functions_are_rewards_of_a_configuration() -> None:
    offset, lock = 10.0, threading.Lock()

    def near(completions: list[Any], **columns: Any) -> list[float]:
        return [offset + len(text) for text in completions]

    def locked(completions: list[Any]) -> list[float]:
        with lock:
            return [1.0] * len(completions)

    class Judge:
        def __call__(self, completions: list[Any], answer: list[str]) -> list[float]:
            return [float(text) for text in answer]

    given = [near, lambda completions: [2.0, 3.0], locked, Judge(), Reward(near, 0.5, "half", time_limit=3.0)]
    config = TrainConfig(rewards=[*given, "exact_match*2"])  # type: ignore[arg-type]
    names = ("near", "reward_2", "locked", "Judge", "half*0.5")
    assert config.rewards == (*(f"python:{name}" for name in names), "exact_match*2")
    rewards, values = made_of(rewards=[*given, "exact_match*2"], reward_time_limit=4.0, reward_default=-1.0)
    assert values == {
        "near": [11.0, 13.0], "reward_2": [2.0, 3.0], "locked": [1.0, 1.0], "Judge": [1.0, 2.0], "half": [11.0, 13.0],
        "exact_match": [0.0, 0.0],
    }  # fmt: skip
    assert [reward.weight for reward in rewards] == [1.0, 1.0, 1.0, 1.0, 0.5, 2.0]
    assert [reward.time_limit for reward in rewards] == [4.0, 4.0, 4.0, 4.0, 3.0, 4.0]
    notes = [reward.note for reward in rewards]
    assert [("in a process" in note, "in a thread" in note) for note in notes] == [
        (True, False), (True, False), (False, True), (True, False), (True, False), (False, False)
    ]  # fmt: skip
    assert "cannot be sent to a process (TypeError: cannot pickle '_thread.lock' object)" in notes[2]
    assert all("\n" not in note for note in notes)
    twice = TrainConfig(rewards=[near, near], tools=[Judge(), Judge()])  # type: ignore[list-item]
    assert twice.rewards == ("python:near", "python:near_2")
    assert twice.tools == ("python:Judge", "python:Judge_2")
    assert made_of(rewards=near)[1] == {"near": [11.0, 13.0]}, "one alone"


def test_one_that_hangs_is_killed() -> None:
    import re

    def regex(completions: list[Any]) -> list[float]:
        return [float(bool(re.match(r"(a+)+b", text))) for text in completions]

    rewards = make_rewards(TrainConfig(rewards=regex, reward_time_limit=0.5))  # type: ignore[arg-type]
    found = score(rewards, ["ab", "a" * 60, "b"], {})
    assert found.failures == {"regex": 1}
    assert found.components["regex"].tolist()[::2] == [1.0, 0.0]
    close_rewards(rewards)


def evens(weight: float) -> Any:
    def even(completions: list[Any], completion_ids: list[list[int]]) -> list[float]:
        return [weight * sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]

    return even


@pytest.mark.heavy
def test_a_run_with_functions_goes_on_with_the_same_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = runs.small_config(tmp_path, steps=2, eval_size=0, checkpoint_every=1)
    runs.train(config, rewards=evens(1.0))
    out = capsys.readouterr().out
    assert "the reward even is a Python value: it runs in a process, whose changes are not seen here" in out
    assert json.loads((tmp_path / "run" / "config.json").read_text())["rewards"] == ["python:even"]
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "run", other)
    shutil.rmtree(other / "checkpoints" / "2")
    with pytest.raises(InputError, match="the reward even was given by a Python program, and is in no file: give it"):
        loop.resume(str(other))
    with pytest.raises(InputError, match="the reward even changed"):
        loop.resume(str(other), rewards=[evens(2.0)])
    loop.resume(str(other), rewards=[evens(1.0)])
    assert_same_run(tmp_path / "run", other)
    by_file = tmp_path / "by_file"
    by_file.mkdir()
    runs.train(runs.small_config(by_file, steps=2, eval_size=0, checkpoint_every=1))
    runs.assert_equal_trees(runs.final_params(tmp_path / "run"), runs.final_params(by_file / "run"))


@pytest.mark.heavy
def test_environments_and_tools_are_values_too(
    tmp_path: Path, calling: None, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [tmp_path / name for name in ("names", "values")]
    for folder in folders:
        folder.mkdir()
    more: dict[str, Any] = {"steps": 1, "eval_size": 0, "checkpoint_every": 1}
    by_name = config_of(folders[0], "Purse", tools=(f"{WORLDS}:double",), **more)
    runs.train(by_name)
    settings = {**vars(by_name), "environment": Purse, "tools": [double], "output": str(folders[1] / "run")}
    runs.train(TrainConfig(**settings))
    assert json.loads((folders[1] / "run" / "config.json").read_text())["environment"] == "python:Purse"
    assert json.loads((folders[1] / "run" / "config.json").read_text())["tools"] == ["python:double"]
    runs.assert_equal_trees(*(runs.final_params(folder / "run") for folder in folders))
    for name, wanted in (("environment", "the environment Purse"), ("tools", "the tool double")):
        kept = {"environment": Purse, "tools": [double]}
        del kept[name]
        with pytest.raises(InputError, match=f"{wanted} was given by a Python program, and is in no file"):
            loop.resume(str(folders[1] / "run"), **kept)

    class Changed(Purse):
        def get_reward(self) -> float:
            return 0.0

    Changed.__name__ = "Purse"
    with pytest.raises(InputError, match="the environment changed"):
        loop.resume(str(folders[1] / "run"), environment=Changed, tools=[double])
    loop.resume(str(folders[1] / "run"), environment=Purse, tools=[double])
    assert RunFolder(folders[1] / "run").read_config().environment == "python:Purse"


def test_files_import_their_neighbours(tmp_path: Path) -> None:
    """Two folders have a neighbour of the same name, and one imports another within its function."""
    for folder, value in (("a", 1.0), ("b", 2.0)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "helper_mod.py").write_text(f"W = {value}\n")
        (tmp_path / folder / "later_mod.py").write_text("V = 10.0\n")
        (tmp_path / folder / "rew.py").write_text(
            "from helper_mod import W\n"
            "def r(completions, **k):\n    from later_mod import V\n    return [W + V] * len(completions)\n"
            "def e(environments, **k):\n    return [W] * len(environments)\n"
        )
    specs = [str(tmp_path / folder / "rew.py:r") for folder in "ab"]
    for spec, value in zip(specs, (11.0, 12.0), strict=True):
        assert made_of(rewards=(spec,))[1] == {"r": [value, value]}
    columns = {"environments": [None]}
    for folder, value in (("a", 1.0), ("b", 2.0)):  # in this process
        reward = make_rewards(TrainConfig(rewards=(str(tmp_path / folder / "rew.py:e"),)))
        assert score(reward, ["x"], columns).components["e"].tolist() == [value]
    before = [reward.function.digest for reward in make_rewards(TrainConfig(rewards=(specs[0],)))]  # type: ignore[attr-defined]
    (tmp_path / "a" / "helper_mod.py").write_text("W = 3.0\n")
    after = [reward.function.digest for reward in make_rewards(TrainConfig(rewards=(specs[0],)))]  # type: ignore[attr-defined]
    assert before != after, "a neighbour is part of the reward"
