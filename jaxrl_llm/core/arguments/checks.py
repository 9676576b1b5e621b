"""Checks of arguments against their annotations, made where a value is composed.

`checked` decorates a public factory; `repr.part` checks its arguments in the same way. An annotation may be
narrowed by a range: `turns: Annotated[int, Range(least=1)] = 8`.
"""

import dataclasses
import functools
import inspect
import os
import pathlib
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin

from jaxrl_llm.core.arguments.ranges import WHOLE, Range, check_number
from jaxrl_llm.utils.errors import InputError, shown, unknown
from jaxrl_llm.utils.keywords import bound

P = ParamSpec("P")
T = TypeVar("T")
_UNKNOWN = (Any, object, inspect.Parameter.empty)
_PLAIN = {bool: "true or false", str: "a text", type(None): "None", pathlib.Path: "a path"}
_PLACES = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def checked(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function so that it raises InputError, in one line, for an argument that its annotation excludes."""

    @functools.wraps(function)
    def call(*args: P.args, **given: P.kwargs) -> T:
        check_arguments(function, args, given)
        return function(*args, **given)

    return call


def check_arguments(function: Callable[..., Any], args: Sequence[Any], given: Mapping[str, Any]) -> None:
    """Check the arguments of a call against the function's annotations.

    Defaults, arrays for numbers and annotations that say nothing (Any, protocols) pass. A function must take as many
    values as its annotation says. Raises InputError that names the argument.
    """
    signature = _signature(function)
    kinds = kinds_of(function)
    for name, value in bound(signature, function.__name__, args, given).arguments.items():
        parameter, kind = signature.parameters[name], kinds.get(name, Any)
        values = {name: value}
        if parameter.kind is parameter.VAR_POSITIONAL:
            values = {f"{name}[{place}]": one for place, one in enumerate(value)}
        elif parameter.kind is parameter.VAR_KEYWORD:
            values = value
        for label, one in values.items():
            if one is not parameter.default:
                check_value(f"{label} of {function.__name__}", one, kind)


def check_fields(settings: Any) -> None:
    """Check the fields of a dataclass against their annotations; for its `__post_init__`. Raises InputError."""
    kind: Callable[..., Any] = type(settings)
    kinds = kinds_of(kind)
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if value is not field.default:
            check_value(f"{field.name} of {type(settings).__name__}", value, kinds.get(field.name, Any))


_signature = functools.lru_cache(maxsize=None)(inspect.signature)


@functools.cache
def kinds_of(function: Callable[..., Any]) -> Mapping[str, Any]:
    """The annotations of a function or class as types; none where one of them is for type checkers alone."""
    try:
        return typing.get_type_hints(function, include_extras=True)
    except (NameError, AttributeError, TypeError):
        return {}


def check_value(name: str, value: Any, kind: Any, limits: Range | None = None) -> None:
    """InputError unless a value is of a kind, an annotation."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        limits = next((one for one in inner[1:] if isinstance(one, Range)), limits)
        return check_value(name, value, inner[0], limits)
    if getattr(value, "makes_parts", False):
        raise InputError(f"{name} is the function {value.__name__}, which makes a part: call it, {value.__name__}(...)")
    if kind in _UNKNOWN or isinstance(kind, TypeVar | str):
        return None
    if origin in (Union, types.UnionType):
        return _check_union(name, value, inner, limits)
    if origin is Literal:
        if not isinstance(value, str):
            raise _wrong(name, value, f"one of {', '.join(map(str, inner))}")
        if value not in inner:
            raise unknown(name, value, inner, in_order=True)
    elif origin in (tuple, Sequence, Iterable, list):
        _check_entries(name, value, origin, inner, limits)
    elif origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise _wrong(name, value, "values by name")
        for key, one in value.items():
            check_value(_at(name, key), one, inner[1], limits)
    elif origin is Callable or kind is Callable:
        _check_function(name, value, inner)
    elif kind in (int, float):
        check_number(name, value, whole=kind is int, **(limits._asdict() if limits else {}))
        if kind is int and (limits is None or limits.most is None):
            check_number(name, value, most=WHOLE)
    elif kind in _PLAIN:
        classes = (str, os.PathLike) if kind is pathlib.Path else kind
        if not isinstance(value, classes) and not (kind is bool and type(value).__name__ in ("bool_", "bool")):
            raise _wrong(name, value, _PLAIN[kind])
    elif _is_array(kind):
        if not hasattr(value, "dtype") and not isinstance(value, list | tuple):
            check_number(name, value)
    elif isinstance(kind, type) and origin is None and not _is_open(kind) and not isinstance(value, kind):
        expect(name, value, kind)
    return None


def _check_union(name: str, value: Any, kinds: Sequence[Any], limits: Range | None) -> None:
    """Of one of the kinds; the error is that of the kind which is nearest, or names them all."""
    errors = []
    if limits:  # those of a number, for which an array may stand
        kinds = [kind for kind in kinds if not _is_array(kind)]
    if isinstance(value, type) and value in kinds:
        raise InputError(f"{name} is the class {value.__name__}: call it, {value.__name__}(...)")
    for kind in kinds:
        try:
            return check_value(name, value, kind, limits)
        except InputError as error:
            errors.append((kind, error))
    said = [error for kind, error in errors if kind is not type(None)]
    if len(said) == 1 or (isinstance(value, Real) and not isinstance(value, bool)):
        raise said[0]
    raise _wrong(name, value, _words(Union[tuple(kinds)]))  # noqa: UP007


def _check_entries(name: str, value: Any, origin: Any, inner: Sequence[Any], limits: Range | None) -> None:
    none = (str, bytes) if origin is Iterable else (str, bytes, Mapping)
    if isinstance(value, none) or not isinstance(value, Iterable):
        raise _wrong(name, value, "a list")
    if not isinstance(value, Sequence):  # an iterator must not be used up, an array has a dtype of its own
        return
    if origin is tuple and inner[-1:] != (...,):
        if len(value) != len(inner):
            raise _wrong(name, value, f"{len(inner)} values")
        kinds: Iterable[Any] = inner
    else:
        kinds = [inner[0]] * len(value)
    for place, (one, kind) in enumerate(zip(value, kinds, strict=True)):
        check_value(_at(name, place), one, kind, limits)


def _at(name: str, place: Any) -> str:
    """The name of an entry: tools[1] of with_tools."""
    name, of, whole = name.partition(" of ")
    return f"{name}[{place!r}]{of}{whole}"


def _check_function(name: str, value: Any, inner: Sequence[Any]) -> None:
    """A function that takes what it will be given, and, if a factory made it, makes what is wanted."""
    if not callable(value):
        raise _wrong(name, value, "a function")
    if not inner or inner[0] is ...:
        return
    wanted = len(inner[0])
    if _made(value) is not None and get_origin(_made(value)) is Callable:
        takes, gives = get_args(_made(value))
        other = isinstance(gives, type) and isinstance(inner[1], type) and not _fits(gives, inner[1])
        if takes is not ... and (len(takes) != wanted or other):
            raise InputError(f"{name} is {shown(value)}, but must be {_words(Callable[[*inner[0]], inner[1]])}")
    parameters = _parameters(value)
    if parameters is None:
        return
    places = [one for one in parameters if one.kind in _PLACES]
    required = sum(one.default is one.empty for one in places)
    named = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY and one.default is one.empty]
    most = len(places) if not any(one.kind is one.VAR_POSITIONAL for one in parameters) else wanted
    if named or not required <= wanted <= most:
        count = required if required > wanted else most
        takes = f"needs the keyword {named[0]}" if named else f"is a function of {count} value{'s' * (count != 1)}"
        raise InputError(f"{name} {takes}, but must be {_words(Callable[[*inner[0]], inner[1]])}")


