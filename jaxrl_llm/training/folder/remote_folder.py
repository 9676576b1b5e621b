"""A run's folder at a URL (s3://, gs://, memory:// ...): the run works in a local folder, which is copied.

What is at the URL counts: a run that is resumed, evaluated or exported begins with a copy of it, and the local folder
is scratch in the user's cache. A checkpoint is copied when it is complete, after the logs that belong to it, and its
file commit_success.txt last: a checkpoint without that file was cut off and is ignored.

The hosts of a run on several share no local folder: there orbax itself writes the checkpoints to the URL, each host its
shards, which it can for gs:// only (with the packages gcsfs and google-cloud-storage). One process can go on with them,
and several with those of one.
"""

import hashlib
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path, PurePosixPath

from jaxrl_llm.training.folder.lock import NAME as LOCK
from jaxrl_llm.training.folder.lock import locked
from jaxrl_llm.utils.errors import InputError
from jaxrl_llm.utils.process import default_cache_folder
from jaxrl_llm.utils.storage import filesystem, reaching

CHECKPOINTS = "checkpoints"
COMPLETE = "commit_success.txt"  # as orbax names it in buckets
_SCRATCH = (".new", ".partial")  # endings of files that are being written
_PROBE = "jaxrl-writes-here"


class Mirror:
    """The folder at a URL and its local copy, `path`. reading: a copy of its own, beside that of a run that goes on."""

    def __init__(self, url: str, reading: bool = False) -> None:
        self.url = url.rstrip("/")
        name = f"{PurePosixPath(self.url).name}-{hashlib.sha256(self.url.encode()).hexdigest()[:12]}"
        self.path = default_cache_folder().parent / ("read" if reading else "runs") / name
        self._sent: dict[str, tuple[int, int]] = {}  # size and time of each log that was copied to the URL
        self._direct = False  # whether orbax writes the checkpoints to the URL
        self._thread = ThreadPoolExecutor(1, "jaxrl-mirror")
        self._pending: Future[None] | None = None

    def check_free(self) -> None:
        """InputError if a new run cannot be written to the URL: it holds one, or writing is not permitted."""
        if set(self._there()[0]) - {_PROBE}:
            raise InputError(f"{self.url} is not empty: resume the run there with --resume, or choose another --output")
        fs, root = filesystem(self.url)
        with reaching(self.url, "write to"):
            fs.pipe_file(f"{root}/{_PROBE}", b"")
            fs.rm_file(f"{root}/{_PROBE}")

    def clear(self, but: str = "") -> None:
        """Empty the local folder, but for the lock and the entry with this name."""
        for path in self.path.iterdir() if self.path.is_dir() else ():
            if path.name not in (LOCK, but):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def pull_file(self, name: str) -> None:
        """Copy one file from the URL; without it there, the local one is removed."""
        fs, root = filesystem(self.url)
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            with reaching(self.url, "read"):
                (self.path / name).write_bytes(fs.cat_file(f"{root}/{name}"))
        except FileNotFoundError:
            (self.path / name).unlink(missing_ok=True)

    def pull(self) -> None:
        """Replace the local files, without the checkpoints, by those at the URL. InputError if a run is using them."""
        self.path.mkdir(parents=True, exist_ok=True)
        with locked(self.path):
            self.clear(but=CHECKPOINTS)
            self._pull({name for name in self._there()[0] if _checkpoint(name) is None})

    def checkpoints(self, processes: int) -> Path | str:
        """Where a run of so many processes reads and writes its checkpoints.

        For one process, the local folder, into which the complete ones that it lacks are copied first; for several, the
        folder at the URL. InputError for several and a URL of another protocol than gs://.
        """
        if processes > 1:
            if not self.url.startswith("gs://"):
                raise InputError(
                    f"{self.url} cannot hold the checkpoints of several hosts: give a folder on a file system that "
                    "they share, which may be a mounted bucket, or gs://"
                )
            self._direct = True
            return f"{self.url}/{CHECKPOINTS}"
        there, complete = self._there()
        kept = {folder for folder in complete if _within(there, folder) == self._here(folder)}
        for folder in self._checkpoints():
            if folder not in kept:
                shutil.rmtree(self.path / folder)
        self._pull({name for name in there if _checkpoint(name) in complete - kept})
        return self.path / CHECKPOINTS

    def _pull(self, names: set[str]) -> None:
        fs, root = filesystem(self.url)
        for name in sorted(names):
            place = self.path / name
            place.parent.mkdir(parents=True, exist_ok=True)
            with reaching(self.url, "read"):
                fs.get_file(f"{root}/{name}", str(place))

    def push(self) -> None:
        """Start copying to the URL what has changed, when the previous copy is done. InputError if that failed."""
        self.wait()
        self._pending = self._thread.submit(self._push)

    def wait(self) -> None:
        """Wait until everything is copied. InputError if it failed."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def _push(self) -> None:
        checkpoints = self._checkpoints()
        fs, root = filesystem(self.url)
        for path in sorted(self.path.rglob("*")):
            name = path.relative_to(self.path).as_posix()
            if name.split("/")[0] == CHECKPOINTS or name == LOCK or path.suffix in _SCRATCH or not path.is_file():
                continue
            with suppress(FileNotFoundError):  # replaced at this moment; the next copy has it
                now = path.stat()
                if self._sent.get(name) != (now.st_size, now.st_mtime_ns):
                    with reaching(self.url, "write to"):
                        fs.pipe_file(f"{root}/{name}", path.read_bytes())  # at once: logs grow
                    self._sent[name] = (now.st_size, now.st_mtime_ns)
        if self._direct:
            return
        there, complete = self._there()
        with reaching(self.url, "write to"):
            for folder in checkpoints:
                if folder not in complete or _within(there, folder) != self._here(folder):
                    if _within(there, folder):  # it was cut off, or is to be replaced
                        fs.rm(f"{root}/{folder}", recursive=True)
                    for name in self._here(folder):
                        fs.put_file(str(self.path / name), f"{root}/{name}")
                    fs.pipe_file(f"{root}/{folder}/{COMPLETE}", b"")
            for old in {_checkpoint(name) for name in there} - {None, *checkpoints}:
                fs.rm(f"{root}/{old}", recursive=True)

    def _checkpoints(self) -> list[str]:
        """Names of the complete local checkpoints, such as "checkpoints/20"."""
        folder = self.path / CHECKPOINTS
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        return [f"{CHECKPOINTS}/{name}" for name in sorted(names) if name.isdigit()]

    def _here(self, folder: str) -> dict[str, int]:
        """Sizes of the files of a local checkpoint. As data files have random names, equals are the same."""
        paths = [path for path in (self.path / folder).rglob("*") if path.is_file()]
        return {path.relative_to(self.path).as_posix(): path.stat().st_size for path in paths}

    def _there(self) -> tuple[dict[str, int], set[str]]:
        """Sizes of the files at the URL by their names, empty if there are none; which checkpoints are complete."""
        fs, root = filesystem(self.url)
        try:
            with reaching(self.url, "read"):
                found = fs.find(root, detail=True)
        except FileNotFoundError:
            return {}, set()
        sizes = {name.removeprefix(root.rstrip("/")).lstrip("/"): int(info["size"]) for name, info in found.items()}
        marks = {name for name in sizes if _checkpoint(name) and name == f"{_checkpoint(name)}/{COMPLETE}"}
        return {name: size for name, size in sizes.items() if name and name not in marks}, {
            mark.removesuffix(f"/{COMPLETE}") for mark in marks
        }


def _checkpoint(name: str) -> str | None:
    """The checkpoint's folder that a file is in, such as "checkpoints/20"; None for other files."""
    parts = name.split("/")
    return "/".join(parts[:2]) if parts[0] == CHECKPOINTS and len(parts) > 2 else None


def _within(sizes: dict[str, int], folder: str) -> dict[str, int]:
    return {name: size for name, size in sizes.items() if name.startswith(f"{folder}/")}
