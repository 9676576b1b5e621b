"""Embeddings of prompts, by the policy before training or of their words, for curricula that predict from them."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from jaxrl_llm.core.arguments.ranges import Count
from jaxrl_llm.core.repr import layout, part
from jaxrl_llm.core.source import Curriculum, MakeCurriculum
from jaxrl_llm.curriculum.records import Array, PromptFacts
from jaxrl_llm.utils.errors import InputError, shown
from jaxrl_llm.utils.words import words

EMBEDDING = "policy_embedding"  # the column that such a curriculum finds in its rows


@dataclass(frozen=True, repr=False)
class FromEmbeddings:
    """A curriculum whose rows have the column `EMBEDDING`, f32[pieces, D] each, which a run computes: means of the last
    hidden states of its initial policy over the tokens of the prompt, see `models.scores.pooled_states`."""

    make: MakeCurriculum
    pieces: int = 1

    def __call__(self, rows: Sequence[dict[str, Any]], seed: int) -> Curriculum:
        """The curriculum of training rows that have the column."""
        return self.make(rows, seed)

    __repr__ = layout


@part
def from_embeddings(curriculum: MakeCurriculum, pieces: Count = 1) -> FromEmbeddings:
    """The curriculum, to which the run gives its initial policy's embeddings of the prompts (`embeddings_of`).

    pieces: equal parts of a prompt, each with an embedding. They are computed when the run starts, and again when it is
    resumed, from the same weights.
    """
    return FromEmbeddings(curriculum, pieces)


def embeddings_of(facts: PromptFacts, column: str | None = None) -> Array:
    """f32[P, S, D]: S embeddings of each prompt, less their mean over all prompts.

    Those of a language model have much in common, which hides how they differ. column: of the data set, with a list of
    numbers (S is 1); None: those that the run gives, see `from_embeddings`. InputError for rows without them.
    """
    table = np.stack(facts.column(EMBEDDING)) if column is None else _given(facts, column)
    return (table - table[facts.order].mean(axis=0, dtype=np.float64)).astype(np.float32)


def _given(facts: PromptFacts, column: str) -> Array:
    values, size = facts.column(column), 0
    for number, value in enumerate(values, start=1):
        right = isinstance(value, list | tuple) and value and all(isinstance(x, int | float) for x in value)
        size = size or (len(value) if right else 0)
        if not right or len(value) != size or not np.isfinite(value).all():
            raise InputError(
                f"the column {column!r} of prompt {number} is {shown(value)}, but must be an embedding: a list of "
                f"{size or 'finite'} numbers{', as that of the first prompt' if size else ''}"
            )
    return np.asarray(values, np.float32)[:, None]


def earlier_rounds(facts: PromptFacts, column: str, size: int) -> tuple[Array, Array]:
    """What a model of success rates learns from before the run: prompts int64[R, size], and their rates f64[R, size].

    column: of the data set, with lists of as many numbers as there were policies: the prompt's success rate under each,
    null where it was not measured. A round has prompts under one policy, at most `size` of them, chosen at random (0
    and NaN for the rest), and each prompt is in one round of a policy; rounds are in a random order. InputError for
    other values, and where nothing was measured.
    """
    random, ids, rates = np.random.default_rng([facts.seed, 5]), list[Array](), list[Array]()
    for history in _histories(facts, column):
        measured = random.permutation(facts.order[~np.isnan(history[facts.order])])
        for first in range(0, len(measured), size):
            some = measured[first : first + size]
            ids.append(padded_to(some, size, 0, np.int64))
            rates.append(padded_to(history[some], size, np.nan, np.float64))
    if not ids:
        raise InputError(f"the column {column!r} has no success rate of any prompt: leave it out")
    order = random.permutation(len(ids))
    return np.stack(ids)[order], np.stack(rates)[order]


def _histories(facts: PromptFacts, column: str) -> Array:
    """f64[H, P]: success rates of the prompts under H earlier policies; NaN: not measured."""
    values = facts.column(column)
    size = len(values[0]) if isinstance(values[0], list | tuple) else 0
    for number, value in enumerate(values, start=1):
        right = isinstance(value, list | tuple) and len(value) == size and size
        if not right or not all(x is None or (isinstance(x, int | float) and 0 <= x <= 1) for x in value):
            raise InputError(
                f"the column {column!r} of prompt {number} is {shown(value)}, but must be a list of success rates from "
                "0 to 1, null where none was measured, one of each earlier policy, as many for every prompt"
            )
    return np.array([[np.nan if x is None else x for x in value] for value in values], np.float64).T


def padded_to(x: Array, size: int, fill: float, dtype: Any) -> Array:
    """The array [m] with `fill` after it up to `size`."""
    out = np.full(size, fill, dtype)
    out[: len(x)] = x
    return out


WIDTH = 256  # numbers that describe a prompt


def text_features(text: str) -> Array:
    """f32[256] of norm 1: counts of a text's words and pairs of words, hashed with signs; zeros for an empty text."""
    said = words(text)
    out = np.zeros(WIDTH, np.float32)
    for one in [*said, *map(" ".join, pairwise(said))]:
        code = zlib.crc32(one.encode())
        out[code % WIDTH] += 1 if code & 0x10000 else -1
    return out / max(float(np.linalg.norm(out)), 1e-9)
