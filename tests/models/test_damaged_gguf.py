"""GGUF files whose bytes are not what they should be: each is read, or refused in one line; no other exception."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_gguf import BYTE_LEVEL, KEYS, NORMS, SENTENCEPIECE, dense_model, llama, write

from jaxrl_llm.models.families import from_hf
from jaxrl_llm.models.io.gguf import read_gguf
from jaxrl_llm.models.io.gguf_tokenizer import gguf_tokenizer
from jaxrl_llm.models.io.huggingface import from_tensors
from jaxrl_llm.utils.errors import InputError

VALUES: list[Any] = [
    0,
    1,
    3,
    2**32 - 1,
    -1.0,
    0.0,
    1e-30,
    float("nan"),
    float("inf"),
    "",
    "x",
    True,
    [1, 2],
    ["x"],
    [1.5],
]


def outcome(path: Path) -> str:
    """What reading all of a file says: "read", or the message of its InputError."""
    try:
        model = read_gguf(path)
        from_tensors(model.tensors, from_hf(model.config, where=path.name), np.float32, path.name)
    except InputError as error:
        said = str(error)
    else:
        said = "read"
    assert "\n" not in said
    assert len(said) < 500
    return said


def test_every_key_with_values_of_every_type(tmp_path: Path) -> None:
    tensors, names = dense_model(NORMS)
    stored = {names[hf]: x for hf, x in tensors.items()}
    more = {
        "attention.key_length": 8, "rope.dimension_count": 8, "rope.scaling.type": "yarn", "rope.scaling.factor": 2.0,
        "rope.scaling.original_context_length": 64, "rope.scaling.attn_factor": 1.0, "expert_count": 0,
        "rope.scaling.yarn_beta_fast": 32.0, "tokenizer.ggml.eos_token_id": 3, "tokenizer.ggml.bos_token_id": 3,
        "split.count": 1,
    }  # fmt: skip
    keys = KEYS | more
    path = tmp_path / "m.gguf"
    assert outcome(write(path, "llama", keys, stored)) == "read"
    refused = 0
    for name in keys:
        for value in VALUES:
            said = outcome(write(path, "llama", keys | {name: value}, stored))
            refused += said != "read"
            assert said == "read" or said.startswith(("m.gguf", "one of")), (name, value, said)
    assert refused > 150


def test_messages(tmp_path: Path) -> None:
    assert "llama.attention.head_count is 0, but must be a whole number" in outcome(
        llama(tmp_path, **{"attention.head_count": 0})[0]
    )
    assert "llama.block_count is 'x', but" in outcome(llama(tmp_path, block_count="x")[0])
    assert "general.alignment" not in outcome(llama(tmp_path)[0])


@pytest.mark.heavy
def test_single_bytes(tmp_path: Path) -> None:
    """Every byte of the header changed, in three ways."""
    path, _ = llama(tmp_path, **{"tokenizer.ggml.tokens": ["a", "b"]})
    whole, changed = path.read_bytes(), tmp_path / "changed.gguf"
    start = read_header_end(path)
    said = set()
    for place in range(4, start):
        for flip in (0x01, 0x80, 0xFF):
            changed.write_bytes(whole[:place] + bytes([whole[place] ^ flip]) + whole[place + 1 :])
            said.add(outcome(changed) == "read")
    assert said == {True, False}


def read_header_end(path: Path) -> int:
    from jaxrl_llm.models.io.gguf_file import GgufFile

    return GgufFile(path).start


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def header(keys: bytes = b"", count: int = 0, tensors: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, count) + keys


HUGE = 2**63
HEADERS = {
    "keys without end": header(b"", 2**64 - 1),
    "tensors without end": header(b"", 0, 2**64 - 1),
    "long name": header(struct.pack("<Q", HUGE) + b"x", 1),
    "long text": header(text("a") + struct.pack("<IQ", 8, HUGE), 1),
    "long list": header(text("a") + struct.pack("<IIQ", 9, 4, HUGE), 1),
    "long list of texts": header(text("a") + struct.pack("<IIQ", 9, 8, HUGE), 1),
    "lists in lists": header(text("a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000, 1),
    "unknown type": header(text("a") + struct.pack("<I", 77), 1),
    "unknown type in a list": header(text("a") + struct.pack("<IIQ", 9, 77, 1) + b"\0" * 8, 1),
    "many axes": header(text("t") + struct.pack("<I", 2**32 - 1) + b"\1" * 64, 0, 1),
    "no alignment": header(text("general.alignment") + struct.pack("<II", 4, 0), 1),
    "alignment of text": header(text("general.alignment") + struct.pack("<I", 8) + text("x"), 1),
    "huge shape": header(text("t") + struct.pack("<IQQ", 2, 2**62, 2**62) + struct.pack("<IQ", 0, 0), 0, 1),
    "empty shape": header(text("t") + struct.pack("<IQQ", 2, 0, 2**62) + struct.pack("<IQ", 0, 0), 0, 1),
    "less than a block": header(text("t") + struct.pack("<IQQ", 2, 1, 2**62) + struct.pack("<IQ", 8, 0), 0, 1),
    "far away": header(text("t") + struct.pack("<IQ", 1, 1) + struct.pack("<IQ", 0, 2**64 - 1), 0, 1),
    "unknown kind of tensor": header(text("t") + struct.pack("<IQ", 1, 1) + struct.pack("<IQ", 999, 0), 0, 1),
    "a tensor twice": header((text("t") + struct.pack("<IQ", 1, 1) + struct.pack("<IQ", 0, 0)) * 2, 0, 2),
    "no architecture": header(),
}


@pytest.mark.parametrize("content", HEADERS.values(), ids=HEADERS)
def test_headers(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(content + b"\0" * 32)
    assert outcome(tmp_path / "m.gguf").startswith("m.gguf")


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["bytes", "sentencepiece"])
def test_tokenizers_of_every_type(tokenizer: dict[str, Any]) -> None:
    refused = []
    more = {"tokenizer.ggml.add_bos_token": False, "tokenizer.chat_template": "x", "tokenizer.ggml.pre": "default"}
    for name in tokenizer | more:
        for value in [*VALUES, None, {}, -1, 10**30, ["a", 1], ["a", "a"], [["a"]]]:
            try:
                gguf_tokenizer(tokenizer | more | {name: value}).encode("ab")
            except InputError as error:
                refused.append(str(error))
    assert len(refused) > 100
    assert not any("\n" in said for said in refused)
