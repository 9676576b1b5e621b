"""Whole runs in which episodes are tried again, with reflections that can be read, and replies that are refined."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny_runs as runs
from test_resume import STEPS, assert_same_run
from test_turn_runs import METHODS, config_of

from jaxrl_llm import algorithms
from jaxrl_llm.algorithms.agents import agent_r, dyna_grpo, r3l
from jaxrl_llm.algorithms.agents.agent_r import revising
from jaxrl_llm.algorithms.agents.dyna_grpo import simulating
from jaxrl_llm.algorithms.agents.r3l import reflecting
from jaxrl_llm.models import load_policy
from jaxrl_llm.models.outputs import policy_outputs
from jaxrl_llm.rollouts.agents.restarts import Reflection, reflection_in
from jaxrl_llm.training import loop

TURNED = METHODS["agent_r"]


@pytest.fixture
def readable(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the policy, of random weights, would have to write: to try again from the second turn.

    It is read as a run reads it. What it is asked fits a context of 128 tokens.
    """

    def read(text: str, steps: int) -> Reflection | None:
        written = {"outcome": "failed", "step": 1, "suggestion": f"not {text[:2]}"}
        return reflection_in(f"I think: {json.dumps(written)}", steps)

    short = {"reflect": "{attempt:.60}", "guidance": "{suggestion}", "read": read}
    monkeypatch.setattr(r3l, "reflecting", lambda *given: reflecting(*given, **short))
    monkeypatch.setattr(agent_r, "revising", lambda *given: revising(*given, judge="{history:.60}"))
    monkeypatch.setattr(dyna_grpo, "simulating", lambda *given: simulating(*given, ask="{states:.16}"))


@pytest.mark.heavy
def test_retries_are_trained_on_from_their_pivot_and_without_the_suggestion(tmp_path: Path, readable: None) -> None:
    options = {"reflection_tokens": 8, "full_reward": 2.0}
    taken: list[runs.Taken] = []
    with runs.watched(taken):
        runs.train(config_of(tmp_path, "r3l", hyperparameters=options))
    lines = runs.finite_lines_of(tmp_path)
    assert all(line["rollout/reflected"] == 1 and line["rollout/guided"] > 0 for line in lines)
    assert all(line["off_prompt/share"] > 0 for line in lines)
    assert lines[0]["mismatch"] < 1e-5
    assert lines[0]["off_prompt/mismatch"] > 1e-4, "the suggestion is gone"
    method, more = algorithms.get("r3l", **options), 0
    policy = load_policy(tmp_path / "model")[0]
    for step in taken:
        batch = step.scored.batch
        info = {name: np.asarray(value) for name, value in (batch.info or {}).items()}
        groups = np.asarray(batch.group)
        explored = np.isin(groups, [group for group in groups if (groups == group).sum() == 4])
        assert explored.sum() == 8
        np.testing.assert_array_equal(info["pivot"][explored], 1)
        assert info["guided"][explored].sum() == 4
        ready = method.transform.apply(method.transform.init(), batch)[1]
        trained = np.asarray(ready.loss_weights) > 0
        np.testing.assert_array_equal(trained[explored], np.asarray(batch.turn)[explored] >= 1)
        logp = np.asarray(jax.jit(policy_outputs, static_argnums=0)(policy, step.params, batch).logp)
        off = np.abs(logp - np.asarray(batch.behaviour_logp)).max(axis=1, where=trained, initial=0.0)
        assert off[info["off_prompt"] == 0].max() < 1e-4, (
            "what is trained on as it was sampled has its log-probabilities"
        )
        added = ~explored
        np.testing.assert_array_equal(np.asarray(batch.reward)[added], 2)
        np.testing.assert_allclose(np.asarray(ready.advantages)[added][trained[added]], 1.0, atol=1e-6)
        more += int(added.sum())
    assert more > 0, "no retry was better: this test shows nothing"


