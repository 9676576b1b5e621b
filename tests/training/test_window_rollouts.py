"""Runs that train on the newest windows of unfinished completions: what is trained on, scored and kept."""

from __future__ import annotations

import json
import shutil
import string
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_runs as runs

from jaxrl_llm import algorithms
from jaxrl_llm.core.rules import Partial
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.learner import step as learner
from jaxrl_llm.reporting.logging.files import read_json
from jaxrl_llm.rewards import Reward
from jaxrl_llm.rewards.scoring import Scored, score_batch
from jaxrl_llm.rollouts.runtime.sources import window_metrics
from jaxrl_llm.training import loop
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.rollout import strategy_of
from jaxrl_llm.utils.errors import InputError

pytestmark = pytest.mark.heavy

STEPS, LIMIT, SEGMENT, GROUPS, SAMPLES = 4, 12, 5, 3, 2
REWARD = """
import json
from pathlib import Path


def even(completions, completion_ids):
    with (Path(__file__).parent / "seen.jsonl").open("a") as file:
        for ids in completion_ids:
            file.write(json.dumps(ids) + "\\n")
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]
"""

Key = tuple[int, int, int]  # data set row, the step in which it was begun, sample: one completion


class Row(NamedTuple):
    """A completion in the batch of a step, as the update had it; arrays are over its actions so far."""

    key: Key
    tokens: list[int]
    weights: np.ndarray
    value_weights: np.ndarray
    advantages: np.ndarray
    returns: np.ndarray
    reward: float
    unfinished: bool


class Kept:
    """A finished run, and each of its batches."""

    def __init__(self, folder: Path) -> None:
        (folder / "own.py").write_text(REWARD)
        self.config = runs.small_config(
            folder, algorithm="t_ppo", segment_tokens=SEGMENT, max_new_tokens=LIMIT, steps=STEPS, critic="shared",
            prompts_per_step=GROUPS, group_size=SAMPLES, minibatches=1, eval_size=0, keep_checkpoints=3, top_p=1.0,
            stop=tuple(string.ascii_letters[:20]), rewards=(f"{folder / 'own.py'}:even",),
        )  # fmt: skip
        self.steps, self.collected = list[list[Row]](), list[runs.Taken]()
        update = learner.update

        def updating(
            policy: Any, objective: Any, optimizer: Any, state: Any, batch: Any, steps: Any, **others: Any
        ) -> Any:
            self.steps.append(self._rows(batch))
            return update(policy, objective, optimizer, state, batch, steps, **others)

        learner.update = updating
        try:
            with runs.watched(self.collected):
                runs.train(self.config)
        finally:
            learner.update = update

    @property
    def begun(self) -> list[tuple[int, int]]:
        """(data set row, first step) of the groups of the newest batch."""
        found = self.collected[-1]
        rows = np.asarray(found.scored.batch.prompt_id)[::SAMPLES].tolist()
        first = [log.first_step for log in found.before.pool]
        return list(zip(rows, first + [len(self.collected) - 1] * (len(rows) - len(first)), strict=True))

    def _rows(self, batch: Trajectories) -> list[Row]:
        mask = np.asarray(batch.action_mask)
        names = ("tokens", "weights", "value_weights", "advantages", "returns")
        arrays = {name: np.asarray(batch.need(name)) for name in names}
        out = []
        for n, group in enumerate(np.asarray(batch.group).tolist()):
            parts = {name: x[n, mask[n]] for name, x in arrays.items()}
            key = (*self.begun[group], n % SAMPLES)
            reward, unfinished = float(batch.need("reward")[n]), bool(batch.need("unfinished")[n])
            out.append(Row(key, parts.pop("tokens").tolist(), **parts, reward=reward, unfinished=unfinished))
        return out

    @property
    def folder(self) -> Path:
        return Path(self.config.output)

    @property
    def seen(self) -> list[list[int]]:
        """Completions that the reward function was called with, in order."""
        return [json.loads(line) for line in (self.folder.parent / "seen.jsonl").read_text().splitlines()]

    @property
    def by_key(self) -> dict[Key, list[Row]]:
        """The rows of each completion, step by step."""
        out: dict[Key, list[Row]] = {}
        for rows in self.steps:
            for row in rows:
                out.setdefault(row.key, []).append(row)
        return out


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    return Kept(tmp_path_factory.mktemp("windows"))


