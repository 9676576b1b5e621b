"""experiments/experience: its statistics by hand, a comparison from end to end, and the table that RESULTS.md shows."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "experiments" / "experience"


@pytest.fixture(scope="module")
def harness() -> Iterator[SimpleNamespace]:
    """The modules of the harness, which are imported from the root of the repository."""
    sys.path.insert(0, str(ROOT))
    try:
        from experiments.experience import __main__ as command
        from experiments.experience import compare, families, measure, rewards, sampling_tasks, tables, tasks, tiny

        yield SimpleNamespace(
            compare=compare, families=families, measure=measure, rewards=rewards, tables=tables, tasks=tasks, tiny=tiny,
            command=command, sampling_tasks=sampling_tasks,
        )  # fmt: skip
    finally:
        sys.path.remove(str(ROOT))


def of(finals: list[float], method: str, why: str = "") -> dict[str, Any]:
    """A run in the results."""
    return {"method": method, "finals": finals, "areas": finals, "tokens": [10, 12, 14], "steps": [1, 1, 1],
            "compiles": [0, 0, 0], "curves": [0.0, float(np.mean(finals))], "why": why}  # fmt: skip


def test_differences_are_in_standard_errors_of_the_difference(harness: SimpleNamespace) -> None:
    assert harness.compare.mean_and_error([0.0, 0.0, 3.0]) == (1.0, pytest.approx(1.0))
    # Standard errors of 1/sqrt(3) each.
    assert harness.compare.difference([5.0, 6.0, 7.0], [1.0, 2.0, 3.0]) == pytest.approx(4 / math.sqrt(2 / 3))
    assert harness.compare.difference([1.0, 1.0], [1.0, 1.0]) == 0
    assert harness.compare.difference([1.0, 1.0], [0.0, 0.0]) == math.inf


def test_the_table_names_who_did_not_help(harness: SimpleNamespace) -> None:
    runs = [of([0.0, 0.1, 0.2], "grpo"), of([0.8, 0.9, 1.0], "good"), of([0.1, 0.2, 0.3], "weak", "the reason")]
    about = {"tokens": 10, "rate": 1e-3, "rows": 4, "step": 2, "group": 8, "length": 3}
    results = {"families": [{"key": "a", "title": "title", "text": "Text.", "about": about, "runs": runs}]}
    lines = harness.tables.table(results).splitlines()
    assert lines[2] == "| a | grpo | 0.100 ± 0.058 |  | 0.100 ± 0.058 |  | 12 | 1 |"
    assert lines[3] == "|  | good | 0.900 ± 0.058 | +9.8 | 0.900 ± 0.058 | +9.8 | 12 | 1 |"
    assert lines[-1] == "- `weak`: the reason"
    assert harness.tables.helped(results) == ["good"]


def test_the_page_shows_the_table_of_the_results(harness: SimpleNamespace) -> None:
    results = json.loads((FOLDER / "results.json").read_text())
    page = (ROOT / "experiments" / "RESULTS.md").read_text()
    begin, end = harness.command.BEGIN, harness.command.END
    assert page.partition(begin)[2].partition(end)[0].strip() == harness.tables.table(results).strip()
    assert (FOLDER / "curves.svg").exists()
    for family in results["families"]:
        assert family["key"] in harness.families.FAMILIES
        methods = [harness.compare.GRPO, *harness.families.FAMILIES[family["key"]].methods]
        assert [run["method"] for run in family["runs"]] == [method.title for method in methods]
        for run in family["runs"]:
            assert len(run["finals"]) == 5
            least, most = min(run["tokens"]), max(run["tokens"])
            step = family["about"]["step"] * family["about"]["group"] * family["about"]["length"]
            assert family["about"]["tokens"] <= least <= most < family["about"]["tokens"] + 4 * step
            assert run["why"] or run in family["runs"][:1] or run["method"] in harness.tables.helped(results)


def test_rewards_are_the_judges(harness: SimpleNamespace) -> None:
    texts, answers = ["12", "1", "3", "12", "31"], ["12", "12", "any", "", "13"]
    for name, judge in (("exact", harness.tasks.exact), ("begins", harness.tasks.begins)):
        found = getattr(harness.rewards, name)(texts, answers)
        assert found == [judge(text, {"answer": one}) for text, one in zip(texts, answers, strict=True)]
    assert harness.rewards.begins(texts, answers) == [1, 1, 1, 0, 1]
    texts, free = ["12", "32", "13", "2", "123"], [".2"] * 5
    assert harness.rewards.matches(texts, free) == [1, 1, 0, 0, 0]
    assert [harness.sampling_tasks.matches(text, {"answer": ".2"}) for text in texts] == [1, 1, 0, 0, 0]
    assert harness.rewards.tested(["12", "1"], ["13", "13"]) == {"reward": [0, 0], "tests": [[1, 0], [1, 0]]}


def test_few_prompts_can_be_learnt_or_are_hard(harness: SimpleNamespace) -> None:
    """What is measured can be right and wrong; the other prompts are always wrong (a), or always right (b)."""
    digits, pairs = list("0123456789"), [f"{n:02}" for n in range(100)]
    for name, texts, score, useful in (("mostly_impossible", digits, 0, 8), ("few_hard", pairs, 1, 4)):
        task = getattr(harness.sampling_tasks, name)()
        assert task.measured == range(useful)
        for place, row in enumerate(task.rows):
            found = getattr(harness.rewards, task.reward)(texts, [row["answer"]] * len(texts))
            assert found == [task.judge(text, row) for text in texts]
            assert sum(found) == (1 if place < useful else score * len(texts))
        assert len({row["prompt"] for row in task.rows}) == len(task.rows)


def test_a_decoy_is_worth_a_half(harness: SimpleNamespace) -> None:
    task = harness.sampling_tasks.decoys()
    for row in task.rows:
        best, decoy = row["answer"]
        found = getattr(harness.rewards, task.reward)(list("0123456789"), [row["answer"]] * 10)
        assert found == [task.judge(text, row) for text in "0123456789"]
        assert (sorted(found)[-3:], found[int(best)], found[int(decoy)]) == ([0.0, 0.5, 1.0], 1.0, 0.5)


@pytest.mark.heavy
def test_a_comparison_runs_from_end_to_end(harness: SimpleNamespace) -> None:
    """Two steps of GRPO and of a method that tries failed groups again: all of its tokens count."""
    task = replace(
        harness.tasks.sparse_lock(keys=2), tokens=64, prompts_per_step=2, group_size=4, taught_steps=1
    )  # fmt: skip
    methods = [harness.compare.Method("ghpo", {"stages": 1})]
    said: list[str] = []
    family = harness.compare.Family("x", "title", "Text.", lambda: task, methods)
    found = harness.compare.run_family(family, [0, 1], said.append)
    grpo, ghpo = found["runs"]
    most = 2 * 4 * 4  # tokens of a step without a second attempt
    for run in (grpo, ghpo):
        assert all(64 <= tokens < 64 + 2 * most for tokens in run["tokens"])
        assert len(run["curves"]) >= 2
    assert all(tokens <= steps * most for tokens, steps in zip(grpo["tokens"], grpo["steps"], strict=True))
    assert all(tokens > steps * most for tokens, steps in zip(ghpo["tokens"], ghpo["steps"], strict=True))
    assert len(said) == 4
    again = harness.compare.run_family(replace(family, methods=[]), [0, 1], said.append, grpo)
    assert again["runs"] == [grpo]
    assert len(said) == 4
