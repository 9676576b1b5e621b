"""Rollouts that are drawn otherwise: through a hook of the sampler, with soft tokens, or by members of a population."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from jaxrl_llm.core.hooks import Hook, first_state
from jaxrl_llm.core.population import Population
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.rollout import Rollout, Task, drawn
from jaxrl_llm.core.soft_thinking import SoftThinking
from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.rollouts.episode import Episode
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


@part
def softly(rollout: Rollout, thinking: SoftThinking) -> Rollout:
    """A rollout whose samples think softly, see `core.soft_thinking`, until they write the token that ends thoughts.

    All that is drawn from the policy that learns does so: at a temperature of its own too, and without noise where it
    is greedy. The update sees the same mixtures (`Trajectories.thoughts`). Raises InputError for a rollout that goes on
    after observations, draws from other policies, or is drawn otherwise already.
    """
    if not isinstance(thinking, SoftThinking):
        raise InputError(f"thinking is {shown(thinking)}, but must be a jaxrl_llm.core.soft_thinking.SoftThinking")
    return drawn(rollout, thinking, "softly")


@part
def soft_thoughts(thinking: SoftThinking) -> Rollout:
    """The run's own rollout, `softly`; else a group of samples."""
    return replace(softly(group(), thinking), wrap=lambda rollout: softly(rollout, thinking))


MEMBERS = frozenset({"member", "member_seed"})


@part
def evolved(rollout: Rollout, population: Population) -> Rollout:
    """A rollout in which sample i of the j-th prompt of a step, of g samples each, is that of member j g + i, greedy.

    All randomness is in the weights, see `core.population`. Two members that share their noise answer the same prompt
    where g is even. Samples at a temperature of their own, greedy ones, those of evaluations and of a reference policy
    are the policy's. It provides info["member"], the member's number, and info["member_seed"], the seed of the noise.
    Raises InputError for a rollout that is drawn otherwise already.
    """
    if not isinstance(population, Population):
        raise InputError(f"the population is {shown(population)}, but must be a jaxrl_llm.core.population.Population")
    return drawn(rollout, population, "evolved", MEMBERS)


@part
def members(population: Population) -> Rollout:
    """The run's own rollout, such as the agents of an environment, `evolved`; else a group of samples."""
    own = evolved(group(), population)
    return replace(own, wrap=lambda rollout: evolved(rollout, population))
