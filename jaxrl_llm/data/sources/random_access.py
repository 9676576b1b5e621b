"""Records of files with random access in bounded memory, in grain's protocol for sources.

A source has `__len__` and `__getitem__`, and may have `_getitems`, which reads several records together (grain's
`RandomAccessDataSource`). A record is a row, or a JSON object as text. Nothing here keeps rows in memory: JSON lines
are found by an index of 8 bytes a line; of Parquet files, only the row groups of the records asked for are decoded,
batch by batch, so that reading many records together costs little more than reading one of each group.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from jaxrl_llm.data.sources import files
from jaxrl_llm.data.sources.hub import hub_data, is_hub_data
from jaxrl_llm.utils.errors import InputError, error_line, optional_package
from jaxrl_llm.utils.json import NotJson, check_regular, json_type, parse_json
from jaxrl_llm.utils.storage import by_url, naming_url

Record = Mapping[str, Any] | bytes | str
_CHUNK = 2**22  # bytes of JSON lines indexed at a time
_BATCH = 2**13  # rows of a Parquet file decoded at a time
_SPACE = np.isin(np.arange(256), np.frombuffer(b" \t\n\v\f\r", np.uint8))


@runtime_checkable
class RandomAccess(Protocol):
    """grain's protocol of a source. `__getitem__` must be safe to call from several threads."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class File(NamedTuple):
    """A file of records."""

    path: Path
    records: int
    read: Callable[[Sequence[int]], list[Record]]  # the records of these numbers, from 0
    place: Callable[[int], str]  # "line 3"
    columns: tuple[str, ...]  # where the file names them
    size: int  # bytes


