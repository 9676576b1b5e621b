"""Agents that bring their own loop: a function plays an episode with any OpenAI client, and the policy answers it.

Each episode has a base URL of its own. A call of the client is an observation of the agent's episode, the whole
conversation as the client tells it; the reply that the policy samples is the answer. So its tokens are those of the
episode's rows, whatever the client keeps of them: a conversation that goes on as it was said stays one row, and what
the harness rewrote begins a new one (`rollout/new_rows`).
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import secrets
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, TypeVar

from aiohttp import web

from jaxrl_llm.core.by_value import name_of
from jaxrl_llm.data.chat.calls import Reply
from jaxrl_llm.data.chat.encode import fault_of, is_conversation
from jaxrl_llm.data.chat.messages import text_of
from jaxrl_llm.environments.copies import NotCopiedError
from jaxrl_llm.environments.protocol import Environment, Observation, finite
from jaxrl_llm.server.protocol import Call, Json, ProtocolError, chat_call, written_calls
from jaxrl_llm.utils.errors import InputError, shown
from jaxrl_llm.utils.threads import called, named

T = TypeVar("T")
Play = Callable[[str, str, dict[str, Any]], float | Awaitable[float | None] | None]
"""(base URL, API key, row of the data set) -> the episode's reward, or None for that of the run's reward functions."""

MODEL = "policy"  # the model's name for clients
RETRY = "x-stainless-retry-count"  # header of OpenAI's clients: above 0, the request was sent before
MOST_BYTES = 64 * 2**20
logger = logging.getLogger("jaxrl_llm.rollouts")


def harness(play: Play) -> Callable[[], Environment]:
    """What makes the environment of an episode that `play` plays, for `--environment` and `environments`.

    `--harness` takes `play` itself. play: plain, which runs in a thread of its own, or async. It calls `base_url` with
    any OpenAI client, as the model "policy": /chat/completions with messages, tools, and `stream`, one reply at a time.
    How tokens are drawn is the run's affair: temperature, limits, stop strings and a required choice of tools are not
    followed, which is said once. A function that raises ends its episode there; one that makes no call has no episode.
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


class _Asked(NamedTuple):
    call: Call
    answer: asyncio.Future[Reply]


@dataclass
class _Episode:
    """What an episode's URL knows. All of it is of the endpoint's event loop."""

    key: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    asked: asyncio.Queue[_Asked] = field(default_factory=asyncio.Queue)
    known: dict[str, asyncio.Future[Reply]] = field(default_factory=dict)  # by the body of the request
    tools: tuple[Json, ...] | None = None  # of its first call
    ended: bool = False