@pytest.mark.heavy
def test_refined_replies_are_in_every_second_step(tmp_path: Path, readable: None) -> None:
    taken: list[runs.Taken] = []
    with runs.watched(taken):
        runs.train(config_of(tmp_path, "dyna_grpo", steps=2))
    lines = runs.lines_of(tmp_path / "run" / "metrics.jsonl")
    assert all("rollout/failed_groups" not in line for line in lines)
    sizes = [len(step.scored.batch.group) for step in taken]
    assert sizes == [8, 16]
    info: Any = taken[1].scored.batch.info
    assert np.asarray(info["refined"]).sum() == 8
    assert lines[0]["off_prompt/share"] == 0
    assert lines[1]["off_prompt/share"] > 0.5, "replies that were cut are not refined"
    assert lines[1]["off_prompt/mismatch"] > 1e-3, "what the simulations saw is gone"
    assert [line["rollout/refined"] for line in lines] == [0, 0.5]


@pytest.mark.heavy
def test_bad_episodes_turn_around(tmp_path: Path, readable: None) -> None:
    """Each revision row goes on from a bad episode of its group, and is learnt with the good ones."""
    taken: list[runs.Taken] = []
    config = config_of(tmp_path, "agent_r", hyperparameters={**TURNED, "wait": "wait"})
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "max_position_embeddings": 512}))
    with runs.watched(taken):
        runs.train(config)
    lines = runs.lines_of(tmp_path / "run" / "metrics.jsonl")
    assert all(line["rollout/refined"] > 0 and np.isfinite(line["nll"]) for line in lines)
    assert all("rollout/failed_groups" not in line for line in lines)
    assert lines[0]["mismatch"] < 1e-5
    for one in taken:
        batch = one.scored.batch
        info: Any = batch.info
        refined = np.asarray(info["refined"]) == 1
        value, learnt = np.asarray(batch.reward), np.asarray(info["pivot"]) == 0
        assert (value[learnt] > 0.1).all()
        assert (value[~learnt] <= 0.1).all()
        assert learnt[refined].all()
        for row in np.flatnonzero(refined):
            given_before = np.asarray(batch.token_mask[row] & ~batch.action_mask[row]).sum()
            assert given_before > 10, "the prompt, and what the bad episode did"


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["r3l", "dyna_grpo", "agent_r", "evocua"])
def test_a_run_resumes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, readable: None) -> None:
    """After a kill behind the last checkpoint it ends the same."""
    monkeypatch.setattr(loop, "write_report", lambda folder: folder)
    runs.train(config_of(tmp_path, name, steps=STEPS, checkpoint_every=1, keep_checkpoints=9))
    copy = runs.resumed_copy(tmp_path, range(3, STEPS + 1))
    assert_same_run(copy, tmp_path / "run")


@pytest.mark.heavy
def test_sub_questions_for_the_initial_policy(tmp_path: Path) -> None:
    """A context of 1024 tokens; the solver is the reference, which stays as it is."""
    model = tmp_path / "model"
    shutil.copytree(runs.MODEL, model, ignore=shutil.ignore_patterns("*.npz"))
    written = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**written, "max_position_embeddings": 1024}))
    rows = [{"prompt": f"number {i}:", "answer": str(i % 2), "solution": "3 + 4 = 7"} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    taken: list[runs.Taken] = []
    with runs.watched(taken):
        config = runs.small_config(
            tmp_path, algorithm="daslam", hyperparameters={"questions": 2, "solver_tokens": 4}, model=str(model),
            prompts=str(tmp_path / "rows.jsonl"), steps=2, eval_size=0, minibatches=1, prompts_per_step=2, top_p=1.0,
        )  # fmt: skip
        runs.train(config)
    lines = runs.finite_lines_of(tmp_path)
    assert len(lines) == 2
    assert all("rollout/failed_groups" not in line for line in lines)
    assert all(line["value/loss"] > 0 for line in lines)
    assert lines[0]["mismatch"] < 1e-5
    batch = taken[0].scored.batch
    terms = np.asarray((batch.info or {})["decomposition"])
    assert terms.shape == (8, 4)
    assert terms.any()
    ready = algorithms.get("daslam").transform
    shaped = np.asarray(batch.reward) + terms.sum(axis=1)
    found = batch.replace(
        values=jax.numpy.zeros(batch.tokens.shape), reference_logp=batch.behaviour_logp, feedback=None
    )
    rewarded = np.asarray(ready.apply(ready.init(), found)[1].reward)
    np.testing.assert_allclose(rewarded, shaped, atol=1e-6)
