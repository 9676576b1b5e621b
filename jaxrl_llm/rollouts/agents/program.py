"""Agents: episodes of several turns with an environment, as exact tokens.

What the policy samples is kept as token ids. What the environment says is rendered by the chat template's own turns,
`jaxrl_llm.data.chat.turns`, and appended. Where a template does not append, or the conversation is compacted, a new row
begins with what goes on as its prompt; both rows are trained on with the episode's reward.
"""

import math
from asyncio import gather
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from typing import Annotated, Any, Concatenate, ParamSpec

from jaxrl_llm.core.arguments.ranges import Count, Fraction, Range
from jaxrl_llm.core.parts import part, settings_first
from jaxrl_llm.core.rollout import AHEAD, OBSERVATION, Demands, Program, Rollout, Task
from jaxrl_llm.data.chat.rendering import PromptFormat
from jaxrl_llm.environments.protocol import MakeEnvironment
from jaxrl_llm.environments.recorded import RecordedSteps
from jaxrl_llm.rewards.specs import ENVIRONMENT
from jaxrl_llm.rollouts.agents.compaction import Compact, Limits
from jaxrl_llm.rollouts.agents.conversation import Conversation, finished
from jaxrl_llm.rollouts.agents.environment_calls import tell_of_beginnings
from jaxrl_llm.rollouts.agents.metrics import CALLS
from jaxrl_llm.rollouts.agents.path import AgentSettings, converse
from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.programs import altered, group, marked, scored_where
from jaxrl_llm.utils.errors import InputError

Given = ParamSpec("Given")
Play = Callable[[Tools, Task, AgentSettings], Awaitable[Sequence[Episode]]]
"""The program of a group of agents whose episodes are made as the settings say."""


@part
def agent(
    environment: MakeEnvironment,
    turns: Count = 8,
    turn_tokens: Count | None = None,
    episode_tokens: Count | None = None,
    turn_rewards: bool = False,
    greedy: bool = False,
    system: str | None = None,
    format: PromptFormat | None = None,
    fresh: bool = False,
    context_tokens: Count | None = None,
    compact: Compact | None = None,
    ahead: Count | None = AHEAD,
) -> Rollout:
    """Groups of episodes with an environment.

    environment: makes an environment from a row of the data set; see `environments.protocol`. turns, turn_tokens,
    episode_tokens, context_tokens, compact: see `Limits` and `rollouts.agents.compaction`. greedy: take the most
    probable tokens, as an evaluation does. system: the system message of prompts that have none. format: of the
    conversation. fresh: each observation is the whole prompt of the next turn, which is a row of its own. ahead: see
    `Demands.max_wait_steps`.

    The environment's reward is the component `environment` of the run's rewards: the sum of its final reward and those
    of all turns. turn_rewards: those of turns are the batch's `turn_rewards` instead, and the component is the final
    reward alone. A summary is a turn too, whose own reward is 0.

    An environment that fails in `reset` is made anew once; if it fails again, or in `close`, its episode is not scored.
    One that fails in `step` ends its episode there. Either is logged and counted.

    Provides turns, state_key, episode, first_turn, calls and failed_calls, and turn_rewards and, with fresh,
    fresh_prompts where asked.
    Raises InputError for compact without context_tokens, or with fresh.
    """
    limits = Limits(turns, turn_tokens, episode_tokens, context_tokens, compact, fresh)
    settings = AgentSettings(environment, limits, turn_rewards, greedy, system, format or PromptFormat())

    return of_agents(plays(settings), settings, ahead)


