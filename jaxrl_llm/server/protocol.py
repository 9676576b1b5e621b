"""What clients of the OpenAI protocol ask for, checked, and how they are answered.

What the endpoint does not do is refused by name, unless it asks for nothing (a penalty of 0, response_format text).
"""

import json
import math
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.data.chat.calls import Reply
from jaxrl_llm.data.chat.messages import text_of_content
from jaxrl_llm.sampling.requests import Tokens
from jaxrl_llm.server.engines import How
from jaxrl_llm.utils.errors import shown

Json = dict[str, Any]
MOST_CHOICES, MOST_STOPS = 128, 16
# Fields that may be there with a value that asks for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (1,), "logit_bias": ({},),
    "response_format": ({"type": "text"},), "top_logprobs": (0,), "best_of": (1,), "echo": (False,), "suffix": ("",),
    "store": (False,), "functions": ([],), "function_call": ("none",), "service_tier": ("auto", "default"),
    "modalities": (["text"],), "ignore_eos": (False,), "min_tokens": (0,),
}  # fmt: skip
IGNORED = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"})  # of clients


class ProtocolError(Exception):
    """An error in the protocol's own form."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code

    @property
    def body(self) -> Json:
        kinds = {401: "authentication_error", 404: "not_found_error", 500: "server_error"}
        kind = kinds.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class Call(NamedTuple):
    """A request for completions."""

    model: str
    prompt: Any  # messages, a text, or token ids
    how: How
    choices: int
    limit: int | None  # tokens; None: as the model's context allows, or the server's default
    seed: int | None
    stop: tuple[str, ...]
    stream: bool
    usage: bool  # whether a stream ends with the numbers of tokens
    logprobs: bool
    token_ids: bool
    tools: tuple[Json, ...]
    options: Json  # of the chat template


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


class _Fields:
    """The fields of a request's body, each of which is asked for once."""

    def __init__(self, body: Any) -> None:
        if not isinstance(body, dict):
            raise ProtocolError("the body must be a JSON object")
        self.left = {name: value for name, value in body.items() if value is not None and name not in IGNORED}

    def take(self, name: str, fits: Callable[[Any], bool], wanted: str, default: Any = None) -> Any:
        if name not in self.left:
            return default
        value = self.left.pop(name)
        if not fits(value):
            raise ProtocolError(f"{name} is {shown(value)}, but must be {wanted}", name)
        return value

    def number(self, name: str, least: float, most: float, default: float) -> float:
        return self.take(
            name, lambda x: _is_number(x) and least <= x <= most, f"a number from {least:g} to {most:g}", default
        )

    def whole(self, name: str, least: int, most: int, default: int | None = None) -> Any:
        return self.take(
            name, lambda x: _is_number(x) and isinstance(x, int) and least <= x <= most,
            f"a whole number from {least} to {most}", default,
        )  # fmt: skip

    def flag(self, name: str) -> bool:
        return bool(self.take(name, lambda x: isinstance(x, bool), "true or false", False))

    def finish(self) -> None:
        for name, value in self.left.items():
            if name not in NEUTRAL or value not in NEUTRAL[name]:
                what = "is not supported" if name in NEUTRAL else "is not known"
                raise ProtocolError(f"{name} {what} by this endpoint: leave it out", name)


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _shared(
    fields: _Fields, model: str, prompt: Any, limit: int | None, logprobs: bool, tools: Any, options: Json
) -> Call:
    stop = fields.take(
        "stop",
        lambda x: (
            isinstance(x, str)
            or (isinstance(x, list) and len(x) <= MOST_STOPS and all(isinstance(one, str) and one for one in x))
        ),
        f"a text, or a list of at most {MOST_STOPS} texts",
        [],
    )
    stream = fields.flag("stream")
    usage = fields.take("stream_options", lambda x: isinstance(x, dict) and stream, "an object, with stream", {})
    call = Call(
        model, prompt,
        How(
            float(fields.number("temperature", 0, 100, 1.0)), float(fields.number("top_p", 1e-6, 1, 1.0)),
            fields.whole("top_k", -1, 2**31 - 1, 0), float(fields.number("min_p", 0, 1, 0.0)),
        ),
        fields.whole("n", 1, MOST_CHOICES, 1), limit, fields.whole("seed", -(2**63), 2**63 - 1),
        tuple([stop] if isinstance(stop, str) else stop), stream, bool(usage.get("include_usage")), logprobs,
        fields.flag("return_token_ids"), tuple(tools), options,
    )  # fmt: skip
    fields.finish()
    return call._replace(how=call.how._replace(top_k=max(call.how.top_k, 0)))


