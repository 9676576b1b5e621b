"""Features of prompts' words, by which similar prompts are found."""

from __future__ import annotations

import zlib
from itertools import pairwise

import numpy as np

from jaxrl_llm.curriculum.records import Array
from jaxrl_llm.utils.words import words

WIDTH = 256  # numbers that describe a prompt


def text_features(text: str) -> Array:
    """f32[256] of norm 1: counts of a text's words and pairs of words, hashed with signs; zeros for an empty text."""
    said = words(text)
    out = np.zeros(WIDTH, np.float32)
    for one in [*said, *map(" ".join, pairwise(said))]:
        code = zlib.crc32(one.encode())
        out[code % WIDTH] += 1 if code & 0x10000 else -1
    return out / max(float(np.linalg.norm(out)), 1e-9)
