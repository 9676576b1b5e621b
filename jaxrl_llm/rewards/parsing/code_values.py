"""Values that leave the sandbox as text: written there, read and compared outside, where none of their code runs.

A value is written as an expression of literals and of the constructors in `MAKERS`. Reading one builds objects of
Python's own classes and nothing else, so that comparing them is Python's equality, which no class of a program changes.
"""

import ast
import cmath
import collections
import datetime
import decimal
import fractions
import math
from collections.abc import Callable, Mapping
from numbers import Number
from typing import Any

MAKERS: dict[str, Callable[..., Any]] = {
    "set": set, "frozenset": frozenset, "list": list, "tuple": tuple, "dict": dict, "range": range, "bytes": bytes,
    "bytearray": bytearray, "float": float, "complex": complex, "int": int, "bool": bool, "str": str,
    "Counter": collections.Counter, "OrderedDict": collections.OrderedDict, "deque": collections.deque,
    "defaultdict": lambda kind, *more: dict(*more), "Fraction": fractions.Fraction, "Decimal": decimal.Decimal,
    "date": datetime.date, "datetime": datetime.datetime, "time": datetime.time, "timedelta": datetime.timedelta,
}  # fmt: skip
NAMES = {"inf": math.inf, "nan": math.nan, "pi": math.pi, "e": math.e, "tau": math.tau}
MODULES = ("math", "collections", "fractions", "decimal", "datetime", "cmath", "np", "numpy")

# Runs in the sandbox. What a class says of itself does not count: an instance is written as the built-in type that its
# class derives from, and as nothing if there is none.
WRITER = """
def written(x):
    kind = type(x)
    name = kind.__module__ + "." + kind.__name__
    if x is None or kind is bool:
        return repr(x)
    if isinstance(x, int):
        return hex(int.__add__(x, 0))
    if isinstance(x, float):
        return "float(%r)" % float.__repr__(x)
    if isinstance(x, complex):
        return "complex(float(%r), float(%r))" % (float.__repr__(x.real), float.__repr__(x.imag))
    if isinstance(x, (str, bytes)):
        base = str if isinstance(x, str) else bytes
        return ascii(x if kind is base else base.__getitem__(x, slice(None)))
    if isinstance(x, bytearray):
        return "bytearray(%r)" % bytes(x)
    for base, form in ((list, "[%s]"), (tuple, "(%s)"), (frozenset, "frozenset([%s])"), (set, "set([%s])")):
        if isinstance(x, base):
            return form % "".join(written(one) + ", " for one in base.__iter__(x))
    if isinstance(x, dict):
        own = x.items() if name == "collections.OrderedDict" else dict.items(x)
        pairs = [(written(key), written(value)) for key, value in own]
        if name == "collections.OrderedDict":
            return "OrderedDict([%s])" % "".join("(%s, %s), " % pair for pair in pairs)
        text = "{%s}" % "".join("%s: %s, " % pair for pair in pairs)
        return "Counter(%s)" % text if name == "collections.Counter" else text
    if kind in (type({}.keys()), type({}.items())):
        return "set([%s])" % "".join(written(one) + ", " for one in x)
    if kind is range:
        return repr(x)
    if name == "collections.deque":
        return "deque([%s])" % "".join(written(one) + ", " for one in x)
    if name == "fractions.Fraction":
        return "Fraction(%s, %s)" % (hex(x.numerator), hex(x.denominator))
    if name in ("decimal.Decimal", "datetime.date", "datetime.datetime", "datetime.time", "datetime.timedelta"):
        return repr(x)
    raise TypeError(name)
"""


def literal_value(text: str) -> Any:
    """The value of an expression of literals and of the constructors in `MAKERS`.

    >>> literal_value("[Counter({'a': 1}), -math.inf, frozenset([1])]")
    [Counter({'a': 1}), -inf, frozenset({1})]

    Raises ValueError for anything else.
    """
    try:
        return built(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, ArithmeticError, MemoryError, RecursionError, AttributeError) as error:
        raise ValueError(f"{text[:80]!r} is no literal: {error}") from None


