"""The endpoint's routes: models, chat completions and completions, whole or as streams of events."""

import asyncio
import hmac
import itertools
import json
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from aiohttp import web

from jaxrl_llm.data.chat.calls import Reading, calls_of, reading_of
from jaxrl_llm.data.chat.encode import encode_prompt
from jaxrl_llm.data.chat.rendering import PromptFormat, Rendering
from jaxrl_llm.sampling.checks import check_ids
from jaxrl_llm.sampling.live import unseen, whole_characters
from jaxrl_llm.sampling.requests import NO_TOKENS, Request
from jaxrl_llm.server.engines import CompletionSoFar, Engines, Pending
from jaxrl_llm.server.protocol import Answers, Call, Choice, Json, ProtocolError, chat_call, message_of, text_call
from jaxrl_llm.utils.errors import InputError
from jaxrl_llm.utils.threads import error_in_words

MOST_BYTES = 64 * 2**20  # of a request
DEFAULT_LIMIT = 1024  # tokens of a chat completion that asks for no limit, where the context has room


class ModelServer(NamedTuple):
    """What the routes serve."""

    engines: Engines
    name: str  # of the model
    format: PromptFormat = PromptFormat()
    key: str | None = None  # that clients must give; None: any
    adapters: Mapping[str, PromptFormat] = {}  # of the engines, by their names, which are names of models too

    @property
    def models(self) -> dict[str, PromptFormat]:
        """The models, and how their prompts become tokens."""
        return {self.name: self.format, **self.adapters}

    @property
    def tokenizer(self) -> Any:
        return self.engines.policy.tokenizer


class _Made(NamedTuple):
    """A request in the engines' terms."""

    call: Call
    answers: Answers
    asked: list[Pending]
    reading: Reading | None  # of replies of a chat


def application(endpoint: ModelServer) -> web.Application:
    """The web application, whose engines run while it does."""

    @web.middleware
    async def guarded(request: web.Request, handler: Callable[..., Awaitable[web.StreamResponse]]) -> Any:
        try:
            given = request.headers.get("Authorization", "").removeprefix("Bearer ")
            if endpoint.key is not None and not hmac.compare_digest(given.encode(), endpoint.key.encode()):
                raise ProtocolError("the API key is missing or wrong", None, 401, "invalid_api_key")
            return await handler(request)
        except ProtocolError as error:
            return web.json_response(error.body, status=error.status)
        except web.HTTPException as error:
            wrong = ProtocolError(f"{request.method} {request.path}: {error.reason}", None, error.status)
            return web.json_response(wrong.body, status=error.status)

    numbers = itertools.count()

    async def models(request: web.Request) -> web.Response:
        each = {"object": "model", "created": 0, "owned_by": "jaxrl_llm"}
        return web.json_response({"object": "list", "data": [{"id": name, **each} for name in endpoint.models]})

    def completions(chat: bool) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def complete(request: web.Request) -> web.StreamResponse:
            try:
                body = json.loads(await request.text())
            except ValueError as error:
                raise ProtocolError(f"the body is not JSON: {error}") from None
            call = (chat_call if chat else text_call)(body, endpoint.models)
            # Encoding a long conversation takes a while, in which streams go on.
            made = await asyncio.to_thread(_made, endpoint, call, chat, next(numbers))
            try:
                return await (_streamed if call.stream else _whole)(endpoint, made, request)
            except InputError as error:
                raise ProtocolError(str(error), status=500) from None

        return complete

    async def with_engines(app: web.Application) -> AsyncIterator[None]:
        endpoint.engines.start()
        yield
        await asyncio.to_thread(endpoint.engines.close)

    app = web.Application(middlewares=[guarded], client_max_size=MOST_BYTES)
    app.cleanup_ctx.append(with_engines)
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/chat/completions", completions(chat=True))
    app.router.add_post("/v1/completions", completions(chat=False))
    return app


def _made(endpoint: ModelServer, call: Call, chat: bool, number: int) -> _Made:
    policy, tokenizer, format = endpoint.engines.policy, endpoint.tokenizer, endpoint.models[call.model]
    reading = None
    try:
        if chat:
            row = {"tools": [*call.tools], "chat_template_kwargs": call.options}
            ids = encode_prompt(tokenizer, call.prompt, format=format, row=row)
            rendering = Rendering(tokenizer, call.tools, format)
            reading = reading_of(rendering, calls_of(rendering), policy.config.eos_token_ids)
        else:
            kind = PromptFormat("rendered") if isinstance(call.prompt, str) else None
            ids = encode_prompt(tokenizer, call.prompt, format=kind)
        room = policy.config.max_positions - len(ids) if policy.config.max_positions else DEFAULT_LIMIT
        limit = max(min(DEFAULT_LIMIT, room), 1) if call.limit is None else call.limit
        check_ids(policy, [ids], limit)
    except InputError as error:
        raise ProtocolError(str(error), "messages" if chat else "prompt") from None
    # A seed is a prompt's id: with it tokens are the same each time, and without no two requests share noise.
    name = number if call.seed is None else zlib.crc32(str(call.seed).encode())
    name = name % 2**30 + (2**30 if call.seed is not None else 0)
    adapter = call.model if call.model in endpoint.adapters else None
    requests = [Request(tuple(ids), limit, name, choice) for choice in range(call.choices)]
    asked = [Pending(request, call.how, call.stop, adapter) for request in requests]
    return _Made(call, Answers(call, chat, ids, lambda id: str(tokenizer.decode([id]))), asked, reading)


