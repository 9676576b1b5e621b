"""Runs whose groups are programs with forks, pauses and a second turn; a killed and resumed run ends the same."""

from __future__ import annotations

import random
import shutil
import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_runs as runs
from test_resume import assert_same_run, kill

from jaxrl_llm import algorithms
from jaxrl_llm.rollouts.registry import rollout_by_name
from jaxrl_llm.training import loop
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.rollout import check_columns
from jaxrl_llm.utils.errors import InputError

WORLDS = Path(__file__).parent / "worlds.py"
STEPS = 6
# Completions go on over several steps, most of them in the middle of a turn.
SETTINGS: dict[str, Any] = {
    "rollout": f"{WORLDS}:everything", "max_new_tokens": 12, "segment_tokens": 4, "oversample": 1.5, "steps": STEPS,
    "eval_size": 0, "minibatches": 1, "top_p": 1.0, "keep_checkpoints": 3, "checkpoint_every": 1, "slots": 8,
}  # fmt: skip


class Kept:
    """A finished run, and what each of its steps was given."""

    def __init__(self, folder: Path) -> None:
        self.config, self.steps = runs.small_config(folder, **SETTINGS), list[runs.Taken]()
        with runs.watched(self.steps):
            runs.train(self.config)

    @property
    def folder(self) -> Path:
        return Path(self.config.output)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    return Kept(tmp_path_factory.mktemp("programs"))


def steps_done(run: Path) -> int:
    """Whole lines of its metrics; the last may be half written."""
    metrics = run / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


@pytest.mark.heavy
def test_rows_hold_forks_and_turns(kept: Kept) -> None:
    turns, shared = 0, 0
    for taken in kept.steps:
        batch = taken.scored.batch
        action, turn = np.asarray(batch.action_mask), np.asarray(batch.turn)
        assert ((turn >= 0) == action).all()
        for row in range(0, len(action), 2):
            first, other = (np.asarray(batch.tokens)[i][np.asarray(batch.token_mask)[i]] for i in (row, row + 1))
            start = int(action[row].argmax())
            assert first[: start + 3].tolist() == other[: start + 3].tolist(), "two branches of a trunk"
            shared += first.tolist() != other.tolist()
        for row in range(len(action)):
            inside = action[row].nonzero()[0]
            between = ~action[row, inside[0] : inside[-1]]
            turns += between.any()
            assert between.any() == (turn[row].max() == 1)
    assert turns >= 8, "no row has two turns: this test shows nothing"
    assert shared >= 4, "no fork parts: this test shows nothing"
    assert any(answer.tokens.size and not answer.ended for taken in kept.steps for answer in taken.waiting)
    assert any(call.place > 3 for taken in kept.steps for log in taken.pool for call in log.drawn), "in a second turn"