def test_the_policy_is_trained_on_every_token_once(kept: Kept) -> None:
    """In the order of its tokens, whatever the number of windows; as many as the run says that it sampled."""
    several, total = 0, 0
    for rows in kept.by_key.values():
        trained = np.concatenate([np.flatnonzero(row.weights) for row in rows]).tolist()
        # A completion that waits for the others of its prompt has no actions any more.
        longest = max(len(row.tokens) for row in rows)
        assert trained == list(range(longest)), "a token was left out, or trained again"
        windows = [int(np.count_nonzero(row.weights)) for row in rows]
        assert all(size <= SEGMENT for size in windows)
        for row, size in zip(rows, windows, strict=True):
            assert size == SEGMENT or not row.unfinished, "one that goes on has its whole window"
            assert not row.advantages[row.weights == 0].any()
        several += sum(size > 0 for size in windows) > 1
        total += longest
    assert several >= 3, "no completion has several windows: this test shows nothing"
    lines = runs.lines_of(kept.folder / "metrics.jsonl")
    assert sum(line["completion/tokens"] for line in lines) == total
    assert read_json(kept.folder / "summary.json")["tokens"]["sampled"] == total


def test_the_critic_is_trained_on_every_finished_completion_once_and_whole(kept: Kept) -> None:
    whole = earlier = 0
    for rows in kept.by_key.values():
        taught = [row for row in rows if row.value_weights.any()]
        done = [row for row in rows if not row.unfinished]
        assert len(taught) == (1 if done else 0)
        for row in taught:
            assert row is done[0], "in the step in which it was finished"
            assert (row.value_weights > 0).all()
            np.testing.assert_allclose(row.returns, row.reward, rtol=1e-6)
            earlier += int((row.weights == 0).sum())
        whole += len(taught)
    assert earlier > SEGMENT, "no token of an earlier window was taught: this test shows nothing"
    assert whole == sum(line["rollout/finished"] for line in runs.lines_of(kept.folder / "metrics.jsonl"))


def test_rewards_are_asked_for_finished_completions_only_and_once(kept: Kept) -> None:
    finished: list[list[int]] = []
    for rows in kept.by_key.values():
        for i, row in enumerate(rows):
            now = not row.unfinished and (i == 0 or rows[i - 1].unfinished)
            assert np.isnan(row.reward) != now
            finished += [row.tokens] if now else []
    assert Counter(map(tuple, kept.seen)) == Counter(map(tuple, finished))
    assert any(row.unfinished for rows in kept.steps for row in rows)


def test_a_batch_is_all_that_is_in_flight(kept: Kept) -> None:
    """Always as many rows; unfinished groups stay, from the tokens that they had; complete ones make room."""
    for step, rows in enumerate(kept.steps):
        assert len(rows) == GROUPS * SAMPLES
        now = {row.key: row for row in rows}
        for row in kept.steps[step - 1] if step else []:
            group = [other for other in kept.steps[step - 1] if other.key[:2] == row.key[:2]]
            stays = any(other.unfinished for other in group)
            assert (row.key in now) == stays
            if stays:
                after = now[row.key].tokens or row.tokens  # one that waits has no actions any more
                assert after[: len(row.tokens)] == row.tokens
                assert (len(after) > len(row.tokens)) == row.unfinished
    idle = [row for rows in kept.steps for row in rows if not row.weights.any()]
    assert idle, "no completion waits for the others of its prompt: this test shows nothing"
    assert not any(row.value_weights.any() or row.advantages.any() for row in idle)


def test_what_the_metrics_say(kept: Kept) -> None:
    lines = runs.lines_of(kept.folder / "metrics.jsonl")
    assert len(lines) == STEPS
    for line, rows, collected in zip(lines, kept.steps, kept.collected, strict=True):
        ended = [row for row in rows if not np.isnan(row.reward)]
        assert line["rollout/unfinished"] == sum(row.unfinished for row in rows)
        assert line["rollout/groups"] + line["rollout/pool"] == GROUPS
        assert line["rollout/pool"] == len(collected.pool)
        assert line["completion/length"] == pytest.approx(np.mean([len(row.tokens) for row in ended]))
        assert line["reward/mean"] == pytest.approx(np.mean([row.reward for row in ended]))
        assert (line["reward/unscored"], line["rollout/stale_tokens"]) == (0, 0)
        assert line["mismatch"] < 1e-4, "the ratio is against the weights of this step"
        assert all(np.isfinite(list(line.values()))), "all are numbers"
        assert line["grad_norm"] > 0


def test_a_resumed_run_is_the_same(kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "write_report", lambda folder: folder)
    run, step = tmp_path / "run", 2
    shutil.copytree(kept.folder, run)
    for later in range(step + 2, STEPS + 1, 2):
        shutil.rmtree(run / "checkpoints" / str(later))
    samples = kept.collected[step - 1].waiting
    assert any(sample.tokens.size and not sample.ended for sample in samples), "a pool without windows shows nothing"
    loop.resume(str(run))
    assert runs.reproducible(run / "metrics.jsonl") == runs.reproducible(kept.folder / "metrics.jsonl")
    assert (run / "completions.jsonl").read_bytes() == (kept.folder / "completions.jsonl").read_bytes()
    sums = [
        runs.lines_of(folder / f"checkpoints/{STEPS}/meta/metadata")[0]["checksums"] for folder in (run, kept.folder)
    ]
    for one in sums:
        del one["meta"]  # it holds seconds
    assert sums[0] == sums[1]
    assert len(sums[0]) >= 2


