"""The batch of a step's groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_llm.rollouts.episode import info_columns
from jaxrl_llm.rollouts.group_run import Group
from jaxrl_llm.sampling.requests import SamplingConfig
from jaxrl_llm.sampling.sampler import BatchRow, assemble
from jaxrl_llm.trajectory import Trajectories


def to_batch(groups: Sequence[Group], sampling: SamplingConfig, step: int, windows: bool = False) -> Trajectories:
    """A batch of the groups' episodes, as numpy arrays. windows: add info "window" and "unfinished".

    A row has the prompt that its episode is trained under; see `Episode.trained_under`.
    """
    rows, episodes = [], [episode for one in groups for episode in one.episodes]
    for number, one in enumerate(groups):
        for episode in one.episodes:
            prompt, own = episode.prompt, episode.own
            if episode.trained_prompt is not None:
                # What top-k, top-p and min-p kept is not known under this prompt.
                prompt, own = episode.trained_prompt, own._replace(floor=np.full_like(own.floor, -np.inf))
            rows.append(BatchRow(
                prompt, own, episode.truncated, one.task.prompt_id, number, episode.actions,
                episode.turns,
            ))  # fmt: skip
    batch = assemble(rows, sampling.temperature, sampling.truncating, step)
    if info := info_columns(episodes):
        batch = batch.with_info(**info)
    if windows:
        unfinished: Any = np.asarray([is_so for one in groups for is_so in one.unfinished])
        window = batch.action_mask & (batch.policy_step == step)
        batch = batch.with_info(window=window, unfinished=unfinished)
    return batch
