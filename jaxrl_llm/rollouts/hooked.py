"""Rollouts whose tokens are drawn through a hook of the sampler."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from jaxrl_llm.core.hooks import Hook, first_state
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.rollout import Rollout, drawn
from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.program_host import Task
from jaxrl_llm.rollouts.programs import group
from jaxrl_llm.sampling import filters
from jaxrl_llm.utils.errors import InputError, shown


@part
def hooked(rollout: Rollout, hook: Hook, provides: Iterable[str] = ()) -> Rollout:
    """A rollout whose tokens are drawn through a hook (`jaxrl_llm.core.hooks`), through which the update goes as well.

    The hook's numbers are those in the controls of the last update; each episode has them in info. Samples at a
    temperature of their own, and greedy ones, do not go through it. provides: names of `jaxrl_llm.core.needs` among
    these numbers. Raises InputError for a rollout that is drawn otherwise already.
    """
    if not isinstance(hook, Hook):
        raise InputError(f"the hook is {shown(hook)}, but must be a jaxrl_llm.core.hooks.Hook")

    async def program(tools: Tools, task: Task) -> list[Episode]:
        numbers = first_state(hook, tools.controls)
        episodes = await rollout.program(tools, task)
        return [episode.with_info(**numbers) for episode in episodes] if numbers else list(episodes)

    return replace(drawn(rollout, hook, hook.name, provides), program=program)


@part
def top_nsigma(n: float = 1.0) -> Rollout:
    """Independent samples, drawn among the tokens of `sampling.filters.top_nsigma`."""
    return replace(hooked(group(), filters.top_nsigma(n)), name=f"top_nsigma({n:g})")
