"""The files of a run: created once, replaced atomically, rewound."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_runs import MODEL, finished_run, lines_of

from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.reporting.logging.writers import read_json
from jaxrl_llm.rewards.scoring import Scored
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.config.json_text import to_dict
from jaxrl_llm.training.folder.files import RunFolder
from jaxrl_llm.training.folder.load_run import load_run
from jaxrl_llm.training.folder.resume_checks import log_digests, log_problems
from jaxrl_llm.utils.errors import InputError


def test_a_run_is_begun_once(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "deep" / "run")
    with pytest.raises(InputError, match=r"holds no run \(no config.json\)"):
        folder.read_config()
    config = to_dict(TrainConfig())
    folder.check_free()
    folder.create(config)
    assert folder.is_run()
    assert folder.read_config() == TrainConfig(output=str(folder.path))
    with pytest.raises(InputError, match=r"holds a run already: resume it with --resume .*, or choose another"):
        folder.create(config)


@pytest.mark.parametrize("rest", ["checkpoints", "metrics.jsonl"])
def test_remains_of_a_run_are_not_built_upon(tmp_path: Path, rest: str) -> None:
    """Old checkpoints would pass for those of the new run."""
    (tmp_path / rest).mkdir()
    with pytest.raises(InputError, match="parts of a run"):
        RunFolder(tmp_path).create(to_dict(TrainConfig()))
    assert not (tmp_path / "config.json").exists()


def test_relative_paths_are_seen_from_where_the_run_was_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(tmp_path / "run")
    folder.create(to_dict(TrainConfig(prompts="data.jsonl", rewards=("mine.py:f",))))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    config = folder.read_config()
    assert config.prompts == str(tmp_path / "data.jsonl")
    assert config.rewards == (f"{tmp_path}/mine.py:f",)
    assert json.loads(folder.config.read_text())["started_in"] == str(tmp_path)


def test_a_folder_that_cannot_be_one_is_said_before_anything_is_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(InputError, match=rf"cannot be the output: {tmp_path}/file is a file"):
            RunFolder(path).check_free()
    with pytest.raises(InputError, match="cannot be the output: File name too long"):
        RunFolder(tmp_path / ("a" * 300)).check_free()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"steps": "many"}, "steps is str 'many', but must be a whole number"),
        ({"optimizer": 3}, "optimizer is 3, but must hold settings by name"),
        ({"stepps": 3}, "unknown setting 'stepps'.*; a run of another version of jaxrl_llm is read by that version"),
        ({"started_in": 3}, "started_in is 3, but must be a folder"),
    ],
)
def test_a_damaged_configuration_is_named(tmp_path: Path, content: dict[str, Any], said: str) -> None:
    RunFolder(tmp_path).create(to_dict(TrainConfig()))
    raw = read_json(tmp_path / "config.json")
    (tmp_path / "config.json").write_text(json.dumps({**raw, **content}))
    with pytest.raises(InputError, match=rf"config\.json: {said}"):
        RunFolder(tmp_path).read_config()


def test_steps_without_their_checkpoints_are_not_dropped(tmp_path: Path) -> None:
    """A process that was killed can have logged two steps more than it has saved, at a checkpoint every step."""
    folder = RunFolder(tmp_path)
    assert log_problems(folder.logs, 0, 1, {}, folder.checkpoints) == []
    folder.metrics.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(3)))
    assert (
        log_problems(folder.logs, 0, 2, {}, folder.checkpoints)
        == log_problems(folder.logs, 0, 0, {}, folder.checkpoints)
        == log_problems(folder.logs, 3, 1, {}, folder.checkpoints)
        == []
    )
    (said,) = log_problems(folder.logs, 0, 1, {}, folder.checkpoints)
    assert "has 3 steps, but there are no checkpoints" in said


def test_logs_begin_with_what_they_were_at_the_checkpoint(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert log_digests(folder.logs) == {}
    for path in (folder.metrics, folder.completions):
        path.write_text('{"step": 0}\n{"step": 1}\n')
    logs = json.loads(json.dumps(log_digests(folder.logs)))
    assert set(logs) == {"metrics.jsonl", "completions.jsonl"}
    with folder.metrics.open("a") as file:
        file.write('{"step": 2}\n{"st')
    assert log_problems(folder.logs, 2, 1, logs, folder.checkpoints) == []
    for content in ('{"step": 0}\n', '{"step": 0}\n{"step": 3}\n', ""):
        folder.completions.write_text(content)
        assert log_problems(folder.logs, 2, 1, logs, folder.checkpoints) == [
            f"{folder.completions} does not begin with the 24 bytes it had at the checkpoint"
        ]
    folder.completions.unlink()
    assert len(log_problems(folder.logs, 2, 1, logs, folder.checkpoints)) == 1
    folder.completions.write_text("[]\n{}\n")
    with pytest.raises(InputError, match=r"completions\.jsonl, line 1"):
        log_problems(folder.logs, 2, 1, logs, folder.checkpoints)


def test_a_folder_with_other_things_in_it_will_do(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    RunFolder(tmp_path).create(to_dict(TrainConfig()))
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_model_is_no_run(tmp_path: Path) -> None:
    assert not RunFolder(MODEL).is_run()
    assert not RunFolder(tmp_path / "nowhere").is_run()
    assert not RunFolder(MODEL / "config.json").is_run()
    with pytest.raises(InputError, match="holds a model, not a run"):
        RunFolder(MODEL).read_config()


def test_files_are_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    RunFolder.write(path, {"a": 1})
    with pytest.raises(ValueError):
        RunFolder.write(path, {"a": float("nan")})
    assert read_json(path) == {"a": 1}
    RunFolder.write(path, {"a": np.float32(2.5)})
    assert read_json(path) == {"a": 2.5}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["summary.json"]


def test_rewinding_forgets_the_step_and_what_follows(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.rewind(0)  # there is nothing yet
    for path in (folder.metrics, folder.completions):
        path.write_text("".join(json.dumps({"step": step}) + "\n" for step in (0, 1, 1, 2, 3)) + '{"step": 3, "x')
    with folder.completions.open("w") as file:  # of a run that had ended after two steps, and goes on
        file.writelines(json.dumps({"step": 2, "phase": phase}) + "\n" for phase in ("train", "eval_after"))
    folder.rewind(2)
    assert [line["step"] for line in lines_of(folder.metrics)] == [0, 1, 1, 2]
    assert [line["phase"] for line in lines_of(folder.completions)] == ["train"]
    folder.rewind(-1)
    assert folder.metrics.read_text() == ""


def batch_of(tokens: list[list[int]], start: int) -> Trajectories:
    """Rows of equal length whose actions begin at `start`; groups of two."""
    ids = jnp.asarray(tokens, jnp.int32)
    action = jnp.broadcast_to(jnp.arange(ids.shape[1]) >= start, ids.shape)
    values = jnp.where(action, ids / 7, 0.0)
    N = ids.shape[0]
    return Trajectories(
        tokens=ids, token_mask=jnp.ones_like(action), action_mask=action, behaviour_logp=-values,
        policy_step=jnp.zeros_like(ids), turn=jnp.zeros_like(ids), group=jnp.arange(N) // 2,
        prompt_id=10 + jnp.arange(N) // 2, truncated=jnp.arange(N) % 2 == 0, entropy=values,
        advantages=None, rewards={"right": jnp.arange(N) / 1.0, "bad": jnp.full(N, jnp.nan)},
        reward=jnp.asarray([1.0, float("nan"), 3.0, 4.0]),
    )  # fmt: skip


def test_completions_are_written_token_by_token(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    batch = batch_of([[1, 2, 3], [1, 4, 5], [6, 7, 8], [6, 9, 1]], start=1)
    rows: list[dict[str, Any]] = [
        {"prompt": "one", "answer": 5},
        {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
    ]
    tokenizer = SimpleNamespace(decode=lambda ids: f"<{ids[0]}>")
    folder.log_completions(3, "train", tokenizer, Scored(batch, [], {}), rows)
    lines = lines_of(folder.completions)
    assert lines[1] == {
        "step": 3, "phase": "train", "prompt_id": 10, "group": 0, "sample": 1,
        "prompt": "one", "tokens": ["<4>", "<5>"],
        "advantage": None, "logp": [-0.5714, -0.7143], "entropy": [0.5714, 0.7143], "reward": None,
        "rewards": {"right": 1.0, "bad": None}, "answer": "5", "truncated": False,
    }  # fmt: skip
    assert [(line["prompt_id"], line["sample"], line["truncated"]) for line in lines] == [
        (10, 0, True), (10, 1, False), (11, 0, True), (11, 1, False),
    ]  # fmt: skip
    assert lines[2]["prompt"] == "system: s\nuser: u"
    assert lines[2]["answer"] is None
    folder.log_completions(4, "train", tokenizer, Scored(batch, [], {}), rows, groups=1)
    assert [line["step"] for line in lines_of(folder.completions)] == [3, 3, 3, 3, 4, 4]
    folder.log_completions(5, "train", tokenizer, Scored(batch, [], {}), rows, judge="right")
    assert [line["correct"] for line in lines_of(folder.completions)[-4:]] == [False, True, True, True]
    folder.log_completions(6, "train", tokenizer, Scored(batch, [], {}), rows, judge="unknown")
    assert "correct" not in lines_of(folder.completions)[-1]


def test_loading_a_run_and_loading_its_model(tmp_path: Path) -> None:
    config, policy, _, tokenizer = load_run(str(finished_run()))
    assert config.output == str(finished_run())
    assert policy.config.vocab_size == 257
    assert tokenizer is policy.tokenizer
    plain, *_ = load_run(str(MODEL))
    assert plain == TrainConfig(model=str(MODEL))
    folder = RunFolder(tmp_path)
    folder.create(to_dict(config))
    with pytest.raises(InputError, match="has no checkpoints yet"):
        load_run(str(tmp_path))
    folder.checkpoints.mkdir()
    with pytest.raises(InputError, match="has no checkpoints yet"):
        load_run(str(tmp_path))
