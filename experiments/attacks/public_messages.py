"""Reports of messages and calls: what chat templates write, what replies call, and what tools answer."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from experiments.attacks.public_reports import MENDED, NONE, RIGHT, Report, refuses
from jaxrl_llm.data.chat.encode import encode_prompt, encode_rendered
from jaxrl_llm.data.chat.messages import plain_message
from jaxrl_llm.data.chat.rendering import PromptFormat
from jaxrl_llm.data.chat.turns import ChatTurns
from jaxrl_llm.environments.tools.base import Toolbox

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

from chat_templates import tokenizer_of

O, C, END = "<tool_call>\n", "\n</tool_call>", "<|im_end|>"
_ASKED = {"role": "user", "content": "hi"}


def get(city: str, unit: Literal["C", "F"] = "C", days: int = 1, tags: list[str] | None = None) -> str:
    """Get the weather.

    Args:
        city: Where.
        unit: Of the temperature.
        days: How many.
        tags: More.
    """
    return f"{city}, {unit}, {days!r}, {tags}"


def now() -> str:
    """The time."""
    return "noon"


async def later(number: int) -> dict[str, int]:
    """Add one, later.

    Args:
        number: To what.
    """
    await asyncio.sleep(0)
    return {"sum": number + 1}


def _answers(text: str, template: str = "qwen3") -> list[str]:
    """What the tools answer to a reply; "" for a reply that calls none."""
    box = Toolbox([get, now, later])
    reply = ChatTurns(tokenizer_of(template), box.schemas).reading.text(text + END)
    return [str(one["content"]) for one in asyncio.run(box.answer(reply)).messages] or [""]


def _answered(text: str, *right: str) -> Callable[[], bool]:
    """Whether the answers begin so."""

    def check() -> bool:
        found = _answers(text)
        return len(found) == len(right) and all(map(str.startswith, found, right))

    return check


def _written(template: str, *messages: dict[str, Any], **options: Any) -> str:
    tokenizer = tokenizer_of(template)
    return str(tokenizer.decode(encode_prompt(tokenizer, list(messages), format=PromptFormat(options=options))))


def _call(*arguments: Any, **more: Any) -> dict[str, Any]:
    calls = [
        {"type": "function", "id": f"call{n:05d}", "function": {"name": "f", "arguments": one}}
        for n, one in enumerate(arguments)
    ]
    return {"role": "assistant", "tool_calls": calls, **more}


def _result(text: str) -> dict[str, str]:
    return {"role": "tool", "name": "f", "content": text}


def _one(name: str, arguments: str) -> str:
    return f'{O}{{"name": "{name}", "arguments": {arguments}}}{C}'


def _begins_once() -> bool:
    """Whether prompts with a BOS token have one, of messages or rendered."""
    tokenizer = tokenizer_of("gemma")
    ids = encode_prompt(tokenizer, [_ASKED])
    text = tokenizer.decode(ids)
    return ids.count(tokenizer.bos_token_id) == encode_rendered(tokenizer, text).count(tokenizer.bos_token_id) == 1


def _bridge(*results: str) -> str:
    """What comes between a reply of Qwen3 that called tools and the next one."""
    tokenizer = tokenizer_of("qwen3")
    ids = ChatTurns(tokenizer, Toolbox([get]).schemas).bridge([_result(text) for text in results], None)
    return str(tokenizer.decode(ids or []))


VLLM, SLIME, NEMO, TRL = "vllm-project/vllm", "THUDM/slime", "NVIDIA-NeMo/RL", "huggingface/trl"
ROME = '{"city": "Rome"}'

REPORTS = [
    Report(
        f"{VLLM}#17790", "two calls between one pair of tags: extra data, no call",
        MENDED, "the second was lost; both are answered",
        _answered(
            f'{O}{{"name": "get", "arguments": {ROME}}}\n{{"name": "now", "arguments": {{}}}}{C}', "Rome", "noon"
        ),
    ),
    Report(
        f"{VLLM}#19419", 'arguments "" of a tool without parameters are no JSON', MENDED, "no arguments",
        _answered(_one("now", '""'), "noon"),
    ),
    Report(
        f"{VLLM}#28806", "empty arguments of such tools are dropped", MENDED, "{}, null and none at all call it",
        lambda: (
            all(_answers(_one("now", one)) == ["noon"] for one in ("{}", "null"))
            and _answers(f'{O}{{"name": "now"}}{C}') == ["noon"]
        ),
    ),
    Report(
        f"{VLLM}#21544", "an unpaired brace in a text breaks the parser", RIGHT, "",
        _answered(_one("get", '{"city": "mkdir -p t/{a,b"}'), "mkdir -p t/{a,b,"),
    ),
    Report(
        f"{VLLM}#32638", "several calls of one message fail when they are sent back",
        RIGHT, "each has its arguments, as text too",
        lambda: (
            _written("qwen3", _ASKED, _call('{"a": 1}', {"a": 2}), _result("3"), _result("4")).count(
                '"arguments": {"a": '
            )
            == 2
        ),
    ),
    Report(
        f"{VLLM}#36654", 'arguments within {"arguments": "..."}', RIGHT, "the policy is told which are wrong",
        _answered(_one("get", json.dumps({"arguments": ROME})), "Error: TypeError: get() got an unexpected"),
    ),
    Report(
        f"{VLLM}#41739", "arguments that are no JSON reach the tool", RIGHT, "an error for the policy",
        _answered(
            f'{O}{{"name": "get", "arguments": {{"city": "Rome"{C}', "Error: the call of a tool could not be read"
        ),
    ),
    Report(
        f"{VLLM}#21301", "a call without arguments is invalid", RIGHT, "",
        _answered(f'{O}{{"name": "now"}}{C}', "noon"),
    ),
    Report(
        f"{VLLM}#28820", "arguments must be texts, not mappings", RIGHT, "both",
        lambda: (
            _written("qwen3", _ASKED, _call({"a": 75}), _result("1"))
            == _written("qwen3", _ASKED, _call('{"a": 75}'), _result("1"))
        ),
    ),
    Report(
        f"{VLLM}#47761", "a stored call with broken arguments fails the next turn",
        RIGHT, "it is written as it was said",
        lambda: '{"a": "cut' in _written("qwen3", _ASKED, _call('{"a": "cut'), _result("no JSON")),
    ),
    Report(
        "ml-explore/mlx-lm#1310", "a date for an integer drops the call", RIGHT, "the tool answers it",
        _answered(_one("get", '{"city": "Rome", "days": "2026-01-15"}'), "Rome, C, '2026-01-15'"),
    ),
    Report(
        f"{VLLM}#30722", "nested lists of pythonic calls (Llama 4)",
        NONE, "this format is not read: runs with tools are refused in a line",
    ),
    Report(
        f"{VLLM}#24478", "several calls of Kimi K2", NONE, "its tokens are read by the package renderers",
    ),
    Report(
        f"{TRL}#4881", "a call with missing arguments ends the training", RIGHT, "an error for the policy",
        _answered(_one("get", "{}"), "Error: TypeError: get() missing 1 required"),
    ),
    Report(
        "SREGym/SREGym#741", "a call of an unknown tool ends the process", RIGHT, "an error that lists the tools",
        _answered(_one("gett", ROME), "Error: there is no tool 'gett', but get"),
    ),
    Report(
        f"{TRL}#5446", "async tools are refused in asynchronous training", RIGHT, "",
        _answered(_one("later", '{"number": 3}'), "{'sum': 4}"),
    ),
    Report(
        "verl-project/verl#3759", "results of several calls are appended several times", RIGHT, "",
        lambda: (lambda text: text.count("ONE") == text.count("TWO") == 1)(_bridge("ONE", "TWO")),
    ),
    Report(
        f"{SLIME}#2263", "results of parallel calls become several user turns", RIGHT, "as the template writes them",
        lambda: _bridge("ONE", "TWO").count("<|im_start|>user") == 1,
    ),
    Report(
        "huggingface/transformers#37686", "encoding a rendered prompt adds a second BOS", RIGHT, "",
        _begins_once,
    ),
    Report(
        "huggingface/transformers#45348", "a message of calls without content crashes the template",
        MENDED, "it was refused; its content is empty",
        lambda: all(
            '"a": 1' in _written(name, _ASKED, _call({"a": 1}), _result("3"))
            for name in ("qwen3", "llama3_1", "deepseekv3")
        ),
    ),
    Report(
        "huggingface/speech-to-speech#425", "and so does content None",
        MENDED, "DeepSeek-V3 got a call in another format",
        lambda: all(
            _written(name, _ASKED, _call({}, content=None), _result("3"))
            == _written(name, _ASKED, _call({}, content=""), _result("3"))
            for name in ("qwen3", "gemma4", "deepseekv3", "glm4moe")
        ),
    ),
    Report(
        "osaurus-ai/vmlx-swift#146", "Gemma 4: after words, a call and its result the policy speaks outside of a turn",
        MENDED, "the turn is begun",
        lambda: (
            all(
                _written(name, _ASKED, _call({"a": 1}, content="I look."), _result("3")).endswith(
                    "<turn|>\n<|turn>model\n"
                )
                for name in ("gemma4", "gemma4_v5")
            )
            and _written("gemma4", _ASKED, _call({"a": 1}), _result("3")).endswith("<tool_response|>")
        ),
    ),
    Report(
        f"{SLIME}#330", "reasoning_content is left out", RIGHT, "",
        lambda: "WHY" in _written("qwen3", _ASKED, _call({"a": 1}, content="", reasoning_content="WHY"), _result("3")),
    ),
    Report(
        f"{NEMO}#2864", "a conversation that begins with a system message fails, as its beginning is rendered alone",
        RIGHT, "it never is",
        lambda: "BE GOOD" in _written("qwen3_5_think", {"role": "system", "content": "BE GOOD"}, _ASKED),
    ),
    Report(
        f"{NEMO}#2822", "earlier answers appear twice where the template strips thoughts", RIGHT, "",
        lambda: (
            _written("qwen3", _ASKED, {"role": "assistant", "content": "<think>\nx\n</think>\n\nANSWER"}, _ASKED).count(
                "ANSWER"
            )
            == 1
        ),
    ),
    Report(
        f"{VLLM}#28089", "enable_thinking is lost where the last message is continued",
        RIGHT, "an open thought goes on",
        lambda: _written(
            "qwen3", _ASKED, {"role": "assistant", "content": "<think>\nWell"}, enable_thinking=True
        ).endswith("<|im_start|>assistant\n<think>\nWell"),
    ),
    Report(
        "mistralai/mistral-vibe#114", "a last message of the assistant is refused", RIGHT, "it is continued",
        lambda: _written("qwen2_5", _ASKED, {"role": "assistant", "content": "Well,"}).endswith("assistant\nWell,"),
    ),
    Report(
        "OpenRLHF/OpenRLHF#363", "the prompt's column is ignored with a chat template",
        RIGHT, "a text is a user's message",
        lambda: "user\nhi<" in tokenizer_of("qwen3").decode(encode_prompt(tokenizer_of("qwen3"), "hi")),
    ),
    Report(
        f"{TRL}#3644", "special tokens of the prompt are lost in decoding and encoding", RIGHT, "prompts are ids",
        lambda: encode_prompt(tokenizer_of("qwen3"), ids := encode_prompt(tokenizer_of("qwen3"), [_ASKED])) == ids,
    ),
    Report(
        f"{VLLM}#52489", "an item of another kind in a tool's result crashes the template",
        RIGHT, "refused, by its type",
        lambda: refuses(
            lambda: plain_message({"role": "tool", "content": [{"type": "tool_reference", "id": "1"}]}),
            "tool_reference",
        ),
    ),
    Report(
        "verl-project/verl#3948", "the system prompt is cut off from each result",
        NONE, "what follows a reply is found by rendering, and no prefix is cut",
    ),
]  # fmt: skip
