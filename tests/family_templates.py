"""Conversations of today's families: chat templates of TRL's wheel, and small ones in the form of those that it lacks,
with a byte tokenizer whose special tokens are theirs."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any, NamedTuple

from chat_templates import FOLDER, NAMES, tokenizer_with
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from jaxrl_llm.data.chat.call_formats import format_by_mark
from jaxrl_llm.data.chat.message_forms import as_written
from jaxrl_llm.data.chat.turns import ChatTurns

_CHATML = (
    "{% for m in messages %}{% if m.role == 'tool' %}RESULT{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}CALLS"
    "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SHOWN = "<tools>{{ tools | tojson }}</tools> <tool_call></tool_call>"
_TOOLS = f"{{% if tools %}}<|im_start|>system\n{_SHOWN}<|im_end|>\n{{% endif %}}"
_EACH = "{% for c in m.tool_calls or [] %}"
_ARGUMENTS = "{% for name, value in c.function.arguments.items() %}"
_RAW = "{{ value | tojson if value is mapping or value is sequence and value is not string else value | string }}"
_FIRST = "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}"
_LAST = "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}"

_OWN = {
    "Qwen3-Coder": _TOOLS
    + _CHATML.replace(
        "RESULT",
        _FIRST + "<|im_start|>user\n{% endif %}<tool_response>\n{{ m.content }}\n</tool_response>\n"
        + _LAST + "<|im_end|>\n{% endif %}",
    ).replace(
        "\n{{ m.content }}CALLS",
        "{% if m.content or not m.tool_calls %}\n{{ m.content }}{% endif %}{% if m.content and m.tool_calls %}\n"
        f"{{% endif %}}{_EACH}\n<tool_call>\n<function={{{{ c.function.name }}}}>\n{_ARGUMENTS}"
        f"<parameter={{{{ name }}}}>\n{_RAW}\n</parameter>\n{{% endfor %}}</function>\n</tool_call>{{% endfor %}}",
    ),
    "SmolLM3": (
        "{% set mode = '/think' if enable_thinking | default(true) else '/no_think' %}"
        "{% set start = '<|im_start|>assistant\n' + ('' if mode == '/think' else '<think>\n\n</think>\n') %}"
        + _TOOLS.replace("<tools>", "Reasoning Mode: {{ mode }}\n<tools>")
        + "{% for m in messages %}{% if m.role == 'assistant' %}{{ start }}{% else %}<|im_start|>"
        "{{ 'user' if m.role == 'tool' else m.role }}\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}{{ start }}{% endif %}"
    ),
    "Granite 4": (
        f"{{% if tools %}}<|start_of_role|>system<|end_of_role|>{_SHOWN}<|end_of_text|>\n{{% endif %}}"
        "{% for m in messages %}{% if m.role == 'tool' %}"
        + _FIRST + "<|start_of_role|>user<|end_of_role|>{% endif %}\n<tool_response>\n{{ m.content }}\n</tool_response>"
        + _LAST + "<|end_of_text|>\n{% endif %}"
        "{% else %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}" + _EACH
        + "{% if m.content or not loop.first %}\n{% endif %}<tool_call>\n"
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
        "<|end_of_text|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"
    ),
    "Granite 3": (
        "{% if thinking %}<|start_of_role|>system<|end_of_role|>Think first.<|end_of_text|>\n{% endif %}"
        "{% if tools %}<|start_of_role|>tools<|end_of_role|>{{ tools | tojson }}<|end_of_text|>\n{% endif %}"
        "{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>\n"
        "{% endfor %}"
        "{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"
    ),
    "OLMo 3": (
        "{% if tools %}<|im_start|>system\n<functions>{{ tools | tojson }}</functions><|im_end|>\n{% endif %}"
        + _CHATML.replace("RESULT", "<|im_start|>environment\n{{ m.content }}<|im_end|>\n")
        .replace(
            "CALLS",
            "{% if m.tool_calls %}<function_calls>"
            + _EACH + "{% if not loop.first %}\n{% endif %}{{ c.function.name }}("
            + _ARGUMENTS + "{% if not loop.first %}, {% endif %}{{ name }}={{ value | tojson }}{% endfor %})"
            "{% endfor %}</function_calls>{% endif %}",
        )
        .replace("<|im_end|>\n{% endif %}{% endfor %}", (
            "{% if m.role == 'assistant' and loop.last %}<|endoftext|>{% else %}<|im_end|>\n{% endif %}"
            "{% endif %}{% endfor %}"
        ))
    ),
    "Ministral 3": (
        "<s>{% if messages[0].role == 'system' %}[SYSTEM_PROMPT]{{ messages[0].content }}[/SYSTEM_PROMPT]{% endif %}"
        "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
        "{% for m in messages %}{% if m.role == 'system' %}{% elif m.role == 'user' %}[INST]{{ m.content }}[/INST]"
        "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
        "{% else %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
        "{% if part.type == 'thinking' %}[THINK]{{ part.thinking }}[/THINK]{% else %}{{ part.text }}{% endif %}"
        "{% endfor %}{% endif %}"
        + _EACH + "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}</s>"
        "{% endif %}{% endfor %}"
    ),
    "DeepSeek-V3.1": (
        "{% set last = namespace(user=false) %}<\uff5cbegin\u2581of\u2581sentence\uff5c>{% for m in messages %}"
        "{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}<\uff5cUser\uff5c>{{ m.content }}"
        "{% set last.user = true %}{% elif m.role == 'tool' %}{% set last.user = false %}"
        "<\uff5ctool\u2581output\u2581begin\uff5c>{{ m.content }}<\uff5ctool\u2581output\u2581end\uff5c>"
        "{% else %}{% if last.user %}<\uff5cAssistant\uff5c></think>{% endif %}{% set last.user = false %}"
        "{{ m.content if m.tool_calls else m.content.split('</think>', 1) | last }}"
        "{% if m.tool_calls %}<\uff5ctool\u2581calls\u2581begin\uff5c>"
        + _EACH + "<\uff5ctool\u2581call\u2581begin\uff5c>{{ c.function.name }}<\uff5ctool\u2581sep\uff5c>"
        "{{ c.function.arguments + '' }}<\uff5ctool\u2581call\u2581end\uff5c>{% endfor %}"
        "<\uff5ctool\u2581calls\u2581end\uff5c>{% endif %}<\uff5cend\u2581of\u2581sentence\uff5c>{% endif %}"
        "{% endfor %}"
        "{% if add_generation_prompt and last.user %}<\uff5cAssistant\uff5c>"
        "{{ '<think>' if thinking | default(false) else '</think>' }}{% endif %}"
    ),
}  # fmt: skip
OWN = {name: template.replace("%}\n", "%}{{ '\\n' }}") for name, template in _OWN.items()}
"""Chat templates in the form of families, whose own are not in TRL's wheel. Line breaks after tags would be dropped."""


