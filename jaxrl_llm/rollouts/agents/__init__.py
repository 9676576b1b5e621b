"""Agents: episodes of several turns with an environment. Names are imported on first use."""

from typing import TYPE_CHECKING

from jaxrl_llm.utils.lazy import imported_at_first_use

if TYPE_CHECKING:
    from jaxrl_llm.rollouts.agents.compaction import Summary, keep_last
    from jaxrl_llm.rollouts.agents.program import (
        AgentSettings,
        Path,
        agent,
        begin,
        begun,
        closed,
        converse,
        draw_reply,
        ends_of,
        graded,
        hear,
        note,
        of_agents,
        player_of,
        plays,
        settings_of,
        take_turn,
    )

__all__ = [
    "AgentSettings",
    "Path",
    "Summary",
    "agent",
    "begin",
    "begun",
    "closed",
    "converse",
    "draw_reply",
    "ends_of",
    "graded",
    "hear",
    "keep_last",
    "note",
    "of_agents",
    "player_of",
    "plays",
    "settings_of",
    "take_turn",
]
_MODULES = {
    "AgentSettings": "program",
    "Path": "program",
    "Summary": "compaction",
    "agent": "program",
    "begin": "program",
    "begun": "program",
    "closed": "program",
    "converse": "program",
    "draw_reply": "program",
    "ends_of": "program",
    "graded": "program",
    "hear": "program",
    "keep_last": "compaction",
    "note": "program",
    "of_agents": "program",
    "player_of": "program",
    "plays": "program",
    "settings_of": "program",
    "take_turn": "program",
}
__getattr__ = imported_at_first_use(__name__, _MODULES)
