"""Replay stores whose tokens are on disk above a size, as array_record files, with what draws and ages rows in memory.

A replay sees a row with one token, its number, in place of its own tokens and text: all else of a row (prompt, rewards,
`info` of rows, what the store knows of it) it has as ever, so that it draws, keeps and drops the same rows. Then the
tokens of rows in the batch are put back: those of the step from memory, others from the files. Beside the replay's own
arrays a state has

    disk:next    int64[1]    the number of the next row that is stored
    disk:files   int64[F]    the files with rows of the store, named by the first number of each, ascending
    disk:bytes   int64[F]    their sizes

A file has the rows that one step added, is written once and never changed: a step that is taken again after a kill
writes the same rows to the same name. A file is removed only when neither the state nor a checkpoint has rows of it.
"""

import dataclasses
import importlib.util
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from flax import serialization

from jaxrl_llm.core.arguments.ranges import check_number
from jaxrl_llm.core.source import Replay
from jaxrl_llm.replay.buffers import Store, count, join, take, to_rows, to_scored
from jaxrl_llm.rewards.scoring import Scored
from jaxrl_llm.utils.errors import InputError, error_line
from jaxrl_llm.utils.storage import replace_file

_OWN = "disk:"
_TOKENS = ("tokens", "action_mask", "behaviour_logp", "policy_step", "turn")  # fields of a batch that a row must have
_KEPT = "kept.json"  # the files of each checkpoint


def is_available() -> bool:
    """Whether array_record is installed, without which stores stay in memory."""
    return importlib.util.find_spec("array_record") is not None


def on_disk(replay: Replay, folder: str | Path, above: int, checkpoints: int = 2) -> Replay:
    """The replay with tokens and texts in files of `folder` once its stores have more than `above` bytes.

    Batches are the same, bit for bit. checkpoints: the newest ones whose rows stay on disk, see
    `Replay.on_checkpoint`. A replay that reads tokens (`Replay.by_row` is false) stays as it is. Raises InputError for
    a missing or damaged file.
    """
    check_number("replay_megabytes", above, least=0)
    if not replay.by_row:
        return replay
    place = Path(folder)

    def mix(state: Store, scored: Scored, step: int, seed: int) -> tuple[Scored, Store]:
        if f"{_OWN}next" not in state:
            found, new = replay.mix(state, scored, step, seed)
            large = bool(_stores(new)) and sum(x.nbytes for x in new.values()) > above
            return found, _moved(place, new) if large else new
        fresh = to_rows(scored)
        found, new = replay.mix(_inner(state), _outline(scored, fresh), step, seed)
        return _filled(place, found, scored, fresh, state), _stored(place, new, fresh, state)

    def metrics(state: Store) -> dict[str, float]:
        size = {"replay/disk_megabytes": float(state[f"{_OWN}bytes"].sum()) / 1e6} if f"{_OWN}bytes" in state else {}
        return {**replay.metrics(_inner(state)), **size}

    def keep(state: Store, step: int) -> None:
        files = state.get(f"{_OWN}files", np.zeros(0, np.int64)).tolist()
        if place.is_dir():
            _remove_others(place, step, files, checkpoints + 1)  # the last one may not be complete yet

    return dataclasses.replace(replay, mix=mix, metrics=metrics, on_checkpoint=keep)


def _stores(state: Store) -> list[str]:
    """What comes before the names of the arrays of each store in a state: "" or "NAME/"."""
    return [key.removesuffix("length") for key in state if key == "length" or key.endswith("/length")]


def _inner(state: Store) -> Store:
    return {key: x for key, x in state.items() if not key.startswith(_OWN)}


def _is_payload(key: str) -> bool:
    return key.startswith("token:") or key in ("text", "length", "text_length")


def _outlined(rows: Store, numbers: np.ndarray) -> Store:
    """Rows with one token, their number int32[n], and without text."""
    n = count(rows)
    out = {key: x for key, x in rows.items() if not _is_payload(key)}
    out |= {f"token:{name}": np.zeros(n, rows[f"token:{name}"].dtype) for name in _TOKENS}
    out |= {"token:tokens": numbers.astype(np.int32), "token:action_mask": np.ones(n, bool)}
    empty: Store = {"text_length": np.zeros(n, np.int32), "text": np.zeros(0, np.uint8)}
    return {"length": np.ones(n, np.int32), **empty, **out}


def _outline(scored: Scored, fresh: Store) -> Scored:
    """The batch of a step with one token in each row, -1, -2 ...: the numbers of rows that are in no file yet."""
    rows = _outlined(fresh, -1 - np.arange(count(fresh)))
    wide = max((x.shape[1] for key, x in rows.items() if key.startswith("row:") and x.ndim == 2), default=0)
    # No field with an entry for each row has as many columns, so none is taken for one with an entry for each token.
    out = to_scored(rows, np.asarray(scored.batch.group), wide + 1, scored.failures)
    return out._replace(entries=scored.entries)


def _moved(place: Path, state: Store) -> Store:
    """A state in memory with its tokens in files, one for each store."""
    out, firsts, sizes = dict(state), list[int](), list[int]()
    number = 0
    for prefix in _stores(state):
        rows = {key.removeprefix(prefix): x for key, x in state.items() if key.startswith(prefix)} if prefix else state
        n = count(rows)
        for key in rows:
            del out[prefix + key]
        out |= {prefix + key: x for key, x in _outlined(rows, number + np.arange(n)).items()}
        if n:
            sizes.append(_write(place, number, rows))
            firsts.append(number)
        number += n
    return _with_files(out, number, firsts, sizes)