def plays(settings: AgentSettings) -> Program:
    """The program of episodes, each with a conversation of each player: those of the first player come first."""
    players = settings.players

    async def program(tools: Tools, task: Task) -> list[Episode]:
        games = await gather(*(converse(tools, task, number, settings) for number in range(task.samples)))
        tell_of_beginnings([game.world for game in games if game.world is not None])
        found = [game.seats[player] for player in range(players) for game in games]
        rows = await graded(tools, found, settings.turn_rewards)
        if players == 1:
            return [row for of_one in rows for row in of_one]
        return [row.in_part(n // task.samples) for n, of_one in enumerate(rows) for row in of_one]

    return program


def of_agents(program: Program, settings: AgentSettings, ahead: int | None = AHEAD) -> Rollout:
    """The rollout of a program whose episodes are conversations, one of each player.

    ahead: see `Demands.max_wait_steps`.
    """
    limits, turn_rewards = settings.limits, settings.turn_rewards
    provides = {"turns", "state_key", "episode", "first_turn", *CALLS}
    provides |= ({"turn_rewards"} if turn_rewards else set()) | ({"fresh_prompts"} if limits.fresh else set())
    longest = [limits.episode_tokens, limits.context_tokens]
    if limits.episode_tokens is None and limits.turn_tokens is not None and not limits.fresh:
        longest.append(limits.turns * (limits.turn_tokens + OBSERVATION))
    each = settings.players * (limits.turns if limits.fresh or limits.compact is not None else 1)
    return Rollout(
        program,
        "agent",
        frozenset({*provides, ENVIRONMENT}),
        agent=settings,
        demands=Demands(
            turns=1 if limits.fresh else limits.turns,
            variable_size=True,
            longest=min((one for one in longest if one is not None), default=None),
            max_episodes=None if each == 1 else (lambda samples: each * samples),
            max_wait_steps=ahead,
        ),
    )


def with_episodes(
    agents: Rollout, play: Play, what: str, name: str, provides: Iterable[str] = (), whole: str = "", **demands: Any
) -> Rollout:
    """A rollout of agents whose groups are what `play` makes of them.

    what: it does to them, which begins the InputError for a rollout without agents of one player. name: appended to
    that of the rollout. provides: beside what it does. whole: of episodes that must not be compacted, the InputError
    for those that may be. demands: the fields of its `Demands` that differ.
    """
    settings = agents.agent
    if settings is None or settings.players > 1:
        raise InputError(
            f"{what}, but the rollout {agents.name} has none of one player: give --environment MODULE:NAME, "
            "--tools, or a --rollout that returns rollouts.agents.agent(ENVIRONMENT)"
        )
    if whole and settings.limits.compact is not None:
        raise InputError(whole)

    return altered(agents, lambda tools, task: play(tools, task, settings), name, provides, **demands)


def agents_part(
    what: str,
    name: str,
    marks: Iterable[str] = (),
    *,
    provides: Iterable[str] = (),
    whole: str = "",
    least: Callable[..., int] = lambda **_: 1,
    rows: Callable[..., int] = lambda inner, samples, **_: inner.rows(samples),
) -> Callable[
    [Callable[Concatenate[Tools, Task, AgentSettings, Given], Awaitable[Sequence[Episode]]]], Callable[Given, Rollout]
]:
    """Decorate an async function of tools, a task, settings of agents and settings of its own: given the latter, it is
    a rollout that goes around the run's agents by `with_episodes`, and is a group alone.

    name: may hold own settings in braces. marks: beside provides, numbers that the episodes of a group alone have as 0.
    least, rows: of the own settings as keyword arguments, the fewest samples of a group; and of the agents, a number of
    samples and these, the most rows of a group.
    """

    def made(play: Any) -> Rollout:
        def around(inner: Rollout) -> Rollout:
            return with_episodes(
                inner, play, what, name.format(**play.settings), {*provides, *marks}, whole,
                min_samples=max(inner.demands.min_samples, least(**play.settings)),
                max_episodes=lambda samples: rows(inner, samples, **play.settings),
            )  # fmt: skip

        alone = marked(group(), **dict.fromkeys(marks, 0.0)) if marks else group()
        return replace(alone, wrap=around)

    return lambda function: settings_first(function, 3, made, Rollout)


async def graded(
    tools: Tools, found: Sequence[Conversation], turn_rewards: bool, more: Sequence[Mapping[str, float]] = ()
) -> list[list[Episode]]:
    """The rows of each finished conversation with their rewards. more: see `ends_of`."""
    ends = await ends_of(tools, found, turn_rewards, more)
    return [finished(one, end, turn_rewards) for one, end in zip(found, ends, strict=True)]


async def ends_of(
    tools: Tools, found: Sequence[Conversation], turn_rewards: bool, more: Sequence[Mapping[str, float]] = ()
) -> list[Episode]:
    """The last row of each episode, scored by the run's reward functions; NaN where the environment gave no reward.

    more: components of each one's reward beside the environment's; none has any by default. One that is NaN, such as a
    verdict that cannot be read, leaves the episode without a score: other rewards would count it as 0.
    """
    others = more or [{}] * len(found)
    ends = [
        replace(one.rows[-1], rewards={ENVIRONMENT: one.component(turn_rewards), **own}, talk=one.talk)
        for one, own in zip(found, others, strict=True)
    ]
    known = [one.scored and not any(map(math.isnan, own.values())) for one, own in zip(found, others, strict=True)]
    return await scored_where(tools, ends, known)


@part
def semi_online(column: str = "steps", patches: Annotated[int, Range(least=-1)] = 2, turns: Count = 16) -> Rollout:
    """Groups of episodes on the trajectory in the row's `column` (`environments.recorded.RecordedSteps`).

    patches: replies of an episode that are replaced by the expert's where they deviate; -1: all. turns: most steps.
    Each step is a row, with a reward of its own, and its prompt is the dialogue so far. The final reward, the component
    `environment`, is the share of the steps that matched.
    """

    rollout = agent(lambda row: RecordedSteps(row, column, patches), turns, turn_rewards=True, fresh=True)
    return replace(rollout, name=f"semi_online({column})", columns=(column,))


def are_similar(one: str, other: str, least: float) -> bool:
    """Whether 2 (characters in common blocks) / (characters of both), as difflib has it, is at least `least`."""
    matcher = SequenceMatcher(None, one, other, autojunk=False)
    bounds = (matcher.real_quick_ratio, matcher.quick_ratio, matcher.ratio)  # the first two are cheap upper bounds
    return all(ratio() >= least for ratio in bounds)


def joined(states: Iterable[str], least: float) -> dict[str, str]:
    """The state that stands for each: the first one before it that is similar to it, else itself.

    >>> joined(["You are in room 12.", "You are in room 13.", "You win."], 0.9)
    {'You are in room 12.': 'You are in room 12.', 'You are in room 13.': 'You are in room 12.', 'You win.': 'You win.'}
    """
    found = dict[str, str]()
    firsts = list[str]()
    for state in dict.fromkeys(states):
        found[state] = next((first for first in firsts if are_similar(first, state, least)), state)
        if found[state] == state:
            firsts.append(state)
    return found


@agents_part("the states of agents can be similar", "similar_states({least:g})")
async def similar_states(tools: Tools, task: Task, settings: AgentSettings, least: Fraction = 0.95) -> list[Episode]:
    """The episodes of the run's agents, where states of a group with similar texts are one (GiGPO, 2505.10978).

    Methods that compare turns in equal states (`state_key`) compare those in similar ones then. A state joins the first
    earlier one, in the order of samples and turns, of which the ratio of `difflib` is at least `least`, between 0 and
    1; at 1 these are equal ones. Its text is the environment's name of it, or its messages.

    It goes around the run's agents, and is a group alone. InputError around another rollout, and for a ratio out of
    range.
    """
    paths = await gather(*(converse(tools, task, number, settings) for number in range(task.samples)))
    found = [path.one for path in paths]
    first = joined((state for one in found for state in one.states), least)
    for one in found:
        one.states = [first[state] for state in one.states]
    return [row for of_one in await graded(tools, found, settings.turn_rewards) for row in of_one]
