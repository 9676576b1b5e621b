"""Steps with labels at their ends are those of TRL's process reward models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxrl_llm.data.step_labels import NO_LABEL, encode_steps
from jaxrl_llm.models.io.load import load_tokenizer
from jaxrl_llm.utils.errors import InputError

TEXT = b"9.8 or 9.11?11 > 8.\nSo 9.11 > 9.8.\n"
STEPS = ("11 > 8.", "So 9.11 > 9.8.")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Of bytes, without a first token; the end is 256."""
    return load_tokenizer(Path(__file__).parents[1] / "reward_models" / "llama_1")


# What PRMTrainer of TRL 1.13 makes of the same row: places of labels, and tokens.
@pytest.mark.parametrize(
    ("options", "labels", "tokens"),
    [
        ({}, {19: 1, 34: 0}, list(TEXT)),
        ({"only_last": True}, {34: 0}, list(TEXT)),
        ({"separator": "<eos>"}, {19: 1, 34: 0}, [256 if byte == 10 else byte for byte in TEXT]),
        ({"max_tokens": 24}, {19: 1}, list(TEXT[:24])),
    ],
)
def test_steps(tokenizer: Any, options: dict[str, Any], labels: dict[int, int], tokens: list[int]) -> None:
    found = encode_steps(tokenizer, "9.8 or 9.11?", STEPS, (True, False), **options)
    assert found.tokens == tokens
    assert {place: label for place, label in enumerate(found.labels) if label != NO_LABEL} == labels
    assert len(found.labels) == len(tokens)


def test_what_is_refused(tokenizer: Any) -> None:
    with pytest.raises(InputError, match="2 steps and 1 labels"):
        encode_steps(tokenizer, "x", STEPS, (True,))
    with pytest.raises(InputError, match="0 steps"):
        encode_steps(tokenizer, "x", (), ())
    with pytest.raises(InputError, match="the separator of steps is ''"):
        encode_steps(tokenizer, "x", STEPS, (1, 0), separator="")
