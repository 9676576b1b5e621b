"""Three whole trials with code as a user of TRL has it, unchanged but for imports: it trains, and says what it did."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import tiny_runs as runs
from test_agent_runs import calling, config_of

from jaxrl_llm import TrainConfig

__all__ = ["calling"]


# 1. An environment class, whose methods are tools, and a reward that reads the environments.
class PurseEnv:
    def __init__(self):
        self.coins = 0

    def reset(self, **kwargs) -> str | None:
        self.coins = kwargs["coins"]
        return f"You have {self.coins} coins."

    def add(self, text: str) -> str:
        """
        Put coins into the purse.

        Args:
            text: One coin for each letter.

        Returns:
            How many there are now.
        """
        self.coins += len(text)
        if self.coins > 60:
            raise ValueError("The purse is full.")
        return f"now {self.coins}"


def purse_reward(environments, **kwargs) -> list[float]:
    return [float(env.coins % 2) for env in environments]


def started_with(environments, coins, log_metric, **kwargs) -> list[float]:
    added = [env.coins - one for env, one in zip(environments, coins)]  # noqa: B905
    log_metric("added", sum(added) / len(added))
    return [0.01 * one for one in added]


# 2. A tool, and rewards that read the conversation.
def add(text: str) -> int:
    """
    Count letters.

    Args:
        text: The letters.

    Returns:
        Their number.
    """
    return len(text)


def tool_reward(completions, **kwargs) -> list[float]:
    rewards = []
    for completion in completions:
        called = [m for m in completion if m["role"] == "assistant" and m.get("tool_calls")]
        rewards.append(sum(m["tool_calls"][0]["function"]["name"] == "add" for m in called) / 10)
    return rewards


def correctness_reward(prompts, completions, answer, **kwargs) -> list[float]:
    assert all(prompt[-1]["role"] == "user" for prompt in prompts)
    results = [[m["content"] for m in completion if m["role"] == "tool"] for completion in completions]
    return [float(int(result[-1]) % 2 == int(a)) if result else 0.0 for result, a in zip(results, answer)]  # noqa: B905


# 3. A notebook's cells: rewards as functions, one of them async, one that scores some alone.
NAMES = ["repeats_reward", "some_reward", "judge_reward"]


def repeats_reward(completions, completion_ids, **kwargs):
    return [len(set(ids)) / len(ids) for ids in completion_ids]


def some_reward(completions, answer, trainer_state=None, log_extra=None, **kwargs):
    log_extra("step", [trainer_state.global_step] * len(completions))
    return [0.25 if a == "1" else None for a in answer]


async def judge_reward(prompts, completions, **kwargs):
    async def one(prompt, completion):
        await asyncio.sleep(0.01)
        return float(len(completion) > 5)

    return await asyncio.gather(*[one(p, c) for p, c in zip(prompts, completions)])  # noqa: B905


def learned(folder: Path, names: list[str], expected: dict[str, float] | None = None) -> list[dict[str, Any]]:
    """The lines of a run that had a learning signal, and whose rewards were all scored in time."""
    lines = runs.lines_of(folder / "run" / "metrics.jsonl")
    assert any(line["groups/uniform"] < 1 and line["grad_norm"] > 0 for line in lines)
    for line in lines:
        assert [line[f"rewards/{name}/failed"] for name in names] == [0.0] * len(names)
    before = runs.load_policy(json.loads((folder / "run" / "config.json").read_text())["model"])[1]
    with pytest.raises(AssertionError):
        runs.assert_equal_trees(before, runs.final_params(folder / "run"))
    return lines


def rows_of(folder: Path, *rows: dict[str, Any]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.heavy
def test_an_environment_class_with_rewards_that_take_environments(tmp_path: Path, calling: None) -> None:
    asked = [{"role": "user", "content": "Odd?"}]
    rows = rows_of(tmp_path, *({"prompt": asked, "coins": coins} for coins in range(6)))
    config = config_of(tmp_path, "Purse", prompts=rows, steps=2, eval_size=0, episode_tokens=90)
    runs.train(config, rewards=[purse_reward, started_with], environment=PurseEnv)
    lines = learned(tmp_path, ["purse_reward", "started_with"])
    for line in lines:
        assert line["rollout/calls"] > 0
        assert line["rewards/started_with"] == pytest.approx(0.01 * line["added"])
        assert line["reward/mean"] == pytest.approx(line["rewards/purse_reward"] + line["rewards/started_with"])
    said = (tmp_path / "run" / "completions.jsonl").read_text()
    assert "You have 5 coins." in said
    assert "now " in said


@pytest.mark.heavy
def test_a_tool_with_rewards_that_read_the_conversation(tmp_path: Path, calling: None) -> None:
    rows = rows_of(
        tmp_path, *({"prompt": [{"role": "user", "content": f"n{n}?"}], "answer": str(n % 2)} for n in range(6))
    )
    config = config_of(tmp_path, "Purse", prompts=rows, steps=2, eval_size=0, episode_tokens=90)
    rewards: Any = [tool_reward, correctness_reward]
    runs.train(
        TrainConfig(**{**vars(config), "environment": None, "tools": [add], "rewards": rewards, "eval_reward": None})
    )
    lines = learned(tmp_path, ["tool_reward", "correctness_reward"])
    for line in lines:
        assert line["rewards/tool_reward"] == pytest.approx(line["rollout/turns"] / 10)
        assert 0 < line["rewards/correctness_reward"] < 1


def test_a_notebook_with_functions_as_rewards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = runs.small_config(tmp_path, steps=2, eval_size=0, checkpoint_every=1)
    functions = [repeats_reward, some_reward, judge_reward]
    summary = runs.train(TrainConfig(**{**vars(config), "rewards": functions}))
    lines = learned(tmp_path, NAMES)
    assert summary["steps"] == 2
    for number, line in enumerate(lines):
        assert line["rewards/some_reward"] == 0.25
        scored = line["rewards/some_reward/scored"]
        assert 0 < scored < 1
        parts = line["rewards/repeats_reward"] + 0.25 * scored + line["rewards/judge_reward"]
        assert line["reward/mean"] == pytest.approx(parts)
        shown = [one for one in runs.lines_of(tmp_path / "run" / "completions.jsonl") if one["step"] == number + 1]
        assert {one["logged"]["step"] for one in shown} == {number}
    assert capsys.readouterr().out.count("is a Python value") == 3
