"""Hyper-parameters of methods: their types, valid ranges and the origins of their defaults, as annotations.

clip_high: Paper[NonNegative] = 0.28
max_length: OfRun[Count | None] = None
"""

import functools
import inspect
import types
import typing
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from jaxrl_llm.core.arguments.ranges import WHOLE, Range, check_number
from jaxrl_llm.utils.errors import InputError, require_choice, shown
from jaxrl_llm.utils.keywords import unknown_keyword

Build = TypeVar("Build", bound=Callable[..., Any])
Kind = TypeVar("Kind")


class Origin(StrEnum):
    """Where a default comes from."""

    PAPER = "paper"
    CODE = "code"  # the released code, or a common implementation
    RECALLED = "from memory"  # of the paper, by who noted it down: not read there again
    OURS = "ours"
    RUN = "the run's"  # default None, filled in by the run

    def __repr__(self) -> str:
        return f"Origin.{self.name}"


Paper = Annotated[Kind, Origin.PAPER]
Code = Annotated[Kind, Origin.CODE]
Recalled = Annotated[Kind, Origin.RECALLED]
Ours = Annotated[Kind, Origin.OURS]
OfRun = Annotated[Kind, Origin.RUN]

TYPE_NAMES = {bool: "true or false", str: "text", int: "a whole number", float: "a number"}


class Hyperparameter(NamedTuple):
    """One parameter of a method."""

    name: str
    kind: Any  # its type: one of TYPE_NAMES, a Literal of texts, either with None, or another
    default: Any
    range: Range = Range()
    origin: Origin | None = None
    help: str = ""
    or_function: bool = False  # whether a program may give a function instead

    @property
    def type(self) -> Any:
        """The type without None; str for a choice."""
        inner = [one for one in _members(self.kind) if one is not type(None)]
        return inner[0] if len(inner) == 1 and inner[0] in TYPE_NAMES else str if self.choices else self.kind

    @property
    def choices(self) -> tuple[Any, ...]:
        """The texts that the type lists; none for one that is no choice."""
        return next((typing.get_args(one) for one in _members(self.kind) if typing.get_origin(one) is Literal), ())

    @property
    def is_optional(self) -> bool:
        """Whether None is a value."""
        return type(None) in _members(self.kind)

    def check(self, label: str, value: Any) -> None:
        """InputError, with the label, for a value of another type, not finite, or out of range.

        Scalar arrays pass, including traced ones, and what is no number, text, or true or false.
        """
        if (value is None and self.is_optional) or self.type not in TYPE_NAMES:
            return
        if self.or_function and callable(value):
            return
        wanted = TYPE_NAMES[self.type]
        if self.type in (bool, str):
            if not isinstance(value, self.type):
                raise InputError(f"{label} is {shown(value)}, but must be {wanted}")
            return
        if getattr(value, "shape", ()) != ():
            raise InputError(f"{label} is an array of the shape {list(value.shape)}, but must be {wanted}")
        whole = self.type is int
        check_number(label, value, whole=whole, **{**({"most": WHOLE} if whole else {}), **self.range.limits})


def hyperparameters_of(function: Callable[..., Any]) -> list[Hyperparameter]:
    """The parameters of a function in order; one without an annotation, or with one that fails, has any kind."""
    signature = inspect.signature(function)
    hints, found = _hints(function), list[Hyperparameter]()
    for one in signature.parameters.values():
        kind, facts = _plain(hints.get(one.name, Any))
        limits = next((fact for fact in facts if isinstance(fact, Range)), Range())
        origin = next((fact for fact in facts if isinstance(fact, Origin)), None)
        members = [one for one in _members(kind) if typing.get_origin(one) is not Callable]
        or_function = 0 < len(members) < len(_members(kind))
        kind = typing.Union[tuple(members)] if or_function else kind  # noqa: UP007
        found.append(Hyperparameter(one.name, kind, one.default, limits, origin, or_function=or_function))
    return found


def checked_method(build: Build) -> Build:
    """Wrap the function that builds a method with a check of its hyper-parameters' names, types, ranges and choices."""
    known = {one.name: one for one in hyperparameters_of(build)}
    label = getattr(build, "__name__", "a method")

    @functools.wraps(build)
    def method(*args: Any, **hyperparameters: Any) -> Any:
        if len(args) > len(known):
            raise InputError(f"{label} has {len(known)} hyper-parameters, but was given {len(args)}")
        given = {**dict(zip(known, args, strict=False)), **hyperparameters}
        for name, value in given.items():
            if name not in known:
                raise unknown_keyword(name, known, f"hyper-parameter of {label}")
            known[name].check(f"{label}: {name}", value)
            if isinstance(value, str) and known[name].choices and name != "preset":  # which `presets` looks up itself
                require_choice(f"{name} of {label}", value, known[name].choices)
        return build(**given)

    return typing.cast(Build, method)


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of a function, with their facts, as far as their names can be found."""
    while isinstance(function, functools.partial):
        function = function.func
    try:
        return typing.get_type_hints(function, include_extras=True)
    except Exception:  # names that only a type checker imports: the others are read one by one
        found, space = dict[str, Any](), getattr(inspect.unwrap(function), "__globals__", {})
        for name, kind in getattr(function, "__annotations__", {}).items():
            try:
                one = types.SimpleNamespace(__annotations__={name: kind})
                found |= typing.get_type_hints(one, space, include_extras=True)
            except Exception:
                continue
        return found


def _plain(kind: Any) -> tuple[Any, list[Any]]:
    """A type without the facts of `Annotated`, and these."""
    if typing.get_origin(kind) is Annotated:
        inner, *facts = typing.get_args(kind)
        plain, more = _plain(inner)
        return plain, [*more, *facts]
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        parts = [_plain(one) for one in typing.get_args(kind)]
        return typing.Union[tuple(part for part, _ in parts)], [fact for _, facts in parts for fact in facts]  # noqa: UP007
    return kind, []


def _members(kind: Any) -> tuple[Any, ...]:
    """The types of a union; a type that is none alone."""
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