class RecordFiles:
    """The records of several files, one file after the other, as a source of grain."""

    def __init__(self, files: Sequence[File], source: str = "") -> None:
        self.files, self._source = tuple(files), source
        self._ends = np.cumsum([file.records for file in files], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Record:
        return self.read([index])[0]

    def read(self, indices: Sequence[int]) -> list[Record]:
        """The records of these indices, reading each file once."""
        at = np.asarray(indices, np.int64)
        if at.size and (at.min() < 0 or at.max() >= len(self)):
            raise IndexError(f"records have the indices 0 to {len(self) - 1}, found {at.min()} to {at.max()}")
        of_file = np.searchsorted(self._ends, at, side="right")
        out: dict[int, Record] = {}
        for number in np.unique(of_file):
            file = self.files[number]
            here = np.flatnonzero(of_file == number)
            wanted = (at[here] - (self._ends[number] - file.records)).tolist()
            out |= zip(here.tolist(), _read(file, wanted), strict=True)
        return [out[place] for place in range(len(at))]

    _getitems = read  # grain's name

    def where(self, index: int) -> str:
        """The file and the line or row of a record, for errors."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        file = self.files[number]
        return by_url(f"{file.path}, {file.place(int(index - (self._ends[number] - file.records)))}", self._source)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that the files name; others are found in the records."""
        return tuple(dict.fromkeys(name for file in self.files for name in file.columns))

    @property
    def facts(self) -> list[Any]:
        """What is known of the files without reading their records: number of records, bytes, columns."""
        return [[file.records, file.size, list(file.columns)] for file in self.files]


def _read(file: File, wanted: Sequence[int]) -> list[Record]:
    try:
        if not file.path.is_dir() and file.path.stat().st_size != file.size:
            raise InputError(f"{file.path} has changed since the run began: restore it, or start another run")
        return file.read(wanted)
    except OSError as error:
        raise InputError(f"cannot read {file.path}: {error.strerror or error_line(error)}") from error


def open_records(source: str) -> RecordFiles | None:
    """The records of a file, pattern or folder; None for formats without random access (.json).

    Raises InputError for a source that does not exist or is damaged, as `files.read_rows` does.
    """
    if is_hub_data(source):
        data = hub_data(source)
        shards = [Path(file["filename"]) for file in data.cache_files]
        folder = shards[0].parent if shards else Path(".")
        return RecordFiles([_data_set(folder, data, sum(file.stat().st_size for file in shards))])
    with naming_url(source):
        found = files.source_files(source)
        if isinstance(found, Path):  # a folder of datasets.save_to_disk
            size = sum(file.stat().st_size for file in found.glob("*.arrow"))
            return RecordFiles([_data_set(found, files.saved_data_set(found), size)], source)
        kinds = {"jsonl": _json_lines, "parquet": _parquet, "array_record": _array_record}
        if any(files.file_format(path) not in kinds for path in found):
            return None
        try:
            for path in found:
                check_regular(path)
            return RecordFiles([kinds[str(files.file_format(path))](path) for path in found], source)
        except OSError as error:
            why = error.strerror or error_line(error)
            raise InputError(f"cannot read {error.filename or source}: {why}") from error


def row_of(record: Any, where: str) -> files.Row:
    """A record as a row. InputError, beginning with `where`, if it is neither a row nor a JSON object."""
    if isinstance(record, bytes | str):
        try:
            record = parse_json(record if isinstance(record, str) else record.decode("utf-8"))
        except UnicodeDecodeError:
            raise InputError(f"{where} is not UTF-8 text: save it as UTF-8") from None
        except NotJson as error:
            raise InputError(f"{where}: {error.reason}") from error
    if not isinstance(record, Mapping):
        raise InputError(f"{where}: a row is a JSON object, found {json_type(record)}")
    return dict(record)


def _json_lines(path: Path) -> File:
    """The lines that are not blank."""
    starts, numbers = index_lines(path)

    def read(wanted: Sequence[int]) -> list[Record]:
        with path.open("rb") as file:
            return [files.read_line(file, int(starts[number]), f"{path}, {place(number)}") for number in wanted]

    def place(number: int) -> str:
        return f"line {number + 1 if numbers is None else numbers[number]}"

    return File(path, len(starts), read, place, (), path.stat().st_size)


def index_lines(path: Path) -> tuple[np.ndarray, np.ndarray | None]:
    """(byte offsets int64 of the lines that are not blank, their line numbers from 1, or None if no line is blank).

    One pass over the file that looks for newlines and parses nothing.
    """
    first = len(files.BYTE_ORDER_MARK) if files.text_head(path).startswith(files.BYTE_ORDER_MARK) else 0
    found, spaced, at = [np.asarray([first], np.int64)], [np.asarray([first], np.int64)], 0
    with path.open("rb") as file:
        buffer = bytearray(_CHUNK)
        while size := file.readinto(buffer):
            data = np.frombuffer(buffer, np.uint8, size)
            starts = np.flatnonzero(data == ord("\n")) + 1
            found.append(starts + at)
            # Lines that may be blank: those that begin with white space, or in the next chunk.
            inside = starts[: len(starts) - (data[-1] == ord("\n"))]
            spaced += [inside[_SPACE[data[inside]]] + at, starts[len(inside) :] + at]
            at += size
        starts = np.concatenate(found)
        starts = starts[starts < at]  # nothing follows the last newline
        blank = [x for x in np.concatenate(spaced) if x < at and not files.read_line(file, int(x), str(path)).strip()]
    if not blank:
        return starts, None
    keep = ~np.isin(starts, blank)
    return starts[keep], np.flatnonzero(keep) + 1


def _parquet(path: Path) -> File:
    with files.parquet_errors(path):
        from pyarrow.parquet import ParquetFile, read_metadata

        metadata = read_metadata(path)
        columns = tuple(metadata.schema.to_arrow_schema().names)
        ends = np.cumsum([metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)], dtype=np.int64)

    def read(wanted: Sequence[int]) -> list[Record]:
        rows: dict[int, Record] = {}
        numbers = np.unique(np.asarray(wanted, np.int64))
        groups = np.searchsorted(ends, numbers, side="right")
        with files.parquet_errors(path), ParquetFile(path, metadata=metadata, memory_map=True) as file:
            for group in np.unique(groups):
                here, at = numbers[groups == group], int(ends[group - 1]) if group else 0
                for batch in file.iter_batches(_BATCH, row_groups=[int(group)]):
                    for number in here[(at <= here) & (here < at + len(batch))]:
                        rows[int(number)] = batch.slice(int(number) - at, 1).to_pylist()[0]
                    at += len(batch)
                    if at > here[-1]:
                        break
        return [rows[number] for number in wanted]

    return File(path, metadata.num_rows, read, lambda number: f"row {number + 1}", columns, path.stat().st_size)


def _array_record(path: Path) -> File:
    """Records that are JSON objects.

    They are read one by one: a reader that is asked for several at once makes a list for each chunk of the file first,
    which takes 700 MB for 10 million chunks.
    """
    with optional_package("array_record", "data", f"reading {path}"):
        from array_record.python.array_record_module import ArrayRecordReader
    try:
        options = "readahead_buffer_size:0,max_parallelism:0"
        reader = ArrayRecordReader(str(path), options, file_reader_buffer_size=2**15)
        if not reader.ok():
            reader.close()  # raises an error that says why
        length = int(reader.num_records())
    except Exception as error:  # of several types
        raise InputError(f"{path} is not a valid array_record file: {error_line(error)}") from error
    position = threading.Lock()

    def read(wanted: Sequence[int]) -> list[Record]:
        found = list[Record]()
        try:
            for number in wanted:
                with position:
                    reader.seek(number)
                    found.append(bytes(reader.read()))
            return found
        except Exception as error:
            raise InputError(f"{path} is not a valid array_record file: {error_line(error)}") from error

    return File(path, length, read, lambda number: f"record {number + 1}", (), path.stat().st_size)


def _data_set(path: Path, data: Any, size: int) -> File:
    """The rows of a `datasets.Dataset` in a folder."""

    def read(wanted: Sequence[int]) -> list[Record]:
        with files.saved_errors(path):
            columns = data[list(wanted)]
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    return File(path, len(data), read, lambda number: f"row {number + 1}", tuple(data.column_names), size)
