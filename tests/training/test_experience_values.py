"""A run takes the curriculum with its counts, the rollout and the replay that its algorithm names."""

from __future__ import annotations

import dataclasses
import shutil
from asyncio import gather
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_runs as runs

from jaxrl_llm import algorithms
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.rollout import Demands, Rollout, Task
from jaxrl_llm.core.source import Curriculum, MakeCurriculum, Replay, Step
from jaxrl_llm.rewards.scoring import Scored
from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.training import loop
from jaxrl_llm.utils.errors import InputError


@part
def seldom_first(extra: int = 2) -> MakeCurriculum:
    """The prompts that were tried least; the first of a step gets `extra` samples more, the last as many fewer."""

    def make(rows: Sequence[dict[str, Any]], seed: int) -> Curriculum:
        def select(state: Any, count: int) -> tuple[np.ndarray, Any]:
            return np.argsort(state["tried"], kind="stable")[:count].astype(np.int32), state

        def observe(state: Any, step: Step) -> Any:
            tried = state["tried"].copy()
            np.add.at(tried, np.asarray(step.scored.batch.prompt_id), 1)
            return {"steps": state["steps"] + 1, "tried": tried}

        def counts(state: Any, ids: np.ndarray, total: int) -> np.ndarray:
            samples = np.full(len(ids), total // len(ids))
            samples[0], samples[-1] = samples[0] + extra, samples[-1] - extra
            return samples

        return Curriculum(
            lambda: {"steps": 0, "tried": np.zeros(len(rows), np.int32)}, select, observe, counts,
            lambda state: {"curriculum/steps": float(state["steps"])},
        )  # fmt: skip

    return make


async def _one_more(tools: Tools, task: Task) -> list[Episode]:
    episodes = await gather(*(tools.sample(task.prompt, number=i) for i in range(task.samples + 1)))
    return [episode.with_info(number=float(i)) for i, episode in enumerate(episodes)]


def _last_mean() -> Replay:
    def mix(state: dict[str, np.ndarray], scored: Scored, step: int, seed: int) -> tuple[Scored, dict[str, np.ndarray]]:
        reward = scored.batch.need("reward")
        return scored._replace(batch=scored.batch.replace(reward=reward - state["last"])), {
            "last": np.float32(np.mean(reward))
        }

    return Replay(lambda: {"last": np.float32(0)}, mix)


def of_experience(extra: int = 2) -> Algorithm:
    """GRPO with all three."""
    return dataclasses.replace(
        algorithms.get("dr_grpo"),
        curriculum=seldom_first(extra),
        rollout=Rollout(_one_more, demands=Demands(variable_size=True)),
        replay=_last_mean(),
    )


@pytest.mark.heavy
def test_a_run_takes_them_and_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    config = runs.small_config(
        tmp_path, steps=3, eval_size=0, minibatches=1, checkpoint_every=1, keep_checkpoints=3, top_p=1.0
    )
    taken: list[runs.Taken] = []
    with runs.watched(taken):
        runs.train(config, algorithm=of_experience)
    for number, one in enumerate(taken):
        batch = one.scored.batch
        ids, counts = np.unique(np.asarray(batch.prompt_id), return_counts=True)
        assert sorted(ids.tolist()) == list(range(4 * number, 4 * number + 4))
        assert sorted(counts.tolist()) == [3, 5, 5, 7]  # one more than the curriculum says
        assert np.asarray(batch.need("number")).max() == 6
    lines = runs.reproducible(Path(config.output) / "metrics.jsonl")
    assert [line["curriculum/steps"] for line in lines] == [1, 2, 3]
    first, second = (float(np.mean(one.scored.batch.need("reward"))) for one in taken[:2])
    assert abs(second) < 0.4 < first  # less the mean of the step before
    other = tmp_path / "other"
    shutil.copytree(config.output, other)
    for step in (2, 3):
        shutil.rmtree(other / "checkpoints" / str(step))
    runs.train(loop.RunFolder(other).read_config(), resume=True, algorithm=of_experience)
    assert runs.reproducible(other / "metrics.jsonl") == lines


def test_counts_below_one_are_refused(tmp_path: Path) -> None:
    config = runs.small_config(tmp_path, steps=1, eval_size=0, minibatches=1, top_p=1.0)
    with pytest.raises(InputError, match="must give each prompt 1 at least, and 16 in all"):
        runs.train(config, algorithm=of_experience(4))


def test_they_are_part_of_the_printed_value() -> None:
    text = repr(dataclasses.replace(algorithms.get("dr_grpo"), curriculum=seldom_first(3)))
    assert "curriculum=seldom_first(3)" in text
    with pytest.raises(InputError, match="rollout"):
        dataclasses.replace(algorithms.get("dr_grpo"), rollout=_one_more)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="curriculum"):
        dataclasses.replace(algorithms.get("dr_grpo"), curriculum=3)  # type: ignore[arg-type]
