"""Arguments are checked against their annotations: kinds one by one, and every part of the library."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Protocol, get_args, get_origin

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_llm
from jaxrl_llm.core.arguments.checks import check_value, checked, kinds_of
from jaxrl_llm.core.arguments.ranges import Count, Range
from jaxrl_llm.core.repr import part
from jaxrl_llm.utils.errors import InputError


class Rule(NamedTuple):
    """What one factory makes."""

    size: int


class Curriculum(NamedTuple):
    """What another factory makes."""

    rules: tuple[Rule, ...]


class Game(Protocol):
    """A protocol of one method."""

    def play(self, text: str) -> str: ...


RuleOf = Callable[[str], Rule]
MakeCurriculum = Callable[[str], Curriculum]


@part
def rule(size: int = 1) -> RuleOf:
    return lambda text: Rule(size)


@part
def curriculum(*rules: RuleOf) -> MakeCurriculum:
    return lambda text: Curriculum(tuple(one(text) for one in rules))


def two(a: str, b: str) -> str:
    return a + b


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (int, [0, -3, np.int64(2), jnp.int32(1)], [True, 1.5, "3", None, float("nan"), 2**31]),
        (float, [0, 0.5, np.float32(2), jnp.ones(2)], [True, "0.5", None, float("nan"), float("inf"), [0.5]]),
        (bool, [True, np.bool_(False)], [0, 1, "yes", None]),
        (str, ["", "a"], [3, None, b"a", ["a"]]),
        (Count, [1, 2**31 - 1], [0, -1, 1.5, "1"]),
        (Count | None, [None, 3], [0, "3"]),
        (Annotated[float, Range(least=0, below=1)], [0, 0.99], [-0.1, 1.0]),
        (Literal["a", "b"], ["a"], ["c", "", None, 3]),
        (tuple[float, float], [(1.0, 2.0), [1, 2]], [(1.0,), (1.0, "2"), 1.0, "ab"]),
        (Sequence[int], [[], (1, 2), np.arange(3)], ["12", 3, [1, "2"], {1: 2}]),
        (Iterable[str], [["a"], {"a"}, {"a": 1}], ["ab", 3, [1]]),
        (Mapping[str, float], [{}, {"a": 1.0}], [{"a": "b"}, [("a", 1.0)], 0.5]),
        (Path, ["a", Path("a")], [3, None]),
        (int | str, [3, "a"], [1.5, None]),
        (Rule, [Rule(1)], [1, Rule, (1,)]),
        (Callable[[str, str], str], [two, lambda *all: ""], [len, lambda: "", lambda a, b, c: "", 3, None]),
        (RuleOf, [rule(), lambda text: Rule(1)], [curriculum(), rule, Rule(1)]),
        (Rule | RuleOf | None, [Rule(1), rule(), None], [Rule, "rule"]),
        (Callable[[str], Game], [lambda text: None], [rule()]),
        (Any, [None, 3, rule()], [rule]),
        (jax.Array | float, [jnp.ones(2), 1.0, np.float32(1)], ["1", None, True, float("nan")]),
    ],
)  # fmt: skip
def test_a_kind(kind: Any, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        check_value("size", value, kind)
    for value in bad:
        with pytest.raises(InputError, match=r"^(unknown )?size") as error:
            check_value("size", value, kind)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: curriculum(rule(), curriculum()), r"rules\[1\] of curriculum is curriculum\(\), .* gives Rule$"),
        (lambda: curriculum(rule), r"rules\[0\] of curriculum is the function rule, which makes a part: call it"),
        (lambda: rule("2"), "size of rule is '2', but must be a whole number"),
        (lambda: rule(sizes=2), "unknown argument of rule 'sizes': did you mean 'size'"),
        (lambda: rule(1, 2), "rule cannot be called so: too many positional arguments"),
    ],
)
def test_a_part_that_does_not_fit_is_one_clear_line(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        call()


def test_own_checks_of_a_part_come_first_and_errors_of_wrong_kinds_are_told() -> None:
    @part
    def half(of: int) -> Callable[[], int]:
        if of == -1:
            raise InputError("-1 has no half here")
        value = of // 2
        return lambda: value

    with pytest.raises(InputError, match="no half here"):
        half(-1)
    with pytest.raises(InputError, match="of of half is None, but must be a whole number"):
        half(None)  # type: ignore[arg-type]
    assert half(4)() == 2


def test_a_checked_function_is_not_called_with_what_does_not_fit() -> None:
    called = []

    @checked
    def note(count: Count, *names: str, **sizes: float) -> int:
        called.append((count, names, sizes))
        return count

    assert note(2, "a", size=0.5) == 2
    for wrong, words in (
        (lambda: note(0, "a"), "count of note is 0, but must be at least 1"),
        (lambda: note(1, "a", 3), r"names\[1\] of note is 3"),
        (lambda: note(1, size="x"), "size of note is 'x', but must be a number"),
    ):
        with pytest.raises(InputError, match=words):
            wrong()
    assert called == [(2, ("a",), {"size": 0.5})]


def factories() -> dict[str, Callable[..., Any]]:
    """Every factory of parts of the library, by its module and name."""
    found = {}
    for one in pkgutil.walk_packages(jaxrl_llm.__path__, "jaxrl_llm."):
        if one.name.endswith(("__main__", ".child")):
            continue
        module = importlib.import_module(one.name)
        for name, value in vars(module).items():
            if getattr(value, "makes_parts", False) and value.__module__ == one.name:
                found[f"{one.name}.{name}"] = value
    return found


Number = jax.Array | float
WRONG = {int: ("3", 1.5, float("nan"), [2]), float: ("0.5", float("nan")), bool: (1, "yes"), str: (3, [3])}


def test_every_part_refuses_numbers_and_texts_of_another_kind() -> None:
    """Each parameter in turn, the others as they are; those without a default stand still."""
    silent, tried = [], 0
    for label, factory in factories().items():
        parameters = inspect.signature(factory).parameters.values()
        required = [one for one in parameters if one.default is one.empty and one.kind is not one.VAR_POSITIONAL]
        for one in parameters:
            kind = kinds_of(inspect.unwrap(factory)).get(one.name)
            plain = get_args(kind)[0] if get_origin(kind) is Annotated else kind
            if plain not in WRONG or any(other is not one for other in required):
                continue
            for value in WRONG[plain]:
                tried += 1
                try:
                    factory(value) if one.kind is one.VAR_POSITIONAL else factory(**{one.name: value})
                except InputError as error:
                    if "\n" not in str(error):
                        continue
                    silent.append(f"{label}: several lines")
                else:
                    silent.append(f"{label}: {one.name} = {value!r}")
    assert not silent
    assert tried > 800, "the catalogue was found"


def test_the_annotations_of_every_part_can_be_read() -> None:
    assert not [label for label, one in factories().items() if not kinds_of(inspect.unwrap(one))]
