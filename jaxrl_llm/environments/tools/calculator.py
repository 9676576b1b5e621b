"""A calculator as a tool: exact arithmetic on Python's syntax trees. Nothing is evaluated by Python itself."""

import ast
import math
import operator
from collections.abc import Callable
from fractions import Fraction

Number = int | float | Fraction

MOST_LETTERS = 1000  # of an expression
MOST_BITS = 10_000  # of a number
DIGITS = 50  # of a number that is shown

_NAMES = {"pi": math.pi, "e": math.e}
_SIGNS: dict[type, Callable[[Number], Number]] = {ast.UAdd: lambda x: x, ast.USub: lambda x: -x}
_OPERATIONS: dict[type, Callable[[Number, Number], Number]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}  # fmt: skip


def calculator(expression: str) -> str:
    """Calculate an arithmetic expression. Whole numbers and fractions are exact: 1/3 + 1/6 is 1/2 = 0.5.

    Args:
        expression: Numbers with + - * / // % **, parentheses, and abs, min, max, sqrt, gcd, lcm, factorial, floor,
            ceil, round, exp, log, sin, cos, tan, pi, e. For example: (3 + 4) * 2 ** 10 / 7
    """
    return text_of(value_of(expression))


def value_of(expression: str) -> Number:
    """The value of an expression; whole numbers and fractions are exact, also decimals: 0.1 + 0.2 is 3/10.

    Raises RuntimeError with a line for the policy: of what cannot be read, is not known, too large or not defined.

    >>> value_of("2 ** 10 / 3")
    Fraction(1024, 3)
    """
    text = str(expression).strip().replace("^", "**").replace("\u00d7", "*").replace("\u00f7", "/")
    if not text:
        raise RuntimeError("the expression is empty")
    if len(text) > MOST_LETTERS:
        raise RuntimeError(f"the expression has {len(text):,} characters, but at most {MOST_LETTERS:,} are read")
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):  # NUL bytes; parentheses nested too deeply
        raise RuntimeError(f"this is no arithmetic expression: {text[:80]}") from None
    try:
        return _value(tree, text)
    except ZeroDivisionError:
        raise RuntimeError("division by zero") from None
    except OverflowError:
        raise RuntimeError("the result is too large") from None
    except RecursionError:
        raise RuntimeError("the expression is nested too deeply") from None
    except ValueError as error:  # outside of a function's domain; complex roots
        raise RuntimeError(f"this is not defined: {error}") from None


def text_of(value: Number) -> str:
    """A number as text: a whole number with all its digits up to 50, a fraction also as a decimal.

    >>> text_of(Fraction(1, 3)), text_of(Fraction(4, 2)), text_of(0.1)
    ('1/3 = 0.3333333333333333', '2', '0.1')
    """
    if isinstance(value, float):
        return repr(value)
    if value.denominator == 1:
        whole = int(value)
        if abs(whole) < 10**DIGITS:
            return str(whole)
        return f"{str(abs(whole))[:DIGITS]}... ({len(str(abs(whole)))} digits)" if whole > 0 else f"-{text_of(-whole)}"
    try:
        decimal = repr(float(value))
    except OverflowError:
        return f"about {text_of(int(value))}"
    terms = f"{value.numerator}/{value.denominator}"
    return f"{terms} = {decimal}" if len(terms) <= DIGITS else f"about {decimal}"


