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
from jaxrl_llm.rollouts.programs import conversation


class Checker:
    """Tells whether the answer was right, and asks again."""

    def __init__(self, row):
        self.answer = row["answer"]

    def step(self, text):
        right = self.answer in text
        return ("<|im_end|>\\n<|im_start|>user\\nThat is wrong. Give the number only.<|im_end|>\\n"
                "<|im_start|>assistant\\n"), right


def talk():
    return conversation(Checker, turns=2)
'''


def run(folder: Path, rollout: str, **changes: Any) -> tuple[list[dict[str, Any]], list[runs.Taken]]:
    """Two steps, of four prompts unless `changes` says otherwise, and what their batches were."""
    rows = [
        {
            "prompt": f"What is {a} + {b}? Answer with the number only.", "answer": str(a + b),
            "hint": f"The answer is {a + b}. ",
        }
        for a, b in [(17, 28), (31, 46), (55, 27), (68, 19), (24, 39), (73, 18)]
    ]  # fmt: skip
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "worlds.py").write_text(WORLD)
    settings: dict[str, Any] = {
        "model": "smollm2-135m", "prompts": str(folder / "sums.jsonl"), "rewards": ("number_match",), "steps": 2,
        "prompts_per_step": 4, "group_size": 4, "max_new_tokens": 12, "eval_size": 0, "top_p": 1.0, "minibatches": 1,
        "optimizer": OptimizerConfig(learning_rate=1e-5), "rollout": rollout, "remat": True,
    }  # fmt: skip
    taken: list[runs.Taken] = []
    with runs.watched(taken):
        runs.train(runs.small_config(folder, **{**settings, **changes}))
    lines = runs.lines_of(folder / "run" / "metrics.jsonl")
    assert len(lines) == 2
    for line in lines:
        assert all(math.isfinite(value) for value in line.values())
        assert line["mismatch"] < 1e-3, "sampler and trainer see the same tokens"
        assert "rollout/failed_groups" not in line
    return lines, taken


@optimised  # or a step takes minutes
def test_hints_for_groups_that_all_fail(tmp_path: Path) -> None:
    """With a hint that gives the answer away, groups that failed get some right answers."""
    lines, taken = run(tmp_path, "hinted(hint)")
    guided, reward = [], []
    for one in taken:
        assert one.scored.batch.info is not None
        guided += np.asarray(one.scored.batch.info["guided"]).tolist()
        reward += np.asarray(one.scored.batch.reward).tolist()
        for group in range(4):
            rows = np.asarray(one.scored.batch.group) == group
            hinted = np.asarray(one.scored.batch.info["guided"])[rows]
            assert hinted.min() == hinted.max(), "a group is tried again as a whole"
            if not hinted.any():
                assert np.asarray(one.scored.batch.reward)[rows].max() > 0, "only groups that fail are tried again"
    assert any(guided)
    assert np.mean([r for r, g in zip(reward, guided, strict=True) if g]) > 0
    assert lines[0]["rollout/guided"] == pytest.approx(np.mean(guided[:16]))
    assert max(line["grad_norm"] for line in lines) > 0


@optimised  # or a step takes minutes
def test_forks(tmp_path: Path) -> None:
    lines, taken = run(tmp_path, "forked(2, 5)", temperature=1.0, prompts_per_step=2)
    prefixes = 0
    for one in taken:
        batch = one.scored.batch
        tokens, action = np.asarray(batch.tokens), np.asarray(batch.action_mask)
        for row in range(0, len(tokens), 4):
            start = int(action[row].argmax())
            of_all = {tuple(tokens[i, start : start + 2].tolist()) for i in range(row, row + 4)}
            assert len(of_all) == 1, "four leaves of one trunk begin with the same two tokens"
            prefixes += len({tuple(tokens[i][action[i]].tolist()) for i in range(row, row + 4)}) > 1
    assert prefixes >= 2, "no leaves part: this test shows nothing"
    assert lines[0]["packing/filled"] > 0


@optimised  # or a step takes minutes
def test_two_turns(tmp_path: Path) -> None:
    lines, taken = run(tmp_path, f"{tmp_path / 'worlds.py'}:talk", prompts_per_step=2)
    assert max(line["rollout/turns"] for line in lines) > 1
    for one in taken:
        batch = one.scored.batch
        action, turn, real = (np.asarray(x) for x in (batch.action_mask, batch.turn, batch.token_mask))
        for row in range(len(action)):
            inside = action[row].nonzero()[0]
            given = real[row, inside[0] : inside[-1]] & ~action[row, inside[0] : inside[-1]]
            assert given.any() == (turn[row].max() == 1), "what lies between two turns is given"
