"""Stores of rows for replay: functions of a dict of numpy arrays, which a checkpoint holds as it is.

A store with n rows of T tokens in all has, with rows of different lengths one after another:

    length        int32[n]       tokens of each row, prompt and completion
    text_length   int32[n]       bytes of each completion's text
    text          uint8[...]     the texts in UTF-8
    token:NAME    [T, ...]       a field of the batch with an entry for each token, such as token:behaviour_logp
    row:NAME      [n, ...]       a field with an entry for each row; of dicts row:info:NAME, row:rewards:NAME
    of:NAME       [n]            what the store itself knows of a row: item int64, step int32 ...

Rows with the same of:item are replayed together. Items have ascending numbers, so that the oldest rows come first.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from jaxrl_llm.core.trajectory import SHARED, Trajectories
from jaxrl_llm.rewards.scoring import PADDING, Scored
from jaxrl_llm.sampling.requests import RECORDS
from jaxrl_llm.utils.errors import InputError

Store = dict[str, np.ndarray]
_LEFT_OUT = ("group", "token_mask", *SHARED)
_DICTS = ("rewards", "info")


def count(store: Store) -> int:
    """The number of rows."""
    return len(store["length"]) if store else 0


def to_rows(scored: Scored) -> Store:
    """The rows of a batch in its order, without of:NAME.

    Raises InputError for a batch of windows, whose rows continue in the next step.
    """
    batch = scored.batch
    if "window" in (batch.info or {}):
        raise InputError("replay stores finished completions, but the run trains on unfinished ones: leave out one")
    mask = np.asarray(batch.token_mask).astype(bool)
    texts = [text.encode() for text in scored.texts]
    out = {
        "length": mask.sum(axis=1).astype(np.int32),
        "text_length": np.asarray([len(text) for text in texts], np.int32),
        "text": np.frombuffer(b"".join(texts), np.uint8),
    }
    for name, value in _fields(batch):
        x = np.asarray(value)
        by_token = (x.shape == mask.shape and name not in ("turn_rewards", "state_key")) or name in RECORDS
        out[f"token:{name}" if by_token else f"row:{name}"] = x[mask] if by_token else x
    return out


def to_scored(rows: Store, group: np.ndarray, width: int, failures: dict[str, int]) -> Scored:
    """The batch of the rows, right-padded to `width` positions, or to the longest row. group: int[n] of each."""
    length = rows["length"]
    mask = np.arange(max(width, int(length.max(initial=0)))) < length[:, None]
    found: dict[str, Any] = {"token_mask": mask, "group": np.asarray(group, np.int32)}
    for key, x in rows.items():
        kind, _, name = key.partition(":")
        if kind == "token":
            full = np.full((*mask.shape, *x.shape[1:]), PADDING.get(name, 0), x.dtype)
            full[mask] = x
        elif kind == "row":
            full = x
        else:
            continue
        place, _, entry = name.partition(":")
        if entry:
            found.setdefault(place, {})[entry] = full
        else:
            found[place] = full
    ends = np.cumsum(rows["text_length"])
    text = rows["text"].tobytes()
    texts = [text[end - size : end].decode() for end, size in zip(ends, rows["text_length"], strict=True)]
    return Scored(Trajectories(**found), texts, failures)


def take(store: Store, index: Iterable[int] | np.ndarray) -> Store:
    """The rows of an index int[m], in its order; a row may be taken several times."""
    index = np.asarray(index, np.int64)
    tokens, letters = token_places(store["length"], index), token_places(store["text_length"], index)
    return {
        key: x[tokens] if key.startswith("token:") else x[letters] if key == "text" else x[index]
        for key, x in store.items()
    }


def join(first: Store, second: Store, like_first: bool = False) -> Store:
    """The rows of both. A field that only one has is padding in the other; like_first: only the fields of the first."""
    if not count(first) and not like_first:
        return second
    if not count(second):
        return first
    out = {}
    for key in first if like_first else {**first, **second}:
        a, b = (_field(store, key, other) for store, other in ((first, second), (second, first)))
        if a.ndim > 1 and a.shape[1:] != b.shape[1:]:  # e.g. of turns
            size = np.maximum(a.shape[1:], b.shape[1:])
            a, b = (np.pad(x, [(0, 0), *((0, n - m) for n, m in zip(size, x.shape[1:], strict=True))]) for x in (a, b))
        out[key] = np.concatenate([a, b.astype(a.dtype)])
    return out


def keep(store: Store, kept: np.ndarray) -> Store:
    """The rows where `kept` bool[n] is true."""
    return store if kept.all() else take(store, np.flatnonzero(kept))


def with_columns(rows: Store, **of: Any) -> Store:
    """The rows with entries of:NAME, arrays [n] or numbers for all."""
    n = count(rows)
    return rows | {f"of:{name}": np.broadcast_to(np.asarray(x), (n,)).copy() for name, x in of.items()}


def next_item(store: Store) -> int:
    """A number for the next item, larger than all in the store."""
    return int(store["of:item"].max(initial=-1)) + 1 if store else 0


def newest(store: Store, items: int) -> Store:
    """The newest items, at most so many."""
    if not items or not count(store):
        return {}
    numbers = np.unique(store["of:item"])
    return keep(store, store["of:item"] >= numbers[-items]) if items < len(numbers) else store


def newest_of_prompts(store: Store, items: int) -> Store:
    """The newest items of each prompt, at most `items` of each, with all of their rows."""
    if not count(store):
        return store
    _, first, index = np.unique(store["of:item"], return_index=True, return_inverse=True)
    prompt = store["row:prompt_id"][first]
    order = np.argsort(prompt[::-1], kind="stable")  # by prompt, the newest first
    same = prompt[::-1][order]
    rank = np.arange(len(same)) - np.searchsorted(same, same)
    kept = np.zeros(len(same), bool)
    kept[len(same) - 1 - order[rank < items]] = True
    return keep(store, kept[index])


def younger(store: Store, step: int, age: int | None) -> Store:
    """The rows that were added at most `age` steps before `step`; all for None."""
    return store if age is None or not count(store) else keep(store, step - store["of:step"] <= age)


def metrics(store: Store, name: str = "replay") -> dict[str, float]:
    """Metrics of a store: its rows, and its size in megabytes."""
    size = sum(x.nbytes for x in store.values()) / 1e6
    return {f"{name}/rows": float(count(store)), f"{name}/megabytes": size}


def part_of(state: Store, name: str) -> Store:
    """One of the stores that a state has together."""
    return {key.removeprefix(f"{name}/"): x for key, x in state.items() if key.startswith(f"{name}/")}


def together(parts: dict[str, Store]) -> Store:
    """Several stores as one dict, the name of each before the names of its arrays."""
    return {f"{name}/{key}": x for name, store in parts.items() for key, x in store.items()}


def parts_metrics(state: Store, names: tuple[str, ...]) -> dict[str, float]:
    """The metrics of several stores."""
    return {name: x for one in names for name, x in metrics(part_of(state, one), f"replay/{one}").items()}


def _fields(batch: Trajectories) -> list[tuple[str, Any]]:
    """The arrays of a batch by name, those in dicts as DICT:NAME."""
    out = []
    for name in batch.__dataclass_fields__:
        value = getattr(batch, name)
        if value is None or name in _LEFT_OUT:
            continue
        out += [(f"{name}:{entry}", x) for entry, x in value.items()] if name in _DICTS else [(name, value)]
    return out


def token_places(length: np.ndarray, index: np.ndarray) -> np.ndarray:
    """The positions of the tokens of rows in a flat array."""
    starts, sizes = (np.cumsum(length) - length)[index], length[index].astype(np.int64)
    return np.repeat(starts - (np.cumsum(sizes) - sizes), sizes) + np.arange(sizes.sum())


def _field(store: Store, key: str, other: Store) -> np.ndarray:
    """A field of a store, padding if it has none."""
    if key in store:
        return store[key]
    size = int(store["length"].sum()) if key.startswith("token:") else count(store)
    return np.full((size, *other[key].shape[1:]), PADDING.get(key.partition(":")[2], 0), other[key].dtype)
