"""INSPO's population of instructions, step by step by hand, and in a run."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxrl_llm import algorithms
from jaxrl_llm.algorithms.prompts.inspo import _new, instruction_population
from jaxrl_llm.core.source import ONLY_MEASURED, Step
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.curriculum.records import prompt_facts
from jaxrl_llm.curriculum.rules import Outcome
from jaxrl_llm.rewards.scoring import Scored
from jaxrl_llm.utils.errors import InputError

sys.path += [str(Path(__file__).resolve().parents[1] / "training")]

import tiny_runs as runs

ROWS = [{"prompt": f"question {i}", "answer": str(i)} for i in range(12)]


def step_of(machine: Any, state: Any, ids: list[int], reward: Any, said: Any = None) -> tuple[Step, list[Any]]:
    """A step with two samples of each prompt, whose rewards are `reward(row, prompt)`."""
    rows = [{**ROWS[i], **more} for i, more in zip(ids, machine.columns(state, np.array(ids)), strict=True)]
    rewards = np.array([reward(row, i) for row, i in zip(rows, ids, strict=True)], float)
    texts = [said(row, k) if said and row.get("reflect") else f"says {k}" for row in rows for k in range(2)]
    N = 2 * len(ids)
    zeros = np.zeros((N, 1))
    batch: Any = Trajectories(
        tokens=zeros, token_mask=zeros, action_mask=zeros, behaviour_logp=zeros, policy_step=zeros, turn=zeros,
        group=np.repeat(np.arange(len(ids)), 2), prompt_id=np.repeat(ids, 2), truncated=np.zeros(N, bool),
        reward=rewards.reshape(-1),
    )  # fmt: skip
    return Step(Scored(batch, texts, {}), rows, {}), rows


def observed(machine: Any, state: Any, step: Step) -> Any:
    return {**state, **machine.observe(state, Outcome(step, *[None] * 3))}  # type: ignore[arg-type]


def test_the_population_by_hand() -> None:
    """Three steps: weights are running means; the failed answers make a question; one of two proposals comes in."""
    machine = instruction_population(("plain", "curt"), 0.1, every=3, proposals=2, checks=2, failures=1)(
        prompt_facts(ROWS, 7)
    )
    state, size = dict(machine.start), machine.size
    assert [size(state, 4)] == [4]
    first, rows = step_of(
        machine, state, [0, 1, 2, 3], lambda row, i: [1, 0] if row["instruction"] == "plain" else [0, 0]
    )
    uses = [row["instruction"] for row in rows]
    state = observed(machine, state, first)
    assert state["count"] == [uses.count("plain"), uses.count("curt")]
    assert state["total"] == [0.5 * uses.count("plain"), 0.0]
    json.dumps(state)

    assert size(state, 4) == 5, "one more group reads the failures"
    extra = state["failed"][0]["id"]
    scores = machine.score(state, type("P", (), {"ids": np.arange(12)}), None)
    assert np.argmax(scores) == extra
    second, rows = step_of(
        machine, state, [extra, *[i for i in range(4, 8) if i != extra]], lambda row, i: [1, 1],
        lambda row, k: ["  \"Add them.\" ", "plain"][k],
    )  # fmt: skip
    assert rows[0][ONLY_MEASURED]
    assert "plain" in rows[0]["reflect"]
    assert all(
        f"question {one['id']}" in rows[0]["reflect"] for one in state["failed"] if one["instruction"] == "plain"
    )
    before = dict(state)
    state = observed(machine, state, second)
    assert state["trial"] == ["Add them."], "what is known, or said in quotes, is no other text"
    for j, text in enumerate(("plain", "curt")):
        groups = sum(row["instruction"] == text for row in rows)
        assert state["count"][j] == before["count"][j] + groups
        assert state["total"][j] == before["total"][j] + groups

    assert size(state, 4) == 4 + 2, "two questions check the proposal"
    ids = [i for i in range(12) if machine.score(state, type("P", (), {"ids": np.array([i])}), None)[0] > 0]
    assert {one["id"] for one in state["failed"]} & {*ids}, "those that failed come first"
    third, rows = step_of(machine, state, ids, lambda row, i: [1, 1] if row["instruction"] == "Add them." else [0, 0])
    assert [row["instruction"] for row in rows] == ["Add them."] * 2
    state = observed(machine, state, third)
    assert state["trial"] == []
    assert "Add them." in state["texts"]
    at = state["texts"].index("Add them.")
    assert (state["total"][at], state["count"][at], state["replaced"]) == (1.0, 1.0, 1)


def test_a_proposal_that_is_no_better_stays_out() -> None:
    machine = instruction_population(("plain", "curt"), every=2, proposals=1, checks=1)(prompt_facts(ROWS, 7))
    state = {**machine.start, "step": 1, "total": [1.0, 1.0], "count": [1.0, 1.0], "trial": ["other"], "failed": []}
    ids = [i for i in range(12) if machine.score(state, type("P", (), {"ids": np.array([i])}), None)[0] > 0]
    step, rows = step_of(machine, state, ids, lambda row, i: [1, 0])
    assert rows[0]["instruction"] == "other"
    after = observed(machine, state, step)
    assert after["texts"] == ["plain", "curt"]
    assert after["replaced"] == 0


def test_instructions_are_drawn_by_their_weights() -> None:
    """The card's examples, by the shares of draws."""
    facts = prompt_facts([{"prompt": str(i)} for i in range(3000)], 3)
    for temperature, shares in ((1.0, [0.280013, 0.377978, 0.342009]), (0.1, [0.035119, 0.705385, 0.259496])):
        machine = instruction_population(("a", "b", "c"), temperature)(facts)
        state = {**machine.start, "total": [0.2, 0.5, 0.4], "count": [1.0] * 3}
        said = [row["instruction"] for row in machine.columns(state, np.arange(3000))]
        np.testing.assert_allclose([said.count(x) / 3000 for x in "abc"], shares, atol=0.03)
    assert said == [row["instruction"] for row in machine.columns(state, np.arange(3000))]


