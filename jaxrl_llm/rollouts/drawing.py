"""Draw the prompts of a step from a curriculum."""

from __future__ import annotations

from typing import Any

from jaxrl_llm.data.prompt_set import PromptSet
from jaxrl_llm.errors import InputError
from jaxrl_llm.rollouts.sources import Curriculum

_MOST_DROPPED = 10_000  # prompts in one step


def draw(curriculum: Curriculum, prompts: PromptSet, state: Any, count: int) -> tuple[list[int], Any, int]:
    """(ids of `count` prompts, the curriculum's state after them, number of prompts dropped among them).

    Prompts that are read as they are drawn may be dropped (too long, or held out): the next ones of the curriculum take
    their places, so that the order is that of the curriculum without them. Then worker threads begin to read the
    prompts that the curriculum would draw next.

    Raises InputError for a row that cannot be read, and if nearly all prompts are dropped.
    """
    ids, state = curriculum.select(state, count)
    chosen = [int(i) for i in ids]
    if prompts.ahead is None:
        return chosen, state, 0
    prompts.ahead(chosen)
    taken, drawn = [i for i in chosen if prompts.ids[i]], len(chosen)
    while len(taken) < count:
        if drawn - len(taken) > _MOST_DROPPED:
            raise InputError(
                f"of {drawn} prompts drawn, {drawn - len(taken)} are held out or too long: raise max_prompt_tokens, or "
                "set long_prompts to truncate"
            )
        ids, state = curriculum.select(state, count - len(taken))
        prompts.ahead(ids)
        taken += [int(i) for i in ids if prompts.ids[i]]
        drawn += len(ids)
    prompts.ahead(curriculum.select(state, drawn)[0])
    return taken, state, drawn - len(taken)


def dropped_metric(count: int) -> dict[str, float]:
    """The number of prompts dropped in a step as a metric, if there are any."""
    return {"prompts/dropped": float(count)} if count else {}
