"""How long the episodes of agents may be."""

from __future__ import annotations

from dataclasses import dataclass

from jaxrl_llm.core.arguments.checks import check_fields
from jaxrl_llm.core.arguments.ranges import Count
from jaxrl_llm.rollouts.agents.compaction import Compact, Summary
from jaxrl_llm.utils.errors import InputError


@dataclass(frozen=True)
class Limits:
    """How long an episode may be."""

    turns: Count = 8
    """Replies of an episode."""
    turn_tokens: Count | None = None
    """Sampled tokens of a reply; None: the run's limit of a completion."""
    episode_tokens: Count | None = None
    """Tokens of an episode after its prompt, observations included; None: as the model's context allows."""
    context_tokens: Count | None = None
    """Tokens of a row, its prompt included; None: as the model's context allows."""
    compact: Compact | None = None
    """What a conversation goes on with when `context_tokens` is near; None: it ends there."""
    fresh: bool = False
    """Whether an observation is the whole prompt of the next turn."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.compact is not None and (self.context_tokens is None or self.fresh):
            why = "fresh prompts have nothing to compact" if self.fresh else "context_tokens says when: give it too"
            raise InputError(f"compact is given, but {why}")
        if isinstance(self.compact, Summary) and self.compact.tokens >= (self.context_tokens or 0):
            raise InputError(
                f"a summary has {self.compact.tokens} tokens, but context_tokens is {self.context_tokens}, which must "
                "hold the prompt beside it: lower one or raise the other"
            )
