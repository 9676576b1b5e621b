"""What a run's folder holds of its prompts: each step's groups, and why a curriculum leaves prompts out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrl_llm.curriculum.excluded import WORDS, Why
from jaxrl_llm.reporting.html.run_data import CORRECT

if TYPE_CHECKING:
    from jaxrl_llm.core.source import Step
    from jaxrl_llm.rewards.scoring import Scored


def write_left_out(path: Path, step: int, why: np.ndarray) -> None:
    """Replace a file of why each prompt is not drawn after `step` steps, uint8[P] of `excluded.Why`, with its words."""
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        np.savez_compressed(file, step=step, why=why, words=np.asarray([WORDS[reason] for reason in Why]))
    os.replace(new, path)


def group_line(found: Step, judge: str | None = None) -> dict[str, list[Any]]:
    """The groups that a step sampled, those that it does not train on among them, without replayed ones.

    Of each group: prompt, its id; samples, scored ones; reward, their mean; right, how many are correct; equal, 1 if
    their rewards are. left_out, if any group is: null, or why the step does not train on it. Groups without a score and
    second prompts (info "part" above 0) are not listed. judge: the reward that is 1 for a correct answer; without it
    the only reward, or their combination, is.
    """
    groups: list[tuple[Any, ...]] = [(*one, None) for one in _groups(found.sampled or found.scored, judge)]
    groups += [(*one, why) for scored, why in found.others for one in _groups(scored, judge)]
    names = ("prompt", "samples", "reward", "right", "equal", "left_out")
    columns = {name: [one[place] for one in groups] for place, name in enumerate(names)}
    return columns if any(columns["left_out"]) else {name: columns[name] for name in names[:-1]}


def _groups(scored: Scored, judge: str | None) -> list[tuple[int, int, float, int, int]]:
    """(prompt, samples, mean reward, correct samples, whether rewards are equal) of each group, in their order."""
    batch = scored.batch
    if batch.reward is None:
        return []
    reward, group = np.asarray(batch.reward, np.float64), np.asarray(batch.group)
    rewards = batch.rewards or {}
    if judge not in rewards and len(rewards) == 1:
        judge = next(iter(rewards))
    right = np.asarray(rewards.get(judge or "", reward)) >= CORRECT
    known = ~np.isnan(reward) & ~(np.asarray((batch.info or {}).get("part", np.zeros(len(group)))) > 0)
    _, first, place = np.unique(group[known], return_index=True, return_inverse=True)
    out = []
    for number, prompt in enumerate(np.asarray(batch.prompt_id)[known][first].tolist()):
        own = known.nonzero()[0][place == number]
        values = reward[own]
        mean, equal = round(float(values.mean()), 6), int(values.min() == values.max())
        out.append((prompt, len(own), mean, int(right[own].sum()), equal))
    return out
