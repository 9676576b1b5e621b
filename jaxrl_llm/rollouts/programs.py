"""Rollout programs: async functions of (tools, task) that sample one group of episodes."""

from __future__ import annotations

from asyncio import gather
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from jaxrl_llm.core.checks import Count
from jaxrl_llm.core.hooks import Hook
from jaxrl_llm.core.repr import layout, part
from jaxrl_llm.core.shapes import bucket
from jaxrl_llm.rollouts.context import Task, Tools
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.runtime.external_calls import AHEAD
from jaxrl_llm.selection.rows import max_variance_subset
from jaxrl_llm.utils.errors import InputError, shown

_max_variance_subset = jax.jit(max_variance_subset)
OBSERVATION = 32  # tokens per observation that the engine initially has room for
Program = Callable[[Tools, Task], Awaitable[Sequence[Episode]]]


@dataclass(frozen=True, repr=False)
class Rollout:
    """A program, and its properties that a run needs before the first group."""

    program: Program
    name: str = "program"
    provides: frozenset[str] = field(default_factory=frozenset)
    """Names of `jaxrl_llm.core.needs` that its episodes provide."""
    columns: tuple[str, ...] = ()
    """Columns of the data set that it reads."""
    turns: int = 1
    """Most completions of an episode, for which the engine initially has room."""
    least: int = 1
    """Fewest samples of a group that it needs."""
    ragged: bool = False
    """The program may return any number of episodes, at least one, and not as many as the task has samples."""
    most: Callable[[int], int] | None = None
    """Of a group's samples, the most episodes that a ragged program returns, so that `jaxrl plan` knows the memory."""

    at_once: bool = False
    """The program asks for all of its samples at the beginning. Otherwise the driver looks more often whether one has
    what it waits for, so that what it asks for next is decoded while long completions of other groups go on."""
    forks: tuple[int, ...] = ()
    """Numbers of tokens of a completion after which it forks; a run is refused that reaches none of those above 0."""
    reference: bool = False
    """Its programs also draw from the reference policy, see `Tools.sample`; that needs memory for another engine."""
    meets: bool = False
    """The programs of a step wait for each other, see `Tools.meet`; then all groups of a step begin and end in it."""
    hook: Hook | None = None
    """What tokens are drawn through at the run's temperature, see `rollouts.hooked`."""
    longest: int | None = None
    """Most tokens of an episode after its prompt, for which the engine has room; None: by `turns`."""
    ahead: int | None = AHEAD
    """Decode steps of others while an external call is answered; None: until it is. See `outside`."""
    rewards: frozenset[str] = field(default_factory=frozenset)
    """Components of the reward that its episodes have already, such as `environment`."""

    around: Callable[[Rollout], Rollout] | None = None
    """Of a method's rollout: what it makes of the run's own, such as the agents of an environment."""

    agent: Any = None
    """Of agents, how their episodes are made, `rollouts.agents.agent.AgentSettings`, which another rollout may fork."""

    def __post_init__(self) -> None:
        if not callable(self.program):
            raise InputError(f"a rollout's program is {shown(self.program)}, but must be an async function")

    __repr__ = layout

    @property
    def converses(self) -> bool:
        """Whether its episodes go on after observations."""
        return "turns" in self.provides

    def rows(self, samples: int) -> int:
        """Episodes of a group of `samples`, at most; of a ragged program that does not say so, as many as samples."""
        return samples if self.most is None else self.most(samples)

    def room(self, limit: int, context: int = 0) -> int:
        """Tokens after the prompt for which the engine initially has room. It grows if an episode needs more.

        limit: of a completion. context: tokens of the model's context, which bounds it; 0: unlimited.
        """
        if self.longest is None and self.turns == 1:
            return bucket(limit, least=4)
        wanted = self.turns * (limit + OBSERVATION) if self.longest is None else self.longest
        return bucket(min(wanted, context or wanted))


async def _group(tools: Tools, task: Task) -> list[Episode]:
    return list(await gather(*(tools.sample(task.prompt, number=i) for i in range(task.samples))))


@part
def group() -> Rollout:
    """`task.samples` independent samples of the prompt, as in GRPO."""
    return Rollout(_group, "group", at_once=True)


@part
def with_greedy_baseline(rollout: Rollout) -> Rollout:
    """A rollout that also samples the greedy completion of the prompt, whose reward is a baseline (ReMax).

    Provides info["greedy_reward"]. The greedy completion itself is not trained on.
    """

    async def greedy_reward(tools: Tools, task: Task) -> float:
        (best,) = await tools.score([await tools.sample(task.prompt, number=0, greedy=True)])
        assert best.reward is not None
        return best.reward

    async def program(tools: Tools, task: Task) -> list[Episode]:
        episodes, baseline = await gather(rollout.program(tools, task), greedy_reward(tools, task))
        return [episode.with_info(greedy_reward=baseline) for episode in episodes]

    return replace(
        rollout, program=program, name=f"{rollout.name}, greedy", provides=rollout.provides | {"greedy_reward"}
    )


