"""What only some episodes have, as arrays of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_llm.core.needs import NEEDS
from jaxrl_llm.core.shapes import bucket
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.utils.errors import InputError, shown


def of_turns(values: Sequence[Sequence[float]], dtype: Any) -> np.ndarray:
    """Values of turns as an array [N, K], 0 where a row has fewer turns; K is a bucket, for few programs."""
    turns = bucket(max(map(len, values)), least=1)
    out = np.zeros((len(values), turns), dtype)
    for row, known in zip(out, values, strict=True):
        row[: len(known)] = known
    return out


def teacher_tokens(episodes: Sequence[Episode]) -> Any:
    """f32[N, T]: the tokens of each episode after its `teacher_prompt`, then -1; only -1 without such a prompt."""
    rows = [[*e.teacher_prompt, *e.own.token.tolist()] if e.teacher_prompt else [] for e in episodes]
    return _filled(rows, bucket(max([1, *map(len, rows)])))


def answer_tokens(episodes: Sequence[Episode]) -> Any:
    """f32[N, A]: the tokens of each episode's `answer`, where -2 - id is one that opens it, then -1."""
    parts = [one.answer or ((), ()) for one in episodes]
    rows = [[*(-2 - token for token in opening), *own] if own else [] for opening, own in parts]
    return _filled(rows, bucket(max([1, *map(len, rows)]), least=4))


def _filled(rows: Sequence[Sequence[int]], width: int) -> Any:
    """f32[N, width]; a width is a bucket of lengths, so that few programs are compiled."""
    found = np.full((len(rows), width), -1.0, np.float32)
    for place, row in enumerate(rows):
        found[place, : len(row)] = row
    return found


def info_columns(episodes: Sequence[Episode], length: int | None = None) -> dict[str, Any]:
    """The episodes' `info` as arrays f32[N, ...], by name; NaN where one has no such entry.

    length: of the batch's rows. An entry that is a list with one number for each token after the prompt, in every
    episode that has it, becomes f32[N, length], with these numbers at the places of their tokens. Lists of a fixed
    length are not taken for such if `jaxrl_llm.core.needs` knows their names as something else.

    Raises InputError where other entries of one name have different shapes.
    """
    columns: dict[str, Any] = {}
    for name in sorted({name for episode in episodes for name in episode.info}):
        known = {number: np.asarray(e.info[name], np.float32) for number, e in enumerate(episodes) if name in e.info}
        of_tokens = name not in NEEDS or "[N, L]" in NEEDS[name].shape + NEEDS[name].meaning
        if length is not None and of_tokens and all(x.shape == (episodes[i].size,) for i, x in known.items()):
            columns[name] = np.full((len(episodes), length), np.nan, np.float32)
            for number, value in known.items():
                start = len(episodes[number].prompt)
                columns[name][number, start : start + len(value)] = value
            continue
        shapes = {value.shape for value in known.values()}
        if len(shapes) > 1:
            raise InputError(f"the rollout gives info {name!r} in several shapes, {shown(sorted(shapes))}: give one")
        columns[name] = np.full((len(episodes), *shapes.pop()), np.nan, np.float32)
        for number, value in known.items():
            columns[name][number] = value
    return columns
