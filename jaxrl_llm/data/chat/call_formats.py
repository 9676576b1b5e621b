"""Formats in which models of today call tools, one entry each, and how a chat template's is found.

The template says it: what it writes for a call is read as JSON between two texts, or by the first format that reads it.
A template that describes tools but writes no calls is of the format whose mark it or its vocabulary has.

Families whose calls are in none of these formats are read by the package renderers (`parser_of`), which has
hand-written renderers and parsers for most. Here it reads replies alone: what a conversation is as tokens, the
published chat template says. The renderer is the first that reads a call, a thought and a plain reply as this template
writes them.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, get_args

from jaxrl_llm.data.chat.call_syntax import (
    CallSyntax,
    braced_arguments,
    json_arguments,
    named_arguments,
    read_syntax,
    tagged_arguments,
)
from jaxrl_llm.data.chat.lenient import CallFormat, Calls, read_calls
from jaxrl_llm.data.chat.messages import Message
from jaxrl_llm.data.chat.rendering import Rendering
from jaxrl_llm.utils.errors import InputError

Tools = Sequence[Mapping[str, Any]]
ReadCalls = Callable[[str], Calls]  # a reply's text, without its thought -> its calls


class ToolFormat(NamedTuple):
    """A format of calls."""

    families: str  # whose it is
    mark: str  # with which calls begin
    syntax: CallSyntax | CallFormat
    write: Callable[[Sequence[Mapping[str, Any]]], str] | None = None
    """Calls, each with "name" and "arguments" -> their text; None where templates write calls themselves."""

    def read(self, text: str, tools: Tools) -> Calls:
        """The calls of a reply's text without its thought. tools: their JSON schemas."""
        if isinstance(self.syntax, CallFormat):
            return read_calls(text, self.syntax)
        return read_syntax(text, self.syntax, tools)

    def of(self, tools: Tools) -> ReadCalls:
        """What reads calls of these tools."""
        return lambda text: self.read(text, tools)


def format_by_mark(rendering: Rendering) -> ToolFormat:
    """The format whose mark a chat template that describes tools has, or its vocabulary; that of Hermes otherwise."""
    texts = (rendering.template, *rendering.control) if rendering.shows_tools else ()
    return next((one for one in FORMATS if one.write and any(one.mark in text for text in texts)), HERMES)


def _as_json(call: Mapping[str, Any]) -> str:
    """A call as a JSON object, with its arguments as they are if they are text."""
    arguments = call["arguments"]
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'{{"name": {json.dumps(call["name"])}, "arguments": {written}}}'


def as_hermes(calls: Sequence[Mapping[str, Any]]) -> str:
    """Calls as Hermes writes them."""
    return "\n".join(f"<tool_call>\n{_as_json(one)}\n</tool_call>" for one in calls)


def as_python(call: Mapping[str, Any]) -> str:
    """A call as Python writes it."""
    arguments = call["arguments"]
    named = json.loads(arguments, strict=False) if isinstance(arguments, str) else arguments
    return f"{call['name']}({', '.join(f'{name}={value!r}' for name, value in named.items())})"


def _python(opened: str, closed: str) -> CallSyntax:
    """Calls as Python writes them, several in brackets or in lines."""
    return CallSyntax(
        rf"{opened}\s*\[?", r"[\s,;]*(?P<name>[\w.-]+)\(", named_arguments, r"\)(?=\s*(?:[,;\]<\w]|\Z))",
        rf"\s*\]?\s*{closed}",
    )  # fmt: skip


