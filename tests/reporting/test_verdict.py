"""The verdict of a run: what it says for a gain, a loss, chance, and runs without evaluations; and its warnings."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from jaxrl_llm.reporting.html.run_data import RunData
from jaxrl_llm.reporting.html.shown_completions import held_out_examples, reward_changes
from jaxrl_llm.reporting.html.verdict import held_out, outcomes, verdict, warnings


def run_of(
    folder: Path,
    before: list[int] | None = None,
    after: list[int] | None = None,
    metrics: list[dict[str, float]] | None = None,
    logged: int | None = None,
    **summary: Any,
) -> RunData:
    """A run with the given outcomes of held-out prompts, of which the first `logged` are in completions.jsonl."""
    lines = []
    for phase, found in (("eval_before", before), ("eval_after", after)):
        if found is not None:
            summary[phase] = {"accuracy": sum(found) / len(found), "prompts": len(found), "low": 0.1, "high": 0.9}
            lines += [
                {
                    "step": 0,
                    "phase": phase,
                    "prompt_id": i,
                    "tokens": ["a"],
                    "reward": 0.5 * right,
                    "correct": right == 1,
                }
                for i, right in enumerate(found[:logged])
            ]
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "config.json").write_text(json.dumps({"steps": 8, "max_new_tokens": 32}))
    rows = [{"step": i, **row} for i, row in enumerate(metrics or [])]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "completions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return RunData(folder)


def said(run: RunData) -> tuple[str, str, str]:
    return verdict(run, held_out(run))


def test_a_gain(tmp_path: Path) -> None:
    """20 prompts: 3 right both times, 10 fixed, 1 broken, 6 wrong; 11 changes of which 10 are one way: p = 0.012."""
    run = run_of(tmp_path, [1] * 4 + [0] * 16, [1, 1, 1, 0] + [1] * 10 + [0] * 6)
    assert held_out(run).counts == (3, 10, 1, 6)
    kind, text, detail = said(run)
    assert kind == "better"
    assert text.startswith("Held-out accuracy rose from 20.0 % (10.0 to 90.0) to 65.0 % (10.0 to 90.0): +45.0 points")
    assert text.endswith("a significant change.")
    assert detail == "10 of 20 prompts were fixed and 1 broken (McNemar's exact test: p = 0.012)."


def test_a_loss(tmp_path: Path) -> None:
    kind, text, _ = said(run_of(tmp_path, [1] * 15 + [0] * 5, [0] * 20))
    assert kind == "worse"
    assert "accuracy fell from 75.0 %" in text
    assert "-75.0 points" in text


def test_chance(tmp_path: Path) -> None:
    kind, text, detail = said(run_of(tmp_path, [1, 0, 0, 0, 0], [0, 1, 1, 0, 0]))
    assert kind == "unclear"
    assert text.startswith("No significant change: held-out accuracy went from 20.0 %")
    assert "2 of 5 prompts were fixed and 1 broken (McNemar's exact test: p = 1)" in detail


def test_outcomes_that_are_not_all_logged_are_not_taken_as_pairs(tmp_path: Path) -> None:
    kind, text, detail = said(run_of(tmp_path, [0] * 100, [1] * 60 + [0] * 40, logged=8))
    assert kind == "better"
    assert "+60.0 points" in text
    assert "Measured on 100 prompts, with the interval for independent samples" in detail


def test_one_evaluation_or_none(tmp_path: Path) -> None:
    rewards = [{"reward/mean": x} for x in (0.25, 0.5, 0.75)]
    kind, text, detail = said(run_of(tmp_path, [1, 0], None, rewards))
    assert (kind, text) == ("unknown", "Held-out accuracy is known only before training: 50.0 % (10.0 to 90.0).")
    assert detail.endswith("The reward of training samples went from 0.25 to 0.75 (first and last).")
    kind, text, detail = said(run_of(tmp_path))
    assert (kind, text) == ("unknown", "Held-out accuracy was not measured.")
    assert "reward" not in detail


@pytest.mark.parametrize(
    "figures",
    [3, {}, {"accuracy": "high", "prompts": 4}, {"accuracy": 2.0, "prompts": 4}, {"accuracy": 0.5, "prompts": 0}],
)
def test_odd_figures_are_no_evaluation(tmp_path: Path, figures: Any) -> None:
    run = run_of(tmp_path, eval_before=figures, eval_after={"accuracy": 10**400, "prompts": 4})
    assert said(run)[0] == "unknown"


def test_outcomes_count_the_first_completion_of_a_prompt_and_only_what_is_known_twice(tmp_path: Path) -> None:
    lines = [
        {"step": 0, "phase": phase, "prompt_id": prompt, "tokens": ["a"], "reward": None, "correct": right}
        for phase, prompt, right in (
            ("eval_before", 0, False), ("eval_before", 0, True), ("eval_after", 0, True), ("eval_after", 0, False),
            ("eval_before", 1, True), ("eval_after", 2, True),
        )
    ]  # fmt: skip
    (tmp_path / "completions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = RunData(tmp_path).rows
    assert outcomes(rows[:2] + rows[4:5], rows[2:4] + rows[5:]).counts == (0, 1, 0, 0)


def test_what_is_correct_without_a_mark(tmp_path: Path) -> None:
    """Runs of earlier versions did not mark it: by the judging reward, else the only one, else the combination."""
    rewards = [{"a": 1.0, "b": 0.5}, {"a": 0.0, "b": 1.0}, {"b": 1.0}, {}]
    lines = [
        {"step": 0, "phase": "train", "prompt_id": 0, "tokens": ["a"], "reward": 0.7, "rewards": own} for own in rewards
    ]
    (tmp_path / "completions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [row.correct for row in RunData(tmp_path).rows] == [False, False, True, False]
    (tmp_path / "config.json").write_text('{"eval_reward": "a"}')
    assert [row.correct for row in RunData(tmp_path).rows] == [True, False, True, False]


HEALTHY = {"groups/uniform": 0.25, "entropy": 1.0, "completion/truncated": 0.0, "mismatch": 1e-6, "reward/mean": 0.5}


def test_a_sound_run_has_no_warnings(tmp_path: Path) -> None:
    assert warnings(run_of(tmp_path, metrics=[HEALTHY] * 8)) == []
    assert warnings(run_of(tmp_path)) == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"groups/uniform": 0.75}, "75% of the groups in the last quarter of the steps had equal rewards (mean 0.5)"),
        ({"entropy": 0.3}, "Entropy fell from 1 to 0.3 nats per token (-70%)"),
        ({"completion/truncated": 0.5}, "50% of the completions in the last quarter of the steps were cut off"),
        ({"rewards/mine/failed": 0.02}, "The reward mine failed on 0.50% of the completions"),
        ({"reward/unscored": 0.04}, "1.00% of the completions have no score"),
        ({"mismatch": 1.0}, "Sampler and trainer differ by 0.25 nats per token"),
    ],
)
def test_what_goes_wrong_at_the_end_is_said(tmp_path: Path, change: dict[str, float], text: str) -> None:
    """In two of eight steps; shares and gaps of the whole run are a quarter of those."""
    start = {**HEALTHY, **{key: 0.0 for key in change if key not in HEALTHY}}
    (found,) = warnings(run_of(tmp_path, metrics=[start] * 6 + [{**HEALTHY, **change}] * 2))
    assert found.startswith(text)


def test_a_short_run_has_no_trend_and_an_unfinished_one_is_said(tmp_path: Path) -> None:
    falling = [{**HEALTHY, "entropy": x} for x in (1.0, 0.5, 0.1)]
    assert warnings(run_of(tmp_path, metrics=falling)) == ["The run has not ended: 3 of 8 steps are logged."]
    assert warnings(run_of(tmp_path, metrics=falling, steps=8, warnings=["as told", 3])) == ["as told"]
    assert warnings(run_of(tmp_path, metrics=falling, steps=8, warnings=3)) == []


def test_a_prompt_that_was_not_scored_where_none_is_right(tmp_path: Path) -> None:
    """Prompt 0 has no score after training, prompt 1 stays at 0."""
    run = run_of(tmp_path, [0, 0], [0, 0])
    rows = [
        row._replace(reward=math.nan) if (row.phase, row.prompt_id) == ("eval_after", 0) else row for row in run.rows
    ]
    found = outcomes(*([row for row in rows if row.phase == f"eval_{when}"] for when in ("before", "after")))
    examples = {one.kind: [pair[0].prompt_id for pair in one.pairs] for one in held_out_examples(rows, found)}
    assert examples == {"stayed": [1], "known once": [0]}
    assert reward_changes(rows) == {"stayed": 1, "is known once": 1}