def _text(endpoint: ModelServer, made: _Made, progress: CompletionSoFar) -> str:
    """The text of a completion so far, up to a stop string, and without what may yet become one."""
    text = str(endpoint.tokenizer.decode(progress.tokens.token.tolist(), skip_special_tokens=True))
    ends = [at for stop in made.call.stop if (at := text.find(stop)) >= 0]
    if ends:
        return text[: min(ends)]
    if progress.finish is not None:
        return text
    begun = [stop[:n] for stop in made.call.stop for n in range(1, len(stop))]  # what a stop string begins with
    held = max((len(one) for one in begun if text.endswith(one)), default=0)
    return whole_characters(text[: len(text) - held])


async def _finished(endpoint: ModelServer, asked: Pending) -> CompletionSoFar:
    last = CompletionSoFar(NO_TOKENS)
    async for progress in endpoint.engines.sample(asked):
        last = progress
    return last


def _said(endpoint: ModelServer, made: _Made, progress: CompletionSoFar) -> tuple[Json, str]:
    """The message or the text of a completion, and why it ended."""
    text, finish = _text(endpoint, made, progress), str(progress.finish)
    if made.reading is None:
        return {"text": text}, finish
    plain = str(endpoint.tokenizer.decode(progress.tokens.token.tolist(), skip_special_tokens=True))
    # The text counts where a stop string cut it.
    reply = made.reading.text(text) if text != plain else made.reading(progress.tokens.token.tolist())
    message: Json = {**message_of(reply), "refusal": None}
    if reply.calls:
        message["content"] = message["content"] or None
    return {"message": message}, "tool_calls" if reply.calls and finish == "stop" else finish


async def _whole(endpoint: ModelServer, made: _Made, request: web.Request) -> web.StreamResponse:
    every = [asyncio.ensure_future(_finished(endpoint, one)) for one in made.asked]
    try:
        found = await asyncio.gather(*every)
    except BaseException:  # a client that went away, too
        for task in every:
            task.cancel()
        await asyncio.gather(*every, return_exceptions=True)
        raise
    said = ((progress.tokens, *_said(endpoint, made, progress)) for progress in found)
    choices = [Choice(index, text, tokens, finish) for index, (tokens, text, finish) in enumerate(said)]
    return web.json_response(made.answers.whole(choices))


async def _pieces(endpoint: ModelServer, made: _Made, index: int) -> AsyncIterator[Choice]:
    """A completion's pieces. Of a reply that may call tools or tell thoughts, the text comes at its end, once read."""
    shown, sent = "", 0
    held = made.reading is not None and (bool(made.call.tools) or bool(made.reading.channels.closed))
    if made.reading is not None:
        yield Choice(index, {"delta": {"role": "assistant", "content": ""}}, NO_TOKENS, None)
    async for progress in endpoint.engines.sample(made.asked[index]):
        new = progress.tokens.after(sent)
        if progress.finish is None:
            if held:
                continue
            text = _text(endpoint, made, progress)
            piece, shown = unseen(shown, text), text if len(text) > len(shown) else shown
            if not piece:
                continue
            sent = progress.tokens.size
            yield Choice(index, {"delta": {"content": piece}} if made.reading else {"text": piece}, new, None)
            continue
        said, finish = _said(endpoint, made, progress)
        if made.reading is None:
            yield Choice(index, {"text": unseen(shown, said["text"])}, new, finish)
        elif not held:
            text = _text(endpoint, made, progress)
            yield Choice(index, {"delta": {"content": unseen(shown, text)}}, new, finish)
        else:
            message = {name: value for name, value in said["message"].items() if value and name != "role"}
            for place, call in enumerate(message.get("tool_calls", ())):
                call["index"] = place
            yield Choice(index, {"delta": message}, new, finish)


async def _streamed(endpoint: ModelServer, made: _Made, request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    queue: asyncio.Queue[Choice | BaseException | None] = asyncio.Queue(maxsize=64)

    async def follow(index: int) -> None:
        try:
            async for choice in _pieces(endpoint, made, index):
                await queue.put(choice)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    async def send(piece: Any) -> None:
        await response.write(b"data: " + (piece if isinstance(piece, bytes) else json.dumps(piece).encode()) + b"\n\n")

    tasks = [asyncio.ensure_future(follow(index)) for index in range(len(made.asked))]
    left, sampled, first = len(tasks), 0, True
    try:
        while left:
            choice = await queue.get()
            if choice is None:
                left -= 1
            elif isinstance(choice, BaseException):
                wrong = choice if isinstance(choice, InputError) else error_in_words(choice)
                await send(ProtocolError(str(wrong), status=500).body)
                break
            else:
                sampled += choice.tokens.size
                await send(made.answers.piece(choice, first))
                first = False
        else:
            if made.call.usage:
                await send(made.answers.usage_piece(sampled))
        await send(b"[DONE]")
        await response.write_eof()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return response
