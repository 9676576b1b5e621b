"""Agents that bring their own loop: a function plays an episode with any OpenAI client, and the policy answers it.

Each episode has a base URL of its own (`server.episodes`). A call of the client is an observation of the agent's
episode, the whole conversation as the client tells it; the reply that the policy samples is the answer. So its tokens
are those of the episode's rows, whatever the client keeps of them: a conversation that goes on as it was said stays one
row, calls at once and returns to an earlier message make a tree of rows (`rollouts.agents.branches`), and what the
harness rewrote begins a new row (`rollout/new_rows`).
"""

import asyncio
import inspect
import json
import uuid
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from jaxrl_llm.core.by_value import name_of
from jaxrl_llm.data.chat.calls import Reply
from jaxrl_llm.environments.copies import NotCopiedError
from jaxrl_llm.environments.protocol import Environment, Observation, finite
from jaxrl_llm.server.episodes import Asked, EpisodeCalls, EpisodeRoutes, endpoint
from jaxrl_llm.utils.errors import InputError, shown
from jaxrl_llm.utils.threads import called, error_in_words

Play = Callable[[str, str, dict[str, Any]], float | Awaitable[float | None] | None]
"""(base URL, API key, row of the data set) -> the episode's reward, or None for that of the run's reward functions."""

PAUSE = 0.03  # seconds after a call in which others are taken to be at once with it
LATE = 5.0  # seconds after which a call is told though others were expected


def harness(play: Play) -> Callable[[], Environment]:
    """What makes the environment of an episode that `play` plays, for `--environment` and `environments`.

    `--harness` takes `play` itself. play: plain, which runs in a thread of its own, or async. It calls `base_url` with
    any OpenAI client, as the model "policy": /chat/completions with messages, tools, `n` and `stream`. Calls that come
    at once are answered together. How tokens are drawn is the run's affair: temperature, limits, stop strings and a
    required choice of tools are not followed, which is said once. A function that raises ends its episode there; one
    that makes no call has no episode.
    InputError unless it takes three arguments.
    """
    check_play(play)
    return lambda: Harness(play)


def check_play(play: Any) -> None:
    """InputError for a harness that cannot be called with a base URL, a key and a row."""
    try:
        signature = inspect.signature(play)
    except (TypeError, ValueError):  # a value that is no function, or code without a signature
        if callable(play):
            return
        raise InputError(f"the harness is {shown(play)}, but must be a function of (base_url, api_key, row)") from None
    try:
        signature.bind("", "", {})
    except TypeError:
        raise InputError(
            f"the harness {name_of(play, 'given')}{signature} cannot be called with three arguments: it must take "
            "base_url, api_key and the row of the data set"
        ) from None


class Harness:
    """The environment of one episode; see `environments.protocol`."""

    def __init__(self, play: Play) -> None:
        self.wrapped = play
        self.tools: Sequence[Mapping[str, Any]] = ()
        self._calls = EpisodeCalls()
        self._pending: list[Asked] = []
        self._expected: list[str] = []
        self._playing: asyncio.Task[float | None] | None = None
        self._id = uuid.uuid4().hex

    async def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Begin to play; the messages of the first calls."""
        return await endpoint().within(self._begin(dict(row)))

    async def step(self, reply: Reply | Sequence[Reply]) -> Observation:
        """Answer the calls; the messages of the next ones, or the end."""
        return await endpoint().within(self._answer([reply] if isinstance(reply, Reply) else reply))

    async def close(self) -> float | None:
        """The reward; what still plays is given up."""
        return await endpoint().within(self._end())

    def expect(self, seen: Observation) -> None:
        """What `reset` or the next `step` returned when the same was played before: these calls are waited for."""
        told = seen.conversations if seen.whole else ()
        self._expected = [json.dumps([dict(message) for message in one], sort_keys=True) for one in told]

    def copy(self) -> Environment:
        """A harness is code of its own, which cannot be copied: a copy is a replay."""
        raise NotCopiedError("a harness plays in code of its own")

    async def _begin(self, row: dict[str, Any]) -> Observation:
        serves = endpoint()
        serves.episodes[self._id] = self._calls
        url = f"{serves.url}/episodes/{self._id}/v1"
        self._playing = asyncio.ensure_future(called(self.wrapped, url, self._calls.key, row))
        # Of a group that fails, nobody closes the environments.
        soon = serves.loop.call_soon_threadsafe
        weakref.finalize(self, soon, _give_up, serves, self._id, self._playing).atexit = False
        try:
            seen = await self._next()
        except BaseException:  # a time limit, too
            _give_up(serves, self._id, self._playing)
            raise
        if seen.done:
            _give_up(serves, self._id, self._playing)
            raise RuntimeError("the harness ended without a call of the policy")
        self.tools = self._calls.tools or ()
        return seen

    async def _answer(self, replies: Sequence[Reply]) -> Observation:
        for asked, reply in zip(self._pending, replies, strict=True):
            if not asked.answer.done():
                asked.answer.set_result(reply)
        return await self._next()

    async def _next(self) -> Observation:
        """The calls that wait once no other comes, or those that are expected; the end where the function returned."""
        assert self._playing is not None
        calls, quiet = self._calls, False
        while not self._playing.done():
            together = _found(calls.waiting, self._expected) if self._expected else []
            if together or (quiet and calls.waiting):
                return self._told(together or calls.waiting)
            pause = None  # without a call there is nothing to tell
            if calls.waiting:
                pause = LATE if self._expected else PAUSE
            calls.arrived.clear()
            arrival = asyncio.ensure_future(calls.arrived.wait())
            done, _ = await asyncio.wait((arrival, self._playing), timeout=pause, return_when="FIRST_COMPLETED")
            quiet = not done
            arrival.cancel()
        if (error := self._playing.exception()) is not None:
            raise RuntimeError(f"the harness raised {error_in_words(error)}")
        return Observation(done=True)

    def _told(self, asked: Sequence[Asked]) -> Observation:
        # By what they ask, so that it does not matter which came first.
        self._pending, self._expected = sorted(asked, key=lambda one: one.text), []
        self._calls.take(self._pending)
        first, *others = (one.prompt for one in self._pending)
        return Observation(messages=first, whole=True, also=others)

    async def _end(self) -> float | None:
        playing = self._playing
        ended = playing is not None and playing.done() and not playing.cancelled() and playing.exception() is None
        found = playing.result() if playing is not None and ended else None
        _give_up(endpoint(), self._id, playing)
        return None if found is None else finite(found, "the harness's reward")


def _found(waiting: Sequence[Asked], expected: Sequence[str]) -> list[Asked]:
    """A call for each of these conversations; none while one of them has not come."""
    left, found = list(waiting), list[Asked]()
    for text in expected:
        one = next((one for one in left if one.text == text), None)
        if one is None:
            return []
        left.remove(one)
        found.append(one)
    return found


def _give_up(serves: EpisodeRoutes, name: str, playing: asyncio.Task[float | None] | None) -> None:
    """Answer an episode's calls no more, and end what plays. In the endpoint's loop."""
    if (calls := serves.episodes.pop(name, None)) is not None:
        calls.end()
    if playing is not None:
        playing.cancel()
