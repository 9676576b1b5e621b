"""What rollouts ask environments: by way of a program's log, so that failures are recorded, counted and said."""

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

from jaxrl_llm.core.rollout import Task
from jaxrl_llm.data.chat.encode import is_conversation
from jaxrl_llm.environments.copies import Replayable
from jaxrl_llm.environments.protocol import MakeEnvironment, Observation, finite, yes_or_no
from jaxrl_llm.environments.tools.base import result_text
from jaxrl_llm.rollouts.agents.conversation import Conversation
from jaxrl_llm.rollouts.agents.metrics import FAILED_ENVIRONMENT
from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.rollouts.program_host import FAILED, NotDeterministicError
from jaxrl_llm.utils.errors import shown
from jaxrl_llm.utils.threads import called, in_thread

logger = logging.getLogger("jaxrl_llm.rollouts")
MOST = 100_000  # characters of a message from an environment


class EnvironmentFailed(Exception):
    """An environment raised, hung, or answered what is no observation."""


async def world_of(tools: Tools, task: Task, number: int, make: MakeEnvironment) -> tuple[Replayable, Observation]:
    """An environment and its first observation; made anew once if it fails.

    The samples of a group have environments of one seed, so that their rewards can be compared: that of the row's
    column `seed`, where it has a whole number there.
    """
    seed = _seed_of(tools, task)
    place = f"environment {number}"
    known: Replayable | None = tools.held(place)

    async def begin(name: str) -> Observation:
        world = tools.hold(place, await in_thread(Replayable, make, task.row, seed))
        _tell_record(tools, world, name)
        seen: Observation = await called(world.reset, dict(task.row), seed)
        _ = tuple(world.tools)  # what has none is no environment
        return seen

    try:
        seen = await observe(tools, begin, name := f"{number}/reset", name=name, of=known)
    except EnvironmentFailed:
        seen = await observe(tools, begin, name := f"{number}/reset again", name=name, of=known)
    return tools.held(place), seen


def _seed_of(tools: Tools, task: Task) -> int:
    """The seed of a group's environments, 0 to 2^31 - 1."""
    own = task.row.get("seed")
    if isinstance(own, Integral) and not isinstance(own, bool):
        return int(own) % 2**31
    return int(tools.random("environment").integers(2**31))


@functools.cache  # once for each kind of environment
def _tell_of_beginnings(kind: str) -> None:
    logger.warning(
        "the samples of a group begin differently, though they have one seed: %s draws from something else than the "
        "seed of its reset and the global generators, so that the run cannot be reproduced, and rewards of different "
        "tasks are compared; let it draw from random.Random(seed)",
        kind,
    )


def tell_of_beginnings(worlds: Sequence[Replayable]) -> None:
    """Say where environments of one group, which have one seed, begin differently."""
    if len({repr([dict(one) for one in world.seen[0].messages or ()]) for world in worlds if world.seen}) > 1:
        _tell_of_beginnings(worlds[0].kind)


async def copied(tools: Tools, world: Replayable, name: str, turns: int | None = None) -> Replayable:
    """A copy of an environment within an episode, which a fork goes on with; see `Replayable.copy`.

    name: of the call, unique in the group. The caller closes the copy too. EnvironmentFailed if there can be none.
    """
    known: Replayable | None = tools.held(name)

    async def copy() -> int:
        return len(tools.hold(name, await world.copy(turns)).seen) - 1

    await answer(tools, copy, name=name, of=known)
    return tools.held(name)


async def in_copy(tools: Tools, world: Replayable, replies: Sequence[Any], name: str) -> list[Observation]:
    """What a copy of an environment answers to replies, one after the other, until it is over or fails.

    Raises EnvironmentFailed if there is no copy.
    """
    copy = await copied(tools, world, name=f"{name}/copy")
    seen = list[Observation]()
    try:
        for number, reply in enumerate(replies):
            seen.append(await observe(tools, copy.step, reply, name=f"{name}/{number}"))
            if seen[-1].done or seen[-1].truncated:
                break
    except EnvironmentFailed as error:
        logger.warning("a simulation ends after %d actions: %s", len(seen), error)
    try:
        await answer(tools, copy.close, name=f"{name}/close")
    except EnvironmentFailed as error:
        logger.warning("the copy of a simulation does not close: %s", error)
    return seen


