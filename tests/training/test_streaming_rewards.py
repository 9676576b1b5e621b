"""Groups that are scored while others are still being sampled: the same scores, and no partial step after Ctrl-C."""

from __future__ import annotations

import logging
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_runs as runs

from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.data.prompt_set import PromptSet
from jaxrl_llm.rewards import Reward
from jaxrl_llm.rewards.scoring import score_batch
from jaxrl_llm.rewards.streamed import StreamedScores
from jaxrl_llm.rollouts.runtime.source import experience
from jaxrl_llm.rollouts.runtime.source_setup import Experience
from jaxrl_llm.rollouts.runtime.sources import shuffled_epochs
from jaxrl_llm.sampling import completion_ids
from jaxrl_llm.sampling.engine import Engine
from jaxrl_llm.sampling.requests import Completion
from jaxrl_llm.sampling.sampler import SamplingConfig
from jaxrl_llm.training import loop

pytestmark = pytest.mark.heavy

TOKENIZER = SimpleNamespace(decode=lambda ids, skip_special_tokens: " ".join(map(str, ids)))
ROWS: list[dict[str, Any]] = [
    {"prompt": "one", "answer": "3"},
    {"prompt": [{"role": "user", "content": "two"}], "answer": "1"},
    {"prompt": "three", "answer": "2"},
]


@pytest.fixture
def batch() -> Trajectories:
    """Three groups of two rows; row i is [9, 0, 1, ... i] with one token of prompt."""
    tokens = jnp.asarray([[9, *range(i + 1), *[0] * (5 - i)] for i in range(6)], jnp.int32)
    real = jnp.arange(7) < jnp.arange(2, 8)[:, None]
    return Trajectories(
        tokens=tokens, token_mask=real, action_mask=real & (jnp.arange(7) > 0), behaviour_logp=tokens * 0.0,
        policy_step=tokens, turn=tokens, group=jnp.arange(6) // 2, prompt_id=jnp.arange(6) // 2,
        truncated=jnp.zeros(6, bool),
    )  # fmt: skip


def length(completions: list[Any], completion_ids: list[list[int]], answer: list[str]) -> list[float]:
    return [len(ids) / float(a) for ids, a in zip(completion_ids, answer, strict=True)]


async def sometimes(completions: list[Any], completion_ids: list[list[int]]) -> list[float | None]:
    return [None if len(ids) % 2 else 1.0 for ids in completion_ids]


def picky(completions: list[Any]) -> list[float]:
    if any("3" in str(completion) for completion in completions):
        raise ValueError("a three")
    return [1.0] * len(completions)


REWARDS = [Reward(length), Reward(sometimes, weight=2.0), Reward(picky, default=-1.0)]


def stream(rewards: list[Reward], batch: Trajectories, order: list[int]) -> Any:
    ids = completion_ids(batch)
    with StreamedScores(rewards, TOKENIZER) as streamed:
        for number in order:
            streamed.add(number, ROWS[number], ids[2 * number : 2 * number + 2])
        return streamed.scores()


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_scores_are_those_of_one_call(batch: Trajectories, order: list[int]) -> None:
    """Sync, async, unscored and failing ones, in whatever order the groups end."""
    whole = score_batch(REWARDS, TOKENIZER, ROWS, batch)
    scored = score_batch([], TOKENIZER, ROWS, batch, stream(REWARDS, batch, order))
    assert scored.texts == whole.texts
    assert scored.failures == whole.failures == {"length": 0, "sometimes": 0, "picky": 3}
    assert scored.batch.rewards is not None
    assert whole.batch.rewards is not None
    for name, values in whole.batch.rewards.items():
        np.testing.assert_array_equal(scored.batch.rewards[name], values)
    np.testing.assert_array_equal(
        scored.batch.rewards["length"], np.asarray([1, 2, 9, 12, 7.5, 9], np.float32) / np.float32(3)
    )
    np.testing.assert_array_equal(scored.batch.reward, whole.batch.reward)


def test_a_time_limit_is_of_each_group(batch: Trajectories) -> None:
    """One group hangs: it alone is not scored."""
    release = threading.Event()

    def hanging(completions: list[Any], answer: list[str]) -> list[float]:
        if answer[0] == "1":
            release.wait(60)
        return [1.0] * len(completions)

    scores = stream([Reward(hanging, time_limit=0.3, default=-2.0)], batch, [0, 1, 2])
    release.set()
    np.testing.assert_array_equal(scores.components["hanging"], [1.0, 1.0, np.nan, np.nan, 1.0, 1.0])
    assert scores.failures == {"hanging": 2}


