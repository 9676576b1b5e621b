"""Metrics of a step's rollouts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from jaxrl_llm.rollouts.agents.metrics import agent_metrics
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.runtime.group_run import Group
from jaxrl_llm.sampling.stats import Stats


def rollout_metrics(runs: Sequence[Stats], dropped: int = 0) -> dict[str, float]:
    """`Stats.metrics` over the rollouts of a step; all 0 if nothing was sampled.

    dropped: the number of prompts that `draw` dropped; a metric if there are any.
    """
    if dropped:
        return {**rollout_metrics(runs), "prompts/dropped": float(dropped)}
    if len(runs) == 1:
        return runs[0].metrics()
    summed = (
        "steps",
        "tokens",
        "prompt_tokens",
        "padded_tokens",
        "drafted",
        "accepted",
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


def program_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Metrics of failed groups, hints, turns and trees, if there are any."""
    failed = sum(one.failed for one in groups)
    out = {"rollout/failed_groups": float(failed)} if failed else {}
    for name in ("guided", "harder", "reflected", "refined"):
        marks = [episode.info[name] for one in groups for episode in one.episodes if name in episode.info]
        if marks:
            out[f"rollout/{name}"] = float(np.mean(marks))
    prefixes = [episode.info["prefix"] for one in groups for episode in one.episodes if "prefix" in episode.info]
    if prefixes:
        out["rollout/prefix"] = float(np.mean(prefixes))
        out["rollout/prefixed"] = float(np.mean(np.asarray(prefixes) > 0))
    unhinted = [one.episodes[0].info["unhinted"] for one in groups if "unhinted" in one.episodes[0].info]
    if unhinted:
        out["rollout/unhinted"] = float(np.mean(unhinted))
    if any("part" in episode.info for one in groups for episode in one.episodes):
        out["rollout/parts"] = float(np.mean([len({episode.part for episode in one.episodes}) for one in groups]))
    turns = [int(episode.turns.max(initial=-1)) + 1 for one in groups for episode in one.episodes]
    if max(turns, default=0) > 1:
        out["rollout/turns"] = float(np.mean(turns))
    out |= agent_metrics(one.episodes for one in groups)
    trees = [[episode for episode in one.episodes if "node" in episode.info] for one in groups]
    if any(trees):
        tokens = sum(episode.size for tree in trees for episode in tree)
        out["rollout/leaves"] = float(np.mean([len(tree) for tree in trees if tree]))
        out["rollout/shared_tokens"] = 1 - sum(map(distinct_tokens, trees)) / max(tokens, 1)
    return out


def distinct_tokens(episodes: Sequence[Episode]) -> int:
    """Number of tokens in the tree of these episodes (info "node"): what several share counts once."""
    return len({place for episode in episodes for place in enumerate(np.asarray(episode.info["node"]).tolist())})


def mean_metrics(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each metric over a step's rounds; 0 where a round does not have it."""
    names = sorted({name for run in runs for name in run})
    return {name: math.fsum(run.get(name, 0.0) for run in runs) / len(runs) for name in names}
