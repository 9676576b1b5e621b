"""Where a method cannot do what its name says: an error, or a fallback that is counted and said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_runs as runs

from jaxrl_llm import algorithms
from jaxrl_llm.rollouts.trees import tree
from jaxrl_llm.training.metrics import count_step, fallback_notes, fallback_warnings, grown_counts
from jaxrl_llm.training.rollout import check_rollout, fork_notes
from jaxrl_llm.utils.errors import InputError


def counted(*steps: dict[str, float]) -> tuple[dict[str, int], list[str]]:
    """The counts and the notes of a run whose steps have these metrics."""
    counts, said = dict[str, int](), list[str]()
    usual = {"signal": 1.0, "groups/uniform": 0.0, "completion/longest": 9.0, "completion/tokens": 10.0}
    config: Any = runs.TrainConfig(max_new_tokens=64)
    for step, metrics in enumerate(steps):
        counts, texts = count_step(counts, step, {**usual, **metrics}, config)
        said += texts
    return counts, said


def test_a_run_without_fallbacks_says_and_counts_nothing() -> None:
    counts, said = counted({}, {"replay/share": 0.5, "rollout/unhinted": 0.0, "curriculum/restarts": 0.0})
    assert counts == {"tokens": 20, "trained": 20, "silent": 0, "single": 0}
    assert said == fallback_warnings(counts, 2) == []


def test_prompts_that_are_drawn_although_all_are_left_out() -> None:
    """The metric is the number so far; a step is said when it grows, and each tenth time after that."""
    counts, said = counted({}, {"curriculum/forced": 4.0}, {"curriculum/forced": 4.0}, {"curriculum/forced": 7.0}, {})
    assert said == ["step 2: the curriculum leaves out all prompts: 4 were drawn all the same"]
    assert (counts["forced"], counts["forced_prompts"]) == (2, 7)
    (warning,) = fallback_warnings(counts, 5)
    assert warning.startswith("the curriculum left out all prompts in 2 of 5 steps: 7 were drawn")
    many, said = counted(*({"curriculum/forced": float(i)} for i in range(1, 22)))
    assert [text.split(":")[0] for text in said] == ["step 1", "step 10", "step 20"]
    assert many["forced"] == 21


def test_an_empty_store_is_said_if_it_was_empty_in_every_step() -> None:
    counts, said = counted({"replay/share": 0.0}, {"replay/share": 0.0})
    assert said == []
    assert fallback_warnings(counts, 2) == [
        "nothing was replayed in any of the 2 steps: the store was empty, or no group called for its rows"
    ]
    assert fallback_warnings(counted({"replay/share": 0.0}, {"replay/share": 0.1})[0], 2) == []


def test_groups_without_a_hint_and_prompts_that_come_back() -> None:
    counts, said = counted({"rollout/unhinted": 0.25, "curriculum/restarts": 1.0}, {"rollout/unhinted": 1.0})
    assert said == [
        "step 1: the policy solves all prompts: those that were dropped are drawn again",
        "step 1: 25% of the groups failed and got no hint, because there was none",
    ]
    assert len(fallback_warnings(counts, 3)) == 2
    assert grown_counts({"restarted": 2}, {}) == {"restarted": 2}
    assert not fallback_notes({"restarted": 2}, {"curriculum/restarts": 2.0})["restarts"][0]


def config_of(folder: Path, **changes: Any) -> Any:
    settings = {"steps": 4, "eval_size": 0, "minibatches": 1, "prompts_per_step": 6, "group_size": 2, **changes}
    return runs.small_config(folder, reward="from_answer", **settings)


def write_solved(path: str) -> None:
    """Prompts that every answer solves."""
    rows = [f'{{"prompt": "number {i:02d}:", "answer": "1"}}\n' for i in range(12)]
    Path(path).write_text("".join(rows))


@pytest.mark.heavy
def test_all_prompts_dropped_is_said_or_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(tmp_path, algorithm="rapo_reward_aware")
    write_solved(config.prompts)
    summary = runs.train(config)
    assert "step 3: the policy solves all prompts" in capsys.readouterr().out
    assert any("came back, in 1 of 4 steps" in text for text in summary["warnings"])
    (tmp_path / "other").mkdir()
    config = config_of(tmp_path / "other", algorithm="nurl", hyperparameters={"hints_from": 0})
    write_solved(config.prompts)
    with pytest.raises(InputError, match="the policy solves every prompt"):
        runs.train(config)


@pytest.mark.heavy
def test_a_replay_of_nothing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = {"replay_groups": 0}
    config = config_of(tmp_path, algorithm="symphony_fading_replay", hyperparameters=given, steps=1)
    assert any(text.startswith("nothing was replayed in any of the 1 steps") for text in runs.train(config)["warnings"])
    assert "warning: nothing was replayed" in capsys.readouterr().out


def test_forks_beyond_the_limit_are_named_where_others_are_reached() -> None:
    assert tree(0, 4, 64).demands.forks == (0, 4, 64)
    grpo = algorithms.get("grpo")
    some = runs.TrainConfig(rollout="tree(0, 4, 64)", max_new_tokens=8)
    check_rollout(some, grpo)
    assert fork_notes(some, grpo) == [
        "the rollout tree(0, 4, 64, branches=2) never reaches its forks after 64 tokens: completions have at most 8"
    ]
    assert fork_notes(runs.TrainConfig(rollout="tree(0, 4)", max_new_tokens=8), grpo) == []
    check_rollout(runs.TrainConfig(rollout="tree(0)", max_new_tokens=8), grpo)
