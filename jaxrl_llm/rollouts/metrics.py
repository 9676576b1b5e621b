"""Metrics of a step's rollout."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_llm.rewards.scoring import Scored
from jaxrl_llm.sampling.requests import Stats


def window_metrics(scored: Scored) -> dict[str, float]:
    """Metrics of a batch of windows (info "window" and "unfinished"; see `experience`), some rows of which continue.

    Metrics of completions cover those that finished in this step, so that each counts once in a run; NaN if there are
    none. Token counts are of the windows. "groups/uniform" is the share of groups with equal rewards among those of
    which at least two completions finished in this step; 0 if there is no such group.
    """
    batch = scored.batch
    window, unfinished = np.asarray(batch.need("window")), np.asarray(batch.need("unfinished"))
    ended = window.any(axis=1) & ~unfinished
    length, count = np.asarray(batch.action_mask).sum(axis=1)[ended], int(ended.sum())
    reward, group = np.asarray(batch.need("reward"))[ended], np.asarray(batch.group)[ended]
    known = [reward[(group == number) & ~np.isnan(reward)] for number in np.unique(group)]
    spread = np.asarray([np.ptp(rewards) for rewards in known if len(rewards) > 1])

    def of(values: np.ndarray, how: Any) -> float:
        return float(how(values)) if count else np.nan

    return {
        "reward/unscored": of(np.isnan(reward), np.mean),
        "completion/length": of(length, np.mean),
        "completion/longest": of(length, np.max),
        "completion/truncated": of(np.asarray(batch.truncated)[ended], np.mean),
        "completion/tokens": float(window.sum()),
        "groups/uniform": float(np.mean(spread == 0)) if len(spread) else 0.0,
        "rollout/finished": float(count),
        "rollout/unfinished": float(unfinished.sum()),
        **{f"rewards/{name}/failed": failed / max(count, 1) for name, failed in scored.failures.items()},
    }


def rollout_metrics(runs: Sequence[Stats]) -> dict[str, float]:
    """`Stats.metrics` over the rollouts of a step; all 0 if nothing was sampled."""
    if len(runs) == 1:
        return runs[0].metrics()
    summed = (
        "steps",
        "tokens",
        "prompt_tokens",
        "padded_tokens",
        "seconds",
        "compiles",
        "moved_bytes",
        "moved_seconds",
    )
    total = dataclasses.replace(Stats(), **{name: sum(getattr(run, name) for run in runs) for name in summed})
    row_steps = sum(run.rows * run.steps for run in runs)
    return {
        **total.metrics(),
        "rollout/occupancy": sum(run.live for run in runs) / max(row_steps, 1),
        "rollout/first_token_seconds": runs[0].first_token if runs else 0.0,
    }
