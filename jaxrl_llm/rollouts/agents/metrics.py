"""What a step's episodes with environments did, in numbers."""

from collections.abc import Iterable

import numpy as np

from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.rollouts.episode import Episode

FAILED_ENVIRONMENT = "failed_environments"
CALLS = ("calls", "failed_calls")  # of tools, which environments count and methods may need
COUNTS = (
    *CALLS, "malformed_calls", "lenient_calls", "cut_observations", "new_rows", "branches", "compactions",
    FAILED_ENVIRONMENT,
)  # fmt: skip
"""Entries of `Episode.info` that all episodes of agents have, so that batches have the same entries in all steps."""

FORKED, RESTARTED = "forked", "restarted"  # entries of episodes that go on from a turn of another one
BEGUN = {FORKED: "rollout/forks", RESTARTED: "rollout/restarts"}


def agent_metrics(groups: Iterable[Iterable[Episode]]) -> dict[str, float]:
    """Means per episode of turns, calls, cut observations, new rows, branches and compactions, how many environments
    failed, and forks and restarts per group where episodes have them; {} without agents.

    Rows of one episode count as one: the first of them stands for all.
    """
    rows = [[episode for episode in one if "first_turn" in episode.info] for one in groups]
    if not any(rows):
        return {}
    firsts = [episode for one in rows for episode in one if episode.info["first_turn"] == 0]
    turns = sum(int(episode.turns.max(initial=-1)) + 1 for one in rows for episode in one)
    out = {f"rollout/{name}": float(np.mean([one.info[name] for one in firsts])) for name in COUNTS[:-1]}
    failed = float(np.sum([one.info[FAILED_ENVIRONMENT] for one in firsts]))
    for name, metric in BEGUN.items():
        if name in firsts[0].info:
            out[metric] = float(np.sum([one.info[name] for one in firsts])) / sum(map(bool, rows))
    return {"rollout/turns": turns / len(firsts), **out, f"rollout/{FAILED_ENVIRONMENT}": failed}


def last_rows(batch: Trajectories) -> np.ndarray:
    """bool[N]: the last row of each episode, of a game of its first player's; an episode's rows follow each other."""
    info = batch.info or {}
    zeros = np.zeros(len(batch.group))
    last = ~np.append(np.asarray(info.get("first_turn", zeros))[1:] > 0, False)
    return last & (np.asarray(info.get("part", zeros)) == 0)
