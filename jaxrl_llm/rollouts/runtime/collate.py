"""The batch of a step's groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.rollouts.columns import answer_tokens, info_columns, of_turns, teacher_tokens
from jaxrl_llm.rollouts.runtime.group_run import Group
from jaxrl_llm.sampling.batch import BatchRow, assemble
from jaxrl_llm.sampling.requests import SamplingConfig


def parts_of(one: Group) -> list[int]:
    """The numbers of the groups that a program returned, ascending."""
    return sorted({episode.part for episode in one.episodes})


def rows_of(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """The data set row of each group of the batch of these programs."""
    return [dict(one.task.row) for one in groups for _ in parts_of(one)]


def to_batch(
    groups: Sequence[Group], sampling: SamplingConfig, step: int, windows: bool = False, remembers: bool = False
) -> Trajectories:
    """A batch of the groups' episodes, as numpy arrays. windows: add info "window" and "unfinished".

    remembers: tokens were drawn through a hook that remembers a number for each, `support_floor`.

    Episodes of one program with different `part` are different groups of the batch. A row has the prompt that its
    episode is trained under; see `Episode.trained_under`.
    """
    rows, episodes = [], [episode for one in groups for episode in one.episodes]
    first = 0
    for one in groups:
        numbers = {part: first + place for place, part in enumerate(parts_of(one))}
        first += len(numbers)
        for episode in one.episodes:
            prompt, own, experts = episode.prompt, episode.own, episode.experts
            if episode.trained_prompt is not None:
                # What top-k, top-p and min-p kept, and a router chose, is not known under this prompt.
                prompt, own = episode.trained_prompt, own._replace(floor=np.full_like(own.floor, -np.inf))
                experts = None
            rows.append(BatchRow(
                prompt, own, episode.truncated, one.task.prompt_id, numbers[episode.part], episode.actions,
                episode.turns, experts,
            ))  # fmt: skip
    batch = assemble(rows, sampling.temperature, sampling.truncating or remembers, step)
    if info := info_columns(episodes, batch.tokens.shape[1]):
        batch = batch.with_info(**info)
    if any(episode.turn_rewards for episode in episodes):
        rewards = [episode.turn_rewards for episode in episodes]
        batch = batch.replace(turn_rewards=of_turns(rewards, np.float32))
    if any(episode.state_keys for episode in episodes):
        keys = [episode.state_keys for episode in episodes]
        batch = batch.replace(state_key=of_turns(keys, np.uint32))
    if any(episode.teacher_prompt is not None for episode in episodes):
        batch = batch.with_info(teacher_tokens=teacher_tokens(episodes))
    if any(episode.answer is not None for episode in episodes):
        batch = batch.with_info(answer_tokens=answer_tokens(episodes))
    if windows:
        unfinished: Any = np.asarray([is_so for one in groups for is_so in one.unfinished])
        window = batch.action_mask & (batch.policy_step == step)
        batch = batch.with_info(window=window, unfinished=unfinished)
    return batch
