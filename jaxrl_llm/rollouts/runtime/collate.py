"""The batch of a step's groups, and metrics of their programs."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.rollouts.agents.metrics import agent_metrics
from jaxrl_llm.rollouts.columns import answer_tokens, info_columns, padded_rows, teacher_tokens
from jaxrl_llm.rollouts.runtime.group_run import Group
from jaxrl_llm.sampling.batch import BatchRow, assemble
from jaxrl_llm.sampling.sampler import SamplingConfig

MEASURED = ("judge/", "rollout/")  # how names of info begin that measure a group; their means are metrics


def _parts_of(one: Group) -> list[int]:
    """The numbers of the groups that a program returned, ascending."""
    return sorted({episode.part for episode in one.episodes})


def dataset_rows(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """The data set row of each group of the batch of these programs."""
    return [dict(one.task.row) for one in groups for _ in _parts_of(one)]


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
        numbers = {part: first + place for place, part in enumerate(_parts_of(one))}
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
    if any(rewards := [episode.turn_rewards for episode in episodes]):
        batch = batch.replace(turn_rewards=padded_rows(rewards, 0, np.float32, 1))
    if any(keys := [episode.state_keys for episode in episodes]):
        batch = batch.replace(state_key=padded_rows(keys, 0, np.uint32, 1))
    if any(episode.teacher_prompt is not None for episode in episodes):
        batch = batch.with_info(teacher_tokens=teacher_tokens(episodes))
    if any(episode.answer is not None for episode in episodes):
        batch = batch.with_info(answer_tokens=answer_tokens(episodes))
    if windows:
        unfinished: Any = np.asarray([is_so for one in groups for is_so in one.unfinished])
        window = batch.action_mask & (batch.policy_step == step)
        batch = batch.with_info(window=window, unfinished=unfinished)
    return batch


def program_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Metrics of failed groups, hints, turns and trees, if there are any."""
    failed, firsts = sum(one.failed for one in groups), [one.episodes[0].info for one in groups]
    every = [episode for one in groups for episode in one.episodes]
    out = {"rollout/failed_groups": float(failed)} if failed else {}
    for name in ("guided", "harder", "reflected", "refined"):
        if marks := [episode.info[name] for episode in every if name in episode.info]:
            out[f"rollout/{name}"] = float(np.mean(marks))
    if prefixes := [episode.info["prefix"] for episode in every if "prefix" in episode.info]:
        out["rollout/prefix"] = float(np.mean(prefixes))
        out["rollout/prefixed"] = float(np.mean(np.asarray(prefixes) > 0))
    if unhinted := [info["unhinted"] for info in firsts if "unhinted" in info]:
        out["rollout/unhinted"] = float(np.mean(unhinted))
    if any("part" in episode.info for episode in every):
        out["rollout/parts"] = float(np.mean([len(_parts_of(one)) for one in groups]))
    for name in sorted({name for info in firsts for name in info if name.startswith(MEASURED)}):
        out[name] = float(np.mean([info[name] for info in firsts if name in info]))
    turns = [int(episode.turns.max(initial=-1)) + 1 for episode in every]
    if max(turns, default=0) > 1:
        out["rollout/turns"] = float(np.mean(turns))
    out |= agent_metrics(one.episodes for one in groups)
    trees = [[episode for episode in one.episodes if "node" in episode.info] for one in groups]
    if any(trees):
        tokens = sum(episode.size for tree in trees for episode in tree)
        out["rollout/leaves"] = float(np.mean([len(tree) for tree in trees if tree]))
        nodes = [(group, np.asarray(one.info["node"]).tolist()) for group, tree in enumerate(trees) for one in tree]
        once = {(group, place, node) for group, row in nodes for place, node in enumerate(row)}
        out["rollout/shared_tokens"] = 1 - len(once) / max(tokens, 1)
    return out


def mean_metrics(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each metric over a step's rounds; 0 where a round does not have it."""
    names = sorted({name for run in runs for name in run})
    return {name: math.fsum(run.get(name, 0.0) for run in runs) / len(runs) for name in names}
