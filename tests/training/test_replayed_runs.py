"""Whole runs of the methods with replay, by name."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_runs as runs

from jaxrl_llm import algorithms
from jaxrl_llm.algorithms.parts import missing
from jaxrl_llm.learner.outputs import outputs_of
from jaxrl_llm.models import load_policy
from jaxrl_llm.training import loop
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.utils.errors import InputError

GIVEN: dict[str, dict[str, Any]] = {
    "dots_rr": {"references": 16, "units": 8, "passes": 2}, "spear": {"replay_rows": 2, "surplus": 1.0},
}  # fmt: skip
# Those of several turns are in test_turn_runs.py.
REPLAYED = [
    name for name in algorithms.names() if algorithms.get(name).replay is not None and "turns" not in missing(name)
]


def config_of(folder: Path, name: str, **changes: Any) -> TrainConfig:
    """Few prompts, so that they come back; half of the completions have the reward 1."""
    settings: dict[str, Any] = {
        "algorithm": name, "hyperparameters": GIVEN.get(name, {}), "steps": 4, "eval_size": 0, "minibatches": 1,
        "checkpoint_every": 2, "reward": "starts_even",
    }  # fmt: skip
    if name == "spo_single_stream":
        settings["group_size"] = 1
    config = runs.small_config(folder, **{**settings, **changes})
    runs.write_prompts(Path(config.prompts), 4)
    return config


@pytest.mark.heavy
@pytest.mark.parametrize("name", REPLAYED)
def test_it_trains_by_name_and_goes_on_from_a_checkpoint(tmp_path: Path, name: str) -> None:
    config = config_of(tmp_path, name)
    runs.train(config)
    lines = runs.reproducible(Path(config.output) / "metrics.jsonl")
    assert all(np.isfinite(line["loss"]) for line in lines)
    assert lines[0]["replay/share"] == 0 or name in ("vspo_prs", "sapo_swarm")  # which replay within a step
    again = [line["replay/share"] for line in lines[1:]]
    if name in ("symphony_fading_replay", "wmar_reservoir_replay", "r2vpo", "remix", "a2pr", "spo_single_stream"):
        assert min(again) > 0
        assert max(line["replay/age"] for line in lines) >= 1
    if name == "spear":
        assert max(again) > 0
    if name == "sapo_swarm":
        assert all(0 <= line["swarm/reward_1"] <= 1 for line in lines)
    sampled = 28 if name == "dots_rr" else 16  # with three groups that are only measured; none that are replayed
    assert all(line["completion/tokens"] <= sampled * 6 for line in lines)
    other = tmp_path / "other"
    shutil.copytree(config.output, other)
    shutil.rmtree(other / "checkpoints" / "4")
    loop.train(loop.RunFolder(other).read_config(), resume=True)
    assert runs.reproducible(other / "metrics.jsonl") == lines
    runs.assert_equal_trees(runs.final_params(other), runs.final_params(Path(config.output)))


@pytest.mark.heavy
def test_a_store_on_disk_gives_the_same_run(tmp_path: Path) -> None:
    """Also after a kill behind the last checkpoint, whose rows are in files already; unneeded files are removed."""
    pytest.importorskip("array_record")
    reference = config_of(tmp_path, "symphony_fading_replay", steps=5)
    runs.train(reference)
    config = dataclasses.replace(reference, output=str(tmp_path / "disk"), replay_megabytes=0)
    runs.train(config)

    def lines(folder: str | Path) -> list[dict[str, Any]]:
        size = ("replay/megabytes", "replay/disk_megabytes")
        found = runs.reproducible(Path(folder) / "metrics.jsonl")
        return [{name: x for name, x in line.items() if name not in size} for line in found]

    assert lines(config.output) == lines(reference.output)
    last = runs.lines_of(tmp_path / "disk" / "metrics.jsonl")[-1]
    assert last["replay/disk_megabytes"] > 0
    other = tmp_path / "other"
    shutil.copytree(config.output, other)
    shutil.rmtree(other / "checkpoints" / "5")
    (other / "replay" / "000000009999.array_record").write_text("of a step that was lost")
    loop.train(loop.RunFolder(other).read_config(), resume=True)
    assert lines(other) == lines(reference.output)
    runs.assert_equal_trees(runs.final_params(other), runs.final_params(Path(reference.output)))
    assert not (other / "replay" / "000000009999.array_record").exists()


@pytest.mark.heavy
def test_what_a_response_is_measured_against_is_the_policy_that_gave_it(tmp_path: Path) -> None:
    """SPO, one response a prompt: those that come back have the log-probabilities of the weights of their step."""
    settings = {"profile": "rate", "profile_samples": 4}
    config = config_of(tmp_path, "spo_single_stream", hyperparameters=settings, group_size=1, steps=3)
    rows = [{"prompt": f"number {i:02d}:", "rate": i / 4} for i in range(5)]
    Path(config.prompts).write_text("".join(json.dumps(row) + "\n" for row in rows))
    taken: list[runs.Taken] = []
    with runs.watched(taken):
        runs.train(config)
    policy, _, _ = load_policy(runs.MODEL)
    start = taken[0].before.curriculum["rule0_value"]
    np.testing.assert_allclose(start, [(i + 0.5) / 5 for i in range(5)], rtol=1e-6)
    last = taken[-1].scored.batch
    assert last.info is not None
    again = np.flatnonzero(last.info["measured"])
    assert again.size
    for row in again:
        step = int(last.policy_step[row].max())
        logp = outputs_of(policy, taken[step].params, last).logp[row]
        np.testing.assert_allclose(last.behaviour_logp[row], logp, atol=2e-5)
    lines = runs.reproducible(Path(config.output) / "metrics.jsonl")
    assert all(line["curriculum/drift"] == 0 for line in lines[:2])  # of the update before
    assert lines[2]["curriculum/drift"] > 0


@pytest.mark.heavy
def test_reference_groups_are_measured_and_not_trained_on(tmp_path: Path) -> None:
    config = config_of(tmp_path, "dots_rr", hyperparameters={"references": 3, "fresh_share": 1.0, "units": 8}, steps=3)
    runs.write_prompts(Path(config.prompts), 12)
    taken: list[runs.Taken] = []
    with runs.watched(taken):
        runs.train(config)
    for number, one in enumerate(taken):
        batch, references = one.scored.batch, one.after.curriculum["rule1_ids"][-1].tolist()
        trained = np.unique(batch.prompt_id)
        assert len(trained) == 4
        assert np.bincount(batch.group).tolist() == [4] * 4
        assert len(references) == 3
        if number != 1:
            assert not set(references) & set(trained.tolist())
    with pytest.raises(InputError, match="the curriculum needs all groups of a step in that step"):
        runs.train(dataclasses.replace(config, output=str(tmp_path / "partial"), oversample=2.0))
    lines = runs.lines_of(Path(config.output) / "metrics.jsonl")
    groups = runs.lines_of(Path(config.output) / "groups.jsonl")
    assert [one.get("left_out", []).count("reference") for one in groups] == [3, 0, 3]
    sampled = [16 + 4 * one.get("left_out", []).count("reference") for one in groups]
    assert all(line["completion/tokens"] <= rows * 6 for line, rows in zip(lines, sampled, strict=True))
    assert lines[0]["curriculum/tried"] == pytest.approx(7 / 12)
