"""Thoughts of today's families: how they are told apart from what is said."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxrl_llm.data.chat.messages import CLOSED, OPENED


class Channels(NamedTuple):
    """How a family tells its thoughts apart from what it says."""

    mark: str
    """What its chat templates contain."""
    opened: str
    """What opens a thought, if that is one text."""
    closed: str
    """What closes a thought."""
    written: str
    """A thought before what is said, with {} for its text, where the template writes none."""
    fields: Mapping[str, Any]
    """Of a `response_template`: how a thought begins and ends, and what is said if that has a beginning."""
    refused: str = "(?!)"
    """A pattern of what its chat templates refuse within a text."""


CHANNELS = (
    Channels(
        CLOSED, OPENED, CLOSED, f"{OPENED}\n{{}}\n{CLOSED}\n\n",
        {"reasoning_content": {"open": OPENED, "close_pattern": rf"{CLOSED}\s*"}},
    ),
    Channels(
        "[/THINK]", "[THINK]", "[/THINK]", "[THINK]{}[/THINK]",
        {"reasoning_content": {"open": "[THINK]", "close_pattern": r"\[/THINK\]\s*"}},
    ),
    Channels(
        "<channel|>", "<|channel>thought", "<channel|>", "<|channel>thought\n{}\n<channel|>",
        {"reasoning_content": {"open_pattern": r"<\|channel>thought\n?", "close_pattern": r"\n?<channel\|>\s*"}},
    ),
    Channels(
        "<|channel|>analysis", "", "<|end|>", "<|channel|>analysis<|message|>{}<|end|><|start|>assistant",
        {
            "reasoning_content": {
                "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>",
                "close_pattern": r"<\|end\|>",
            },
            "content": {"open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>(?:final|commentary)<\|message\|>"},
        },
        r"<\|(?:start|channel|constrain|message|end|call|return)\|>",
    ),
)  # fmt: skip
"""Of the families that think: Qwen and many more, Mistral, Gemma 4, gpt-oss."""
NO_THOUGHTS = Channels("", "", "", CHANNELS[0].written, {})


def channels_of(template: str) -> Channels:
    """How a family with this chat template tells its thoughts; `NO_THOUGHTS` if the template does not show it."""
    return next((one for one in CHANNELS if one.mark in template), NO_THOUGHTS)
