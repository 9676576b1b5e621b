"""Parts that know how they were composed: their `repr` is the Python code that composes them again.

`@part` on a factory records the factory and its arguments in what it returns. The record is an attribute beside the
fields of a dataclass, so it takes no part in equality and hashing, and `dataclasses.replace` drops it. A plain function
that a factory returns is wrapped in a `_Part`, which is equal to itself alone, as functions are.
"""

import copy
import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

from jaxrl_llm.core.arguments.checks import check_arguments
from jaxrl_llm.utils.errors import InputError

P = ParamSpec("P")
T = TypeVar("T")
WIDTH = 100  # columns of a printed expression, after which it is laid out in several lines
_RECORD = "_expression"
_SUM, _PRODUCT, _NEGATION, _ATOM = range(4)  # how tightly an expression binds
_LEVELS = {"+": _SUM, "-": _SUM, "*": _PRODUCT, "/": _PRODUCT}


class PartCall(NamedTuple):
    """A call of a public function or class, with the arguments that differ from their defaults."""

    function: Callable[..., Any]
    positional: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = {}


class Operation(NamedTuple):
    """`left symbol right`, one of + - * /."""

    symbol: str
    left: Any
    right: Any


class Negation(NamedTuple):
    """`-operand`."""

    operand: Any


Expression = PartCall | Operation | Negation