def failed(one: Conversation, task: Task, number: int, where: str, error: Exception) -> None:
    """Count and say that the environment of an episode failed. Raises NotDeterministicError, which ends more."""
    if isinstance(error, NotDeterministicError):
        raise error
    one.info[FAILED_ENVIRONMENT] = 1.0
    logger.warning("the environment of sample %d of prompt %d failed %s: %s", number, task.prompt_id, where, error)


async def answer(tools: Tools, method: Any, *arguments: Any, name: str, of: Replayable | None = None) -> Any:
    """What a method of the environment returns, by way of the log. EnvironmentFailed if it raises or hangs.

    of: the environment, where the method is not bound to it. What one answered that was held is not asked again.
    """
    again = tools.reruns(getattr(method, "__self__", of))

    async def call() -> Any:
        return await called(method, *arguments)

    found = await tools.call(call, name=name, again=again, failing=True)
    if isinstance(found, dict) and set(found) == {FAILED}:
        raise EnvironmentFailed(found[FAILED])
    return found


async def observe(tools: Tools, method: Any, *arguments: Any, name: str, of: Replayable | None = None) -> Observation:
    """An observation from a method of the environment, as `answer`."""
    world: Replayable | None = getattr(method, "__self__", of)

    async def observation() -> Any:
        if world is not None:
            _tell_record(tools, world, name)
        return _checked(await called(method, *arguments)).as_json()

    return Observation(**await answer(tools, observation, name=name, of=world))


def _tell_record(tools: Tools, world: Replayable, name: str) -> None:
    """Tell an environment what it answered before, where the program is rerun from its log."""
    record = tools.recorded(name)
    if record is not None and set(record) != {FAILED}:
        world.expect(Observation(**record))


def _checked(found: Observation) -> Observation:
    """An answer as the policy sees it: long messages are cut and counted. RuntimeError for no messages or rewards."""
    (messages, *also), cuts = zip(*(_cut(one) for one in (found.messages, *found.also)), strict=True)
    info = {name: float(value) for name, value in (found.info or {}).items()}
    if cut := sum(cuts):
        info["cut_observations"] = info.get("cut_observations", 0.0) + cut
    return replace(
        found, messages=messages, reward=finite(found.reward, "its reward"), done=yes_or_no(found.done, "its done"),
        truncated=yes_or_no(found.truncated, "its truncated"), player=int(found.player), info=info, also=also,
        state=None if found.state is None else str(found.state),
    )  # fmt: skip


def _cut(given: Any) -> tuple[list[Any], int]:
    """Messages of which each is as long as `MOST` at most, and how many were longer."""
    messages: Any = [dict(one) if isinstance(one, Mapping) else one for one in given or ()]
    if messages and not is_conversation(messages):
        raise RuntimeError(f"its messages are {shown(given)}, but must be a list of dicts of role and content")
    texts = [(one, one["content"]) for one in messages if isinstance(one.get("content"), str | bytes)]
    for one, text in texts:
        one["content"] = result_text(text, MOST)
    return messages, sum(len(text) > MOST for _, text in texts)


async def final_rewards(tools: Tools, world: Replayable, players: int, name: str) -> list[float]:
    """The final reward of each player, 0 for none, as the environment's `close` returns them; see `answer`."""

    async def close() -> float | list[float | None] | None:
        found: Any = await called(world.close)
        if found is None or players == 1:
            return None if found is None else finite(found, "its final reward")
        if not isinstance(found, list | tuple) or len(found) != players:
            raise RuntimeError(f"it returns {shown(found)}, but must return a reward for each of {players} players")
        return [None if one is None else finite(one, "a final reward") for one in found]

    known = await answer(tools, close, name=name, of=world)
    return [float(one or 0) for one in (known if isinstance(known, list) else [known] * players)]