class Harness:
    """The environment of one episode; see `environments.protocol`."""

    def __init__(self, play: Play) -> None:
        self.wrapped = play
        self.tools: Sequence[Mapping[str, Any]] = ()
        self._episode = _Episode()
        self._pending: _Asked | None = None
        self._playing: asyncio.Task[float | None] | None = None
        self._id = uuid.uuid4().hex

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Begin to play; the messages of the first call."""
        return _endpoint().wait(self._begin(dict(row)))

    def step(self, reply: Reply) -> Observation:
        """Answer the call; the messages of the next one, or the end."""
        return _endpoint().wait(self._answer(reply))

    def close(self) -> float | None:
        """The reward; what still plays is given up."""
        return _endpoint().wait(self._end())

    def copy(self) -> Environment:
        """A harness is code of its own, which cannot be copied: a copy is a replay."""
        raise NotCopiedError("a harness plays in code of its own")

    async def _begin(self, row: dict[str, Any]) -> Observation:
        endpoint, episode = _endpoint(), self._episode
        endpoint.episodes[self._id] = episode
        url = f"{endpoint.url}/episodes/{self._id}/v1"
        self._playing = asyncio.ensure_future(called(self.wrapped, url, episode.key, row))
        seen = await self._next()
        if seen.done:
            raise RuntimeError("the harness ended without a call of the policy")
        self.tools = episode.tools or ()
        return seen

    async def _answer(self, reply: Reply) -> Observation:
        assert self._pending is not None
        if not self._pending.answer.done():
            self._pending.answer.set_result(reply)
        return await self._next()

    async def _next(self) -> Observation:
        assert self._playing is not None
        asked = asyncio.ensure_future(self._episode.asked.get())
        await asyncio.wait((asked, self._playing), return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            self._pending = asked.result()
            return Observation(messages=[dict(one) for one in self._pending.call.prompt], whole=True)
        asked.cancel()
        if (error := self._playing.exception()) is not None:
            raise RuntimeError(f"the harness raised {named(error)}")
        return Observation(done=True)

    async def _end(self) -> float | None:
        self._episode.ended = True
        _endpoint().episodes.pop(self._id, None)
        for answer in self._episode.known.values():
            if not answer.done():
                answer.cancel()
        if self._playing is None or not self._playing.done():
            if self._playing is not None:
                self._playing.cancel()
            return None
        found = None if self._playing.exception() else self._playing.result()
        return None if found is None else finite(found, "the harness's reward")


class _Endpoint:
    """The routes of all episodes of this process, in a thread of their own, on this machine alone."""

    def __init__(self) -> None:
        self.loop, self.episodes, self.url = asyncio.new_event_loop(), dict[str, _Episode](), ""
        threading.Thread(target=self.loop.run_forever, daemon=True, name="harness endpoint").start()
        self.wait(self._listen())

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine in the endpoint's loop, for callers in other threads."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    async def _listen(self) -> None:
        app = web.Application(client_max_size=MOST_BYTES)
        app.router.add_get("/episodes/{id}/v1/models", self._models)
        app.router.add_post("/episodes/{id}/v1/chat/completions", self._complete)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "jaxrl_llm"}]}
        )

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        try:
            episode = self.episodes.get(request.match_info["id"])
            given = request.headers.get("Authorization", "").removeprefix("Bearer ")
            if episode is None or episode.ended or not secrets.compare_digest(given, episode.key):
                raise ProtocolError("this episode is over, or the API key is another's", None, 401)
            body = await request.text()
            again = int(request.headers.get(RETRY) or 0) > 0 and body in episode.known
            call = _checked(body, episode)
            if not again:
                asked = _Asked(call, self.loop.create_future())
                episode.known[body] = asked.answer
                episode.asked.put_nowait(asked)
            try:
                # A client that goes away and asks again gets the same answer.
                reply = await asyncio.shield(episode.known[body])
            except asyncio.CancelledError:
                if not episode.ended:
                    raise
                raise ProtocolError("this episode is over", None, 401) from None
            return await _answered(request, call, reply)
        except ProtocolError as error:
            return web.json_response(error.body, status=error.status)


def _checked(body: str, episode: _Episode) -> Call:
    """A call of an episode. ProtocolError for what it cannot be answered."""
    try:
        asked = json.loads(body)
        if forced := isinstance(asked, dict) and asked.get("tool_choice") == "required":
            asked["tool_choice"] = "auto"
        call = chat_call(asked, (MODEL,))
    except ValueError as error:
        raise ProtocolError(f"the body is not JSON: {error}") from None
    if not is_conversation(call.prompt):
        raise ProtocolError("each message must have a role and a content", "messages")
    if fault := fault_of(call.prompt):
        raise ProtocolError(fault, "messages")
    for name, asks in (("n", call.choices > 1), ("logprobs", call.logprobs), ("return_token_ids", call.token_ids)):
        if asks:
            raise ProtocolError(f"{name} is not supported by the endpoint of a harness: leave it out", name)
    if episode.tools is None:
        episode.tools = call.tools
    if call.tools != episode.tools:
        raise ProtocolError("all calls of an episode must have the same tools", "tools")
    if forced or call.stop or call.limit is not None or call.how != type(call.how)():
        _tell_of_sampling()
    return call


@cache
def _tell_of_sampling() -> None:
    logger.warning(
        "the harness asks for a temperature, a limit of tokens, stop strings or a required call of a tool: that is not "
        "followed, since the run's own settings say how tokens are drawn"
    )


async def _answered(request: web.Request, call: Call, reply: Reply) -> web.StreamResponse:
    message: Json = {"role": "assistant", "content": text_of(reply.message.get("content"))}
    if thought := reply.message.get("reasoning_content"):
        message["reasoning_content"] = thought
    if reply.calls:
        message["tool_calls"] = written_calls([one._asdict() for one in reply.calls])
    finish = "tool_calls" if reply.calls else "stop"
    head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": MODEL}
    usage = {
        "prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.tokens,
        "total_tokens": reply.prompt_tokens + reply.tokens,
    }  # fmt: skip
    if not call.stream:
        choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
        return web.json_response({**head, "object": "chat.completion", "choices": [choice], "usage": usage})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for place, one in enumerate(message.get("tool_calls", ())):
        one["index"] = place
    pieces: list[Json] = [
        {"choices": [{"index": 0, "delta": message, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]},
        *([{"choices": [], "usage": usage}] if call.usage else []),
    ]
    for piece in pieces:
        text = json.dumps({**head, "object": "chat.completion.chunk", **piece})
        await response.write(f"data: {text}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    return response


_lock = threading.Lock()


@cache
def _made_endpoint() -> _Endpoint:
    return _Endpoint()


def _endpoint() -> _Endpoint:
    with _lock:
        return _made_endpoint()
