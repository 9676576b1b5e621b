"""Errors that a user can act on: one line that says what is wrong and what to do."""

import contextlib
import difflib
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
_TYPO, _SIMILAR = 0.85, 0.66  # shares of letters, as difflib counts them, from which names are suggested


class InputError(ValueError):
    """Bad input. The message is one line: what was found, and what to do about it.

    The command line prints it without a traceback (unless `--traceback`) and exits with status 2. `known`: the valid
    names, if the error is about a name.
    """

    def __init__(self, message: str = "", known: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.known = tuple(known)


class InputErrors(InputError):
    """Several problems, found together; `problems` has the message of each."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(self.problems))


def gather(*checks: Callable[[], T]) -> list[T]:
    """Run all checks, even after one fails, and return their results.

    Raises the InputError of the check that failed, or InputErrors with the problems of several.

    >>> gather(lambda: 1, lambda: 2)
    [1, 2]
    """
    found: list[T] = []
    problems: list[str] = []
    first: InputError | None = None
    for check in checks:
        try:
            found.append(check())
        except InputError as error:
            problems += error.problems if isinstance(error, InputErrors) else [str(error)]
            first = first or error
    if problems := list(dict.fromkeys(problems)):
        raise InputErrors(problems) if len(problems) > 1 else InputError(problems[0]) from first
    return found


def shown(value: Any, most: int = 80) -> str:
    """A short repr of a value for messages: one line of at most `most` characters.

    >>> shown("a b"), shown(10**5000)
    ("'a b'", 'a number of over 80 digits')
    """
    if isinstance(value, int) and abs(value) >= 10**most:
        return f"a number of over {most} digits"
    brief = reprlib.Repr()  # bounds the work for nested lists, which a short YAML text can make huge
    brief.maxlevel, brief.maxstring, brief.maxother, brief.maxlong = 3, most, most, most
    try:
        text = " ".join(brief.repr(value).split())
    except Exception:  # a __repr__ may raise anything; integers of thousands of digits raise ValueError
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= most else f"{text[: most - 3]}..."


def unknown(kind: str, name: str, known: Iterable[str], in_order: bool = False) -> InputError:
    """The error for an unknown name; it suggests the nearest known name and lists the known ones.

    in_order: list them as they are given, not sorted.

    >>> str(unknown("algorithm", "gropo", ["grpo", "rloo"]))
    "unknown algorithm 'gropo': did you mean 'grpo'? Known: grpo, rloo"
    """
    names, name = list(known) if in_order else sorted(known), str(name)
    near = nearest(name, names)
    hint = f": did you mean {near!r}?" if near else "."
    listed = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
    return InputError(f"unknown {kind} {shown(name)}{hint} Known: {listed or 'none'}", known=names)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most similar to this one, ignoring case; None if none is similar.

    First a name with the same letters or nearly all of them, then one that begins with all words of the other, then the
    one that shares most letters.

    >>> nearest("GRPO", ["dapo", "grpo"]), nearest("gpro", ["gspo", "grpo"]), nearest("sampling", ["temperature"])
    ('grpo', 'grpo', None)
    >>> nearest("reference", ["reference_logp", "refined"]), nearest("GRPOTrainer", ["grpo", "grpo_tcr"])
    ('reference_logp', 'grpo')
    """
    plain, words = {one.lower(): one for one in known}, _words(name[:200])
    name = name[:200].lower()
    same = [one for one in plain if sorted(one) == sorted(name)]
    typo = difflib.get_close_matches(name, plain, n=1, cutoff=_TYPO)
    longer = [one for one in plain if words and _words(one)[: len(words)] == words]
    shorter = [one for one in plain if (own := _words(one)) and words[: len(own)] == own]
    begun = sorted(longer + shorter, key=lambda one: (abs(len(one) - len(name)), one))
    found = [*same, *typo, *begun, *difflib.get_close_matches(name, plain, n=1, cutoff=_SIMILAR)]
    return plain[found[0]] if found else None


def _words(name: str) -> list[str]:
    """The words of a name in lower case, of one in capitals too.

    >>> _words("GRPOTrainer"), _words("clip_high")
    (['grpo', 'trainer'], ['clip', 'high'])
    """
    return [word.lower() for word in re.findall(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z0-9]+|[A-Z0-9]+", name)]


def accepts(check: Callable[..., object], *arguments: Any) -> bool:
    """Whether a call raises no InputError."""
    try:
        check(*arguments)
    except InputError:
        return False
    return True


def missing_package(package: str, extra: str, why: str) -> InputError:
    """The error for an optional package that is not installed."""
    return InputError(f"{why} needs the package {package!r}: pip install 'jaxrl_llm[{extra}]'")


@contextlib.contextmanager
def optional_package(package: str, extra: str, why: str) -> Iterator[None]:
    """Import an optional package within this context: if it is not installed, `missing_package` is raised.

    >>> with optional_package("tyro", "run", "the command line"):
    ...     import tyro
    """
    try:
        yield
    except ImportError as error:
        raise missing_package(package, extra, why) from error


def require(
    name: str,
    value: Any,
    *,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> None:
    """InputError unless a number is in range (NaN never is). Anything else, such as a traced value, passes.

    >>> require("clip_low", -0.1, least=0, most=1)
    Traceback (most recent call last):
    jaxrl_llm.utils.errors.InputError: clip_low is -0.1, but must be at least 0 and at most 1
    """
    if not isinstance(value, int | float):
        return
    limits = [
        (least, "at least", lambda limit: value >= limit),
        (above, "above", lambda limit: value > limit),
        (most, "at most", lambda limit: value <= limit),
        (below, "below", lambda limit: value < limit),
    ]
    wanted = [(limit, words, test) for limit, words, test in limits if limit is not None]
    if value != value or not all(test(limit) for limit, _, test in wanted):
        texts = " and ".join(f"{words} {_plain(limit)}" for limit, words, _ in wanted) or "a number"
        raise InputError(f"{name} is {shown(value)}, but must be {texts}")


def _plain(number: float) -> str:
    """Integers with all their digits, other numbers with six significant digits.

    >>> _plain(2.0**32), _plain(1e-6)
    ('4294967296', '1e-06')
    """
    return str(int(number)) if abs(number) < 1e16 and number == int(number) else f"{number:g}"


def require_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """InputError unless `value` is one of the choices."""
    if value not in (known := list(choices)):
        raise unknown(name, value, known)


def is_off(coefficient: Any) -> bool:
    """Whether a coefficient is statically zero, so that its term can be dropped. Traced values are not static."""
    return isinstance(coefficient, int | float) and coefficient == 0


def several(count: int, what: str) -> str:
    """A count with its noun.

    >>> several(1, "prompt"), several(1200, "prompt")
    ('1 prompt', '1,200 prompts')
    """
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def error_line(error: BaseException) -> str:
    """The exception in one line of at most 300 characters, since its message may contain a whole completion."""
    try:
        text = " ".join(f"{type(error).__name__}: {error}".split())
    except Exception:  # __str__ of a user's exception can raise
        text = type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file's name to an OSError raised inside; errors of writes do not include it."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
