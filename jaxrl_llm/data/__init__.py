"""Prompts: loading, tokenisation, and the stream of batches for training. Names are imported on first use."""

from typing import TYPE_CHECKING

from jaxrl_llm.utils.lazy import imported_at_first_use

if TYPE_CHECKING:
    from jaxrl_llm.data.chat.encode import encode_prompt, is_conversation, prompt_text
    from jaxrl_llm.data.chat.rendering import PromptFormat
    from jaxrl_llm.data.load import conflicting, load_prompts, without
    from jaxrl_llm.data.prompt_rows import rows_digest
    from jaxrl_llm.data.stream import PromptStream

__all__ = [
    "PromptFormat", "PromptStream", "conflicting", "encode_prompt", "is_conversation", "load_prompts", "prompt_text",
    "rows_digest", "without",
]  # fmt: skip
_MODULES = {
    "chat.encode": "encode_prompt is_conversation prompt_text",
    "chat.rendering": "PromptFormat",
    "load": "conflicting load_prompts without",
    "prompt_rows": "rows_digest",
    "stream": "PromptStream",
}
__getattr__ = imported_at_first_use(__name__, _MODULES)
