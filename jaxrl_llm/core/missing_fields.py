"""What of a batch a function read before it was there, found once the function has failed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from jaxrl_llm.core.trajectory import Trajectories


class _Entries(dict[str, Any]):
    """Entries of a batch's field, which note the name of one that is not there."""

    def __init__(self, entries: dict[str, Any] | None, field: str, absent: list[tuple[str, str]]) -> None:
        super().__init__(entries or {})
        self._field, self._absent = field, absent

    def __missing__(self, name: str) -> Any:
        self._absent.append((self._field, name))
        raise KeyError(name)


class _Read:
    """A batch that notes which of its fields and entries were read and are not there."""

    def __init__(self, batch: Trajectories) -> None:
        self._batch = batch
        self.absent: list[tuple[str, str]] = []  # field, and entry of it or ""

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._batch, name)
        if name in ("info", "rewards", "controls", "feedback"):
            return _Entries(value, name, self.absent)
        if value is None and name in Trajectories.__dataclass_fields__:
            self.absent.append((name, ""))
        return value


def explained(error: Exception, function: Callable[[Any], Any], batch: Trajectories) -> str:
    """What the batch lacks that a function failed on with this error, in words; "" if that is not why."""
    return absent(function, batch) if isinstance(error, KeyError) or "None" in str(error) else ""


def absent(function: Callable[[Any], Any], batch: Trajectories) -> str:
    """What a function read last of a batch that is not there, and what provides it, in words; "" for nothing.

    The function is called once more, on a batch that notes what is read.
    """
    read = _Read(batch)
    with contextlib.suppress(Exception):  # as before, or since this is no Trajectories
        function(read)
    return _in_words(*read.absent[-1]) if read.absent else ""


def _in_words(field: str, entry: str) -> str:
    from jaxrl_llm.core.needs import NEEDS, where_from  # here: needs are made of transforms' modules

    if entry:
        what, need = f"{field}[{entry!r}]", entry.partition(":")[0] in NEEDS and field == "info"
    else:
        what, need = field, field in NEEDS
    found = f"the batch has no {what} where a transform reads it"
    if need:
        return f"{found}: name {entry or field!r} among its needs"
    if field in ("advantages", "returns", "weights", "controls"):
        return f"{found}: put it after the transform that writes batch.{field}"
    return f"{found}: {where_from(field)}"
