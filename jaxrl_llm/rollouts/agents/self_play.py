"""Games of several players, in which the policy is each of them."""

from __future__ import annotations

from dataclasses import replace

from jaxrl_llm.core.arguments.ranges import Count
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.rollout import AHEAD, Rollout
from jaxrl_llm.data.chat.rendering import PromptFormat
from jaxrl_llm.environments.protocol import MakeEnvironment
from jaxrl_llm.rollouts.agents.compaction import Compact
from jaxrl_llm.rollouts.agents.limits import Limits
from jaxrl_llm.rollouts.agents.path import AgentSettings
from jaxrl_llm.rollouts.agents.program import of_agents, plays
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
