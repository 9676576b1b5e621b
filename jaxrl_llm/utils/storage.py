"""Files at URLs (gs://, s3://, hf://, memory:// ...) through fsspec, and what is wrong with files that cannot be read.

fsspec needs the package of the protocol: gcsfs for gs://, s3fs for s3://, adlfs for az://.
"""

import contextlib
import errno
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxrl_llm.utils.errors import InputError
from jaxrl_llm.utils.process import default_cache_folder
from jaxrl_llm.utils.starting import limited, phase

SILENT = 120.0  # seconds without a further byte after which a URL is given up
_VALIDATORS = ("ETag", "Last-Modified", "Content-MD5", "Digest")  # headers of HTTP that change with a file


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all: a kill leaves the old one or the new one. Raises OSError as writing does."""
    new = path.with_name(f"{path.name}.new")
    with new.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)


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
        with phase(f"{what} {url}"):
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

    Raises InputError if there is none, if it cannot be read, or if nothing comes for SILENT seconds.
    """
    fs, path = filesystem(url)
    copied = _copies() / f"{os.getpid()}.{os.urandom(4).hex()}"
    late = f"{url} has sent nothing for {SILENT:g} s: check its server and the network, or give a local copy"
    try:
        with reaching(url, "read"):
            return limited(lambda: _copy(fs, url, path, copied), SILENT, late, lambda: _bytes_in(copied))
    except FileNotFoundError:
        raise InputError(f"there is nothing at {url}") from None
    finally:
        shutil.rmtree(copied, ignore_errors=True)


def _copy(fs: Any, url: str, path: str, copied: Path) -> Path:
    """Where the local copy is, which is made in the folder `copied` first if need be."""
    found = [path] if _is_http(fs) else sorted(fs.find(path))
    files = {name: _version(fs, name) for name in found}
    if not files:
        raise FileNotFoundError
    name = path.rstrip("/").rpartition("/")[2].partition("?")[0] or "file"
    if None not in files.values() and (place := _place((url, files), name)).exists():
        return place
    digests = {}
    for one in files:
        to = copied / name if one == path else copied / name / one.removeprefix(path).lstrip("/")
        to.parent.mkdir(parents=True, exist_ok=True)
        fs.get_file(one, str(to))
        with to.open("rb") as file:
            digests[one] = hashlib.file_digest(file, "sha256").hexdigest()
    place = _place((url, digests if None in files.values() else files), name)
    with contextlib.suppress(OSError):  # it is there, or another process was faster
        os.replace(copied, place.parent)
    return place


def _bytes_in(folder: Path) -> int:
    """Bytes of the files that have been copied into a folder so far, which may be renamed meanwhile."""
    total = 0
    with contextlib.suppress(OSError):
        for path in folder.rglob("*"):
            total += path.stat().st_size
    return total


def _is_http(fs: Any) -> bool:
    """Whether a file system is that of web pages, which has no folders."""
    return "http" in ([fs.protocol] if isinstance(fs.protocol, str) else fs.protocol)


def _version(fs: Any, name: str) -> Any:
    """What changes when a file does; None where the storage does not say."""
    if not _is_http(fs):
        return fs.ukey(name)
    known = fs.info(name)
    found = {header: known[header] for header in _VALIDATORS if known.get(header)}
    return {**found, "size": known.get("size")} if found else None


def _copies() -> Path:
    return default_cache_folder().parent / "files"


def _place(version: Any, name: str) -> Path:
    return _copies() / hashlib.sha256(repr(version).encode()).hexdigest()[:32] / name


def by_url(text: str, url: str) -> str:
    """A message about the local copy of a URL, which names the URL instead; other texts as they are."""
    return re.sub(rf"{re.escape(str(_copies()))}/[0-9a-f]{{32}}/[^/,:'\s]*", lambda found: url, text)


@contextlib.contextmanager
def naming_url(source: str) -> Iterator[None]:
    """Errors about the local copy of a source at a URL name the URL."""
    try:
        yield
    except InputError as error:
        if not is_url(source):
            raise
        raise InputError(by_url(str(error), source)) from None


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
