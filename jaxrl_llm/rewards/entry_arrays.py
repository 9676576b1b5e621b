"""Entries that reward functions return beside their scores, as arrays of a batch: its `info`, and `token_rewards`."""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.rewards.entries import ANSWER_KEY, SPANS, Entries
from jaxrl_llm.utils.errors import InputError, shown

_WINDOW = 8  # tokens decoded together with one, so that its text is what it is in its context


def with_entries(batch: Trajectories, entries: Entries, tokenizer: Any, texts: Sequence[str]) -> Trajectories:
    """The batch with the entries of its N completions; texts: the completions.

    "answer_key" becomes info["answer_key"] int32[N], equal for equal answers to a prompt, -1 for none. "spans" become
    `token_rewards` f32[N, L]: each span's value on its last token. Others become info[name] f32[N, ...], NaN where a
    completion has none or a shorter one.

    Raises InputError for a name that the rollout gave too, and for numbers of axes that differ between prompts.
    """
    info: dict[str, Any] = {}
    for name, column in entries.items():
        if name == SPANS:
            continue
        if name in (batch.info or {}):
            raise InputError(
                f"a reward function returns {name!r}, which the rollout gives as info[{name!r}]: rename it"
            )
        info[name] = keys_of(column, np.asarray(batch.group)) if name == ANSWER_KEY else stacked(name, column)
    if SPANS in entries:
        fields: dict[str, Any] = {"token_rewards": _token_rewards(batch, entries[SPANS], tokenizer, texts)}
        batch = batch.replace(**fields)
    return batch.with_info(**info) if info else batch


def keys_of(answers: Sequence[str | None], group: np.ndarray) -> np.ndarray:
    """int32[N], at least 0: equal for equal answers of a group, different for others; -1 for None.

    An answer has the same key in every batch and order of rows, unless two answers of a group share a checksum.

    >>> keys = keys_of(["1/2", "3", None, "1/2"], np.zeros(4, np.int32))
    >>> bool(keys[0] == keys[3] != keys[1]), int(keys[2])
    (True, -1)
    """
    out = np.full(len(answers), -1, np.int32)
    taken: dict[int, dict[int, str]] = {}
    # In the order of the texts, so that the keys do not depend on the order of the rows.
    for row in sorted((i for i, answer in enumerate(answers) if answer is not None), key=lambda i: str(answers[i])):
        answer, of_group = str(answers[row]), taken.setdefault(int(group[row]), {})
        key = zlib.crc32(answer.encode()) >> 1
        while of_group.setdefault(key, answer) != answer:
            key = (key + 1) % 2**31
        out[row] = key
    return out


def stacked(name: str, column: Sequence[Any]) -> np.ndarray:
    """Numbers, or lists of them, of N completions as f32[N, ...]: as long as the longest, NaN where there is none."""
    values = {row: np.asarray(value, np.float32) for row, value in enumerate(column) if value is not None}
    if len(axes := sorted({value.ndim for value in values.values()})) > 1:
        raise InputError(f"a reward function returns {name!r} with {shown(axes)} axes for different prompts: give one")
    shape = np.max([value.shape for value in values.values()], axis=0).astype(int) if values else ()
    out = np.full((len(column), *shape), np.nan, np.float32)
    for row, value in values.items():
        place: Any = (row, *(slice(size) for size in value.shape))
        out[place] = value
    return out


def token_ends(tokenizer: Any, ids: Sequence[int], text: str) -> np.ndarray:
    """int[n]: where in the text of n tokens each token ends; ascending, the last at the end of the text.

    A token that is a part of a character ends where the character begins, until the last of its parts.
    """

    def size(start: int, end: int) -> int:
        return len(tokenizer.decode(list(ids[max(start, 0) : end]), skip_special_tokens=True))

    lengths, at = [], 0
    for end in range(1, len(ids) + 1):
        at += size(end - 1 - _WINDOW, end) - size(end - 1 - _WINDOW, end - 1)
        lengths.append(at)
    if lengths and lengths[-1] != len(text):  # a tokenizer whose text of a token depends on more than that
        lengths = [size(0, end) for end in range(1, len(ids) + 1)]
    # What is not final yet, such as a part of a character, is longer now than it will be.
    return np.minimum.accumulate(np.asarray(lengths[::-1], np.int64))[::-1]


def _token_rewards(
    batch: Trajectories, column: Sequence[Sequence[Any] | None], tokenizer: Any, texts: Sequence[str]
) -> np.ndarray:
    """f32[N, L]: the value of each span on the token that has its last character; 0 elsewhere."""
    tokens, acted = np.asarray(batch.tokens), np.asarray(batch.action_mask)
    out = np.zeros(tokens.shape, np.float32)
    for row, spans in enumerate(column):
        places = np.flatnonzero(acted[row])
        if not spans or not len(places):
            continue
        ends = token_ends(tokenizer, tokens[row][places].tolist(), texts[row])
        for _, end, value in spans:
            last = int(np.searchsorted(ends, min(end, len(texts[row])), side="left"))
            out[row, places[min(last, len(places) - 1)]] += value
    return out


def blank(values: np.ndarray, which: np.ndarray) -> np.ndarray:
    """The values without those of the rows `which`, bool[N]: NaN, or -1 for integers and False for booleans."""
    out = values.copy()
    out[which] = _nothing(values.dtype)
    return out


def _nothing(dtype: np.dtype[Any]) -> Any:
    return np.nan if dtype.kind == "f" else False if dtype.kind == "b" else -1


def concatenable(parts: Sequence[tuple[Mapping[str, np.ndarray], int]]) -> list[dict[str, np.ndarray]]:
    """Several batches' arrays by name, with the numbers of their rows, such that they can be concatenated.

    A missing array is filled, and a shorter one padded, with NaN (integers: -1, booleans: False). Raises InputError for
    numbers of axes that differ.
    """
    out: list[dict[str, np.ndarray]] = [{} for _ in parts]
    for name in dict.fromkeys(name for arrays, _ in parts for name in arrays):
        found = [np.asarray(arrays[name]) for arrays, _ in parts if name in arrays]
        # An entry that no completion of a batch has is without further axes.
        full = [x for x in found if not (x.ndim == 1 and x.dtype.kind == "f" and np.isnan(x).all())] or found
        if len({x.ndim for x in full}) > 1:
            raise InputError(
                f"info {name!r} has {shown(sorted({x.ndim - 1 for x in full}))} axes for different prompts"
            )
        shape, dtype = np.max([x.shape[1:] for x in full], axis=0).astype(int), full[0].dtype
        for own, (arrays, rows) in zip(out, parts, strict=True):
            own[name] = np.full((rows, *shape), _nothing(dtype), dtype)
            if name in arrays and (given := np.asarray(arrays[name])).ndim == len(shape) + 1:
                own[name][(slice(None), *(slice(size) for size in given.shape[1:]))] = given
    return out