def hand_made(unfinished: list[bool], window: list[int]) -> Trajectories:
    """Rows of 1, 2, 3, 4 tokens in two groups, of which the newest `window` each are of this step."""
    size, N = np.arange(1, 5), 4
    mask = np.arange(4) < size[:, None]
    newest = mask & (np.arange(4) >= (size - window)[:, None])
    zeros, rows = jnp.zeros((N, 4), jnp.int32), jnp.arange(N) // 2
    batch = Trajectories(
        tokens=zeros, token_mask=jnp.asarray(mask), action_mask=jnp.asarray(mask), behaviour_logp=zeros * 1.0,
        policy_step=zeros, turn=zeros, group=rows, prompt_id=rows, truncated=jnp.asarray([False, False, False, True]),
    )  # fmt: skip
    return batch.with_info(window=jnp.asarray(newest), unfinished=jnp.asarray(unfinished))


class Letters:
    """A minimal tokenizer."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "x" * len(ids)


def scored(batch: Trajectories, which: list[bool]) -> tuple[Scored, list[int]]:
    """With the length as the reward, but none for the longest; and the lengths that it saw."""
    seen: list[int] = []

    def length(completions: list[str]) -> list[float | None]:
        seen.extend(map(len, completions))
        return [None if len(text) == 4 else float(len(text)) for text in completions]

    rows = [{"prompt": "a"}, {"prompt": "b"}]
    return score_batch([Reward(length)], Letters(), rows, batch, which=np.asarray(which)), seen


def test_figures_by_hand() -> None:
    """Row 0 was finished earlier, row 1 goes on; rows 2 and 3 were finished now, of which row 3 cannot be scored."""
    found, seen = scored(hand_made([False, True, False, False], [0, 2, 1, 4]), [False, False, True, True])
    assert seen == [3, 4]
    np.testing.assert_array_equal(found.batch.reward, [np.nan, np.nan, 3, np.nan])
    assert window_metrics(found) == {
        "reward/unscored": 0.5,
        "completion/length": 3.5,
        "completion/longest": 4.0,
        "completion/truncated": 0.5,
        "completion/tokens": 7.0,
        "groups/uniform": 0.0,
        "rollout/finished": 2.0,
        "rollout/unfinished": 1.0,
        "rewards/length/failed": 0.0,
    }


def test_no_reward_function_is_called_where_nothing_is_finished() -> None:
    found, seen = scored(hand_made([True] * 4, [1] * 4), [False] * 4)
    assert seen == []
    assert np.isnan(np.asarray(found.batch.reward)).all()
    assert np.isnan(np.asarray(found.batch.rewards["length"])).all()
    metrics = window_metrics(found)
    assert np.isnan([metrics[f"completion/{name}"] for name in ("length", "longest", "truncated")]).all()
    assert (metrics["completion/tokens"], metrics["groups/uniform"], metrics["rewards/length/failed"]) == (4, 0, 0)


def test_equal_rewards_of_those_that_finish_together_are_seen() -> None:
    batch = hand_made([False] * 4, [1] * 4).replace(reward=jnp.asarray([1.0, 1, 0, 1]), rewards={})
    assert window_metrics(Scored(batch, [""] * 4, {}))["groups/uniform"] == 0.5


def test_which_strategy_a_run_has() -> None:
    windows = algorithms.get("t_ppo", max_length=24)
    assert strategy_of(TrainConfig(), windows) == Partial(segment_tokens=8, train_unfinished=True)
    assert strategy_of(TrainConfig(segment_tokens=5), windows) == Partial(segment_tokens=5, train_unfinished=True)
    with pytest.raises(InputError, match=r"oversample is 2.0, but must be 1 with train_unfinished"):
        strategy_of(TrainConfig(oversample=2.0), windows)
    with pytest.raises(InputError, match="stream_rewards scores complete groups: leave it out"):
        strategy_of(TrainConfig(stream_rewards=True, algorithm="t_ppo"), windows)
    segments = algorithms.get("ulorl", max_length=24)
    assert strategy_of(TrainConfig(), segments) == Partial(segment_tokens=3)
    assert strategy_of(TrainConfig(oversample=2.0), segments) == Partial(2.0, 3)
    assert algorithms.get("ulorl").strategy is algorithms.get("ulorl", max_length=24, segments=1).strategy is None
