"""Find the files of a data set: one file, a pattern, or a folder of files such as a data set's folder on the Hub."""

from __future__ import annotations

import glob
import itertools
import re
from collections.abc import Sequence
from pathlib import Path

from jaxrl_llm.utils.errors import InputError, shown

_FORMATS = {"jsonl": "jsonl", "parquet": "parquet", "array_record": "array_record", "arrayrecord": "array_record"}
_ENDING = re.compile(rf"\.({'|'.join(_FORMATS)})(-\d+-of-\d+)?$")
_SHARD = re.compile(r"-(\d+)-of-(\d+)")
_SPLITS = frozenset(("train", "test", "validation", "valid", "val", "dev", "eval"))


def format_of(path: Path) -> str | None:
    """ "jsonl", "parquet" or "array_record", by the name (shards may end in -00000-of-00002); None for another file."""
    found = _ENDING.search(path.name)
    return None if found is None else _FORMATS[found[1]]


def is_pattern(source: str) -> bool:
    """Whether a source is a pattern of file names, such as data/train-*.parquet."""
    return glob.has_magic(source)


def matching_files(pattern: str) -> list[Path]:
    """The files that match a pattern, sorted by name.

    Raises InputError if there is none, or if they are not all JSON lines, all Parquet or all array_record.
    """
    paths = sorted(Path(path) for path in glob.glob(str(Path(pattern).expanduser()), recursive=True))
    if not paths:
        raise InputError(f"no data at {shown(pattern, 200)}: no file matches the pattern")
    for path in paths:
        if format_of(path) is None or format_of(path) != format_of(paths[0]):
            raise InputError(
                f"{shown(pattern, 200)} matches {path}: all its files must be .jsonl, all .parquet or all .array_record"
            )
    return paths


def lacking(paths: Sequence[Path]) -> str:
    """Which shards of a set are not among these files, by their names, in words; "" where none is missing.

    >>> lacking([Path("train-00000-of-00003.parquet"), Path("train-00002-of-00003.parquet")])
    'train-00001-of-00003.parquet'
    """
    sets: dict[tuple[Path, str, str, str], set[int]] = {}
    for path in paths:
        if found := _SHARD.search(path.name):
            key = path.parent, path.name[: found.start()], found[2], path.name[found.end() :]
            sets.setdefault(key, set()).add(int(found[1]))
    # Shards are numbered from 0; some tools begin with 1.
    missing = [
        f"{name}-{number:0{len(count)}}-of-{count}{ending}"
        for (_, name, count, ending), there in sets.items()
        for number in range(int(int(count) in there), int(count) + int(int(count) in there))
        if number not in there
    ]
    return ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")


def files_of_folder(folder: Path) -> list[Path]:
    """The data files of a folder, or else of its folder `data`, sorted by name; empty if there are none.

    Raises InputError if they have several formats, or several splits, as the words of their names tell.
    """
    for place in (folder, folder / "data"):
        paths = sorted(path for path in place.glob("*") if format_of(path)) if place.is_dir() else []
        if not paths:
            continue
        formats, splits = {format_of(path) for path in paths}, {_split(path) for path in paths}
        if len(formats) > 1 or len(splits) > 1:
            what = "formats" if len(formats) > 1 else "splits"
            raise InputError(f"{folder} has files of several {what}: give one of {', '.join(_patterns(paths))}")
        return paths
    return []


def _split(path: Path) -> str:
    return next((word for word in re.split(r"[^a-z]+", path.name.lower()) if word in _SPLITS), "")


def _patterns(paths: Sequence[Path]) -> list[str]:
    """Patterns of the files of each split and format."""
    groups: dict[tuple[str, str | None], list[str]] = {}
    for path in paths:
        groups.setdefault((_split(path), format_of(path)), []).append(str(path))
    return [files[0] if len(files) == 1 else f"{_common(files)}*" for files in groups.values()]


def _common(texts: Sequence[str]) -> str:
    """The longest beginning that all texts have."""
    first, last = min(texts), max(texts)
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    return "".join(letter for letter, _ in same)
