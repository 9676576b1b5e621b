"""Reward functions of runs see what TRL's see: conversations, environments, the trainer's state, and logs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_runs as runs
from test_agent_runs import calling, config_of
from test_resume import assert_same_run

from jaxrl_llm.rewards import Reward, get_reward, score
from jaxrl_llm.training import inputs, loop
from jaxrl_llm.utils.errors import InputError

__all__ = ["calling"]

REWARDS = '''
def talk(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **kwargs):
    """Everything that TRL gives: calls and results of an episode, of which each has one for each reply."""
    for prompt, completion in zip(prompts, completions):
        assert [one["role"] for one in prompt] == ["user"] and prompt[0]["content"].endswith(" coins"), prompt
        assert [one["role"] for one in completion[:2]] == ["assistant", "tool"], completion
        assert completion[0]["tool_calls"][0]["function"]["name"] == "add", completion
        assert completion[1]["content"].endswith(" coins"), completion
    log_extra("last", [completion[-1]["content"] for completion in completions])
    log_metric("step", float(trainer_state.global_step))
    log_metric("reward/mean", 7.0)
    assert trainer_state.max_steps == 2 and set(kwargs) == {"answer"}, kwargs
    return [float(sum(one["role"] == "tool" for one in completion)) for completion in completions]


def coins(environments, **kwargs):
    return [float(environment.coins) for environment in environments]


def looked_up(completions, **kwargs):
    return [float(environment.coins) for environment in kwargs["environments"]]


def told(completions, **kwargs):
    """What the last result of a tool says the environment has."""
    return [float(completion[-1]["content"].split()[0]) for completion in completions]


def said(completions: list[str], **kwargs):
    assert all(isinstance(text, str) for text in completions)
    return [float(len(text)) for text in completions]


def state(completions, trainer_state=None, log_metric=None, log_extra=None, **kwargs):
    if log_metric:
        log_metric("length", sum(map(len, completions)) / len(completions))
        log_extra("twice", [2 * len(text) for text in completions])
    return [float(trainer_state.global_step)] * len(completions)
'''


NAMES = ("talk", "coins", "told", "said", "looked_up")


def of(folder: Path, *names: str) -> tuple[str, ...]:
    (folder / "agent_rewards.py").write_text(REWARDS)
    return tuple(f"{folder / 'agent_rewards.py'}:{name}" for name in names)


@pytest.mark.heavy
def test_rewards_of_agents_see_the_conversation(
    tmp_path: Path, calling: None, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(
        tmp_path, "Purse", steps=2, episode_tokens=90, rewards=of(tmp_path, *NAMES),
    )  # fmt: skip
    summary = runs.train(config)
    lines = runs.lines_of(tmp_path / "run" / "metrics.jsonl")
    for step, line in enumerate(lines):
        assert [line[f"rewards/{name}/failed"] for name in NAMES] == [0.0] * 5
        assert line["rewards/talk"] == pytest.approx(line["rollout/calls"])
        assert line["rewards/coins"] == line["rewards/told"] == line["rewards/looked_up"] > 0
        assert line["logged/step"] == step
        assert line["logged/reward/mean"] == 7.0
        assert line["reward/mean"] != 7.0
    assert summary["eval_after"]["unscored"] == 0
    assert "failed" not in summary["eval_after"]
    logged = runs.lines_of(tmp_path / "run" / "completions.jsonl")
    for line in logged:
        assert float(line["logged"]["last"].split()[0]) == line["rewards"]["coins"]
    assert {line["phase"] for line in logged} == {"train", "eval_before", "eval_after"}
    assert "the reward coins reads the environments of episodes, so it runs in a thread" in capsys.readouterr().out


@pytest.mark.heavy
def test_a_run_with_environments_in_its_rewards_resumes(
    tmp_path: Path, calling: None, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(
        tmp_path, "Purse", steps=3, rewards=of(tmp_path, "coins"), checkpoint_every=1, keep_checkpoints=9
    )
    runs.train(config)
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "run", other)
    settings = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**settings, "output": str(other)}))
    shutil.rmtree(other / "checkpoints" / "3")
    capsys.readouterr()
    loop.resume(str(other))
    assert "the reward coins reads the environments" in capsys.readouterr().out
    assert_same_run(tmp_path / "run", other)


@pytest.mark.heavy
def test_a_run_without_environments_logs_too(tmp_path: Path) -> None:
    runs.train(runs.small_config(tmp_path, rewards=of(tmp_path, "state"), steps=3, stream_rewards=True))
    lines = runs.lines_of(tmp_path / "run" / "metrics.jsonl")
    assert [line["rewards/state"] for line in lines] == [0.0, 1.0, 2.0]
    for line in runs.lines_of(tmp_path / "run" / "completions.jsonl"):
        assert line["logged"]["twice"] >= 0
        assert line["rewards"]["state"] == {"train": line["step"] - 1, "eval_before": 0, "eval_after": 3}[line["phase"]]
    assert all(line["length"] > 0 for line in lines)


def test_environments_are_named_where_there_are_none(tmp_path: Path) -> None:
    config = runs.small_config(tmp_path, rewards=of(tmp_path, "coins"))
    with (
        pytest.raises(
            InputError, match="the reward 'coins' reads environments, but there are none: give --environment"
        ),
        inputs.read_inputs(config),
    ):
        pass


def test_what_a_function_declares_it_gets(tmp_path: Path) -> None:
    talks: list[Any] = [
        [
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]},
            {"role": "tool", "content": "7"},
            {"role": "assistant", "content": "It is 7."},
        ]
    ]

    def texts(completions: list[str]) -> list[float]:
        return [float(completions == ["It is 7."])]

    def messages(completions, log_extra=None, **columns):
        log_extra("same", [completions == talks])
        return [float(completions == talks and not columns)]

    found = score([Reward(texts), Reward(messages), get_reward("number_match")], talks, {"answer": ["7"]})
    assert {name: x.tolist() for name, x in found.components.items()} == {
        "texts": [1.0], "messages": [0.0], "number_match": [1.0]
    }  # fmt: skip
    assert found.logged.extras == {"same": [True]}
    assert json.dumps(found.logged.extras)
    wrong = score([Reward(lambda completions, log_extra: log_extra("a", [1, 2]) or [1.0], name="wrong")], talks, {})
    assert wrong.failures == {"wrong": 1}


def test_all_signatures_of_trl(tmp_path: Path) -> None:
    """Each gets what it names, whether Python has it as an object or a file."""
    file = tmp_path / "as_trl.py"
    file.write_text(AS_TRL)
    names = ("all_kwargs", "soft_kwargs", "named_solution", "instance", "slow_judge")
    rewards = [get_reward(f"{file}:{name}") for name in names]
    columns = {
        "prompts": ["a", "b"], "completion_ids": [[1], [2, 3]], "answer": ["#### 4", "#### 5"], "solution": [4, 5],
        "difficulty": [1, 2],
    }  # fmt: skip
    found = score(rewards, ["it is 4", "no"], columns, {"global_step": 3, "max_steps": 9, "epoch": 0.5})
    assert found.failures == dict.fromkeys(found.components, 0)
    assert found.components["all_kwargs"].tolist() == [1.0, 2.0]
    assert found.components["slow_judge"].tolist() == [1.0, 0.0]
    assert list(found.logged.metrics) == [("step", 3.0), ("seen", 1.0)]
    assert found.logged.extras == {"length": [1, 2]}


AS_TRL = """
import asyncio


def all_kwargs(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **kwargs):
    log_extra("length", [len(i) for i in completion_ids])
    log_metric("step", float(trainer_state.global_step))
    return [float(len(ids)) for ids in completion_ids]


def soft_kwargs(prompts, completions, trainer_state=None, log_metric=None, **kwargs):
    if log_metric:
        log_metric("seen", 1.0)
    return [None if i % 2 else 0.25 for i, _ in enumerate(completions)]


async def slow_judge(completions, answer, **kwargs):
    async def one(c, a):
        await asyncio.sleep(0.01)
        return float(a.split("####")[-1].strip() in c)

    return await asyncio.gather(*[one(c, a) for c, a in zip(completions, answer)])


def named_solution(completions, solution, difficulty, **kwargs):
    return [float(str(s) in c) + 0.01 * d for c, s, d in zip(completions, solution, difficulty)]


class Callable:
    def __call__(self, completions, **kwargs):
        return [1.0 for _ in completions]


instance = Callable()
"""
