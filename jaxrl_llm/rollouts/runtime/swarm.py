"""Experience that several nodes share: each trains on groups of its own and on groups that others sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxrl_llm.core.source import Replay
from jaxrl_llm.replay.base import TOLERANCE, group_moments, mixed
from jaxrl_llm.replay.buffers import join, keep, take, to_rows
from jaxrl_llm.rewards.scoring import Scored


@dataclass(frozen=True, repr=False)
class Swarm(Replay):
    """A replay among `nodes` policies that a run trains side by side, see `training.source.swarm`."""

    nodes: int = 2
    own: int = 4
    foreign: int = 4


def shared(scored: Scored, others: Sequence[Scored], own: int, foreign: int, seed: int) -> Scored:
    """`own` groups of a node's batch and `foreign` groups of the other nodes', uniformly and each at most once.

    Groups of others with equal rewards are dropped before they are drawn; fewer are taken where there are fewer. The
    rows of others have info["replayed"].
    """
    random, fresh, group = np.random.default_rng(seed), to_rows(scored), np.asarray(scored.batch.group)
    kept = np.isin(group, random.permutation(np.unique(group))[:own])
    pool, numbers = dict[str, np.ndarray](), np.zeros(0, np.int64)
    for other in others:
        varied = group_moments(other)[1] > TOLERANCE
        first = numbers.max(initial=group.max()) + 1
        pool = join(pool, keep(to_rows(other), varied))
        numbers = np.concatenate([numbers, first + np.asarray(other.batch.group)[varied]])
    chosen = np.flatnonzero(np.isin(numbers, random.permutation(np.unique(numbers))[:foreign]))
    if not kept.any() and not len(chosen):  # a step trains on one group at least
        kept = group == group[0]
    past = take(pool, chosen) if len(chosen) else {}
    return mixed(scored, keep(fresh, kept), past, group[kept], numbers[chosen])
