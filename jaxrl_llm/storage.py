"""Files at URLs (gs://, s3://, hf://, memory:// ...) through fsspec, and what is wrong with files that cannot be read.

fsspec needs the package of the protocol: gcsfs for gs://, s3fs for s3://, adlfs for az://.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxrl_llm.errors import InputError
from jaxrl_llm.process import default_cache_folder


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether a path names a protocol.

    >>> is_url("gs://bucket/run"), is_url("runs/a"), is_url("reasoning-gym:chain_sum")
    (True, False, False)
    """
    return "://" in os.fspath(path)


def filesystem(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path in it. InputError if the protocol or its package is missing."""
    import fsspec  # here: it takes a while, and few runs need it

    protocol = url.partition("://")[0]
    try:
        return fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise InputError(f"{url}: {protocol}:// needs another package: {_line(error)}") from error
    except ValueError as error:
        raise InputError(f"{url}: fsspec knows no {protocol}:// ({_line(error)})") from error


@contextlib.contextmanager
def reaching(url: str, what: str) -> Iterator[None]:
    """Turn an error of the storage into one line: "cannot `what` `url`: ...". Files that are missing stay that."""
    try:
        yield
    except (InputError, FileNotFoundError):
        raise
    except Exception as error:  # each protocol's package has its own
        raise InputError(
            f"cannot {what} {url} ({type(error).__name__}: {_line(error)}): check the name, and the rights of the "
            "credentials in use"
        ) from error


def local_copy(url: str) -> Path:
    """A file or folder at a URL as a local copy, in the user's cache folder; one that is there and current is used.

    Raises InputError if there is none, or it cannot be read.
    """
    fs, path = filesystem(url)
    try:
        with reaching(url, "read"):
            # The version of each file, so that a changed one is copied again.
            files = {name: fs.ukey(name) for name in sorted(fs.find(path))}
            if not files:
                raise FileNotFoundError
            key = hashlib.sha256(repr((url, files)).encode()).hexdigest()[:32]
            place = default_cache_folder().parent / "files" / key / path.rstrip("/").rpartition("/")[2]
            if not place.exists():
                partial = place.parent.with_name(f"{key}.{os.getpid()}")
                shutil.rmtree(partial, ignore_errors=True)
                for name in files:
                    to = partial / place.name / name.removeprefix(path).lstrip("/")
                    to = partial / place.name if name == path else to
                    to.parent.mkdir(parents=True, exist_ok=True)
                    fs.get_file(name, str(to))
                with contextlib.suppress(OSError):  # another process was faster
                    os.replace(partial, place.parent)
                shutil.rmtree(partial, ignore_errors=True)
            return place
    except FileNotFoundError:
        raise InputError(f"there is nothing at {url}") from None


def unreadable(folder: str | os.PathLike[str], contents: bool) -> list[OSError]:
    """Why files in a local folder cannot be read. contents: also read every file to its end."""
    failed: list[OSError] = []
    for place, _, names in os.walk(folder, onerror=failed.append):
        for path in (Path(place) / name for name in names):
            try:
                if not stat.S_ISREG(path.stat().st_mode):  # reading a pipe, for instance, would block forever
                    failed.append(OSError(errno.EINVAL, "not a regular file", str(path)))
                elif contents:
                    with path.open("rb") as file:
                        while file.read(2**24):
                            pass
            except OSError as error:
                failed.append(OSError(error.errno, error.strerror, str(path)))
    return failed


def _line(error: Exception) -> str:
    """An error's message on one line of at most 200 characters."""
    return " ".join(str(error).split())[:200] or type(error).__name__
