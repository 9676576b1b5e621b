"""`@method`: the facts of a published method, beside the function that builds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from jaxrl_llm.core.arguments.hyperparameters import checked
from jaxrl_llm.utils.errors import InputError, shown

Parameters = ParamSpec("Parameters")
Built = TypeVar("Built")  # an Algorithm, or a TextMethod
Parts = Mapping[str, tuple[str, str]]  # name of a part -> (what is not here, what would provide it)


@dataclass(frozen=True)
class Facts:
    """What is known of a method.

    paper: "arXiv 2402.03300", or another name of the source; year: of its first version. test: FILE::TEST in
    tests/algorithms (of methods of texts in tests/texts), which compares the method's own part with an independent
    computation: a slow loop, or the paper's worked example.

    lacks: parts that are not implemented, and without which the method is a simpler one than its name says: what the
    paper's results rest on, or what makes the method another than GRPO or PPO. A run is refused unless it excludes each
    by name (--algorithm.without). needs: needs that only some runs provide (`jaxrl_llm.core.needs`), and what each is
    to the method; a run must provide or exclude them too. beside: parts of the paper that are not here, and without
    which the method is still the paper's: variants, ablations, stages before the run, other models, and choices that a
    run makes by its data, rewards or environment; `jaxrl algorithms NAME` shows them.
    """

    paper: str
    year: int
    test: str
    lacks: Parts = field(default_factory=dict)
    needs: Mapping[str, str] = field(default_factory=dict)
    beside: Parts = field(default_factory=dict)

    def __post_init__(self) -> None:
        for parts in (self.lacks, self.beside):
            if wrong := [name for name, said in parts.items() if len(said) != 2]:
                raise InputError(f"a part of a method says what it is and what would provide it, unlike {shown(wrong)}")


def method(
    *,
    paper: str,
    year: int,
    test: str,
    lacks: Parts | None = None,
    needs: Mapping[str, str] | None = None,
    beside: Parts | None = None,
) -> Callable[[Callable[Parameters, Built]], Callable[Parameters, Built]]:
    """Decorate the function that builds a method with its `Facts`, and check its hyper-parameters when it is called.

    The function has the name of its file, in a folder of `jaxrl_llm.algorithms` or in `jaxrl_llm.texts.methods`; its
    parameters are annotated with ranges and origins (`core.arguments.hyperparameters`), and its docstring has the
    equations after a line with its title.
    """
    facts = Facts(paper, year, test, lacks or {}, needs or {}, beside or {})

    def decorate(build: Callable[Parameters, Built]) -> Callable[Parameters, Built]:
        made = checked(build)
        made.__dict__["facts"] = facts
        return made

    return decorate


def facts_of(build: Callable[..., Any]) -> Facts | None:
    """The facts of a method; None for what has no `@method`."""
    found = getattr(build, "facts", None)
    return found if isinstance(found, Facts) else None
