"""Prompts with a correct solution, under which the policy itself is the teacher of a failed sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.rollouts.episode import Episode


def taught(tools: Tools, episode: Episode, known: Sequence[str], which: int, text: str, right: bool) -> Episode:
    """The episode with its teacher's prompt, where it failed and something is known."""
    prompt: tuple[int, ...] = ()
    if not right and known:
        longer = tools.prompt_with(text.format(known[which]))
        prompt = longer if tools.fits((*longer, *episode.own.token.tolist())) else ()
    return replace(episode, teacher_prompt=prompt).with_info(taught=float(bool(prompt)))
