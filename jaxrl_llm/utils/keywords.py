"""Keyword arguments that a function or a class of settings does not have: one line that says where they belong.

Names of TRL are told as what they are here, settings of another class as that class's, and others with the nearest
name.
"""

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from jaxrl_llm.utils.errors import InputError, unknown
from jaxrl_llm.utils.peer_names import TRL_FLAGS, TRL_OTHER, TRL_SAME

F = TypeVar("F", bound=Callable[..., Any])
Class = TypeVar("Class", bound=type[Any])
Elsewhere = Callable[[str], str]  # where a name belongs, such as "OptimizerConfig(beta1=...)"; "" where it is unknown

_OPTION = re.compile(r"--(no-)?(?:(optimizer|algorithm)\.)?([a-z][a-z0-9-]*)")
_NONE: Mapping[str, str] = MappingProxyType({})
_SECTIONS = {"optimizer": "optimizer=OptimizerConfig({}=...)", "algorithm": "hyperparameters={{'{}': ...}}"}


def nowhere(name: str) -> str:
    """No other place for a name."""
    return ""


def checked_keywords(elsewhere: Elsewhere = nowhere, peers: Mapping[str, str] = _NONE) -> Callable[[F], F]:
    """Decorate a function so that it raises InputError for a keyword argument that it does not have.

    elsewhere: where a name belongs that is no argument. peers: names of TRL that are other arguments here than
    settings of a run.
    """
    return lambda function: _checked(function, "argument", elsewhere, function.__name__, peers)


def settings_class(elsewhere: Elsewhere = nowhere) -> Callable[[Class], Class]:
    """Decorate a dataclass of settings so that it raises InputError for a name that it does not have."""

    def decorate(kind: Class) -> Class:
        kind.__init__ = _checked(kind.__init__, "setting", elsewhere, kind.__name__)
        return kind

    return decorate


def _checked(function: F, kind: str, elsewhere: Elsewhere, label: str, peers: Mapping[str, str] = _NONE) -> F:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        bound(signature, label, arguments, keywords, kind, elsewhere, peers)
        return function(*arguments, **keywords)

    return call  # type: ignore[return-value]


def bound(
    signature: inspect.Signature,
    label: str,
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
    kind: str = "argument",
    elsewhere: Elsewhere = nowhere,
    peers: Mapping[str, str] = _NONE,
) -> inspect.BoundArguments:
    """The arguments of a call of `label` by their parameters. InputError where they do not fit, as above."""
    parameters = [name for name in signature.parameters if name != "self"]
    any_name = any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values())
    for name in keywords:
        if name in peers:
            raise InputError(f"unknown {kind} of {label} {name!r}: TRL's {name} is {peers[name]} here")
        if name not in parameters and not any_name:
            raise unknown_keyword(name, parameters, f"{kind} of {label}", elsewhere)
    try:
        return signature.bind(*arguments, **keywords)
    except TypeError as error:
        raise InputError(f"{label} cannot be called so: {error}") from None


def unknown_keyword(name: str, known: Iterable[str], kind: str, elsewhere: Elsewhere = nowhere) -> InputError:
    """The error for an unknown name, where `known` are the names that there are.

    >>> print(unknown_keyword("beta", ["clip_low", "kl_coefficient"], "hyper-parameter"))
    unknown hyper-parameter 'beta': TRL's beta is kl_coefficient here
    """
    known = list(known)
    if here := _same(name, known, elsewhere) or (not elsewhere(name) and _other(name)):
        return InputError(f"unknown {kind} {name!r}: TRL's {name} {here}")
    if place := elsewhere(name):
        return InputError(f"unknown {kind} {name!r}: it belongs to {place}")
    return unknown(kind, name, known)


def _same(name: str, known: Iterable[str], elsewhere: Elsewhere) -> str:
    """What a name of TRL is here, in words; "" where it is none."""
    if name in TRL_FLAGS:
        option, *values = TRL_FLAGS[name][0]
        return f"is {option.removeprefix('--').replace('-', '_')}={(values[0] if values else True)!r} here"
    if name not in TRL_SAME:
        return ""
    found = _OPTION.fullmatch(TRL_SAME[name].option)
    assert found is not None
    own = found[3].replace("-", "_")
    if own == name:  # the name here too, so that only its place is another
        return ""
    place = own if own in known else _SECTIONS[found[2]].format(own) if found[2] else elsewhere(own) or own
    return f"is {place} here"


def _other(name: str) -> str:
    """What takes the place of a name of TRL here, in words; "" where it is none."""
    return _OPTION.sub(_setting, TRL_OTHER.get(name, ""))


def _setting(found: re.Match[str]) -> str:
    own = found[3].replace("-", "_")
    own = {"optimizer": f"optimizer.{own}", "algorithm": f"hyperparameters[{own!r}]"}.get(found[2] or "", own)
    return f"no {own}" if found[1] else own


def belonging(places: Mapping[str, Iterable[str]]) -> Elsewhere:
    """Where names belong. places: how each is written, with {} in the place of the name: the names."""
    return lambda name: next((text.format(name) for text, names in places.items() if name in set(names)), "")
