"""Files as tools: a scratch folder of the episode, in which the policy reads, writes and lists text files."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxrl_llm.core.arguments.checks import checked
from jaxrl_llm.core.arguments.ranges import Count
from jaxrl_llm.environments.tools.base import EachEpisode

CHARACTERS = 4000
MOST_DEEP, MOST_NAME = 8, 100  # folders of a path; bytes of a name


@checked
def scratch_files(kilobytes: Count = 1024, count: Count = 100, characters: Count = CHARACTERS) -> EachEpisode:
    """Tools `read_file(path, start)`, `write_file(path, text)` and `list_files()` on a folder that is empty at first.

    kilobytes, count: most of all files of an episode together (1 kilobyte is 1000 bytes). characters: of a file that
    one call shows. The folder is removed at the end of the episode. Raises InputError for a number below 1.
    """
    return EachEpisode(lambda: _Folder(kilobytes * 1000, count, characters))


class _Folder:
    """The tools of one episode; see `base.Kit`. Their errors are RuntimeErrors that tell no path of the host."""

    def __init__(self, size: int, count: int, characters: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="files-")).resolve()
        self._size, self._count, self._characters = size, count, characters
        self._end = weakref.finalize(self, shutil.rmtree, str(self._folder), True)
        self.functions: tuple[Callable[..., Any], ...] = (self.read_file, self.write_file, self.list_files)

    def read_file(self, path: str, start: int = 0) -> str:
        """Read a text file of your folder.

        Args:
            path: Its name, such as notes/plan.txt
            start: Character from which to read on. 0 is the beginning.
        """
        text = self._text(self._place(path), path)
        begin = min(max(int(start), 0), len(text))
        shown = text[begin : begin + self._characters]
        if (end := begin + len(shown)) < len(text):
            return f"{shown}\n[cut: it goes on at start={end}, and has {len(text)} characters]"
        return shown

    def write_file(self, path: str, text: str) -> str:
        """Write a text file in your folder. One of the same name is replaced.

        Args:
            path: Its name, such as notes/plan.txt
            text: What is in it.
        """
        place, data = self._place(path), str(text).encode("utf-8", "replace")
        before = {name: name.stat().st_size for name in self._all()}
        after = {**before, place: len(data)}
        if (size := sum(after.values())) > self._size:
            raise RuntimeError(f"all files together may have {self._size:,} bytes, but would have {size:,}")
        if len(after) > self._count:
            raise RuntimeError(f"there may be {self._count} files, and there are as many")
        if place.is_dir():
            raise RuntimeError(f"{path} is a folder")
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)
        except OSError as error:  # a file where a folder would be
            raise RuntimeError(f"{path} cannot be written: {error.strerror}") from None
        return f"{path} has {len(data):,} bytes now"

    def list_files(self) -> str:
        """List the files of your folder with their sizes."""
        found = [f"{name.relative_to(self._folder).as_posix()} ({name.stat().st_size:,} bytes)" for name in self._all()]
        return "\n".join(found) or "there are no files"

    def copy(self) -> _Folder:
        """Another folder with the same files."""
        other = _Folder(self._size, self._count, self._characters)
        shutil.copytree(self._folder, other._folder, symlinks=True, dirs_exist_ok=True)
        return other

    def close(self) -> None:
        self._end()

    def _all(self) -> list[Path]:
        return sorted(name for name in self._folder.rglob("*") if name.is_file())

    def _place(self, path: str) -> Path:
        """Where a file is. RuntimeError for a path that leads out of the folder."""
        parts = [one for one in str(path).split("/") if one not in ("", ".")]
        if not parts or str(path).startswith("/") or ".." in parts or "\0" in str(path):
            raise RuntimeError(f"{str(path)[:MOST_NAME]!r} is no path in your folder: write a name such as notes.txt")
        if len(parts) > MOST_DEEP or any(len(one.encode("utf-8", "replace")) > MOST_NAME for one in parts):
            raise RuntimeError(f"a path has at most {MOST_DEEP} names of {MOST_NAME} bytes each")
        try:
            place = self._folder.joinpath(*parts).resolve()
        except (OSError, ValueError):  # letters that are no text
            raise RuntimeError("the path cannot be used: write a plain name such as notes.txt") from None
        if not place.is_relative_to(self._folder):  # the tools make no links, but others may
            raise RuntimeError("the path leads out of your folder")
        return place

    def _text(self, place: Path, path: str) -> str:
        try:
            return place.read_bytes().decode("utf-8", "replace")
        except OSError:
            there = "is a folder" if place.is_dir() else "does not exist: list_files() shows what does"
            raise RuntimeError(f"{path} {there}") from None


files = scratch_files()
