"""What a run writes down of its prompts: every group that was sampled, and why the curriculum leaves prompts out."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_runs as runs

from jaxrl_llm import algorithms
from jaxrl_llm.cli.program import main
from jaxrl_llm.core.source import Step
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.curriculum.compose import choose_prompts
from jaxrl_llm.curriculum.scores import drop_solved, least_tried
from jaxrl_llm.learner.optimizer import OptimizerConfig
from jaxrl_llm.reporting.html.visits import read_left_out
from jaxrl_llm.rewards.scoring import Scored
from jaxrl_llm.training.folder.completion_lines import group_line
from jaxrl_llm.training.folder.run import Run


def scored_of(prompts: list[int], reward: Any, info: dict[str, Any] | None = None) -> Scored:
    """Groups of two samples, rewards [groups, 2]."""
    n = 2 * len(prompts)
    mask: Any = np.ones((n, 1), bool)
    score = np.ravel(np.asarray(reward, np.float32))
    batch = Trajectories(
        tokens=jnp.zeros((n, 1), jnp.int32), token_mask=mask, action_mask=mask, behaviour_logp=jnp.zeros((n, 1)),
        policy_step=jnp.zeros((n, 1), jnp.int32), turn=jnp.zeros((n, 1), jnp.int32),
        group=np.repeat(np.arange(len(prompts)), 2), prompt_id=np.repeat(prompts, 2), truncated=mask[:, 0],
        reward=score, rewards={"own": score, "other": 1 - score}, info=info,
    )  # fmt: skip
    return Scored(batch, [""] * n, {})


def test_a_line_counts_each_group_that_was_sampled() -> None:
    nan = float("nan")
    batch = scored_of([5, 2, 9, 4], [[1, 0], [0.5, 0.5], [nan, 1], [nan, nan]])
    whole = Step(batch, [], {}, others=[(scored_of([7], [[0, 0]]), "no signal")])
    assert group_line(whole) == {
        "prompt": [5, 2, 9, 7], "samples": [2, 2, 1, 2], "reward": [0.5, 0.5, 1.0, 0.0], "right": [1, 0, 1, 0],
        "equal": [0, 1, 1, 1], "left_out": [None, None, None, "no signal"],
    }  # fmt: skip
    assert group_line(whole, "other")["right"] == [1, 0, 0, 2]
    mixed = Step(scored_of([0] * 4, [[0, 0]] * 4), [], {}, sampled=batch)
    assert group_line(mixed)["prompt"] == [5, 2, 9], "not what was replayed"
    assert "left_out" not in group_line(mixed)
    second = scored_of([5, 2], [[1, 0], [0, 0]], {"part": np.array([0, 0, 0, 1])})
    assert group_line(Step(second, [], {}))["samples"] == [2, 1], "without second prompts"


@pytest.mark.heavy
def test_a_run_logs_what_it_sampled_and_why_prompts_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With dynamic sampling: groups without a signal are in no batch, but in the log; a resumed run writes the same."""
    make = choose_prompts(least_tried(), drop_solved(0.5))
    given: Any = {"algorithm": algorithms.get("dapo", rounds=3), "curriculum": lambda rows: make(rows, 0)}
    slowly = OptimizerConfig(learning_rate=1e-4)
    whole = runs.small_config(tmp_path, reward="starts_even", group_size=2, eval_size=0, optimizer=slowly)
    taken: list[runs.Taken] = []
    with runs.watched(taken):
        runs.train(whole, **given)
    run = Path(whole.output)
    lines = runs.lines_of(run / "groups.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    reasons: Counter[Any] = Counter()
    for line, one in zip(lines, taken, strict=True):
        batch = one.scored.batch
        fate = line.get("left_out", [None] * len(line["prompt"]))
        trained = [i for i, why in enumerate(fate) if why is None]
        assert [line["prompt"][i] for i in trained] == batch.prompt_id[::2].tolist()
        np.testing.assert_allclose([line["reward"][i] for i in trained], np.reshape(batch.reward, (-1, 2)).mean(axis=1))
        reasons.update(why for why in fate if why)
        assert all(line["equal"][i] for i, why in enumerate(fate) if why == "no signal")
    assert reasons["no signal"] > 0
    left_out = read_left_out(run)
    assert left_out is not None
    assert left_out.step == 4
    share = runs.lines_of(run / "metrics.jsonl")[-1]["curriculum/left_out/solved"]
    assert share == np.mean(left_out.why == 1) > 0
    table = Run(run).prompts
    assert table.groups == sum(len(line["prompt"]) for line in lines)
    assert table.dropped == dict(reasons)
    assert main(["report", str(run), "--prompts"]) == 0
    assert str(table) in capsys.readouterr().out

    half = dataclasses.replace(whole, output=str(tmp_path / "half"), steps=3)
    runs.train(half, **given)
    with (Path(half.output) / "groups.jsonl").open("a") as file:
        file.write('{"step": 4, "prompt": [')  # as a kill leaves it
    runs.train(dataclasses.replace(half, steps=4), **given, resume=True)
    assert (Path(half.output) / "groups.jsonl").read_bytes() == (run / "groups.jsonl").read_bytes()
    again = read_left_out(Path(half.output))
    assert again is not None
    np.testing.assert_array_equal(again.why, left_out.why)