class Family(NamedTuple):
    """A family, and what is written of its conversations in the docs."""

    name: str
    template: str
    """Of TRL, or a key of `OWN`."""
    calls: str
    """How it writes a call, from its beginning to its end, with ... between."""
    ends: str
    """What ends a reply."""
    special: tuple[str, ...] = ()
    """Further special tokens."""
    several: bool = True
    """Whether a reply may call several tools."""


END = "<|im_end|>"
_JSON, _XML = '<tool_call>{"name": ...}</tool_call>', "<tool_call><function=...></tool_call>"
_DEEPSEEK = "<\uff5ctool\u2581call\u2581begin\uff5c>...<\uff5ctool\u2581call\u2581end\uff5c>"
_SENTENCE = "<\uff5cend\u2581of\u2581sentence\uff5c>"
FAMILIES = (
    Family("Qwen 2.5", "qwen2_5", _JSON, END),
    Family("Qwen 3", "qwen3", _JSON, END),
    Family("Qwen3-Coder", "Qwen3-Coder", _XML, END),
    Family("Qwen3.5", "qwen3_5_think", _XML, END),
    Family("Qwen3.6", "qwen3_6", _XML, END),
    Family("GLM-4.5", "glm4moe", "<tool_call>...</tool_call>", "<|user|>"),
    Family("gpt-oss", "gptoss", "to=functions....<|message|>{...}", "<|return|>", ("<|call|>",), False),
    Family("Gemma 3", "gemma3", _JSON, "<end_of_turn>"),
    Family("Gemma 4", "gemma4_v5", "<|tool_call>call:...{...}<tool_call|>", "<turn|>", ('<|"|>', "<|tool_response>")),
    Family("Ministral 3", "Ministral 3", "[TOOL_CALLS]...[ARGS]{...}", "</s>"),
    Family("Llama 3.1", "llama3_1", '{"name": ...}', "<|eot_id|>", (), False),
    Family("DeepSeek-V3", "deepseekv3", _DEEPSEEK, _SENTENCE),
    Family("DeepSeek-V3.1", "DeepSeek-V3.1", _DEEPSEEK, _SENTENCE),
    Family("LFM2", "lfm2_v2", "<|tool_call_start|>[...(...)]<|tool_call_end|>", END),
    Family("LFM2.5", "lfm2_2_5_v2", "<|tool_call_start|>[...(...)]<|tool_call_end|>", END),
    Family("SmolLM3", "SmolLM3", _JSON, END),
    Family("Granite 3", "Granite 3", '<|tool_call|>[{"name": ...}]', "<|end_of_text|>", ("<|tool_call|>",)),
    Family("Granite 4", "Granite 4", _JSON, "<|end_of_text|>"),
    Family("Phi-4", "phi3_5", _JSON, "<|end|>"),
    Family("OLMo 3", "OLMo 3", "<function_calls>...(...)</function_calls>", END),
    Family("Nemotron 3", "nemotron_3_nano", _XML, END),
)  # fmt: skip


