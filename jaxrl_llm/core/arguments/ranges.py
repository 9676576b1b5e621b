"""Ranges of numbers, as annotations and as checks made when a part is built rather than in a training step.

As an annotation: `turns: Annotated[int, Range(least=1)] = 8`.
"""

from numbers import Integral, Real
from typing import Annotated, Any, NamedTuple

from jaxrl_llm.utils.errors import InputError, is_off, require, shown

LARGEST = 3.4e38  # about the largest float32, the dtype of coefficients on devices
WHOLE = 2**31 - 1  # the largest whole number: they become int32 on devices


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

    def __repr__(self) -> str:
        return f"Range({', '.join(f'{name}={limit}' for name, limit in self.limits.items())})"


NonNegative = Annotated[float, Range(least=0)]
Positive = Annotated[float, Range(above=0)]
AtLeastOne = Annotated[float, Range(least=1)]
AboveOne = Annotated[float, Range(above=1)]
Fraction = Annotated[float, Range(least=0, most=1)]
OpenFraction = Annotated[float, Range(above=0, below=1)]
Share = Annotated[float, Range(above=0, most=1)]
BelowOne = Annotated[float, Range(least=0, below=1)]
BelowHalf = Annotated[float, Range(least=0, below=0.5)]
Seconds = Positive
NonNegativeInt = Annotated[int, Range(least=0)]
ZeroOrOne = Annotated[int, Range(least=0, most=1)]
Count = Annotated[int, Range(least=1)]
AtLeastTwo = Annotated[int, Range(least=2)]


def check_number(
    name: str,
    value: Any,
    *,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    whole: bool = False,
    or_none: bool = False,
) -> None:
    """InputError unless the value is a finite number in range.

    whole: require an integer. or_none: accept None, which turns a feature off. Arrays, also traced ones, pass
    unchecked: their values are unknown or expensive to read.

    >>> check_number("clip low", "0.2", least=0, most=1)
    Traceback (most recent call last):
    jaxrl_llm.utils.errors.InputError: clip low is '0.2', but must be a number
    """
    if (value is None and or_none) or _is_array(value):
        return
    if isinstance(value, bool) or not isinstance(value, Integral if whole else Real):
        raise InputError(f"{name} is {shown(value)}, but must be a {'whole ' if whole else ''}number")
    size: Any = abs(value)
    if not size <= LARGEST:
        raise InputError(f"{name} is {shown(value)}, but must be a finite number")
    require(name, value, least=least, most=most, above=above, below=below)


def _is_array(value: Any) -> bool:
    """Whether the value is a numeric NumPy or JAX array; NumPy scalars are numbers, not arrays."""
    kind = getattr(getattr(value, "dtype", None), "kind", "")
    return kind in tuple("fiuV") and not isinstance(value, Real)  # "V": bfloat16 and other extension dtypes


def check_divisor(of: str, divisor: Any) -> None:
    """InputError unless something can be divided by it: a number other than 0."""
    check_number(f"what {of} is divided by", divisor)
    if is_off(divisor):
        raise InputError(f"{of} is divided by 0")
