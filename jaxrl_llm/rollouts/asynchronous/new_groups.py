"""The groups of new prompts that come in with the weights of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxrl_llm.rollouts.program_host import Task
from jaxrl_llm.rollouts.runtime.replay_log import GroupLog
from jaxrl_llm.rollouts.runtime.source import begun
from jaxrl_llm.rollouts.runtime.source_setup import Experience
from jaxrl_llm.rollouts.runtime.source_state import ExperienceState
from jaxrl_llm.rollouts.runtime.sources import draw
from jaxrl_llm.utils.errors import InputError


def new_groups(
    setup: Experience, state: ExperienceState, counts: Sequence[int], step: int, earlier: Sequence[int] = ()
) -> tuple[list[tuple[GroupLog, Task]], ExperienceState, int]:
    """(groups of new prompts that this host samples, the state after them, number of prompts dropped).

    counts: of each host. earlier: the prompts of the groups that began in this step before.
    """
    ids, curriculum, dropped = _prompts(setup, state.curriculum, sum(counts))
    first = sum(counts[: setup.hosts.index])
    new = begun(setup, curriculum, ids, len(ids), step, earlier)[first : first + counts[setup.hosts.index]]
    return new, state._replace(curriculum=curriculum), dropped


def _prompts(setup: Experience, curriculum: Any, count: int) -> tuple[list[int], Any, int]:
    """The prompts of so many groups, those of one step after another."""
    ids, dropped = list[int](), 0
    while len(ids) < count:
        wanted = min(setup.prompts_per_step, count - len(ids))
        found, curriculum, lost = draw(setup.curriculum, setup.prompts, curriculum, wanted)
        if len(found) != wanted:
            raise InputError(
                f"max_staleness is above 0, but the curriculum chose {len(found)} prompts for {wanted} groups, which "
                "asynchronous sampling does not support: leave one of the two out"
            )
        ids, dropped = [*ids, *found], dropped + lost
    return ids, curriculum, dropped
