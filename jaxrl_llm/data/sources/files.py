"""Find the files of a data set, and read their rows: JSON lines, JSON arrays, Parquet, and data set folders.

A data set is one file, a pattern, or a folder of files, such as one of the Hub or of the datasets package.
"""

import glob
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from jaxrl_llm.utils.errors import InputError, optional_package, shown
from jaxrl_llm.utils.json import NotJson, check_regular, json_type, not_text, parse_json, read_object
from jaxrl_llm.utils.storage import is_url, local_copy

_FORMATS = {"jsonl": "jsonl", "parquet": "parquet", "array_record": "array_record", "arrayrecord": "array_record"}
_ENDING = re.compile(rf"\.({'|'.join(_FORMATS)})(-\d+-of-\d+)?$")
_SHARD = re.compile(r"-(\d+)-of-(\d+)")
_SPLITS = frozenset(("train", "test", "validation", "valid", "val", "dev", "eval"))
Row = dict[str, Any]
_LONGEST_LINE = 2**26  # characters
_LARGEST_ARRAY = 2**31  # bytes of a .json file, which is read into memory; .jsonl is read line by line
_SAVED = ("dataset_dict.json", "state.json")  # files that only datasets.save_to_disk writes
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def file_format(path: Path) -> str | None:
    """ "jsonl", "parquet" or "array_record", by the name (shards may end in -00000-of-00002); None for another file."""
    found = _ENDING.search(path.name)
    return None if found is None else _FORMATS[found[1]]


def matching_files(pattern: str) -> list[Path]:
    """The files that match a pattern, sorted by name.

    Raises InputError if there is none, or if they are not all JSON lines, all Parquet or all array_record.
    """
    paths = sorted(Path(path) for path in glob.glob(str(Path(pattern).expanduser()), recursive=True))
    if not paths:
        raise InputError(f"no data at {shown(pattern, 200)}: no file matches the pattern")
    if other := [path for path in paths if file_format(path) is None or file_format(path) != file_format(paths[0])]:
        raise InputError(
            f"{shown(pattern, 200)} matches {other[0]}: all its files must be .jsonl, all .parquet or all .array_record"
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
        paths = sorted(path for path in place.glob("*") if file_format(path)) if place.is_dir() else []
        if not paths:
            continue
        groups: dict[tuple[str, str | None], list[str]] = {}
        for path in paths:
            groups.setdefault((_split(path), file_format(path)), []).append(str(path))
        if len(groups) > 1:
            what = "formats" if len({kind for _, kind in groups}) > 1 else "splits"
            common = os.path.commonprefix  # letter by letter
            patterns = [files[0] if len(files) == 1 else f"{common(files)}*" for files in groups.values()]
            raise InputError(f"{folder} has files of several {what}: give one of {', '.join(patterns)}")
        return paths
    return []


def _split(path: Path) -> str:
    return next((word for word in re.split(r"[^a-z]+", path.name.lower()) if word in _SPLITS), "")


def source_files(source: str) -> Path | list[Path]:
    """The files of a source: a file, the files of a pattern or of a folder; or a folder of `datasets.save_to_disk`.

    Raises InputError for a path that does not exist, and for files of another format.
    """
    source = str(local_copy(source)) if is_url(source) else source
    try:
        path = Path(source).expanduser()
        known = path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # a name too long, no such home
        raise InputError(f"no data at {shown(source)}: {' '.join(str(error).split())[:200]}") from error
    if not known and glob.has_magic(source):
        return matching_files(source)
    if not known:
        raise InputError(
            f"no data at {shown(source, 200)}: give a .jsonl, .json or .parquet file, a data set folder, a data set "
            "of the Hugging Face hub (OWNER/NAME:CONFIG/SPLIT) or reasoning-gym:TASK"
        )
    if path.is_dir():
        return path if any((path / name).exists() for name in _SAVED) else files_of_folder(path) or path
    if path.suffix != ".json" and file_format(path) is None:
        raise InputError(
            f"cannot read {shown(source)}: it must end in .jsonl, .json or .parquet (or .array_record), or be a data "
            "set folder"
        )
    return [path]


def read_rows(paths: Sequence[Path]) -> Iterator[Row]:
    """Yield the rows of .jsonl, .json or .parquet files (see `source_files`), unchanged.

    Raises InputError, before or between rows, for a path that is not a file, has the wrong format, or is damaged.
    """
    for path in paths:
        try:
            check_regular(path)
            yield from _read_parquet(path) if file_format(path) == "parquet" else _read_json(path)
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror or ' '.join(str(error).split())}") from error


