"""Runs of `relic`: which tokens each update trains on, and that the next window is drawn by the new weights."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_turn_runs
import tiny_runs as runs

from jaxrl_llm.learner import step as learner
from jaxrl_llm.models.outputs import policy_outputs
from jaxrl_llm.training.config import TrainConfig

pytestmark = pytest.mark.heavy

EVERY = 2


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Of each update of a run, the batch, and log-probabilities f32[N, L] of whole rows by the weights before it."""
    found, update = list[Any](), learner.update

    def updating(policy: Any, objective: Any, optimizer: Any, state: Any, batch: Any, steps: Any, **others: Any) -> Any:
        found.append((batch, np.asarray(policy_outputs(policy, state.params, batch).logp)))
        return update(policy, objective, optimizer, state, batch, steps, **others)

    monkeypatch.setattr(learner, "update", updating)
    return found


def config_of(kind: str, folder: Path) -> TrainConfig:
    """Completions, or episodes of an environment, in windows of a few tokens."""
    settings: dict[str, Any] = {
        "algorithm": "relic", "hyperparameters": {"full_every": EVERY}, "steps": 5, "critic": "shared",
        "prompts_per_step": 3, "group_size": 2, "minibatches": 1, "eval_size": 0, "top_p": 1.0,
        "segment_tokens": 2 if kind == "environment" else 3,
    }  # fmt: skip
    if kind == "environment":
        return test_turn_runs.config_of(folder, "poad", **test_turn_runs.ENVIRONMENT | {"epochs": 1} | settings)
    (folder / "own.py").write_text(
        "def even(completion_ids):\n    return [sum(t % 2 == 0 for t in ids) / len(ids) for ids in completion_ids]\n"
    )
    return runs.small_config(
        folder, max_new_tokens=12, stop=tuple(string.ascii_letters[:12]), rewards=(f"{folder / 'own.py'}:even",),
        **settings,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["completions", "environment"])
def test_updates_are_of_the_newest_window_and_sometimes_of_all(kind: str, batches: list[Any], tmp_path: Path) -> None:
    """Every second window and the last one train the whole episode. Weights that see all of it give the tokens of each
    window the probabilities that they were drawn with, so no key or value was of older weights."""
    config = config_of(kind, tmp_path)
    runs.train(config)
    seen = set[str]()
    for step, (batch, logp) in enumerate(batches):
        mask, weights = np.asarray(batch.action_mask), np.asarray(batch.weights)
        for n in np.flatnonzero(mask.any(axis=1)):
            drawn = np.asarray(batch.policy_step)[n, mask[n]]
            trained = weights[n, mask[n]] > 0
            count, goes_on = len(set(drawn.tolist())), bool(np.asarray(batch.need("unfinished"))[n])
            if not np.asarray(batch.need("window"))[n].any():  # it waits for others, or its reward has waited for them
                np.testing.assert_array_equal(trained, not goes_on)
                continue
            assert drawn.max() == step
            near = np.abs(logp - np.asarray(batch.behaviour_logp))[n, mask[n]]
            assert near[drawn == step].max() < 1e-4, "by the new weights, with all that was before"
            whole = not goes_on or count % EVERY == 0
            np.testing.assert_array_equal(trained, True if whole else drawn == step)
            if count > 1:
                seen.add("the end" if not goes_on else "all" if whole else "a window")
    assert seen == {"the end", "all", "a window"}, "or this test shows nothing"
    if kind == "environment":
        assert max(int(np.asarray(batch.turn).max()) for batch, _ in batches) > 0
    lines = runs.lines_of(Path(config.output) / "metrics.jsonl")
    assert all(np.isfinite(line["loss"]) for line in lines)
    assert max(line["grad_norm"] for line in lines) > 0
    assert not any(line.get("rewards/environment/failed") for line in lines), "rewards are those of whole episodes"
