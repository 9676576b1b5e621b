"""Rollout programs: how one group of episodes comes to be, as ordinary async functions of (tools, task)."""

from __future__ import annotations

from asyncio import gather
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxrl_llm.buckets import bucket
from jaxrl_llm.errors import InputError, shown
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.tools import Task, Tools

OBSERVATION = 32  # tokens of an observation that the engine has room for at its start
Program = Callable[[Tools, Task], Awaitable[Sequence[Episode]]]


@dataclass(frozen=True)
class Rollout:
    """A program, and what a run must know of it before the first group."""

    program: Program
    name: str = "program"
    provides: frozenset[str] = field(default_factory=frozenset)
    """What its episodes have beyond tokens, of the names in `jaxrl_llm.needs`."""
    columns: tuple[str, ...] = ()
    """Columns of the data set that it reads."""
    turns: int = 1
    """Completions that an episode has one after another at most: the engine starts with room for them."""

    def __post_init__(self) -> None:
        if not callable(self.program):
            raise InputError(f"a rollout's program is {shown(self.program)}, but must be an async function")

    def room(self, limit: int) -> int:
        """Tokens after the prompt for which the engine starts with room; it grows where an episode needs more."""
        return bucket(limit, least=4) if self.turns == 1 else bucket(self.turns * (limit + OBSERVATION))


async def _group(tools: Tools, task: Task) -> list[Episode]:
    return list(await gather(*(tools.sample(task.prompt, number=i) for i in range(task.samples))))


def group() -> Rollout:
    """`task.samples` independent samples of the prompt (GRPO and its kin)."""
    return Rollout(_group, "group")


def with_greedy_baseline(rollout: Rollout) -> Rollout:
    """Another rollout, and beside it the greedy completion of the prompt, whose reward is a baseline (ReMax).

    Provides info["greedy_reward"]; the greedy completion itself is not trained on.
    """

    async def greedy_reward(tools: Tools, task: Task) -> float:
        (best,) = await tools.score([await tools.sample(task.prompt, number=0, greedy=True)])
        assert best.reward is not None
        return best.reward

    async def program(tools: Tools, task: Task) -> list[Episode]:
        episodes, baseline = await gather(rollout.program(tools, task), greedy_reward(tools, task))
        return [episode.with_info(greedy_reward=baseline) for episode in episodes]

    return replace(
        rollout, program=program, name=f"{rollout.name}, greedy", provides=rollout.provides | {"greedy_reward"}
    )


def hinted(column: str = "hint", above: float = 0.0) -> Rollout:
    """Try a group again with a hint where no sample of it has a reward above `above`.

    column: of the data set; its text follows the prompt and is conditioned on. A row without a hint is not tried
    again. The second attempt takes the place of the first. Provides info["guided"], 1 for episodes with the hint.
    """

    async def program(tools: Tools, task: Task) -> list[Episode]:
        first = await tools.score(await _group(tools, task))
        hint = task.row.get(column)
        if not hint or any(episode.reward is not None and episode.reward > above for episode in first):
            return [episode.with_info(guided=0.0) for episode in first]
        prompt = (*task.prompt, *tools.encode(str(hint)))
        again = [tools.sample(prompt, number=task.samples + i) for i in range(task.samples)]
        return [episode.with_info(guided=1.0) for episode in await tools.score(await gather(*again))]

    return Rollout(program, f"hinted({column})", frozenset({"guided"}), (column,))


def forked(*places: int) -> Rollout:
    """Samples that fork: at each of the places (tokens of the completion, ascending), every episode splits in two.

    A trunk has 2 ** len(places) leaves, and there are as many trunks as `task.samples` needs. A fork shares its
    parent's tokens, which both rows hold as actions. A completion that ends before a fork takes the place of all leaves
    that it would have had. Raises InputError for places that do not ascend from 1.
    """
    if not places or list(places) != sorted(set(places)) or places[0] < 1:
        raise InputError(f"forks are at {shown(places)}, but must be at ascending numbers of tokens, from 1")

    async def grow(
        tools: Tools, task: Task, episode: Episode, number: int, left: Sequence[int], n: int
    ) -> list[Episode]:
        """`n` leaves from an episode, fewer where a completion ends before it forks; numbers: from `number` on."""
        limit = task.limit - episode.size
        if not left or n == 1:
            return [await tools.sample(episode, number=number, limit=limit)]
        reached = await tools.sample(episode, number=number, limit=limit, pause_at=left[0] - episode.size)
        if reached.ended or reached.truncated:
            return [reached] * n
        half = n // 2
        kept = grow(tools, task, reached, number, left[1:], n - half)
        other = grow(tools, task, reached, number + n - half, left[1:], half)
        return [leaf for leaves in await gather(kept, other) for leaf in leaves]

    async def program(tools: Tools, task: Task) -> list[Episode]:
        leaves = 2 ** len(places)
        trunks = []
        for start in range(0, task.samples, leaves):
            trunk = Episode(task.prompt, task.prompt_id, start)
            trunks.append(grow(tools, task, trunk, start, places, min(leaves, task.samples - start)))
        return [leaf for part in await gather(*trunks) for leaf in part]

    return Rollout(program, f"forked({', '.join(map(str, places))})")


def conversation(environment: Callable[[dict[str, Any]], Any], turns: int = 2) -> Rollout:
    """Episodes of several turns with an environment.

    environment: makes one for a row of the data set. Its `step(text)` takes what the policy wrote and returns
    (observation, done): the observation is given to the policy before its next turn; `turns` bounds them.
    Provides turns.
    The rewards are those of the run, on the whole conversation.
    """

    async def one(tools: Tools, task: Task, number: int) -> Episode:
        world = environment(dict(task.row))
        episode = await tools.sample(task.prompt, number=number)
        for turn in range(1, turns):
            text = tools.decode(episode.last)
            observation, done = await tools.call(world.step, text, name=f"{number}/{turn}", again=True)
            if done or episode.truncated:
                break
            episode = await tools.sample(episode + tools.given(str(observation)))
        return episode

    async def program(tools: Tools, task: Task) -> list[Episode]:
        return list(await gather(*(one(tools, task, number) for number in range(task.samples))))

    return Rollout(program, "conversation", frozenset({"turns"}), turns=turns)