@pytest.mark.heavy
@pytest.mark.parametrize("step", [4, 5])
def test_it_goes_on_in_the_middle_of_a_conversation(kept: Kept, step: int, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(loop, "write_report", lambda folder: folder)
    run = tmp_path / "run"
    shutil.copytree(kept.folder, run)
    for later in range(step + 1, STEPS + 1):
        shutil.rmtree(run / "checkpoints" / str(later), ignore_errors=True)
    loop.resume(str(run))
    assert_same_run(run, kept.folder)


@pytest.mark.heavy
def test_it_is_killed_at_random_moments(kept: Kept, tmp_path: Path, monkeypatch: Any) -> None:
    """Each time after one more step, with forks, pauses and environments in flight."""
    monkeypatch.setattr(loop, "write_report", lambda folder: folder)
    chance, run, killed = random.Random(0), tmp_path / "run", 0
    config = TrainConfig(**{**vars(kept.config), "output": str(run)})
    command = runs.as_arguments(config)
    while killed < 3 and (done := steps_done(run)) < STEPS - 1:
        process = runs.start("train", *command, WORLD_SECONDS="0.05")
        kill(process, lambda done=done: steps_done(run) > done, delay=chance.uniform(0, 0.5))
        command, killed = ["--resume", str(run)], killed + 1
    assert killed >= 2
    loop.resume(str(run))
    assert_same_run(run, kept.folder)


@pytest.mark.heavy
def test_a_run_of_two_turns(tmp_path: Path) -> None:
    """Without partial rollouts: all groups are finished in their step."""
    taken: list[runs.Taken] = []
    more: Any = {"segment_tokens": 0, "oversample": 1.0, "steps": 2, "rollout": f"{WORLDS}:talk"}
    more["stop"] = tuple(string.ascii_letters[:20])  # so that turns end before their limit
    with runs.watched(taken):
        runs.train(runs.small_config(tmp_path, **{**SETTINGS, **more}))
    for one in taken:
        assert one.pool == ()
        assert np.asarray(one.scored.batch.turn).max() == 1
    assert runs.lines_of(tmp_path / "run" / "metrics.jsonl")[-1]["rollout/turns"] > 1


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gruop", "unknown rollout 'gruop': did you mean 'group'"),
        ("hinted(a, b, c)", r"hinted\(a, b, c\) has arguments that hinted does not take"),
        ("forked(4, 2)", "forks are at .*ascending"),
        ("forked", "forks are at"),
        ("nowhere.py:talk", "cannot load a rollout from 'nowhere.py'"),
        (f"{WORLDS}:talks", "unknown function of .*did you mean 'talk'"),
        (f"{WORLDS}:Adding", "rollout .*Adding"),
    ],
)
def test_rollouts_that_are_none(spec: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        rollout_by_name(spec)


@pytest.mark.heavy
def test_a_group_whose_program_fails_gets_the_rewards_defaults(tmp_path: Path) -> None:
    """The failure is counted, and the run continues."""
    (tmp_path / "faulty.py").write_text(
        "async def faulty(tools, task):\n"
        "    episodes = [await tools.sample(task.prompt, number=i) for i in range(task.samples)]\n"
        "    if task.prompt_id % 3 == 0:\n"
        "        raise RuntimeError('a broken tool')\n"
        "    return episodes\n"
    )
    taken: list[runs.Taken] = []
    more: Any = {"segment_tokens": 0, "oversample": 1.0, "steps": 2, "rollout": f"{tmp_path / 'faulty.py'}:faulty"}
    with runs.watched(taken):
        runs.train(runs.small_config(tmp_path, **{**SETTINGS, **more}, reward_default=-2.0))
    failed = 0
    for one, line in zip(taken, runs.lines_of(tmp_path / "run" / "metrics.jsonl"), strict=True):
        ids, reward = np.asarray(one.scored.batch.prompt_id), np.asarray(one.scored.batch.reward)
        assert (reward[ids % 3 == 0] == -2.0).all()
        assert (reward[ids % 3 != 0] >= 0).all()
        groups = len(set(ids[ids % 3 == 0].tolist()))
        assert line.get("rollout/failed_groups", 0) == groups
        assert line["rewards/even/failed"] == pytest.approx(groups / 4)
        failed += groups
    assert failed


def test_a_column_that_no_prompt_has(tmp_path: Path) -> None:
    """A hint that is never there would make the method a simpler one."""
    config = runs.small_config(tmp_path, rollout="hinted(clue)")
    with pytest.raises(InputError, match=r"the rollout hinted\(clue\) reads the column 'clue', which no prompt has"):
        loop.train(config)
    assert not Path(config.output).exists()


def test_texts_to_learn_are_in_one_of_two_columns() -> None:
    config, method = TrainConfig(algorithm="sft"), algorithms.get("sft")
    for column in ("completion", "answer"):
        check_columns(config, method, [{"prompt": "a", column: "b"}])
    with pytest.raises(InputError, match="written_completions reads the column 'completion' or 'answer', which no pro"):
        check_columns(config, method, [{"prompt": "a", "chosen": "b"}])
    with pytest.raises(InputError, match="reads the column 'text', which no prompt has"):
        check_columns(config, algorithms.get("sft", column="text"), [{"prompt": "a", "answer": "b"}])
