"""Rollouts whose samples think with soft tokens before they answer."""

from __future__ import annotations

from dataclasses import replace

from jaxrl_llm.core.repr import part
from jaxrl_llm.core.rollout import Rollout, drawn
from jaxrl_llm.core.soft_thinking import SoftThinking
from jaxrl_llm.rollouts.programs import group
from jaxrl_llm.utils.errors import InputError, shown


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