def test_groups_are_scored_while_others_are_sampled(vectors: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first group's reward is running before the last group is sampled, and does not end before that either."""
    model = vectors("llama_tied")
    running, sampled, seen = threading.Event(), threading.Event(), list[str]()

    def reward(completions: list[Any], answer: list[str]) -> list[float]:
        seen.append(answer[0])
        running.set()
        assert sampled.wait(60)
        return [1.0] * len(completions)

    ended, completed = list[int](), Engine.completed

    def watching(self: Engine) -> list[Completion]:
        found = completed(self)
        ended.extend(completion.index for completion in found)
        if len(ended) == 6:
            assert running.wait(60), "nothing was scored before all was sampled"
            sampled.set()
        return found

    monkeypatch.setattr(Engine, "completed", watching)
    setup = Experience(
        model.policy, PromptSet(ROWS, [[1, 2], [3, 4], [5, 6]]), [Reward(reward, time_limit=120.0)],
        shuffled_epochs(ROWS, seed=0), SamplingConfig(max_new_tokens=4, slots=2), prompts_per_step=3, group_size=2,
        stream_rewards=True,
    )  # fmt: skip
    source = experience(setup)
    found, _ = source.next(source.init(), model.params, jax.random.key(0), 0)
    assert sorted(ended) == list(range(6))
    assert seen == [row["answer"] for row in found.rows]
    assert found.scored.batch.reward.tolist() == [1.0] * 6


def test_a_rewards_own_error_does_not_stop_the_others(batch: Trajectories, caplog: pytest.LogCaptureFixture) -> None:
    def broken(completions: list[Any]) -> list[float]:
        raise SystemExit(3)

    with caplog.at_level(logging.WARNING, logger="jaxrl_llm"):
        scores = stream([Reward(broken)], batch, [0, 1, 2])
    assert scores.total.tolist() == [0.0] * 6
    assert scores.failures == {"broken": 6}


@pytest.mark.parametrize("more", [{}, pytest.param({"oversample": 2.0, "slots": 6}, marks=pytest.mark.heavy)])
def test_a_run_is_the_same(tmp_path: Path, more: dict[str, Any]) -> None:
    found = []
    for streamed in (False, True):
        folder = tmp_path / str(streamed)
        folder.mkdir()
        config = runs.small_config(folder, steps=2, stream_rewards=streamed, eval_size=0, **more)
        runs.train(config)
        found.append(Path(config.output))
    one, other = found
    assert runs.reproducible(one / "metrics.jsonl") == runs.reproducible(other / "metrics.jsonl")
    runs.assert_equal_trees(runs.final_params(one), runs.final_params(other))
    assert (one / "completions.jsonl").read_bytes() == (other / "completions.jsonl").read_bytes()


@pytest.mark.parametrize("more", [{}, pytest.param({"oversample": 2.0, "slots": 6}, marks=pytest.mark.heavy)])
def test_ctrl_c_in_a_rollout_keeps_nothing_of_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    """While the second step samples. The sampler itself would give back what is finished; a run goes on from whole
    steps."""
    config = runs.small_config(
        tmp_path, steps=2, stream_rewards=True, eval_size=0, checkpoint_every=1, **{"slots": 6, **more}
    )
    add, groups = StreamedScores.add, list[int]()

    def interrupting(self: StreamedScores, number: int, *others: Any) -> None:
        add(self, number, *others)
        groups.append(number)
        if len(groups) == 5:
            signal.raise_signal(signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(StreamedScores, "add", interrupting)
    with pytest.raises(KeyboardInterrupt):
        runs.train(config)
    assert signal.getsignal(signal.SIGINT) is handler
    run = Path(config.output)
    assert len(runs.lines_of(run / "metrics.jsonl")) == 1
    assert [path.name for path in (run / "checkpoints").iterdir() if path.is_dir()] == ["1"]
    assert 5 <= len(groups) < 8, "the step was sampled to its end"
    monkeypatch.setattr(StreamedScores, "add", add)
    monkeypatch.setattr(loop, "write_report", lambda folder: folder)
    loop.resume(str(run))
    assert len(runs.lines_of(run / "metrics.jsonl")) == 2


def test_scoring_stops_when_the_rollout_does(batch: Trajectories) -> None:
    """Leaving the block drops what waits: the second group is never scored."""
    seen, go = list[str](), threading.Event()

    def slow(completions: list[Any], answer: list[str]) -> list[float]:
        seen.append(answer[0])
        go.wait(60)
        return [1.0] * len(completions)

    with StreamedScores([Reward(slow, time_limit=60.0)], TOKENIZER) as streamed:
        streamed.add(0, ROWS[0], [[1], [2]])
        streamed.add(1, ROWS[1], [[1], [2]])
        while not seen:
            time.sleep(0.001)
    go.set()
    streamed._thread.shutdown(wait=True)
    assert seen == ["3"]
