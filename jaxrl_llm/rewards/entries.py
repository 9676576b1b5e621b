"""What a reward function returns: N numbers, and further entries of each completion. Imports neither NumPy nor JAX.

A function returns a list of numbers, a dict of lists, or a list of dicts. In dicts "reward" is the number, and each
other name an entry:

    "answer_key"   a text or number; equal ones are equal answers to a prompt. None: no answer
    "spans"        (start, end, value) of parts of the completion's text; `value` is earned where the part ends
    other names    a number or rectangular lists of numbers, such as the results of tests
"""

import math
import struct
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from itertools import islice
from numbers import Real
from typing import Any

from jaxrl_llm.utils.errors import error_line

REWARD, ANSWER_KEY, SPANS = "reward", "answer_key", "spans"

Entries = Mapping[str, list[Any]]  # by name, N values each; None where a completion has none


def parsed_result(result: Any, count: int) -> tuple[list[float], list[bool], Entries, str]:
    """A function's result as (N values, N flags for failed, entries, the first problem in one line).

    A completion with an entry that is malformed has failed. All have where the result as a whole is malformed.
    """
    values, failed = [math.nan] * count, [True] * count
    try:
        rewards, columns = _columns(result, count)
    except (TypeError, ValueError) as error:
        return values, failed, {}, error_line(error)
    entries: dict[str, list[Any]] = {name: [None] * count for name in columns}
    problem = ""
    for sample, reward in enumerate(rewards):
        try:
            value = _number(reward)
            own = {name: entry(name, column[sample]) for name, column in columns.items()}
        except Exception as error:
            problem = problem or error_line(error)
            continue
        values[sample], failed[sample] = value, False
        for name, one in own.items():
            entries[name][sample] = one
    for name, column in entries.items():
        if len(axes := sorted({len(_shape(one)) for one in column if one is not None})) > 1 and name != SPANS:
            problem = f"ValueError: returned {name!r} with {axes[0]} and with {axes[-1]} axes: give all the same"
            return [math.nan] * count, [True] * count, {}, problem
    return values, failed, entries, problem


def _columns(result: Any, count: int) -> tuple[list[Any], dict[str, list[Any]]]:
    """The rewards, and the other columns, of a result in one of the three forms."""
    if isinstance(result, Mapping):
        if REWARD not in result:
            raise ValueError(f"returned a dict without {REWARD!r}: {', '.join(map(repr, islice(result, 5)))}")
        columns = {_name(name): _listed(column, count, name) for name, column in result.items()}
        return columns.pop(REWARD), columns
    rewards = _listed(result, count, "")
    if not any(isinstance(one, Mapping) for one in rewards):
        return rewards, {}
    for one in rewards:
        if isinstance(one, Mapping) and REWARD not in one:
            raise ValueError(f"returned a dict without {REWARD!r} for a completion")
    names = dict.fromkeys(_name(name) for one in rewards if isinstance(one, Mapping) for name in one if name != REWARD)
    rows = [one if isinstance(one, Mapping) else {REWARD: one} for one in rewards]
    return [row[REWARD] for row in rows], {name: [row.get(name) for row in rows] for name in names}


def _name(name: Any) -> str:
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"returned an entry named {str(name)[:80]!r}, but names are words, such as 'tests'")
    return name


def _listed(column: Any, count: int, name: Any) -> list[Any]:
    of = f"{name!r}: " if name else ""
    if isinstance(column, str | bytes | Mapping | AbstractSet) or not isinstance(column, Iterable):
        raise TypeError(f"returned {of}{type(column).__name__}, not a list of {count} {'values' if of else 'numbers'}")
    values = list(islice(column, count + 1))  # a generator may be infinite
    if len(values) != count:
        found = len(values) if len(values) < count else f"more than {count}"
        raise ValueError(f"returned {of}{found} values for {count} samples")
    return values


def _number(value: Any) -> float:
    """A finite number, NaN for None. Raises TypeError or ValueError for anything else."""
    if value is None:
        return math.nan
    is_scalar_array = getattr(value, "shape", None) == () and not isinstance(value, str | bytes)
    if not (isinstance(value, Real) or is_scalar_array):
        raise TypeError(f"returned {type(value).__name__}, not a number")
    found = float(value)
    try:
        struct.pack("<f", found)  # raises OverflowError if the value rounds to infinity
        finite = not math.isinf(found)
    except OverflowError:
        finite = False
    if not finite:
        raise ValueError(f"returned {value!r}, which is infinite in float32")
    return found


def entry(name: str, value: Any) -> Any:
    """One completion's entry as a JSON value: a text, numbers, or lists of them. TypeError or ValueError if malformed.

    >>> entry("answer_key", " 1 / 2 "), entry("tests", (True, None)), entry("spans", [(0, 3, 1)])
    ('1 / 2', [1.0, nan], [[0, 3, 1.0]])
    """
    if value is None:
        return None
    if name == ANSWER_KEY:
        return " ".join(value.split()) if isinstance(value, str) else f"{_number(value):.17g}"
    if name == SPANS:
        return [_span(one) for one in value]
    try:
        return _numbers(value.tolist() if getattr(value, "shape", ()) else value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"returned {name!r} with {str(error).removeprefix('returned ')}") from None


def _span(span: Any) -> list[Any]:
    if isinstance(span, str | bytes) or not isinstance(span, Iterable) or len(parts := list(span)) != 3:
        raise ValueError(f"returned the span {str(span)[:80]}, but a span is (start, end, value)")
    start, end, value = int(parts[0]), int(parts[1]), _number(parts[2])
    if not 0 <= start < end or math.isnan(value):
        raise ValueError(f"returned the span {tuple(parts)!r}, but needs 0 <= start < end and a value")
    return [start, end, value]


def _numbers(value: Any) -> Any:
    """Numbers, or rectangular lists of them."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        return _number(value)
    parts = [_numbers(part) for part in value]
    if len({_shape(part) for part in parts}) > 1:
        raise ValueError("returned lists of different lengths")
    return parts


def _shape(value: Any) -> tuple[int, ...]:
    return (len(value), *(_shape(value[0]) if value else ())) if isinstance(value, list) else ()


def concatenate_entries(parts: Iterable[tuple[Entries, int]]) -> Entries:
    """The entries of several lists of completions, one after the other; with each the number of its completions.

    >>> concatenate_entries([({"tests": [[1.0]]}, 1), ({"answer_key": ["4", None]}, 2)])
    {'tests': [[1.0], None, None], 'answer_key': [None, '4', None]}
    """
    listed = list(parts)
    names = dict.fromkeys(name for entries, _ in listed for name in entries)
    return {name: [one for entries, n in listed for one in entries.get(name, [None] * n)] for name in names}


def entries_at(entries: Entries, indices: Iterable[int | None]) -> Entries:
    """The entries of the completions at some places; None for a completion that has no place."""
    places = list(indices)
    return {name: [None if i is None else column[i] for i in places] for name, column in entries.items()}


def provided(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names in a function's attribute `provides`: the entries that it always returns. TypeError if malformed."""
    names = getattr(function, "provides", ())
    listed = [names] if isinstance(names, str) or not isinstance(names, Iterable) else list(names)
    if not all(isinstance(name, str) and name.isidentifier() for name in listed):
        raise TypeError(f"provides is {names!r}, but must be a set of names, such as {{'tests'}}")
    return tuple(sorted(listed))
