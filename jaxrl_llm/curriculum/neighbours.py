"""Features of prompts' words, by which similar prompts are found."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from jaxrl_llm.curriculum.records import Array, PromptFacts

WIDTH = 256  # numbers that describe a prompt


def text_features(text: str) -> Array:
    """f32[256] of norm 1: counts of a text's words and pairs of words, hashed with signs; zeros for an empty text."""
    words = re.findall(r"\w+|[^\w\s]", text.lower())
    out = np.zeros(WIDTH, np.float32)
    for one in [*words, *map(" ".join, pairwise(words))]:
        code = zlib.crc32(one.encode())
        out[code % WIDTH] += 1 if code & 0x10000 else -1
    return out / max(float(np.linalg.norm(out)), 1e-9)


def features_of(row: Mapping[str, Any]) -> Array:
    """`text_features` of a row's prompt, a text or messages."""
    prompt = row["prompt"]
    return text_features(
        prompt if isinstance(prompt, str) else " ".join(str(turn.get("content") or "") for turn in prompt)
    )


def word_features(facts: PromptFacts) -> Callable[[Array], Array]:
    """The function of ids int[n] that gives `features_of` their rows, f32[n, 256], which are made when needed."""
    table, made = np.zeros((facts.size, WIDTH), np.float32), np.zeros(facts.size, bool)

    def of(ids: Array) -> Array:
        for i in np.unique(ids[~made[ids]]).tolist():
            table[i], made[i] = features_of(facts.rows[i]), True
        return table[ids]

    return of
