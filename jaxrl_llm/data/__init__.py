"""Prompts: loading, tokenisation, and the stream of batches for training. Names are imported on first use."""

from typing import TYPE_CHECKING

from jaxrl_llm.lazy import imported_at_first_use

if TYPE_CHECKING:
    from jaxrl_llm.data.chat import encode_prompt, is_conversation, prompt_text
    from jaxrl_llm.data.digest import rows_digest
    from jaxrl_llm.data.prompts import conflicting, load_prompts, without
    from jaxrl_llm.data.rendering import PromptFormat
    from jaxrl_llm.data.stream import PromptStream

__all__ = [
    "PromptFormat",
    "PromptStream",
    "conflicting",
    "encode_prompt",
    "is_conversation",
    "load_prompts",
    "prompt_text",
    "rows_digest",
    "without",
]

_MODULES = {
    "PromptFormat": "rendering",
    "PromptStream": "stream",
    "conflicting": "prompts",
    "encode_prompt": "chat",
    "is_conversation": "chat",
    "load_prompts": "prompts",
    "prompt_text": "chat",
    "rows_digest": "digest",
    "without": "prompts",
}

__getattr__ = imported_at_first_use(__name__, _MODULES)