KNOWN = [one for one in FAMILIES if one.template in OWN or NAMES]
"""Those whose templates are here."""
ASKED = {"role": "user", "content": "so?"}


@cache
def tokenizer_of_family(name: str) -> PreTrainedTokenizerFast:
    """A byte tokenizer with a family's chat template, special tokens and end of text."""
    family = next(one for one in FAMILIES if one.name == name)
    template = OWN.get(family.template) or (FOLDER / f"{family.template}.jinja").read_text(encoding="utf-8")
    made = tokenizer_with(template)
    special = [AddedToken(text, special=True, normalized=False) for text in (family.ends, *family.special)]
    made.add_tokens(special, special_tokens=True)
    made.eos_token = family.ends
    return made


def calling(*arguments: dict[str, Any]) -> dict[str, Any]:
    """A reply that calls the tool `find`, with each of these arguments."""
    calls = [{"type": "function", "id": f"call{n:05d}", "function": {"name": "find", "arguments": one}}
             for n, one in enumerate(arguments)]  # fmt: skip
    return {"role": "assistant", "content": "", "tool_calls": calls}


def called(family: Family, turns: ChatTurns, *arguments: dict[str, Any]) -> str:
    """What a policy of the family writes for calls, without what ends its reply."""
    reply = calling(*arguments)
    given = as_written(turns, [ASKED, reply])[0]
    if "tool_calls" not in given[-1]:  # the template writes none
        text = (format_by_mark(turns).write or json.dumps)([one["function"] for one in reply["tool_calls"]])
    else:
        text = turns.written(given).rpartition("so?")[2]
    begins = re.match(r'\{"name": |<[^>]+>|[^{.]+', family.calls)
    assert begins is not None
    text = text[text.index(begins[0]) :].rstrip("\n")
    for end in turns.tokenizer.batch_decode([[number] for number in turns.stops]):
        text = text.removesuffix(end).rstrip("\n")
    return text


def sampled(turns: ChatTurns, text: str, calls: bool) -> list[int]:
    """Token ids of a reply, with what closes a thought that the prompt opened, and the token that ends it."""
    before = "</think>\n\n" if turns.reply_start.rstrip().endswith("<think>") else ""
    ends = turns.ends[calls] or turns.ends[0]
    eos = turns.tokenizer.eos_token_id
    return [*turns.encode(before + text), eos if eos in ends else min(ends)]