def test_replies_that_are_no_instructions() -> None:
    assert _new(["", "  ", "known", "x" * 601, "new", "new"], ["known"]) == ["new"]


@pytest.mark.parametrize("wrong", ["", "one", "a||b", "a|a"])
def test_first_instructions_that_are_none_are_refused(wrong: str) -> None:
    with pytest.raises(InputError, match="two or more texts"):
        algorithms.get("inspo", instructions=wrong)


def test_a_run_evolves_them_and_resumes(tmp_path: Path) -> None:
    def config_of(folder: Path) -> Any:
        folder.mkdir()
        given = {"every": 2, "instructions": "a|b", "kl_coefficient": 0.0, "checks": 1}
        return runs.small_config(
            folder, algorithm="inspo", hyperparameters=given, steps=4, minibatches=1, top_p=1.0, checkpoint_every=2,
            eval_size=0,
        )  # fmt: skip

    config = config_of(tmp_path / "whole")
    taken: list[runs.Taken] = []
    with runs.watched(taken):
        runs.train(config)
    lines = runs.lines_of(tmp_path / "whole" / "run" / "metrics.jsonl")
    assert lines[-1]["curriculum/best_weight"] > 0
    batch = taken[0].scored.batch
    first = [int(np.argmax(row)) for row in np.asarray(batch.action_mask)]
    assert {*first} == {len("a") + 2 + 10}, (
        "the prompt of ten letters, after an instruction of one and two ends of lines"
    )
    assert len(batch.reward) == 16, "what is measured alone is not trained on"
    killed = config_of(tmp_path / "killed")
    runs.train(dataclasses.replace(killed, steps=2))
    runs.train(killed, resume=True)
    again = runs.reproducible(tmp_path / "killed" / "run" / "metrics.jsonl")
    assert again[-1] == runs.reproducible(tmp_path / "whole" / "run" / "metrics.jsonl")[-1]
