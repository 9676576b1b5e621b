"""What only some episodes have, as arrays of a batch."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_llm.core.needs import NEEDS
from jaxrl_llm.core.shapes import bucket
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.utils.errors import InputError, shown


def padded_rows(rows: Sequence[Sequence[float]], empty: float, dtype: Any, least: int) -> Any:
    """Rows as an array [N, K], filled up with `empty`; K is a `bucket` of their lengths, so that few programs are
    compiled."""
    found = np.full((len(rows), bucket(max([1, *map(len, rows)]), least=least)), empty, dtype)
    for place, row in enumerate(rows):
        found[place, : len(row)] = row
    return found


def teacher_tokens(episodes: Sequence[Episode]) -> Any:
    """f32[N, T]: the tokens of each episode after its `teacher_prompt`, then -1; only -1 without such a prompt."""
    rows = [[*e.teacher_prompt, *e.own.token.tolist()] if e.teacher_prompt else [] for e in episodes]
    return padded_rows(rows, -1, np.float32, 8)


def answer_tokens(episodes: Sequence[Episode]) -> Any:
    """f32[N, A]: the tokens of each episode's `answer`, where -2 - id is one that opens it, then -1."""
    parts = [one.answer or ((), ()) for one in episodes]
    rows = [[*(-2 - token for token in opening), *own] if own else [] for opening, own in parts]
    return padded_rows(rows, -1, np.float32, 4)


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
