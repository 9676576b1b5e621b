"""Prompts: loading, tokenisation, and the stream of batches for training."""

from jaxrl_llm.data.chat import encode_prompt, is_conversation, prompt_text
from jaxrl_llm.data.digest import rows_digest
from jaxrl_llm.data.prompts import conflicting, load_prompts, without
from jaxrl_llm.data.stream import PromptStream

__all__ = [
    "PromptStream",
    "conflicting",
    "encode_prompt",
    "is_conversation",
    "load_prompts",
    "prompt_text",
    "rows_digest",
    "without",
]