@part
def with_start_value(rollout: Rollout, column: str) -> Rollout:
    """A rollout whose episodes know what their prompt's completions earned before the run.

    column: of the data set, with that mean reward. Provides info["start_value"].
    """

    async def program(tools: Tools, task: Task) -> list[Episode]:
        value = float(task.row[column])
        return [episode.with_info(start_value=value) for episode in await rollout.program(tools, task)]

    return replace(
        rollout, program=program, name=f"{rollout.name}, start value", columns=(*rollout.columns, column),
        provides=rollout.provides | {"start_value"},
    )  # fmt: skip


@part
def down_sampled(times: int = 2) -> Rollout:
    """Sample `times` as many completions as a group has, and train on those whose rewards have the largest variance.

    Sampling is cheaper than training, and among more samples there are more often both right and wrong ones (PODS:
    max-variance down-sampling, Not All Rollouts are Useful, arXiv 2504.13818). Raises InputError unless times is a
    whole number, at least 2.
    """
    if isinstance(times, bool) or not isinstance(times, int) or times < 2:
        raise InputError(f"down_sampled's times is {shown(times)}, but must be a whole number, at least 2")

    async def program(tools: Tools, task: Task) -> list[Episode]:
        numbers = range(times * task.samples)
        episodes = await tools.score(await gather(*(tools.sample(task.prompt, number=i) for i in numbers)))
        return [episodes[i] for i in most_varied([episode.reward for episode in episodes], task.samples)]

    return Rollout(program, f"down_sampled({times})", at_once=True)


def most_varied(rewards: Sequence[float | None], keep: int) -> list[int]:
    """Ascending indices of the `keep` rewards with the largest variance, which are the smallest and the largest ones.

    See `selection.rows.max_variance_subset`, also for ties. Rewards that are None or NaN are taken only if there are
    too few others.

    >>> most_varied([0.1, 0.2, 0.9, 0.4, 0.5, 1.0], 4)
    [0, 1, 2, 5]
    """
    values = np.array([np.nan if reward is None else reward for reward in rewards], np.float32)
    known, places = ~np.isnan(values), np.arange(len(rewards), dtype=np.float32)
    chosen = np.flatnonzero(_max_variance_subset(np.where(known, values, 0), known, np.float32(keep), places))
    return sorted([*chosen.tolist(), *np.flatnonzero(~known)[: keep - len(chosen)].tolist()])


@part
def forked(*places: int) -> Rollout:
    """Samples that fork: every episode splits in two at each of the places, ascending numbers of completion tokens.

    A trunk has 2 ** len(places) leaves, and there are as many trunks as `task.samples` needs. Both branches of a fork
    contain the tokens before it as actions. A completion that ends before a fork replaces all leaves that it would have
    had. Raises InputError unless places are ascending and at least 1.
    """
    if not places or list(places) != sorted(set(places)) or places[0] < 1:
        raise InputError(f"forks are at {shown(places)}, but must be at ascending numbers of tokens, at least 1")

    async def grow(
        tools: Tools, task: Task, episode: Episode, number: int, left: Sequence[int], n: int
    ) -> list[Episode]:
        """`n` leaves of an episode, with sample numbers from `number` on. They are equal if it ends before it forks."""
        limit = task.limit - episode.size
        if not left or n == 1:
            return [await tools.sample(episode, number=number, limit=limit)]
        reached = await tools.sample(episode, number=number, limit=limit, pause_at=left[0] - episode.size)
        if reached.ended or reached.truncated:
            return [reached] * n
        half = n // 2
        kept = grow(tools, task, reached, number, left[1:], n - half)
        other = grow(tools, task, reached, number + n - half, left[1:], half)
        return [leaf for leaves in await gather(kept, other) for leaf in leaves]

    async def program(tools: Tools, task: Task) -> list[Episode]:
        leaves = 2 ** len(places)
        trunks = []
        for start in range(0, task.samples, leaves):
            trunk = Episode(task.prompt, task.prompt_id, start)
            trunks.append(grow(tools, task, trunk, start, places, min(leaves, task.samples - start)))
        return [leaf for part in await gather(*trunks) for leaf in part]

    return Rollout(program, f"forked({', '.join(map(str, places))})", forks=places)


@part
def conversation(environment: Callable[[dict[str, Any]], Any], turns: Count = 2) -> Rollout:
    """Episodes of at most `turns` turns with an environment.

    environment: builds the environment for a row of the data set. Its `step(text)` takes the policy's text and returns
    (observation, done). The observation is given to the policy before its next turn. The run's reward functions score
    the whole conversation. Provides turns.
    """

    async def one(tools: Tools, task: Task, number: int) -> Episode:
        place = f"environment {number}"
        if (world := tools.held(place)) is None:
            world = tools.hold(place, environment(dict(task.row)))
        again = tools.reruns(world)
        episode = await tools.sample(task.prompt, number=number)
        for turn in range(1, turns):
            text = tools.decode(episode.last)
            observation, done = await tools.call(world.step, text, name=f"{number}/{turn}", again=again)
            if done or episode.truncated:
                break
            episode = await tools.sample(episode + tools.given(str(observation)))
        return episode

    async def program(tools: Tools, task: Task) -> list[Episode]:
        return list(await gather(*(one(tools, task, number) for number in range(task.samples))))

    return Rollout(program, "conversation", frozenset({"turns"}), turns=turns)
