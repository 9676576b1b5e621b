"""Replies of families whose calls of tools are in none of the formats of `call_formats`, read by the package renderers.

It has hand-written renderers and parsers for most families. Here it reads replies alone: what a conversation is as
tokens, the published chat template says. The renderer is the first that reads a call, a thought and a plain reply as
this template writes them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from jaxrl_llm.data.chat.messages import Message
from jaxrl_llm.data.chat.rendering import Rendering
from jaxrl_llm.utils.errors import InputError

Parse = Callable[[Sequence[int]], Any]
"""Token ids of a reply -> a `renderers.ParsedResponse`."""

_ASKED: Message = {"role": "user", "content": "x"}
_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}, "at": {"type": "string"}}},
    },
}


def parser_of(rendering: Rendering, tools: Sequence[Mapping[str, Any]]) -> Parse | None:
    """What reads the replies of this tokenizer; None if the package is not installed, or reads none as they are."""
    try:
        from renderers import create_renderer
        from renderers.configs import RendererConfig, config_from_name
    except ImportError:
        return None
    known = Rendering(rendering.tokenizer, (_TOOL,), rendering.format)
    names = [one.model_fields["name"].default for one in get_args(get_args(RendererConfig)[0])]
    level = logging.getLogger("renderers").level
    logging.getLogger("renderers").setLevel(logging.ERROR)  # of those that do not fit
    try:
        for name in names:
            if name in ("auto", "default", "custom"):
                continue
            try:
                renderer = create_renderer(rendering.tokenizer, config_from_name(name))
                if _reads(known, renderer):
                    prompt, specs = rendering.encode(rendering.render([_ASKED])), [_spec(one) for one in tools]
                    return lambda ids: renderer.parse_response(list(ids), tools=specs or None, prompt_ids=prompt)
            except Exception:  # it wants tokens that this tokenizer does not have, or cannot read its replies
                continue
    finally:
        logging.getLogger("renderers").setLevel(level)
    return None


def _spec(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as the package has them: without the function around it."""
    return dict(tool.get("function", tool))


def _reads(rendering: Rendering, renderer: Any) -> bool:
    """Whether it reads a call with two arguments, two calls, and a plain reply as the template writes them."""

    def parsed(*messages: Message) -> Any:
        asked = rendering.render([_ASKED])
        text = rendering.written([_ASKED, *messages])
        begun = asked if text.startswith(asked) else rendering.written([_ASKED])
        ids = rendering.encode(text[len(begun) :])
        return renderer.parse_response(ids, tools=[_spec(_TOOL)], prompt_ids=rendering.encode(begun))

    def call(number: int, **arguments: str) -> dict[str, Any]:
        own = {"name": "look", "arguments": arguments}
        return {"type": "function", "id": f"call0000{number}", "function": own}

    wanted = [{"text": "at it", "at": "3\n4"}, {"text": "<b>"}]
    for count in (1, 2):
        calls = [call(number, **one) for number, one in enumerate(wanted[:count])]
        try:
            found = parsed({"role": "assistant", "content": "", "tool_calls": calls})
        except InputError:
            if count == 1:
                raise
            continue  # one call at a time
        read = [(one.name, one.arguments) for one in found.tool_calls if one.status == "ok"]
        if read[:1] != [("look", wanted[0])] or (len(read) != count and count == 1):
            return False
    plain = parsed({"role": "assistant", "content": "a reply"})
    return bool(str(plain.content).strip() == "a reply" and not plain.tool_calls)
