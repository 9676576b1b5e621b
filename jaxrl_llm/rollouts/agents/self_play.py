"""Games of several players, in which the policy is each of them, or plays against earlier ones."""

from asyncio import gather
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from jaxrl_llm.core.arguments.ranges import Count
from jaxrl_llm.core.population import League
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.rollout import AHEAD, Rollout, Task
from jaxrl_llm.data.chat.rendering import PromptFormat
from jaxrl_llm.environments.protocol import MakeEnvironment
from jaxrl_llm.rollouts.agents.compaction import Compact, Limits
from jaxrl_llm.rollouts.agents.conversation import Conversation
from jaxrl_llm.rollouts.agents.environment_calls import tell_of_beginnings
from jaxrl_llm.rollouts.agents.path import AgentSettings, begun, played
from jaxrl_llm.rollouts.agents.program import graded, of_agents, plays
from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.programs import altered, group
from jaxrl_llm.utils.errors import InputError, shown


@part
def self_play(
    environment: MakeEnvironment,
    players: int = 2,
    turns: Count = 8,
    turn_tokens: Count | None = None,
    episode_tokens: Count | None = None,
    turn_rewards: bool = False,
    greedy: bool = False,
    system: str | None = None,
    format: PromptFormat | None = None,
    context_tokens: Count | None = None,
    compact: Compact | None = None,
    ahead: Count | None = AHEAD,
) -> Rollout:
    """Groups of games, in which the policy is each of the players.

    environment: makes environments whose observations name the player who is to reply, `Observation.player`, and whose
    `close` returns a reward for each. A task's samples are its games. Each player sees what it is told alone, in a
    conversation of its own with its own reward: the limits, as those of `agent`, are those of a player. Roles differ,
    and so may what they can win: the conversations of a player are compared with those of the same player in the
    group's other games, info["part"]. A player who never replied has a row that is not scored, and a game that is cut
    off is so for all.

    Otherwise as `agent`. Raises InputError unless players is a whole number, at least 2.
    """
    if isinstance(players, bool) or not isinstance(players, int) or players < 2:
        raise InputError(f"players is {shown(players)}, but must be a whole number, at least 2: one player is an agent")
    limits = Limits(turns, turn_tokens, episode_tokens, context_tokens, compact)
    settings = AgentSettings(environment, limits, turn_rewards, greedy, system, format or PromptFormat(), players)
    return replace(of_agents(plays(settings), settings, ahead), name="self_play")


MEMBER = "league_member"
SEAT = "league/seat"  # control: the player who learns


@part
def league_play(rollout: Rollout, league: League | None = None, first_seat: int | None = None) -> Rollout:
    """Games of `self_play` in which one player is the policy that learns, and all others are one of the league.

    The player and the member are drawn for each group, so that its games have one opponent and compare with each other.
    Members are drawn by the controls "league/0", "league/1" ... of the last update, probabilities up to a factor, and
    uniformly before the first. first_seat: None, or the player until the control "league/seat" of the last update says
    another. Rows are those of the policy that learns, with info["league_member"], the place of its opponent, which it
    provides. InputError for a rollout without several players, and for a player that the game has not.
    """
    settings, own = rollout.agent, league or League()
    if settings is None or settings.players < 2:
        raise InputError(
            f"a league needs a game of several players, but the rollout {rollout.name} has none: give --environment "
            "MODULE:NAME and --players 2"
        )

    if first_seat is not None and not 0 <= first_seat < settings.players:
        raise InputError(f"first_seat is {first_seat}, but the game has players 0 to {settings.players - 1}")

    async def play(tools: Tools, task: Task, number: int, seat: int, member: int) -> Conversation:
        game = await begun(tools, task, number, settings)
        for player, one in enumerate(game.seats):
            one.snapshot = None if player == seat else member
        return (await played(game)).seats[seat]

    async def program(tools: Tools, task: Task) -> list[Episode]:
        random = tools.random("league")
        drawn, turn = int(random.integers(settings.players)), tools.controls.get(SEAT, first_seat)
        seat = drawn if turn is None else int(turn) % settings.players
        member = int(random.choice(own.size, p=mixture_in(tools.controls, own.size)))
        found = await gather(*(play(tools, task, number, seat, member) for number in range(task.samples)))
        tell_of_beginnings([one.world for one in found if one.world is not None])
        rows = await graded(tools, found, settings.turn_rewards)
        return [row.with_info(**{MEMBER: float(member)}) for of_one in rows for row in of_one]

    return replace(altered(rollout, program, "league", {MEMBER}, league=own), agent=None)


@part
def against_league(league: League, first_seat: int | None = None) -> Rollout:
    """What `league_play` makes of the run's games, of which there are none without an environment."""
    return replace(group(), wrap=lambda rollout: league_play(rollout, league, first_seat))


def mixture_in(controls: Mapping[str, float], size: int) -> np.ndarray[Any, Any]:
    """f64[size]: how often each member is drawn; uniform where nothing is known.

    >>> mixture_in({"league/0": 3.0, "league/1": 1.0}, 2).tolist(), mixture_in({}, 2).tolist()
    ([0.75, 0.25], [0.5, 0.5])
    """
    found = np.asarray([controls.get(f"league/{place}", 0.0) for place in range(size)], np.float64)
    found = np.maximum(found, 0.0) if found.sum() > 0 else np.ones(size)
    return np.asarray(found / found.sum())
