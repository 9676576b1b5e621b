"""The endpoint of harnesses: a URL for each episode, the requests of its clients, and how they are answered.

All of it is of one event loop, in a thread of its own, and on this machine alone.
"""

import asyncio
import json
import logging
import secrets
import threading
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

from aiohttp import web

from jaxrl_llm.data.chat.calls import Message, Reply
from jaxrl_llm.data.chat.encode import fault_of, is_conversation
from jaxrl_llm.sampling.requests import NO_TOKENS
from jaxrl_llm.server.protocol import Answers, Call, Choice, Json, ProtocolError, chat_call, message_of

T = TypeVar("T")
MODEL = "policy"  # the model's name for clients
RETRY = "x-stainless-retry-count"  # header of OpenAI's clients: above 0, the request was sent before
NAME = "Idempotency-Key"  # header of a client that names its requests: of one name, there is one
MOST_BYTES = 64 * 2**20
logger = logging.getLogger("jaxrl_llm.rollouts")


@dataclass(eq=False)
class Asked:
    """A reply that a client asks for."""

    prompt: list[Message]
    answer: asyncio.Future[Reply]
    number: int = 0  # among the replies of the episode

    @property
    def text(self) -> str:
        """What is asked: equal for equal conversations."""
        return json.dumps(self.prompt, sort_keys=True)


@dataclass(eq=False)
class _Request:
    """What a client sent, perhaps more than once."""

    name: str  # its own, else its body
    asked: list[Asked]  # as many as it wants choices
    lost: bool = False  # whether the client went away before it was answered


@dataclass
class EpisodeCalls:
    """What an episode's URL knows."""

    key: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    requests: list[_Request] = field(default_factory=list)
    waiting: list[Asked] = field(default_factory=list)  # that the policy was not asked for yet
    arrived: asyncio.Event = field(default_factory=asyncio.Event)  # set when something waits
    tools: tuple[Json, ...] | None = None  # of its first call
    replies: int = 0
    ended: bool = False

    def take(self, calls: Sequence[Asked]) -> None:
        """The policy is asked for these, which are numbered in this order."""
        for one in calls:
            self.waiting.remove(one)
            one.number, self.replies = self.replies, self.replies + 1

    def end(self) -> None:
        """Answer nothing more."""
        self.ended = True
        for request in self.requests:
            for one in request.asked:
                one.answer.cancel()

    def request(self, headers: Mapping[str, str], body: str, call: Call) -> _Request:
        """The request that was sent before, or a new one, which waits.

        A client names its requests, or says which it sends again. Of several that are equal, that is one whose client
        went away, else the last.
        """
        name, again = headers.get(NAME), headers.get(RETRY, "0") != "0"
        same = [one for one in self.requests if one.name == (name or body)] if name or again else []
        if same:
            found = next((one for one in same if one.lost), same[-1])
            found.lost = False
            return found
        loop = asyncio.get_running_loop()
        asked = [Asked([dict(one) for one in call.prompt], loop.create_future()) for _ in range(call.choices)]
        self.requests.append(_Request(name or body, asked))
        self.waiting += asked
        self.arrived.set()
        return self.requests[-1]

    def lose(self, request: _Request) -> None:
        """The client of a request went away. The policy is not asked for what still waits."""
        request.lost = True
        if any(one in self.waiting for one in request.asked):
            self.waiting = [one for one in self.waiting if one not in request.asked]
            self.requests.remove(request)


class EpisodeRoutes:
    """The routes of all episodes of this process."""

    def __init__(self) -> None:
        self.loop, self.episodes, self.url = asyncio.new_event_loop(), dict[str, EpisodeCalls](), ""
        threading.Thread(target=self.loop.run_forever, daemon=True, name="harness endpoint").start()
        asyncio.run_coroutine_threadsafe(self._listen(), self.loop).result()

    async def within(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine in the endpoint's loop, for those in other loops. It is cancelled as they are."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    async def _listen(self) -> None:
        app = web.Application(client_max_size=MOST_BYTES)
        app.router.add_get("/episodes/{id}/v1/models", self._models)
        app.router.add_post("/episodes/{id}/v1/chat/completions", self._complete)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": MODEL, "object": "model", "owned_by": "jaxrl_llm"}
        return web.json_response({"object": "list", "data": [model]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        try:
            episode = self.episodes.get(request.match_info["id"])
            given = request.headers.get("Authorization", "").removeprefix("Bearer ")
            if episode is None or not secrets.compare_digest(given.encode(), episode.key.encode()):
                raise ProtocolError("this episode is over, or the API key is another's", None, 401)
            body = await request.text()
            call = _checked(body, episode)
            if episode.ended:
                raise ProtocolError("this episode is over", None, 401)
            sent = episode.request(request.headers, body, call)
            try:
                await asyncio.wait([one.answer for one in sent.asked])  # which go on if the client goes away
                if any(one.answer.cancelled() for one in sent.asked):
                    raise ProtocolError("this episode is over", None, 401)
                return await _answered(request, call, sent.asked)
            except (asyncio.CancelledError, ConnectionError):
                episode.lose(sent)
                raise
        except ProtocolError as error:
            return web.json_response(error.body, status=error.status)


def _checked(body: str, episode: EpisodeCalls) -> Call:
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
    for name, asks in (("logprobs", call.logprobs), ("return_token_ids", call.token_ids)):
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


def _said(asked: Asked) -> tuple[Json, str]:
    """The message of a reply, and why it ended. Ids of calls follow from its number, so that a rerun has the same."""
    reply = asked.answer.result()
    if reply.calls:
        finish = "tool_calls"
    else:
        finish = "length" if reply.truncated else "stop"
    return message_of(reply, f"{asked.number:012}"), finish


async def _answered(request: web.Request, call: Call, asked: Sequence[Asked]) -> web.StreamResponse:
    said = [_said(one) for one in asked]
    replies = [one.answer.result() for one in asked]
    answers = Answers(call, True, range(replies[0].prompt_tokens), str)
    sampled = sum(one.tokens for one in replies)
    if not call.stream:
        choices = [Choice(index, {"message": one}, NO_TOKENS, finish) for index, (one, finish) in enumerate(said)]
        return web.json_response(answers.whole(choices, sampled))
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    pieces = list[Json]()
    for index, (message, finish) in enumerate(said):
        for place, one in enumerate(message.get("tool_calls", ())):
            one["index"] = place
        pieces.append(answers.piece(Choice(index, {"delta": message}, NO_TOKENS, None)))
        pieces.append(answers.piece(Choice(index, {"delta": {}}, NO_TOKENS, finish)))
    for piece in [*pieces, *([answers.usage_piece(sampled)] if call.usage else [])]:
        await response.write(f"data: {json.dumps(piece)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    return response


_lock = threading.Lock()


@cache
def _made_endpoint() -> EpisodeRoutes:
    return EpisodeRoutes()


def endpoint() -> EpisodeRoutes:
    """The endpoint of this process, which begins with its first use."""
    with _lock:
        return _made_endpoint()
