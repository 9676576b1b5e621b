"""Rollout programs trained on a real model: a hint for groups that all fail, forks, and two turns."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_runs as runs
from compiling import optimised

from jaxrl_llm.learner.optimizer import OptimizerConfig

WORLD = '''
from jaxrl_llm.core.rollout import Demands
from jaxrl_llm.rollouts.registry import rollout_by_name
from jaxrl_llm.rollouts.programs import Rollout, conversation


class Checker:
    """Tells whether the answer was right, and asks again."""

    def __init__(self, row):
        self.answer = row["answer"]

    def step(self, text):
        right = self.answer in text
        return ("<|im_end|>\\n<|im_start|>user\\nThat is wrong. Give the number only.<|im_end|>\\n"
                "<|im_start|>assistant\\n"), right


def by_kind():
    """Each prompt with the program that its row names."""
    of_kind = {
        "hint": rollout_by_name("hinted(hint)"), "forks": rollout_by_name("forked(2, 5)"),
        "turns": conversation(Checker, turns=2),
    }

    async def program(tools, task):
        episodes = await of_kind[task.row["kind"]].program(tools, task)
        return episodes if task.row["kind"] == "hint" else [one.with_info(guided=0.0) for one in episodes]

    return Rollout(program, "by kind", frozenset({"guided"}), ("hint", "kind"), Demands(turns=2))
'''
SUMS = [(17, 28), (31, 46), (55, 27), (68, 19), (24, 39), (73, 18)]
KINDS = ["hint"] * 4 + ["turns"] * 2 + ["forks"] * 2  # of each prompt


def run(folder: Path) -> tuple[list[dict[str, Any]], list[runs.Taken]]:
    """Two steps of four prompts, each prompt once, and what their batches were."""
    rows = [
        {"prompt": f"What is {a} + {b}? Answer with the number only.", "answer": str(a + b),
         "hint": f"The answer is {a + b}. "}
        for a, b in SUMS
    ]  # fmt: skip
    rows += [{"prompt": f"Tell me a story about a {one}.", "answer": "7", "hint": ""} for one in ("dog", "ship")]
    rows = [{**row, "kind": kind} for row, kind in zip(rows, KINDS, strict=True)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "worlds.py").write_text(WORLD)
    config = runs.small_config(
        folder, model="smollm2-135m", prompts=str(folder / "sums.jsonl"), rewards=("number_match",), steps=2,
        prompts_per_step=4, group_size=4, max_new_tokens=12, eval_size=0, top_p=1.0, minibatches=1,
        optimizer=OptimizerConfig(learning_rate=1e-5), rollout=f"{folder / 'worlds.py'}:by_kind", remat=True,
    )  # fmt: skip
    taken: list[runs.Taken] = []
    with runs.watched(taken):
        runs.train(config)
    return runs.lines_of(folder / "run" / "metrics.jsonl"), taken


@optimised  # or a step takes minutes
def test_hints_forks_and_two_turns(tmp_path: Path) -> None:
    """In one run, as compiling its programs takes most of the time."""
    lines, taken = run(tmp_path)
    assert len(lines) == 2
    for line in lines:
        assert all(math.isfinite(value) for value in line.values())
        assert line["mismatch"] < 1e-3, "sampler and trainer see the same tokens"
        assert "rollout/failed_groups" not in line
    assert max(line["grad_norm"] for line in lines) > 0
    assert lines[0]["packing/filled"] > 0
    assert max(line.get("rollout/turns", 1.0) for line in lines) > 1
    groups = [group for one in taken for group in groups_of(one.scored.batch)]
    assert sorted(KINDS) == sorted(group["kind"] for group in groups)
    hints_are_for_groups_that_fail([group for group in groups if group["kind"] == "hint"])
    leaves_share_their_trunk([group for group in groups if group["kind"] == "forks"])
    for group in groups:
        what_lies_between_two_turns_is_given(group)
    for line, one in zip(lines, taken, strict=True):
        assert line["rollout/guided"] == pytest.approx(np.mean(one.scored.batch.info["guided"]))


def groups_of(batch: Any) -> list[dict[str, Any]]:
    """Arrays of the rows of each group."""
    ids = np.asarray(batch.prompt_id)
    names = ("tokens", "action_mask", "token_mask", "turn", "reward")
    arrays = {name: np.asarray(getattr(batch, name)) for name in names}
    arrays["guided"] = np.asarray(batch.info["guided"])
    return [{"kind": KINDS[one], **{k: x[ids == one] for k, x in arrays.items()}} for one in sorted(set(ids.tolist()))]


def hints_are_for_groups_that_fail(groups: list[dict[str, Any]]) -> None:
    """With a hint that gives the answer away, groups that failed get some right answers."""
    for group in groups:
        assert group["guided"].min() == group["guided"].max(), "a group is tried again as a whole"
        if not group["guided"].any():
            assert group["reward"].max() > 0, "only groups that fail are tried again"
    guided = [group["reward"].mean() for group in groups if group["guided"].any()]
    assert guided
    assert np.mean(guided) > 0


def leaves_share_their_trunk(groups: list[dict[str, Any]]) -> None:
    for group in groups:
        tokens, action = group["tokens"], group["action_mask"]
        start = int(action[0].argmax())
        of_all = {tuple(row[start : start + 2].tolist()) for row in tokens}
        assert len(of_all) == 1, "four leaves of one trunk begin with the same two tokens"
        assert len({tuple(row[mine].tolist()) for row, mine in zip(tokens, action, strict=True)}) > 1, "none part"


def what_lies_between_two_turns_is_given(group: dict[str, Any]) -> None:
    for real, action, turn in zip(group["token_mask"], group["action_mask"], group["turn"], strict=True):
        inside = action.nonzero()[0]
        given = real[inside[0] : inside[-1]] & ~action[inside[0] : inside[-1]]
        assert given.any() == (turn.max() == 1)
        assert group["kind"] == "turns" or turn.max() == 0
