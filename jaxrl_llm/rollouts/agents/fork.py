"""Groups of episodes with environments that fork after observations, where these made the policy less certain."""

from __future__ import annotations

import logging
import math
from asyncio import gather
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated

import numpy as np

from jaxrl_llm.core.arguments.ranges import Count, Fraction, NonNegative, Range
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.rollout import Rollout, Task
from jaxrl_llm.rollouts.agents.environment_calls import EnvironmentFailed
from jaxrl_llm.rollouts.agents.metrics import FORKED
from jaxrl_llm.rollouts.agents.path import AgentSettings, Path, begun
from jaxrl_llm.rollouts.agents.program import graded, with_episodes
from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.programs import group
from jaxrl_llm.rollouts.trees import by_prefix

logger = logging.getLogger("jaxrl_llm.rollouts")
Forks = Callable[[float, float, int], bool]
"""Of the change of the entropy, a uniform number in [0, 1), and the rounds with forks just before: whether to fork."""


@part
def by_chance(probability: Fraction = 0.5, weight: float = 0.2, damping: NonNegative = 0.0) -> Forks:
    """Fork where clip((u + weight dH) max(0, 1 - damping l), 0, 1) >= 1 - probability.

    With damping 0 that has the probability `probability` + weight dH. dH: change of the entropy; l: see `Forks`.
    """

    def forks(change: float, uniform: float, rounds: int) -> bool:
        raised = (uniform + weight * change) * max(0.0, 1.0 - damping * rounds)
        return min(max(raised, 0.0), 1.0) >= 1.0 - probability

    return forks


def whole_paths(budget: int, at_question: float, of_turns: float, beta: float) -> int:
    """How many of `budget` paths begin at the question: floor(budget sigmoid(beta (H_question - H_turns))) + 1, or all.

    >>> whole_paths(16, 1.0, 2.0, 0.5), whole_paths(16, 2.0, 1.0, 0.5), whole_paths(4, 9.0, 0.0, 1.0)
    (7, 10, 4)
    """
    return min(math.floor(budget / (1 + math.exp(-beta * (at_question - of_turns)))) + 1, budget)


def reply_entropy(entropies: Sequence[float] | np.ndarray, first: int, vocabulary: int, summed: bool = False) -> float:
    """Mean or sum of the entropies of a reply's first tokens over the logarithm of the vocabulary's size; 0 without.

    >>> round(reply_entropy([2.0, 1.0, 9.0], 2, 10), 4), round(reply_entropy([2.0, 1.0, 9.0], 2, 10, summed=True), 4)
    (0.6514, 1.3029)
    """
    drawn = np.asarray(entropies, np.float64)[:first]
    if not drawn.size:
        return 0.0
    return float(np.sum(drawn) if summed else np.mean(drawn)) / math.log(max(vocabulary, 2))