def _stored(place: Path, state: Store, fresh: Store, before: Store) -> Store:
    """A replay's new state, with the rows of the step that it keeps in a file, numbered as there."""
    numbers, first = [state[f"{prefix}token:tokens"] for prefix in _stores(state)], int(before[f"{_OWN}next"][0])
    everything = np.unique(np.concatenate([np.zeros(0, np.int32), *numbers]))
    new = everything[everything < 0][::-1]  # -1 is the step's first row
    if first + len(new) > np.iinfo(np.int32).max:
        raise InputError("a store on disk has numbered 2^31 rows: begin another run from this one's model")
    out = dict(state)
    for prefix, x in zip(_stores(state), numbers, strict=True):
        found = np.searchsorted(-new, -x, side="left") + first
        out[f"{prefix}token:tokens"] = np.where(x < 0, found, x).astype(np.int32)
    files, sizes = before[f"{_OWN}files"], before[f"{_OWN}bytes"]
    alive = np.isin(np.arange(len(files)), np.searchsorted(files, everything[everything >= 0], side="right") - 1)
    firsts, kept = files[alive].tolist(), sizes[alive].tolist()
    if len(new):
        kept.append(_write(place, first, take(fresh, -1 - new.astype(np.int64))))
        firsts.append(first)
    return _with_files(out, first + len(new), firsts, kept)


def _with_files(state: Store, number: int, firsts: list[int], sizes: list[int]) -> Store:
    own = {"next": [number], "files": firsts, "bytes": sizes}
    return state | {f"{_OWN}{name}": np.asarray(x, np.int64) for name, x in own.items()}


def _filled(place: Path, found: Scored, scored: Scored, fresh: Store, state: Store) -> Scored:
    """A mixed batch with the tokens of its rows. state: in whose files those of earlier steps are."""
    numbers, n = np.asarray(found.batch.tokens)[:, 0].astype(np.int64), count(fresh)
    rows = {key: x for key, x in to_rows(found).items() if key.startswith("row:")}
    if np.array_equal(numbers, -1 - np.arange(n)):
        only = dataclasses.replace(scored.batch, group=found.batch.group)
        fields = {key.partition(":")[2]: x for key, x in rows.items()}
        info: Any = {name.partition(":")[2]: x for name, x in fields.items() if name.startswith("info:")}
        return scored._replace(batch=only.replace(reward=fields.get("reward")).with_info(**info))
    past = np.unique(numbers[numbers >= 0])
    pool = join(fresh, _read(place, state[f"{_OWN}files"], past), like_first=True)
    at = np.where(numbers < 0, -1 - numbers, n + np.searchsorted(past, numbers))
    tokens = {key: x for key, x in take(pool, at).items() if _is_payload(key)}
    width = scored.batch.tokens.shape[1]
    return to_scored(tokens | rows, np.asarray(found.batch.group), width, found.failures)


def _path(place: Path, first: int) -> Path:
    return place / f"{first:012d}.array_record"


def _write(place: Path, first: int, rows: Store) -> int:
    """Write the tokens and texts of rows to the file of this name, all or nothing; its size in bytes."""
    from array_record.python.array_record_module import ArrayRecordWriter

    path = _path(place, first)
    new = path.with_suffix(".new")
    try:
        place.mkdir(parents=True, exist_ok=True)
        writer = ArrayRecordWriter(str(new), "group_size:1")
        names = [key for key in rows if key.startswith("token:")]
        tokens, letters = (np.cumsum([0, *rows[key]]) for key in ("length", "text_length"))
        for i in range(count(rows)):
            one = {key: rows[key][tokens[i] : tokens[i + 1]] for key in names}
            one |= {key: rows[key][i : i + 1] for key in ("length", "text_length")}
            one["text"] = rows["text"][letters[i] : letters[i + 1]]
            writer.write(serialization.msgpack_serialize(one))
        writer.close()
        os.replace(new, path)
        return path.stat().st_size
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(f"replayed rows cannot be written to {path}: {error_line(error)}; free space there") from error


def _read(place: Path, files: np.ndarray, numbers: np.ndarray) -> Store:
    """The tokens and texts of the rows with these numbers, ascending; an empty store for none."""
    from array_record.python.array_record_module import ArrayRecordReader

    out: Store = {}
    of = np.searchsorted(files, numbers, side="right") - 1
    for file in np.unique(of):
        path = _path(place, int(files[file]))
        if not path.is_file():
            raise InputError(f"replayed rows are missing, {path}: put the file back")
        try:
            reader = ArrayRecordReader(str(path), "readahead_buffer_size:0,max_parallelism:0")
            records = reader.read((numbers[of == file] - files[file]).tolist())
            reader.close()
            rows = [serialization.msgpack_restore(record) for record in records]
        except Exception as error:  # of several types
            raise InputError(f"{path} is damaged ({error_line(error)}): put a good copy back") from error
        for row in rows:
            out = join(out, row)
    return out


def _remove_others(place: Path, step: int, files: list[int], checkpoints: int) -> None:
    """Note the files of the checkpoint of `step`, and remove those of none of the newest so many checkpoints."""
    notes = place / _KEPT
    try:
        known = json.loads(notes.read_text()) if notes.exists() else {}
        kept = {int(at): list(map(int, firsts)) for at, firsts in known.items() if int(at) < step} | {step: files}
    except (ValueError, AttributeError, TypeError) as error:
        raise InputError(f"{notes} is damaged: remove it, and the newest checkpoint is kept only") from error
    kept = {at: kept[at] for at in sorted(kept)[-checkpoints:]}
    replace_file(notes, json.dumps(kept))
    left = {_path(place, first) for firsts in kept.values() for first in firsts}
    for path in _files(place):
        if path not in left:
            path.unlink(missing_ok=True)


def _files(place: Path) -> Iterable[Path]:
    return [*place.glob("*.array_record"), *place.glob("*.new")]