class _Part:
    """A function that a factory returned, which prints as the call of the factory."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.function = function

    def __call__(self, *args: Any, **given: Any) -> Any:
        return self.function(*args, **given)

    def __repr__(self) -> str:
        return layout(self)


def part(factory: Callable[P, T]) -> Callable[P, T]:
    """Decorate a public factory of parts: what it returns prints as the call that made it.

    Arguments equal to their defaults are left out. A value that is one of the arguments keeps its own record.
    Raises InputError for an argument that its annotation excludes, such as a factory that was not called.

    >>> @part
    ... def power(of, base=2, name=""):
    ...     return lambda x: base**of
    >>> power(3), power(3, 2, "cube"), power(of=3, base=4)
    (power(3), power(3, 2, "cube"), power(of=3, base=4))
    """
    parameters = inspect.signature(factory).parameters

    @functools.wraps(factory)
    def make(*args: P.args, **given: P.kwargs) -> T:
        try:
            value = factory(*args, **given)  # its own checks come first: they know more
        except InputError:
            raise
        except Exception:
            check_arguments(factory, args, given)
            raise
        check_arguments(factory, args, given)
        if any(one is value for one in (*args, *given.values())):
            return value
        return recorded(value, _call(make, parameters, args, given))

    make.makes_parts = True  # type: ignore[attr-defined]
    return make


def _call(
    function: Callable[..., Any],
    parameters: Mapping[str, inspect.Parameter],
    args: tuple[Any, ...],
    given: Mapping[str, Any],
) -> PartCall:
    """The call as written, without arguments that are equal to their defaults if no positional one follows."""
    positional, listed = list(args), [one for one in parameters.values() if one.kind is not one.VAR_POSITIONAL]
    while positional and len(positional) <= len(listed):
        if not is_default(positional[-1], listed[len(positional) - 1].default):
            break
        positional.pop()
    changed = {
        name: one
        for name, one in given.items()
        if name not in parameters or not is_default(one, parameters[name].default)
    }
    return PartCall(function, tuple(positional), changed)


def is_default(value: Any, default: Any) -> bool:
    """Whether an argument can be left out; arrays, which may be traced, never can."""
    if value is default:
        return True
    plain = isinstance(value, bool | int | float | str | tuple | list | frozenset | None)
    return plain and type(value) is type(default) and bool(value == default)


def recorded(value: T, expression: Expression) -> T:
    """A copy of a value with this record; a function becomes a `_Part`, unless it has a name of its own."""
    if isinstance(value, FunctionType):
        if _named(value):
            return value
        value = cast(T, _Part(value))
    else:
        value = copy.copy(value)
    record(value, expression)
    return value


def record(value: Any, expression: Expression) -> None:
    """Record how a new value was composed."""
    object.__setattr__(value, _RECORD, expression)  # parts are frozen


def expression_of(value: Any) -> Expression | None:
    """How a value was composed; for a dataclass without a record, the call with its fields. None for anything else."""
    found = getattr(value, "__dict__", {}).get(_RECORD)
    if found is None and dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [(one.name, getattr(value, one.name), one.default) for one in dataclasses.fields(value) if one.init]
        return PartCall(type(value), (), {name: one for name, one, default in fields if not is_default(one, default)})
    return found


def _named(function: Any) -> bool:
    """Whether a function can be written by its name: it is a global of its module."""
    name, module = getattr(function, "__name__", ""), sys.modules.get(getattr(function, "__module__", None) or "")
    found = getattr(module, name, None) if name.isidentifier() else None
    return found is not None and inspect.unwrap(found) is inspect.unwrap(function)


def leaves(value: Any) -> Iterator[Any]:
    """The functions, and the values that are no expressions, of which a value is composed."""
    expression = expression_of(value) if not isinstance(value, Expression) else value
    if isinstance(expression, PartCall):
        yield expression.function
        inner: Iterator[Any] | Any = (*expression.positional, *expression.keywords.values())
    elif isinstance(expression, Operation):
        inner = (expression.left, expression.right)
    elif isinstance(expression, Negation):
        inner = (expression.operand,)
    elif isinstance(value, Mapping):
        inner = (*value.keys(), *value.values())
    elif isinstance(value, tuple | list | set | frozenset):
        inner = value
    else:
        yield value
        return
    for one in inner:
        yield from leaves(one)


def is_code(value: Any) -> bool:
    """Whether the repr of a value is code that makes it again: it holds no lambda and no array."""
    return all(_written(leaf)[:1] != "<" for leaf in leaves(value))


def code(value: Any) -> str:
    """The code of a value in one line.

    >>> code({"low": 0.5, "all": (1, True)})
    '{"low": 0.5, "all": (1, True)}'
    """
    return _code(value)[0]


def layout(value: Any, width: int = WIDTH) -> str:
    """The code of a value, in several lines if one would be longer than `width`, like those of a formatter."""
    text = _lines(value, 0, 0, width)
    if "\n" in text and _code(value)[1] == _SUM:
        return f"(\n    {_lines(value, 4, 0, width)}\n)"
    return text


def _code(value: Any) -> tuple[str, int]:
    expression = value if isinstance(value, Expression) else expression_of(value)
    match expression:
        case PartCall():
            arguments = ", ".join(prefix + code(one) for prefix, one in _arguments(expression))
            return f"{expression.function.__name__}({arguments})", _ATOM
        case Operation(symbol, left, right):
            level = _LEVELS[symbol]
            # The right side of an equal level keeps its parentheses, so that terms are added in the same order.
            return f"{_within(left, level)} {symbol} {_within(right, level + 1)}", level
        case Negation(operand):
            return f"-{_within(operand, _NEGATION)}", _NEGATION
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{code(key)}: {code(one)}" for key, one in value.items()) + "}", _ATOM
    if isinstance(value, frozenset | set):
        return ("{" + ", ".join(sorted(code(one) for one in value)) + "}" if value else "set()"), _ATOM
    if isinstance(value, list):
        return "[" + ", ".join(code(one) for one in value) + "]", _ATOM
    if isinstance(value, tuple) and type(value) is tuple:
        return "(" + ", ".join(code(one) for one in value) + ("," if len(value) == 1 else "") + ")", _ATOM
    written = _written(value)
    return written, _NEGATION if written[:1] == "-" else _ATOM


def _within(value: Any, least: int) -> str:
    text, level = _code(value)
    return text if level >= least else f"({text})"


def _arguments(call: PartCall) -> list[tuple[str, Any]]:
    """The arguments of a call, with "name=" before those given by name."""
    return [("", one) for one in call.positional] + [(f"{name}=", one) for name, one in call.keywords.items()]


def _lines(value: Any, indent: int, before: int, width: int) -> str:
    """The code of a value at a level of indentation, `before` columns after it and with a comma behind it."""
    flat = code(value)
    if indent + before + len(flat) + 1 <= width:
        return flat
    expression, pad = expression_of(value), " " * indent
    match expression:
        case PartCall() if arguments := _arguments(expression):
            items = [f"{pad}    {p}{_lines(one, indent + 4, len(p), width)},\n" for p, one in arguments]
            return f"{expression.function.__name__}(\n{''.join(items)}{pad})"
        case Operation(symbol, left, right) if symbol in "+-":
            terms = [(symbol, right)]
            while isinstance(inner := expression_of(left), Operation) and inner.symbol in "+-":
                terms, left = [(inner.symbol, inner.right), *terms], inner.left
            rest = "".join(f"\n{pad}{sign} {_operand(one, _PRODUCT, indent, 2, width)}" for sign, one in terms)
            return _lines(left, indent, before, width) + rest
        case Operation(symbol, left, right):
            if isinstance(expression_of(left), Expression):
                return f"{_operand(left, _PRODUCT, indent, before, width)} {symbol} {_within(right, _NEGATION)}"
            text = f"{_within(left, _PRODUCT)} {symbol} "
            return text + _operand(right, _NEGATION, indent, before + len(text), width)
        case Negation(operand):
            return "-" + _operand(operand, _NEGATION, indent, before + 1, width)
    return flat


def _operand(value: Any, least: int, indent: int, before: int, width: int) -> str:
    """An operand, in parentheses if it binds less tightly than `least`."""
    if _code(value)[1] >= least:
        return _lines(value, indent, before, width)
    pad = " " * indent
    return f"(\n{pad}    {_lines(value, indent + 4, 0, width)}\n{pad})"


def _written(value: Any) -> str:
    """A value that is no expression, as code; text in angle brackets for what has none."""
    if callable(value) and not isinstance(value, type):
        return value.__name__ if _named(value) else "<function>"
    if isinstance(value, type):
        return value.__name__
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return _number(value)
    if isinstance(value, str) and value.isprintable() and not {'"', "\\"} & set(value):
        return f'"{value}"'
    return repr(value)


def _number(array: Any) -> str:
    """A numeric array: a scalar as a number, anything else, and what is traced, by dtype and shape."""
    try:
        return repr(array.item()) if array.shape == () else f"<{array.dtype}{list(array.shape)}>"
    except Exception:  # a traced value has no number, and JAX's errors for that differ
        return f"<{array.dtype}{list(array.shape)}>"