def chat_call(body: Any, models: Collection[str]) -> Call:
    """The call of a body of /v1/chat/completions for one of these models. Raises ProtocolError."""
    fields = _Fields(body)
    model = model_of(fields, models)
    messages = fields.take(
        "messages", lambda x: isinstance(x, list) and len(x) > 0 and all(isinstance(one, dict) for one in x),
        "a list of messages with at least one",
    )  # fmt: skip
    if messages is None:
        raise ProtocolError("messages is missing", "messages")
    limits = [fields.whole(name, 1, 2**24) for name in ("max_completion_tokens", "max_tokens")]
    tools = fields.take(
        "tools", lambda x: isinstance(x, list) and all(map(_is_tool, x)),
        'a list of {"type": "function", "function": {"name": ..., "parameters": ...}}', [],
    )  # fmt: skip
    choice = fields.take("tool_choice", lambda x: x in ("auto", "none"), "'auto' or 'none'", "auto")
    logprobs = fields.flag("logprobs")
    options = fields.take("chat_template_kwargs", lambda x: isinstance(x, dict), "an object", {})
    limit = next((one for one in limits if one is not None), None)
    return _shared(fields, model, messages, limit, logprobs, tools if choice == "auto" else [], options)


def text_call(body: Any, models: Collection[str]) -> Call:
    """The call of a body of /v1/completions for one of these models. Raises ProtocolError."""
    fields = _Fields(body)
    model = model_of(fields, models)
    prompt = fields.take(
        "prompt",
        lambda x: bool(x) and (isinstance(x, str) or (isinstance(x, list) and all(type(one) is int for one in x))),
        "a text or token ids, one prompt a request",
    )
    if prompt is None:
        raise ProtocolError("prompt is missing", "prompt")
    logprobs = fields.whole("logprobs", 0, 1)
    return _shared(fields, model, prompt, fields.whole("max_tokens", 1, 2**24, 16), logprobs is not None, [], {})


def model_of(fields: _Fields, models: Collection[str]) -> str:
    """The model's name. ProtocolError for another than these."""
    name = fields.take("model", lambda x: isinstance(x, str), "a text")
    if name not in models:
        known = ", ".join(models)
        raise ProtocolError(
            f"the model {shown(name)} does not exist: this endpoint has {known}", "model", 404, "model_not_found"
        )
    return str(name)


class Choice(NamedTuple):
    """A completion, or a piece of one, for an answer."""

    number: int
    said: Json  # "message", "delta" or "text"
    tokens: Tokens  # those of the piece
    finish: str | None


class Answers:
    """The answers to one request: whole, or in pieces."""

    def __init__(self, call: Call, chat: bool, prompt: Sequence[int], token: Callable[[int], str]) -> None:
        self.call, self.prompt, self.token, self.chat = call, prompt, token, chat
        kind = "chat.completion" if chat else "text_completion"
        self.head = {"id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}", "created": int(time.time())}
        self.head |= {"model": call.model}
        self.whole_kind, self.piece_kind = kind, f"{kind}.chunk" if chat else kind

    def _choice(self, one: Choice) -> Json:
        found: Json = {"index": one.number, **one.said, "finish_reason": one.finish, "logprobs": None}
        ids = one.tokens.token.tolist()
        if self.call.logprobs:
            texts, logps = [self.token(id) for id in ids], one.tokens.logp.tolist()
            if self.chat:
                found["logprobs"] = {
                    "content": [
                        {"token": text, "logprob": logp, "bytes": list(text.encode()), "top_logprobs": []}
                        for text, logp in zip(texts, logps, strict=True)
                    ],
                    "refusal": None,
                }
            else:
                found["logprobs"] = {
                    "tokens": texts, "token_logprobs": logps, "top_logprobs": None, "text_offset": None
                }  # fmt: skip
        if self.call.token_ids:
            found["token_ids"] = ids
        return found

    def _usage(self, sampled: int) -> Json:
        count = len(self.prompt)
        return {"prompt_tokens": count, "completion_tokens": sampled, "total_tokens": count + sampled}

    def whole(self, choices: Sequence[Choice], sampled: int | None = None) -> Json:
        """The answer as a whole. sampled: tokens of all choices, where these do not have them."""
        own = {"prompt_token_ids": [*self.prompt]} if self.call.token_ids else {}
        usage = self._usage(sum(one.tokens.size for one in choices) if sampled is None else sampled)
        found = [self._choice(one) for one in choices]
        return {**self.head, "object": self.whole_kind, "choices": found, "usage": usage, **own}

    def piece(self, choice: Choice, first: bool = False) -> Json:
        own = {"prompt_token_ids": [*self.prompt]} if self.call.token_ids and first else {}
        return {**self.head, "object": self.piece_kind, "choices": [self._choice(choice)], **own}

    def usage_piece(self, sampled: int) -> Json:
        return {**self.head, "object": self.piece_kind, "choices": [], "usage": self._usage(sampled)}


def message_of(reply: Reply, name: str | None = None) -> Json:
    """A reply as the protocol writes it: its thought and its calls of tools if there are, with arguments as JSON text.

    name: of the reply, from which ids of calls follow; None: they are new.
    """
    message: Json = {"role": "assistant", "content": text_of_content(reply.message.get("content"))}
    if thought := reply.message.get("reasoning_content"):
        message["reasoning_content"] = thought
    if reply.calls:
        message["tool_calls"] = [
            {
                "id": f"call_{uuid.uuid4().hex[:24] if name is None else f'{name}{place:012}'}", "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for place, call in enumerate(reply.calls)
        ]  # fmt: skip
    return message
