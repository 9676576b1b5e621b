"""Metrics of sampling beside updates: the staleness of tokens, and what samplers did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from jaxrl_llm.rollouts.asynchronous.sampler import Taken
from jaxrl_llm.sampling.stats import Stats


def ages(parts: Sequence[Taken], step: int) -> np.ndarray:
    """The staleness int[tokens], in steps, of each sampled token of the groups that a step has taken.

    Tokens that are trained on but were not drawn, such as those of hints, are no older than their group.
    """
    found = [np.zeros(0, int)]
    for one in parts:
        for log, group in zip(one.logs, one.groups, strict=True):
            for episode in group.episodes:
                drawn = np.maximum(episode.own.policy_step, log.key.first_step)
                found.append(step - drawn[episode.actions])
    return np.concatenate(found)


def staleness_metrics(age: np.ndarray, bound: int) -> dict[str, float]:
    """The share of tokens of each staleness, its mean, and the largest. age: as of `ages`."""
    size = max(age.size, 1)
    return {
        "rollout/staleness": float(age.sum()) / size,
        "rollout/stale_tokens": float(np.sum(age > 0)) / size,
        "rollout/oldest": float(age.max(initial=0)),
        **{f"staleness/{steps}": float(np.sum(age == steps)) / size for steps in range(bound + 1)},
    }


def sampler_metrics(seconds: Sequence[Mapping[str, float]], stats: Sequence[Stats], hosts: int) -> dict[str, float]:
    """Seconds of decoding, and idle at the bound, since the last step: the mean of the hosts; and tokens a second.

    seconds, stats: of all hosts.
    """
    found = {name: sum(one[name] for one in seconds) / hosts for name in ("decoding", "idle")}
    speed = sum(one.tokens for one in stats) / found["decoding"] if found["decoding"] else 0.0
    return {"rollout/tokens_per_second": speed} | {f"sampler/{name}_seconds": x for name, x in found.items()}