_QWEN = CallSyntax(
    r"<tool_call>\s*|(?=<function=[^>\s]+>)",
    r"\s*<function=(?P<name>[^>\s]+)>",
    tagged_arguments(
        r"\s*<parameter=(?P<name>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
        r"(?=\s*(?:<parameter=|</function>|</tool_call>))"
    ),
    r"\s*</function>\s*",
    r"</tool_call>\s*",
)
_GLM = CallSyntax(
    r"<tool_call>\s*",
    r"(?P<name>[^\s<{]+)",
    tagged_arguments(
        r"\s*<arg_key>(?P<name>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
        r"(?=\s*(?:<arg_key>|</tool_call>))"
    ),
    r"\s*(?=</tool_call>)",
    r"</tool_call>",
)
_HARMONY = CallSyntax(
    r"(?:(?:\A|<\|start\|>assistant)\s*(?:<\|channel\|>\w+\s*)?|<\|channel\|>\w+\s+)to=(?:functions\.)?",
    r"(?P<name>[\w.-]+)[^<{]*(?:<\|(?:channel|constrain)\|>[^<{]*)*<\|message\|>\s*",
    json_arguments,
    r"\s*(?=<\|(?:call|start)\|>|\Z)",
)
_GEMMA = CallSyntax(
    r"<\|tool_call>\s*", r"call:\s*(?P<name>[\w.-]+)\s*\{", braced_arguments, r"\}(?=\s*<tool_call\|>|\Z)",
    r"\s*<tool_call\|>",
)  # fmt: skip
_DEEPSEEK = CallSyntax(
    r"(?:<\uff5ctool\u2581calls\u2581begin\uff5c>\s*)?<\uff5ctool\u2581call\u2581begin\uff5c>",
    r"(?:function<\uff5ctool\u2581sep\uff5c>)?(?P<name>[^<\n]+?)(?:\s*```json\s*|<\uff5ctool\u2581sep\uff5c>\s*)",
    json_arguments,
    r"\s*(?:```\s*)?<\uff5ctool\u2581call\u2581end\uff5c>",
    r"(?:\s*<\uff5ctool\u2581calls\u2581end\uff5c>)?",
)
_MISTRAL = CallSyntax(
    r"\[TOOL_CALLS\]\s*", r"(?P<name>[\w.-]+)\s*(?:\[CALL_ID\]\s*[\w-]*\s*)?\[ARGS\]\s*", json_arguments,
    r"\s*(?=\[TOOL_CALLS\]|</s>|\Z)",
)  # fmt: skip

HERMES = ToolFormat(
    "Qwen 2.5 and 3, SmolLM3, Granite 4, Hermes", "<tool_call>", CallFormat("<tool_call>", "</tool_call>"),
    as_hermes,
)  # fmt: skip
FORMATS = (
    ToolFormat("Qwen3-Coder, Qwen3.5 and later, Nemotron 3", "<function=", _QWEN),
    ToolFormat("GLM-4.5", "<arg_key>", _GLM),
    ToolFormat("gpt-oss", "<|channel|>commentary", _HARMONY),
    ToolFormat("Gemma 4", "<|tool_call>", _GEMMA),
    ToolFormat("DeepSeek-V3 and R1", "<\uff5ctool\u2581call\u2581begin\uff5c>", _DEEPSEEK),
    ToolFormat("Ministral 3", "[ARGS]", _MISTRAL),
    ToolFormat(
        "LFM2", "<|tool_call_start|>", _python(r"<\|tool_call_start\|>", r"<\|tool_call_end\|>"),
        lambda calls: f"<|tool_call_start|>[{', '.join(map(as_python, calls))}]<|tool_call_end|>",
    ),
    ToolFormat(
        "OLMo 3", "<function_calls>", _python("<function_calls>", "</function_calls>"),
        lambda calls: "<function_calls>" + "\n".join(map(as_python, calls)) + "</function_calls>",
    ),
    ToolFormat(
        "Granite 3", "<|tool_call|>", CallFormat("<|tool_call|>", "", is_list=True),
        lambda calls: f"<|tool_call|>[{', '.join(map(_as_json, calls))}]",
    ),
    HERMES,
)  # fmt: skip
"""In the order in which they are tried on what a template writes."""


Parse = Callable[[Sequence[int]], Any]  # token ids of a reply -> a `renderers.ParsedResponse`

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
                    prompt = rendering.encode(rendering.render([_ASKED]))
                    specs = [dict(one.get("function", one)) for one in tools]
                    return lambda ids: renderer.parse_response(list(ids), tools=specs or None, prompt_ids=prompt)
            except Exception:  # it wants tokens that this tokenizer does not have, or cannot read its replies
                continue
    finally:
        logging.getLogger("renderers").setLevel(level)
    return None


def _reads(rendering: Rendering, renderer: Any) -> bool:
    """Whether it reads a call with two arguments, two calls, and a plain reply as the template writes them."""

    def parsed(*messages: Message) -> Any:
        asked = rendering.render([_ASKED])
        text = rendering.written([_ASKED, *messages])
        begun = asked if text.startswith(asked) else rendering.written([_ASKED])
        ids = rendering.encode(text[len(begun) :])
        return renderer.parse_response(ids, tools=[_TOOL["function"]], prompt_ids=rendering.encode(begun))

    def call(number: int, **arguments: str) -> dict[str, Any]:
        return {"type": "function", "id": f"call0000{number}", "function": {"name": "look", "arguments": arguments}}

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
