"""Agents: episodes of several turns with an environment. Names are imported on first use."""

from typing import TYPE_CHECKING

from jaxrl_llm.utils.lazy import imported_at_first_use

if TYPE_CHECKING:
    from jaxrl_llm.rollouts.agents.compaction import Summary, keep_last
    from jaxrl_llm.rollouts.agents.path import AgentSettings
    from jaxrl_llm.rollouts.agents.program import agent

__all__ = ["AgentSettings", "Summary", "agent", "keep_last"]
_MODULES = {"compaction": "Summary keep_last", "path": "AgentSettings", "program": "agent"}
__getattr__ = imported_at_first_use(__name__, _MODULES)