def built(node: ast.expr) -> Any:
    """The value of a parsed expression; see `literal_value`."""
    match node:
        case ast.Constant(value=value) if value is not ...:
            return value
        case ast.List(elts=elements):
            return [built(one) for one in elements]
        case ast.Tuple(elts=elements):
            return tuple(built(one) for one in elements)
        case ast.Set(elts=elements):
            return {built(one) for one in elements}
        case ast.Dict(keys=keys, values=values) if None not in keys:
            return {built(key): built(value) for key, value in zip(keys, values, strict=True) if key is not None}
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return +_number(operand)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as op, right=ast.Constant(value=complex() as imaginary)):
            return _number(left) + imaginary if isinstance(op, ast.Add) else _number(left) - imaginary
        case ast.Call(func=function, args=arguments, keywords=named) if (name := _name(function)) in MAKERS:
            if name == "defaultdict":  # its factory is of no account
                return dict(*map(built, arguments[1:]))
            return MAKERS[name](*map(built, arguments), **{str(one.arg): built(one.value) for one in named})
        case _ if (name := _name(node)) in NAMES:
            return NAMES[name]
    raise ValueError(f"{ast.unparse(node)[:80]} is no literal")


def _number(node: ast.expr) -> Any:
    value = built(node)
    if not isinstance(value, Number | datetime.timedelta):
        raise ValueError(f"{ast.unparse(node)[:80]} is no number")
    return value


def _name(node: ast.expr) -> str:
    """A name, or that of a module's attribute; "" for anything else."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in MODULES:
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def equal(found: Any, wanted: Any, tolerance: float = 0.0, as_json: bool = False) -> bool:
    """Whether two values that `literal_value` made are equal, as Python's == says, with NaN equal to itself.

    tolerance: of floats, absolute or relative, whichever is larger. as_json: the wanted value is of a format without
    tuples, so that a list may stand for one.

    >>> equal((1, True), (1.0, 1)), equal([1], (1,)), equal(0.1 + 0.2, 0.3), equal(0.1 + 0.2, 0.3, 1e-9)
    (True, False, False, True)
    """
    if isinstance(found, Number) and isinstance(wanted, Number):
        return _equal_numbers(found, wanted, tolerance)
    if isinstance(found, list | tuple) and isinstance(wanted, list | tuple):
        same = isinstance(found, list) == isinstance(wanted, list) or (as_json and isinstance(wanted, list))
        return same and len(found) == len(wanted) and all(map(_of(tolerance, as_json), found, wanted))
    if isinstance(found, collections.deque) and isinstance(wanted, collections.deque):
        return len(found) == len(wanted) and all(map(_of(tolerance, as_json), found, wanted))
    if isinstance(found, Mapping) and isinstance(wanted, Mapping):
        names: Any = found.keys()
        if isinstance(found, collections.Counter) and isinstance(wanted, collections.Counter):
            names = found.keys() | wanted.keys()  # none is as good as 0
        elif found.keys() != wanted.keys():
            return False
        ordered = isinstance(found, collections.OrderedDict) and isinstance(wanted, collections.OrderedDict)
        if ordered and list(found) != list(wanted):
            return False
        return all(equal(found[name], wanted[name], tolerance, as_json) for name in names)
    return bool(found == wanted)


def _of(tolerance: float, as_json: bool) -> Callable[[Any, Any], bool]:
    return lambda found, wanted: equal(found, wanted, tolerance, as_json)


def _equal_numbers(found: Any, wanted: Any, tolerance: float) -> bool:
    if found == wanted or (found != found and wanted != wanted):
        return True
    if not tolerance or not any(isinstance(one, float | complex | decimal.Decimal) for one in (found, wanted)):
        return False
    try:
        return cmath.isclose(complex(found), complex(wanted), rel_tol=tolerance, abs_tol=tolerance)
    except (OverflowError, ValueError):
        return False