@part
def forking_agents(
    forks: Forks,
    initial: Count | None = 8,
    branches: Annotated[int, Range(least=2)] = 2,
    first_tokens: Count = 20,
    beta: float = 0.5,
    summed: bool = False,
) -> Rollout:
    """The episodes of the run's agents as trees that fork after observations, `task.samples` in all.

    `initial` of them begin at the question. All take their turns in rounds. After each reply to an observation `forks`
    says, `branches` - 1 times, whether another episode goes on from there with a reply of its own and a copy of the
    environment, until there are as many as the group has samples. If all are over before, the others begin at the
    question. initial None: a first episode is played to its end, and `whole_paths` of the entropy of its first reply,
    the mean of its replies', and beta says how many begin there, it included.

    The entropy of a reply is the mean over its first `first_tokens` tokens, or with `summed` their sum, divided by the
    logarithm of the vocabulary's size; its change is that to the first reply of the episode. Each episode has all of
    its tokens, those from before a fork too. Provides node, the same for tokens that episodes share. It goes around the
    run's agents; InputError around another rollout.
    """

    def entropy_of(path: Path) -> float:
        drawn = path.one.rows[-1].segments[-1].tokens.entropy
        return reply_entropy(drawn, first_tokens, len(path.tools.tokenizer), summed)

    async def grown(tools: Tools, task: Task, settings: AgentSettings) -> list[Path]:
        paths, at_first, level = list[Path](), dict[int, float](), 0
        begins = dict[int, int]()  # the first turns of forks, which have no observation of their own before them

        async def begin(number: int) -> None:
            first = len(paths)
            paths.extend(await gather(*(begun(tools, task, first + i, settings) for i in range(number))))
            for path in paths[first:]:
                path.one.info[FORKED] = 0.0

        wanted = min(initial or 1, task.samples)
        await begin(wanted)
        if initial is None:
            of_turns = list[float]()
            while not paths[0].over:
                await paths[0].draw()
                of_turns.append(entropy_of(paths[0]))
                await paths[0].hear()
            if of_turns:
                wanted = whole_paths(task.samples, of_turns[0], float(np.mean(of_turns)), beta)
            await begin(wanted - 1)
        while True:
            if not (live := [path for path in paths if not path.over]):
                if len(paths) == task.samples:
                    break
                await begin(task.samples - len(paths))
                continue
            await gather(*(path.draw() for path in live))
            chosen = list[tuple[Path, int]]()
            for path in live:
                now = entropy_of(path)
                change = now - at_first.setdefault(path.number, now)
                for place in range(branches - 1 if path.turn > begins.get(path.number, 0) else 0):
                    drawn = float(tools.random(f"fork {path.number}/{path.turn}/{place}").random())
                    if len(paths) + len(chosen) < task.samples and forks(change, drawn, level):
                        number = len(paths) + len(chosen)
                        at_first[number], begins[number] = at_first[path.number], path.turn
                        chosen.append((path, number))
            made = await gather(*(forked(path, number) for path, number in chosen))
            await gather(*(path.hear() for path in live))
            level = level + 1 if chosen else 0
            paths += made
        await gather(*(path.close() for path in paths))
        return paths

    async def play(tools: Tools, task: Task, settings: AgentSettings) -> list[Episode]:
        found = [path.one for path in await grown(tools, task, settings)]
        rows = await graded(tools, found, settings.turn_rewards)
        return shared_nodes([row for of_one in rows for row in of_one])

    def around(inner: Rollout) -> Rollout:
        least = max(inner.demands.min_samples, (initial or 1) + 1)
        what = "the episodes of agents fork after observations"
        return with_episodes(inner, play, what, "forking", {"node"}, min_samples=least)

    return replace(group(), wrap=around)


async def forked(path: Path, number: int) -> Path:
    """The episode before the reply that was drawn last, as another sample. Not scored if there can be no copy."""
    fork = path.before(path.turn, number)
    try:
        await fork.copy_world()
        fork.one.info[FORKED] = 1.0
    except EnvironmentFailed as error:
        logger.warning(
            "sample %d of prompt %d does not fork, and is not scored: its environment is not copied: %s",
            *(number, path.task.prompt_id, error),
        )
        fork.one.scored, fork.over, fork.world = False, True, None
        fork.one.info[FORKED] = 0.0
    return fork


def shared_nodes(rows: Sequence[Episode]) -> list[Episode]:
    """The rows with info["node"] by their common tokens, `trees.by_prefix`; rows of other prompts share none."""
    out, first = list(rows), 0.0
    for prompt in dict.fromkeys(row.prompt for row in rows):
        places = [i for i, row in enumerate(rows) if row.prompt == prompt]
        found = by_prefix([rows[i] for i in places])
        highest = first
        for i, one in zip(places, found, strict=True):
            nodes = [node + first for node in np.atleast_1d(one.info["node"]).tolist()]
            highest = max([highest, *(node + 1 for node in nodes)])
            out[i] = one.with_info(node=nodes)
        first = highest
    return out
