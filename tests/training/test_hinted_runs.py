"""Runs by name of methods that repair groups, with hints, examples, budgets, teachers and rewritten prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_runs as runs
from test_resume import STEPS, assert_same_run

from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.models import load_policy
from jaxrl_llm.training import loop
from jaxrl_llm.utils.errors import InputError

ROW = {
    "solution": "first add, then halve", "hint": "add", "hints": [["sum", "mean"], ["add", "halve"]],
    "examples": ["number 77: 7", "number 88: 8"],  "teachers": ["is 0", "is 1"],
}  # fmt: skip
HARD = {"success": 1.0}  # no sample succeeds
METHODS: dict[str, dict[str, Any]] = {
    "ghpo": HARD, "scaf_grpo": {"hints_from": 0}, "sage_self_hint": HARD,
    "nurl": {**HARD, "source": "column", "hints_from": 0},
    "clpo": {}, "icpo_in_context": {"reject": False}, "ampo_multi_guidance": HARD, "hbpo": {},
    "srpo_sample_routing": {"top": 8, "success": 0.5},
    "adhint": {"hinted": 2, "noise": 0.0, "hint_low": 0.5},
}  # fmt: skip
GUIDED = {"ghpo": 1.0, "nurl": 0.75, "sage_self_hint": 0.0, "icpo_in_context": 0.25, "ampo_multi_guidance": 0.5}


def config_of(folder: Path, name: str, **changes: Any) -> Any:
    rows = [{"prompt": f"number {i:02d}:", "answer": str(i % 2), **ROW} for i in range(12)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings: dict[str, Any] = {
        "algorithm": name, "hyperparameters": METHODS[name], "prompts": str(folder / "rows.jsonl"), "steps": 2,
        "reward": "starts_even", "eval_size": 0, "top_p": 1.0, "minibatches": 1, "group_size": 4,
    }  # fmt: skip
    return runs.small_config(folder, **{**settings, **changes})


@pytest.mark.heavy
@pytest.mark.parametrize("name", METHODS)
def test_it_trains_by_name(name: str, tmp_path: Path) -> None:
    """With no option but the method's name, and what makes sure that the few groups of the run are repaired."""
    taken: list[runs.Taken] = []
    with runs.watched(taken):
        runs.train(config_of(tmp_path, name))
    lines = runs.finite_lines_of(tmp_path)
    assert len(lines) == 2
    assert all(line.get("rollout/failed_groups", 0) == 0 for line in lines)
    assert lines[0]["mismatch"] < 1e-5, "sampler and trainer agree, whatever the prompt"
    if name in GUIDED:
        assert lines[0]["rollout/guided"] == GUIDED[name]
        assert lines[0]["rollout/unhinted"] == (name == "sage_self_hint"), "random weights write no list"
    batch = taken[0].scored.batch
    assert batch.info is not None
    if name == "icpo_in_context":
        assert np.asarray(batch.info["off_prompt"]).sum() == 4, "one of each group"
        assert lines[0]["off_prompt/mismatch"] > 1e-4 > lines[0]["mismatch"]
        assert 0 < lines[0]["off_prompt/share"] < 0.5
        check_examples(tmp_path, batch)
    if name == "srpo_sample_routing":
        taught = np.asarray(batch.info["taught"]) == 1
        assert taught.any()
        assert not np.asarray(batch.reward)[taught].any(), "failures, whose group has a success"
        assert lines[0]["distil/share"] == pytest.approx(taught.mean(), abs=1e-6), "all have as many tokens"
        assert all(line["distil/loss"] > 0 for line in lines)
    if name == "hbpo":
        assert sorted(set(np.asarray(batch.info["budget"]).tolist())) == [1, 2, 3, 4]


def check_examples(folder: Path, batch: Trajectories) -> None:
    """Rows have the plain prompt; what they were drawn with is the log-probability after one of the examples."""
    policy, params, tokenizer = load_policy(runs.MODEL)
    guided = np.flatnonzero(np.asarray(batch.info["guided"]) == 1)  # type: ignore[index]
    for row in guided:
        tokens, action = np.asarray(batch.tokens)[row], np.asarray(batch.action_mask)[row]
        prompt, completion = tokens[: action.argmax()].tolist(), tokens[action].tolist()
        assert prompt == tokenizer(f"number {int(batch.prompt_id[row]):02d}:")["input_ids"]
        found = []
        for example in ROW["examples"]:
            text = f"{example}\n\n{tokenizer.decode(prompt)}"
            ids: Any = np.asarray([[*tokenizer(text)["input_ids"], *completion]], np.int32)
            logits = np.asarray(policy.logits(params, ids), np.float64)[0, -len(completion) - 1 : -1]
            logp = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
            logp -= logits.max(-1, keepdims=True)
            found.append(logp[np.arange(len(completion)), completion])
        drawn = np.asarray(batch.behaviour_logp)[row][action]
        assert min(np.abs(one - drawn).max() for one in found) < 1e-4


@pytest.mark.heavy
def test_a_run_with_hints_in_flight_resumes(tmp_path: Path, monkeypatch: Any) -> None:
    """Completions go on over several steps, in the middle of a repair; a resumed run ends the same."""
    monkeypatch.setattr(loop, "write_report", lambda folder: folder)
    more: Any = {"segment_tokens": 3, "oversample": 1.5, "steps": STEPS, "checkpoint_every": 1, "keep_checkpoints": 9}
    hyperparameters = {"drop_solved": True, "source": "column"}
    runs.train(config_of(tmp_path, "nurl", hyperparameters=hyperparameters, **more))
    copy = runs.resumed_copy(tmp_path, range(3, STEPS + 1))
    assert_same_run(copy, tmp_path / "run")


@pytest.mark.heavy
def test_a_run_with_a_teacher_resumes(tmp_path: Path) -> None:
    """The teacher's weights are in the checkpoints."""
    config = config_of(tmp_path, "srpo_sample_routing", steps=STEPS, keep_checkpoints=9)
    runs.train(config)
    copy = runs.resumed_copy(tmp_path, range(3, STEPS + 1))
    assert_same_run(copy, tmp_path / "run")


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    config = runs.small_config(tmp_path, algorithm="ghpo")
    with pytest.raises(InputError, match=r"reads the column 'solution', which no prompt has"):
        loop.train(config)


def test_a_group_that_is_too_small_is_refused(tmp_path: Path) -> None:
    config = runs.small_config(tmp_path, algorithm="hbpo", group_size=2)
    with pytest.raises(
        InputError, match=r"group_size is 2, but the rollout with_budgets\(.*\) needs at least 4 samples"
    ):
        loop.train(config)
