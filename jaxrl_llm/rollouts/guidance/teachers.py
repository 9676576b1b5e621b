"""Prompts with a correct solution, under which the policy itself is the teacher of a failed sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jaxrl_llm.core.repr import part
from jaxrl_llm.core.rollout import Rollout
from jaxrl_llm.rollouts.context import Task, Tools
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.guidance.prompted import texts_of
from jaxrl_llm.rollouts.guidance.repair import Succeeds, sampled

SOLVED = "\n\nA correct solution is:\n\n{}\n\nNow answer the question yourself."


@part
def with_right_siblings(succeeds: Succeeds, column: str | None = None, text: str = SOLVED) -> Rollout:
    """A group of samples, of which each failed one has a teacher's prompt: with the text of one that succeeded.

    succeeds: a function of a scored episode, see `repair.succeeds`. Each failed sample draws one of those that
    succeeded. Where none did, `column` of the data set may have other information: feedback, or a solution. text: how
    it is written after the prompt. A sample that does not fit into the model's context behind it has no teacher.

    Provides teacher_tokens (`batch.teacher_tokens`); info["taught"] is 1 for samples with a teacher's prompt.
    """

    async def program(tools: Tools, task: Task) -> list[Episode]:
        found = await sampled(tools, task.prompt, 0, task.samples)
        right = [tools.decode(one.own.token.tolist()) for one in found if succeeds(one)]
        known = right or (texts_of(task.row.get(column), column) if column is not None else [])
        drawn = tools.random("teacher").integers(0, max(len(known), 1), len(found))
        return [taught(tools, one, known, int(i), text, succeeds(one)) for one, i in zip(found, drawn, strict=True)]

    return Rollout(program, "with_right_siblings", frozenset({"teacher_tokens"}), () if column is None else (column,))


def taught(tools: Tools, episode: Episode, known: Sequence[str], which: int, text: str, right: bool) -> Episode:
    """The episode with its teacher's prompt, where it failed and something is known."""
    prompt: tuple[int, ...] = ()
    if not right and known:
        longer = tools.prompt_with(text.format(known[which]))
        prompt = longer if tools.fits((*longer, *episode.own.token.tolist())) else ()
    return replace(episode, teacher_prompt=prompt).with_info(taught=float(bool(prompt)))
