"""Conversations as tokens: chat templates, turns, and calls of tools. Names are imported on first use."""

from typing import TYPE_CHECKING

from jaxrl_llm.utils.lazy import imported_at_first_use

if TYPE_CHECKING:
    from jaxrl_llm.data.chat.encode import (
        encode_plain,
        encode_prompt,
        encode_rendered,
        fault_of,
        format_notes,
        format_of,
        has_chat_template,
        is_conversation,
        is_rendered,
        preview,
        prompt_text,
        row_tools,
    )

__all__ = [
    "encode_plain",
    "encode_prompt",
    "encode_rendered",
    "fault_of",
    "format_notes",
    "format_of",
    "has_chat_template",
    "is_conversation",
    "is_rendered",
    "preview",
    "prompt_text",
    "row_tools",
]
_MODULES = {
    "encode_plain": "encode",
    "encode_prompt": "encode",
    "encode_rendered": "encode",
    "fault_of": "encode",
    "format_notes": "encode",
    "format_of": "encode",
    "has_chat_template": "encode",
    "is_conversation": "encode",
    "is_rendered": "encode",
    "preview": "encode",
    "prompt_text": "encode",
    "row_tools": "encode",
}
__getattr__ = imported_at_first_use(__name__, _MODULES)
