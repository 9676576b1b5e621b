"""Rollouts with a second set of samples at another temperature, which a controller of the method chooses."""

from __future__ import annotations

from asyncio import gather

import numpy as np

from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.rollout import Rollout
from jaxrl_llm.rollouts.context import Task, Tools
from jaxrl_llm.rollouts.episode import Episode


@part
def with_tempered(start: float, share: float = 0.25, control: str = "temperature") -> Rollout:
    """A group, and for a random `share` of the prompts as many samples again at another temperature.

    The temperature is controls[`control`] of the last update, `start` before the first. Which prompts are sampled again
    depends on prompt and step alone. Provides info["tempered"], 1 for the samples of the second set. Raises InputError
    unless start is above 0 and share within [0, 1].
    """
    check_number("with_tempered: start", start, above=0)
    check_number("with_tempered: share", share, least=0, most=1)

    async def program(tools: Tools, task: Task) -> list[Episode]:
        count = task.samples
        first = [tools.sample(task.prompt, number=i) for i in range(count)]
        if np.random.default_rng([task.prompt_id, tools.first_step]).uniform() >= share:
            return [episode.with_info(tempered=0.0) for episode in await gather(*first)]
        heat = float(tools.controls.get(control, start))
        again = [tools.sample(task.prompt, number=count + i, temperature=heat) for i in range(count)]
        episodes = await gather(*first, *again)
        return [episode.with_info(tempered=float(i >= count)) for i, episode in enumerate(episodes)]

    return Rollout(
        program,
        f"with_tempered({share:g})",
        frozenset({"tempered"}),
        ragged=share > 0,
        most=lambda G: 2 * G if share else G,
    )
