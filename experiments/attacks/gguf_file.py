"""GGUF files of a tiny Llama with zero weights, whole or with something wrong in the header."""

from __future__ import annotations

import math
import struct
from typing import Any

TOKENS = ["a", "b", "c", "d", "<eos>", "ab", "Ġ", "Ċ"]
METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.embedding_length": 8,
    "llama.feed_forward_length": 8,
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.context_length": 64,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 4,
}
# Name -> shape, the innermost dimension first, as in the file.
TENSORS: dict[str, list[int]] = {
    "token_embd.weight": [8, len(TOKENS)],
    "output_norm.weight": [8],
    **{f"blk.0.{name}.weight": [8] for name in ("attn_norm", "ffn_norm")},
    **{f"blk.0.{name}.weight": [8, 8] for name in ("attn_q", "attn_k", "attn_v", "attn_output")},
    **{f"blk.0.{name}.weight": [8, 8] for name in ("ffn_gate", "ffn_up", "ffn_down")},
}
ALIGNMENT = 32


def gguf_bytes(
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, Any] | None = None,
    header: dict[str, Any] | None = None,
) -> bytes:
    """The file. Entries of the arguments replace or add to those of the tiny model; None takes one out.

    tensors: name -> shape, or an object with shape, type (0 is float32) and offset.
    header: magic (text), version, tensors and keys (the counts that it gives), kind (of the last value).
    """
    facts = {"magic": "GGUF", "version": 3, **(header or {})}
    values = {name: x for name, x in {**METADATA, **(metadata or {})}.items() if x is not None}
    shapes = {name: x for name, x in {**TENSORS, **(tensors or {})}.items() if x is not None}
    out = facts["magic"].encode() + struct.pack("<I", facts["version"])
    out += struct.pack("<QQ", facts.get("tensors", len(shapes)), facts.get("keys", len(values)))
    for number, (name, value) in enumerate(values.items(), 1):
        kind, content = _value(value)
        out += _string(name) + struct.pack("<I", facts.get("kind", kind) if number == len(values) else kind) + content
    at = 0
    for name, entry in shapes.items():
        entry = entry if isinstance(entry, dict) else {"shape": entry}
        shape = entry["shape"]
        out += _string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        out += struct.pack("<IQ", entry.get("type", 0), entry.get("offset", at))
        at += -(-4 * min(math.prod(shape), 2**16) // ALIGNMENT) * ALIGNMENT
    return out + bytes(-len(out) % ALIGNMENT + at)


def _string(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> tuple[int, bytes]:
    """The code of a value's type, and its bytes."""
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, int):
        return (4, struct.pack("<I", value)) if 0 <= value < 2**32 else (11, struct.pack("<q", value))
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    if isinstance(value, str):
        return 8, _string(value)
    inner = [_value(x) for x in value]
    kind = inner[0][0] if inner else 8
    return 9, struct.pack("<IQ", kind, len(inner)) + b"".join(content for _, content in inner)
