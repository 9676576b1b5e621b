"""A digest of a run's tokenizer: equal in every process, and for equal contents only."""

from __future__ import annotations

import hashlib
import json
from typing import Any

# Texts that tokenizers split and normalise in different ways: their tokens tell merges and rules apart.
_PROBE = (
    "The quick brown fox's 12345.678 + 9 = x**2;\n\n\tdef f(a_b):  return [a, B]\r\n",
    "na\u00efve e\u0301 \u65e5\u672c\u8a9e \U0001f642 don't HE'LL <b>&amp;</b> \\frac{1}{2}  ",
)


def tokenizer_digest(tokenizer: Any) -> str:
    """A SHA-256 of a tokenizer, 64 hexadecimal digits: vocabulary, added and special tokens, chat template, and how it
    splits a few texts. What a call sets, such as padding, does not count, nor does the library's version.
    """
    kept: dict[str, Any] = {}
    if callable(getattr(tokenizer, "get_vocab", None)):
        kept["vocabulary"] = sorted(tokenizer.get_vocab().items())
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    kept["added"] = [
        (index, str(token), *(bool(getattr(token, name, False)) for name in ("special", "lstrip", "rstrip")))
        for index, token in sorted(added.items())
    ]
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "chat_template")
    kept |= {name: getattr(tokenizer, name, None) for name in names}
    if callable(getattr(tokenizer, "encode", None)):
        kept["probe"] = [list(map(int, tokenizer.encode(text))) for text in _PROBE]
    return _of_lines([json.dumps(kept, sort_keys=True, default=str)])


def _of_lines(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass")).hexdigest()