def _value(node: ast.expr, text: str) -> Number:
    match node:
        case ast.Constant(value=int() as whole) if not isinstance(whole, bool):
            return _checked(whole)
        case ast.Constant(value=float()):
            value = float(said := _part(node, text))
            return _checked(Fraction(said) if 1e-30 < abs(value) < 1e30 else value)  # exact, unless it is far from 1
        case ast.Name(id=name):
            if name not in _NAMES:
                raise RuntimeError(f"there is no name {name}: use numbers, {', '.join(_NAMES)}")
            return _NAMES[name]
        case ast.UnaryOp(op=sign, operand=one) if type(sign) in _SIGNS:
            return _SIGNS[type(sign)](_value(one, text))
        case ast.BinOp(left=left, op=op, right=right):
            a, b = _value(left, text), _value(right, text)
            if isinstance(op, ast.Pow):
                return _checked(_power(a, b))
            if isinstance(op, ast.Div):
                return _checked(a / b if isinstance(a, float) or isinstance(b, float) else Fraction(a) / Fraction(b))
            if type(op) in _OPERATIONS:
                return _checked(_OPERATIONS[type(op)](a, b))
        case ast.Call(func=ast.Name(id=name), args=given, keywords=[]):
            if name not in FUNCTIONS:
                raise RuntimeError(f"there is no function {name}, but {', '.join(FUNCTIONS)}")
            numbers = [_value(one, text) for one in given]
            try:
                return _checked(FUNCTIONS[name](*numbers))
            except TypeError:
                raise RuntimeError(f"{name} does not take {len(numbers)} numbers") from None
    raise RuntimeError(f"this is no arithmetic: {_part(node, text)}")


def _part(node: ast.AST, text: str) -> str:
    return (ast.get_source_segment(text, node) or text)[:80]


def _checked(value: Number) -> Number:
    """The value, as an int where it is whole. OverflowError if it is too large."""
    if isinstance(value, float):
        if math.isnan(value):
            raise ValueError("the result is not a number")
        if math.isinf(value):
            raise OverflowError
        return value
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MOST_BITS:
        raise OverflowError
    return value.numerator if value.denominator == 1 else value


def _power(a: Number, b: Number) -> Number:
    """a to the power of b; exact for a whole b and an exact a. OverflowError before a huge number is computed."""
    if isinstance(a, float) or isinstance(b, float) or b.denominator != 1:
        found = float(a) ** float(b)
        if isinstance(found, complex):
            raise ValueError(f"a root of a negative number, {text_of(a)}")
        return found
    size = max(a.numerator.bit_length(), a.denominator.bit_length())
    if size > 1 and size * abs(b.numerator) > MOST_BITS:
        raise OverflowError
    return Fraction(a) ** b.numerator


def _whole(value: Number, name: str) -> int:
    if isinstance(value, float) or value.denominator != 1:
        raise ValueError(f"{name} of {text_of(value)}, which is not a whole number")
    return int(value)


def _factorial(n: Number) -> Number:
    whole = _whole(n, "factorial")
    if whole > 1000:
        raise OverflowError
    return math.factorial(whole)


def _sqrt(x: Number) -> Number:
    """Exact for squares."""
    if not isinstance(x, float) and x >= 0:
        roots = math.isqrt(x.numerator), math.isqrt(x.denominator)
        if roots[0] ** 2 == x.numerator and roots[1] ** 2 == x.denominator:
            return Fraction(*roots)
    return math.sqrt(x)


def _round(x: Number, digits: Number = 0) -> Number:
    """Half away from zero, as on paper; exact."""
    places = _whole(digits, "round to digits")
    if abs(places) > 300:
        raise OverflowError
    scaled = Fraction(x) * Fraction(10) ** places
    return Fraction(math.floor(abs(scaled) + Fraction(1, 2)) * (1 if scaled >= 0 else -1)) / Fraction(10) ** places


FUNCTIONS: dict[str, Callable[..., Number]] = {
    "abs": abs, "min": min, "max": max, "sqrt": _sqrt,
    "gcd": lambda *of: math.gcd(*[_whole(one, "gcd") for one in of]),
    "lcm": lambda *of: math.lcm(*[_whole(one, "lcm") for one in of]),
    "factorial": _factorial, "floor": math.floor, "ceil": math.ceil, "round": _round,
    "exp": math.exp, "log": math.log, "sin": math.sin, "cos": math.cos, "tan": math.tan,
}  # fmt: skip