def _made(value: Any) -> Any:
    """What the factory of a part says that it makes; None where no factory made it."""
    from jaxrl_llm.core.repr import PartCall, expression_of

    made = expression_of(value) if hasattr(value, "__dict__") else None
    return kinds_of(made.function).get("return") if isinstance(made, PartCall) else None


def _fits(made: type, wanted: type) -> bool:
    """Whether values of one class may stand for those of another; a protocol wants methods of the same names."""
    if _is_open(made):
        return True
    if getattr(wanted, "_is_protocol", False):
        return all(hasattr(made, name) for name in vars(wanted) if not name.startswith("_"))
    return _is_open(wanted) or issubclass(made, wanted)


def _is_open(kind: type) -> bool:
    """Whether values that are no instances may be meant."""
    return kind in _UNKNOWN or getattr(kind, "_is_protocol", False) or _is_array(kind)


def _is_array(kind: Any) -> bool:
    """Whether an annotation is NumPy's or JAX's array, which is known by its name so that neither is imported here."""
    return isinstance(kind, type) and kind.__name__.rpartition(".")[2] in ("Array", "ndarray")


def _words(kind: Any) -> str:
    """A kind in words, for messages."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _words(inner[0])
    if origin in (Union, types.UnionType):  # an array is a number here
        return " or ".join(dict.fromkeys(_words(one) for one in inner if not (float in inner and _is_array(one))))
    if origin is Literal:
        return "one of " + ", ".join(map(str, inner))
    if origin in (tuple, Sequence, Iterable, list):
        return "a list"
    if origin in (dict, Mapping):
        return "values by name"
    if origin is Callable:
        takes = "" if inner[0] is ... else f" of {len(inner[0])} value{'s' * (len(inner[0]) != 1)}"
        gives = f", which gives {inner[1].__name__}" if isinstance(inner[1], type) and not _is_open(inner[1]) else ""
        return f"a function{takes}{gives}"
    if kind in (int, float):
        return "a whole number" if kind is int else "a number"
    return _PLAIN.get(kind) or f"of the type {getattr(kind, '__name__', kind)}"


def _wrong(name: str, value: Any, wanted: str) -> InputError:
    return InputError(f"{name} is {shown(value)}, but must be {wanted}")


def expect(name: str, value: Any, kind: type) -> None:
    """InputError unless the value is an instance of `kind`; if a function returns one, the error says to call it."""
    if isinstance(value, kind):
        return
    from jaxrl_llm.core.shapes import in_words  # here: it imports JAX

    found, hint = in_words(value), ""
    if isinstance(value, type) and issubclass(value, kind):
        found, hint = f"the class {value.__name__}", f": call it, {value.__name__}()"
    elif callable(value) and makes(value, kind):
        found, hint = "the function " + value.__name__, f", which makes one: call it, {value.__name__}(...)"
    elif getattr(value, "makes_parts", False):
        found, hint = "the function " + value.__name__, f", which makes a part: call it, {value.__name__}(...)"
    raise InputError(f"{name} must be of the type {kind.__name__}, but is {found}{hint}")


def makes(function: Any, kind: Any, name: str | None = None) -> bool:
    """Whether a function is annotated to return a type: itself, or its name where annotations are texts."""
    return getattr(function, "__annotations__", {}).get("return", ...) in (kind, name or kind.__name__)


def names_of(needs: Iterable[str]) -> frozenset[str]:
    """The names as a set; InputError for a single string, which would be split into letters, and for no names."""
    if isinstance(needs, str):
        raise InputError(f"needs is {needs!r}, but must be a set of names: {{{needs!r}}}")
    found = tuple(needs) if isinstance(needs, Iterable) else None
    if found is None or not all(isinstance(need, str) for need in found):
        raise InputError(f"needs is {shown(needs)}, but must be a set of names, such as {{'old_logp'}}")
    return frozenset(found)


def require_function(name: str, value: Any, alone: bool = False) -> None:
    """InputError unless the value is a function of a batch, not a factory of transforms or objectives.

    alone: and of nothing else that it requires.
    """
    if not callable(value):
        raise InputError(f"{name} is {shown(value)}, but must be a function of a batch")
    required = sum(one.kind in _PLACES and one.default is one.empty for one in _parameters(value) or ())
    if alone and required > 1:
        raise InputError(f"{name} is a function of {required} values, but must be a function of a batch alone")
    made = getattr(value, "__annotations__", {}).get("return")
    made = getattr(made, "__name__", made)
    if made in ("Transform", "Objective"):
        raise InputError(
            f"{name} is {value.__name__}, which makes a value of the type {made}: give a function of a batch"
        )


def _parameters(function: Any) -> list[inspect.Parameter] | None:
    """None for a function of C that does not say them."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None
