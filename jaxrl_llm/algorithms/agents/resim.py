import logging
import math
from asyncio import gather
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from jaxrl_llm.advantages.turns import needs_turns
from jaxrl_llm.algorithms.agents.r3l import from_pivot
from jaxrl_llm.algorithms.classic.sft import as_right
from jaxrl_llm.algorithms.method import Algorithm, method, run_needs
from jaxrl_llm.core.annotations import Count, Ours, Paper
from jaxrl_llm.core.parts import chain, stateless
from jaxrl_llm.data.chat.calls import Message
from jaxrl_llm.objectives import imitation, token_mean
from jaxrl_llm.rollouts.agents.conversation import finished
from jaxrl_llm.rollouts.agents.environment_calls import EnvironmentFailed
from jaxrl_llm.rollouts.agents.messages import merged
from jaxrl_llm.rollouts.agents.path import AgentSettings, Path, begun
from jaxrl_llm.rollouts.agents.program import agents_part, ends_of
from jaxrl_llm.rollouts.agents.restarts import PIVOT
from jaxrl_llm.rollouts.episode import with_reply
from jaxrl_llm.rollouts.programs import Episode, Task, Tools

logger = logging.getLogger("jaxrl_llm.rollouts")
FORESEE = """This is not said in the task. Ways to go on were tried out in copies of the environment:

{ways}

Write your next reply with this knowledge, as if you had foreseen it: say what each way leads to, compare them, and \
choose. Do not mention that they were tried out."""


@method(paper="arXiv 2510.09577", test="test_resim.py::test_resim_learns_replies_that_have_seen_what_follows")
@run_needs(
    episode="rows of one episode",
    first_turn="the order of these rows",
    turns="episodes of several turns, whose states are gone on from in copies of the environment",
)
def resim(branches: Ours[Count] = 4, depth: Paper[Count] = 5, success: Ours[float] = 0.0) -> Algorithm:
    """ReSim, the first stage of Dyna-Mind.

    Supervised learning to foresee. Before each reply of an episode the policy plays `branches` ways on, each of at most
    `depth` replies, in copies of the environment. It is told what each way said and saw, and its value, and writes the
    reply with this knowledge; the episode goes on with that reply. The episodes with R > success are learnt, all
    replies of them, without what the policy was told. The loss is -log pi, a mean over all these tokens of a step:

        loss = -sum_t log pi(y_t | s, y_<t) / number of tokens,   y ~ pi(. | s, ways)

    The value of a way is what the environment gives for it: the rewards of its turns, and the final reward of the copy
    as the way left it. The paper's value function is a model, and another language model writes the reply; here the
    policy does, so that nothing but the environment is needed. A reply that nothing could be tried out for, as there is
    no copy or no room, is an ordinary one. What we read of the paper does not say which episodes are learnt.
    `dyna_grpo` is the second stage, which a run begins with --model and the export of this one.
    """
    return Algorithm(
        chain(needs_turns(), from_pivot(), stateless(as_right)),
        imitation(average=token_mean(), metric="nll"),
        rollout=foreseeing(branches, depth, success),
    )


class Way(NamedTuple):
    """What followed in a copy of the environment."""

    said: Sequence[Message]
    value: float


def ways_text(ways: Sequence[Way]) -> str:
    """The ways as a text, from 1: their messages, a line each, and their values.

    >>> print(ways_text([Way([{"role": "assistant", "content": "up"}, {"role": "user", "content": "wall"}], -0.5)]))
    Way 1, of value -0.5:
    you: up
    then: wall
    """
    lines = list[str]()
    for number, way in enumerate(ways, start=1):
        lines.append(f"Way {number}, of value {way.value:g}:")
        lines += [f"{'you' if one['role'] == 'assistant' else 'then'}: {one.get('content') or ''}" for one in way.said]
    return "\n".join(lines)


async def tried(path: Path, number: int, depth: int) -> Way | None:
    """At most `depth` replies from where an episode is, as sample `number`; None without a copy or a value."""
    seats = [one.copy(number - path.number) for one in path.seats]
    way = replace(path, number=number, seats=seats, past=list(path.past))
    try:
        await way.copy_world()
    except EnvironmentFailed as error:
        logger.warning("prompt %d: %s; a reply of sample %d is not foreseen", path.task.prompt_id, error, path.number)
        return None
    known, rewards = len(way.one.said), len(way.one.rewards)
    for _ in range(depth):
        if way.over:
            break
        await way.take_turn()
    await way.close()
    value = math.fsum(way.one.rewards[rewards:]) + way.one.final
    return Way(way.one.said[known:], value) if way.one.scored and math.isfinite(value) else None


async def foreseen(path: Path, ways: Sequence[Way], ask: str, number: int) -> Episode:
    """The next reply of an episode, as the last segment of a row: after the ways, where they leave room for it."""
    one, tools = path.one, path.tools
    assert path.chat is not None
    row, room = one.rows[-1], one.room(path.task, path.settings.limits)
    if ways:
        told: Message = {"role": "user", "content": ask.format(ways=ways_text(ways))}
        prompt = tuple(path.chat.begin(merged([*one.messages, told])))
        if tools.fits(prompt):
            return await tools.sample(Episode(prompt, row.prompt_id, number), limit=room)
    return await tools.sample(row, number=number, limit=room)


@agents_part("the replies of agents see what follows", "foreseeing", {PIVOT})
async def foreseeing(
    tools: Tools,
    task: Task,
    settings: AgentSettings,
    branches: Count = 4,
    depth: Count = 5,
    success: float = 0.0,
    ask: str = FORESEE,
) -> list[Episode]:
    """The episodes of the run's agents, whose replies have seen what follows from others (ReSim, 2510.09577).

    See `resim`. ask: what the policy is told before a reply, with the ways in place of {ways}. Provides pivot: 0 for
    rows of episodes with a reward above `success`, the number of turns for others. It goes around the run's agents;
    InputError around another rollout. Alone it is a group of ordinary samples.
    """
    G, each = task.samples, branches + 1
    wide = replace(task, samples=G * (1 + settings.limits.turns * each))  # from G on: of ways and their replies

    async def episode(number: int) -> Path:
        path = await begun(tools, wide, number, settings)
        while not path.over:
            first = G + (path.turn * G + number) * each
            found = await gather(*(tried(path, first + n, depth) for n in range(branches)))
            ways = [way for way in found if way is not None]
            path.take(with_reply(path.one.rows[-1], await foreseen(path, ways, ask, first + branches)))
            await path.hear()
        await path.close()
        return path

    paths = await gather(*map(episode, range(G)))
    ends = await ends_of(tools, [path.one for path in paths], settings.turn_rewards)
    rows = list[Episode]()
    for path, end in zip(paths, ends, strict=True):
        value = end.score + (math.fsum(path.one.rewards) if settings.turn_rewards else 0.0)
        pivot = 0.0 if value > success else float(len(path.one.states))
        found = finished(path.one, end, settings.turn_rewards)
        rows += [row.with_info(**{**row.info, "off_prompt": 1.0, PIVOT: pivot}) for row in found]
    return rows
