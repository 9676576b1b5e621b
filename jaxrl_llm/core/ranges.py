"""Ranges of numbers, for `Annotated`: `turns: Annotated[int, Range(least=1)] = 8`."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple


class Range(NamedTuple):
    """The range of a number; limits that are None do not hold."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None

    @property
    def limits(self) -> dict[str, Any]:
        """Those that there are, by name."""
        return {name: limit for name, limit in self._asdict().items() if limit is not None}


NonNegative = Annotated[float, Range(least=0)]
Positive = Annotated[float, Range(above=0)]
AtLeastOne = Annotated[float, Range(least=1)]
Fraction = Annotated[float, Range(least=0, most=1)]
Seconds = Positive
NonNegativeInt = Annotated[int, Range(least=0)]
ZeroOrOne = Annotated[int, Range(least=0, most=1)]
Count = Annotated[int, Range(least=1)]

WHOLE = 2**31 - 1  # the largest whole number: they become int32 on devices
