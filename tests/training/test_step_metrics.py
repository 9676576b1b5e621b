"""A step's metrics say of which samples they are, and add up; notes say what is so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_runs as runs

from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.rewards import Reward, score
from jaxrl_llm.rewards.scoring import Scored
from jaxrl_llm.training import loop
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.metrics import batch_metrics, count_step, trained_metrics
from jaxrl_llm.training.notes import accuracy_line, trend_warnings


def scored(reward: list[float], group: list[int], tokens: int = 4, **components: list[float]) -> Scored:
    n = len(reward)
    batch = Trajectories(
        tokens=jnp.zeros((n, 8), jnp.int32), token_mask=jnp.ones((n, 8), bool),
        action_mask=jnp.arange(8)[None].repeat(n, 0) < tokens, behaviour_logp=jnp.zeros((n, 8)),
        policy_step=jnp.zeros((n, 8), jnp.int32), turn=jnp.zeros((n, 8), jnp.int32), group=jnp.asarray(group),
        prompt_id=jnp.asarray(group), truncated=jnp.zeros(n, bool), temperature=jnp.ones(n),
        rewards={name: jnp.asarray(values) for name, values in components.items()}, reward=jnp.asarray(reward),
    )  # fmt: skip
    return Scored(batch, [""] * n, dict.fromkeys(components, 0))


def test_metrics_are_of_all_samples_and_of_those_trained_on_apart() -> None:
    mixed = scored([1.0, 0.0], [0, 0], a=[1.0, 0.0])
    others = [scored([1.0, 1.0], [0, 0], tokens=6, a=[1.0, 1.0]), scored([0.0, np.nan], [3, 3], a=[0.0, np.nan])]
    found = batch_metrics([mixed, *others], seconds=2.0)
    assert found["completion/tokens"] == 2 * 4 + 2 * 6 + 2 * 4
    assert found["tokens_per_second"] == 14.0
    assert found["reward/mean"] == pytest.approx(3 / 5)
    assert found["reward/unscored"] == pytest.approx(1 / 6)
    assert found["groups/uniform"] == pytest.approx(4 / 6)
    assert trained_metrics(mixed) == {"trained/reward": 0.5, "trained/tokens": 8.0, "trained/uniform": 0.0}


def test_means_of_components_times_their_shares_add_up() -> None:
    even, half = [0.25, 0.5, 0.25, 0.5], [1.0, None, 1.0, None]
    rewards = [
        Reward(lambda completions: even, name="even"), Reward(lambda completions: half, name="half", weight=0.5)
    ]  # fmt: skip
    found = score(rewards, ["a"] * 4, {})
    components = {name: np.asarray(x).tolist() for name, x in found.components.items()}
    said = batch_metrics([scored(np.asarray(found.total).tolist(), [0, 0, 1, 1], **components)], 1.0)
    assert (said["rewards/even/scored"], said["rewards/half/scored"]) == (1.0, 0.5)
    total = (
        said["rewards/even"] * said["rewards/even/scored"] + 0.5 * said["rewards/half"] * said["rewards/half/scored"]
    )
    assert said["reward/mean"] == pytest.approx(total)


USUAL = {"signal": 0.0, "completion/longest": 9.0, "completion/tokens": 20.0, "groups/uniform": 1.0, "reward/mean": 0.0}


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({}, "too hard or too easy"),
        ({"rewards/a/failed": 1.0}, "reward functions failed on 100% of the completions (rewards/a/failed)"),
        ({"reward/unscored": 1.0}, "no completion was scored"),
        ({"reward/unscored": 0.75}, "75% of the completions were not scored"),
        ({"groups/uniform": 0.9, "trained/uniform": 1.0}, "too hard or too easy"),
        ({"groups/uniform": 0.9, "trained/uniform": 0.0}, "the method gives every token the advantage 0"),
    ],
)
def test_why_a_step_had_no_signal(metrics: dict[str, float], said: str) -> None:
    counts, (text,) = count_step({}, 0, {**USUAL, **metrics}, TrainConfig())
    assert said in text
    assert ("too hard" in text) == ("too hard" in said)
    assert counts["tokens"] == counts["trained"] == 20


def test_tokens_of_the_summary_are_sampled_and_trained_ones() -> None:
    counts, _ = count_step({"tokens": 100, "trained": 10}, 1, {**USUAL, "trained/tokens": 4.0}, TrainConfig())
    assert (counts["tokens"], counts["trained"]) == (120, 14)


def test_a_trend_of_what_is_trained_on() -> None:
    rows = [{"entropy": 1.0, "groups/uniform": 0.9, "trained/uniform": 0.0} for _ in range(20)]
    assert trend_warnings(rows) == []
    assert "taught nothing" in trend_warnings([{"entropy": 1.0, "groups/uniform": 0.9} for _ in range(20)])[0]


def test_failed_environments_are_in_the_line() -> None:
    figures: dict[str, Any] = {"accuracy": 0.5, "low": 0.1, "high": 0.9, "prompts": 4, "length": 2.0, "unscored": 1}
    assert accuracy_line({**figures, "failed_environments": 1}).endswith(", 1 not scored, 1 environment failed")


@pytest.mark.heavy
def test_dynamic_sampling_counts_all_that_it_draws(tmp_path: Path) -> None:
    """A reward that is always 1 makes all groups uniform: every round is sampled, and said."""
    config = runs.small_config(tmp_path, algorithm="dapo", steps=1, rewards=("format_match((?s).*)",), eval_size=0)
    loop.train(config)
    (said,), (groups,) = (
        [json.loads(line) for line in (Path(config.output) / f"{name}.jsonl").read_text().splitlines()]
        for name in ("metrics", "groups")
    )
    count = sum(groups["samples"])
    assert count > config.prompts_per_step * config.group_size
    assert said["groups/uniform"] == 1.0
    assert said["completion/tokens"] == pytest.approx(said["completion/length"] * count)
    assert said["trained/tokens"] < said["completion/tokens"]
    summary = json.loads((Path(config.output) / "summary.json").read_text())
    assert summary["tokens"] == {"sampled": said["completion/tokens"], "trained": said["trained/tokens"]}


def test_one_of_something_is_singular() -> None:
    figures: dict[str, Any] = {"accuracy": 1.0, "low": 0.1, "high": 1.0, "prompts": 1, "length": 2.0, "unscored": 0}
    assert "on 1 held-out prompt, 2.0 tokens" in accuracy_line(figures)
    assert "on 1 prompt of a.jsonl, " in accuracy_line(figures, "prompts of a.jsonl")
    assert "on 2 prompts of a.jsonl, " in accuracy_line({**figures, "prompts": 2}, "prompts of a.jsonl")


def test_no_more_than_all_samples_count_as_failed() -> None:
    """Groups that failed leave one row without actions, whatever number of samples their rewards failed on."""
    left = scored([0.0], [0], tokens=0, a=[0.0])
    left.failures["a"] = 2
    assert batch_metrics([left], seconds=1.0)["rewards/a/failed"] == 1.0