def text_head(path: Path) -> bytes:
    """The first bytes of a file. InputError if they are of another kind of file than text."""
    with path.open("rb") as file:
        head = file.read(4096)
    if (reason := not_text(head, "")) != "":
        raise InputError(f"{path} is not JSON: {reason}")
    return head


def read_line(file: IO[bytes], start: int, where: str) -> bytes:
    """The line at a byte offset. InputError, beginning with `where`, if it is too long for a row."""
    file.seek(start)
    line = file.readline(_LONGEST_LINE + 1)
    if len(line) > _LONGEST_LINE:
        raise InputError(f"{where}: more than {_LONGEST_LINE:,} bytes; a row is one line")
    return line


def _read_json(path: Path) -> Iterator[Row]:
    head = text_head(path)
    try:
        with path.open(encoding="utf-8-sig") as file:
            if path.suffix == ".json" and head.removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"["):
                if (size := os.fstat(file.fileno()).st_size) > _LARGEST_ARRAY:
                    raise InputError(f"{path} is an array of {size:,} bytes: write one object a line, as .jsonl")
                yield from _objects(path, enumerate(_parse(path, 0, file.read()), start=1), "entry")
                return
            lines = enumerate(iter(lambda: file.readline(_LONGEST_LINE + 1), ""), start=1)
            values = ((number, _parse(path, number, line)) for number, line in lines if line.strip())
            yield from _objects(path, values, "line")
    except UnicodeDecodeError:
        raise InputError(f"{path}{_undecodable(path)} is not UTF-8 text: save it as UTF-8") from None


def _parse(path: Path, line: int, text: str) -> Any:
    """Parse JSON text that starts at this line of the file (0: the text is the whole file)."""
    if line and len(text) > _LONGEST_LINE:
        raise InputError(f"{path}, line {line}: more than {_LONGEST_LINE:,} characters; a row is one line")
    try:
        return parse_json(text)
    except NotJson as error:
        at = line or error.line
        raise InputError(f"{path}{f', line {at}' if at else ''}: {error.reason}") from error


def _objects(path: Path, values: Iterable[tuple[int, Any]], unit: str) -> Iterator[Row]:
    for number, value in values:
        if not isinstance(value, dict):
            raise InputError(f"{path}, {unit} {number}: a row is a JSON object, found {json_type(value)}")
        yield value


def _undecodable(path: Path) -> str:
    """ ", line N" for the first line that is not UTF-8."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError:
                return f", line {number}"
    return ""


def _read_parquet(path: Path) -> Iterator[Row]:
    with parquet_errors(path):
        from pyarrow.parquet import ParquetFile

        with ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()


@contextmanager
def parquet_errors(path: Path) -> Iterator[None]:
    """Context manager: InputError where pyarrow is missing or rejects the file."""
    with optional_package("pyarrow", "data", f"reading {path}"):
        from pyarrow import ArrowException
    try:
        yield
    except (ArrowException, OSError, ValueError) as error:  # ValueError: text is not UTF-8, or dates are out of range
        raise InputError(f"{path} is not a valid Parquet file: {_reason(error)}") from error


def saved_data_set(path: Path) -> Any:
    """The data set in a folder of `datasets.save_to_disk`, whose rows are memory-mapped."""
    # Checked first, so that any other folder is rejected at once and without the package.
    if (path / "dataset_dict.json").is_file():
        splits = read_object(path / "dataset_dict.json").get("splits")
        names = [str(name) for name in splits] if isinstance(splits, list) else []
        raise InputError(f"{path} has several splits: give one of {', '.join(str(path / name) for name in names)}")
    for name in ("dataset_info.json", "state.json"):
        if not (path / name).is_file():
            raise InputError(
                f"{path} is not a folder written by datasets.save_to_disk: it has no {name}, and no .jsonl, .parquet "
                "or .array_record files"
            )
        read_object(path / name)
    with optional_package("datasets", "data", f"reading the data set folder {path}"):
        from datasets import load_from_disk
    with saved_errors(path):
        return load_from_disk(str(path))


@contextmanager
def saved_errors(path: Path) -> Iterator[None]:
    """Context manager: InputError where a data set cannot be read."""
    try:
        yield
    except Exception as error:
        raise InputError(f"{path} is not a valid folder of datasets.save_to_disk: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:300]
