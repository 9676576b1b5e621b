"""What the file of a method is written with: its facts (`@method`), sets of defaults, and settings of a run."""

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, ParamSpec, TypeVar

from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.arguments.checks import expect
from jaxrl_llm.core.arguments.hyperparameters import checked_method
from jaxrl_llm.utils.errors import InputError, shown, unknown

Parameters = ParamSpec("Parameters")
Built = TypeVar("Built")  # an Algorithm, or a TextMethod
Build = Callable[..., Algorithm]
Decorated = TypeVar("Decorated", bound=Callable[..., Any])
Parts = Mapping[str, tuple[str, str]]  # name of a part -> (what is not here, what would provide it)
Given = Mapping[str, Any]  # hyper-parameters of the method, with their defaults


@dataclass(frozen=True)
class Facts:
    """What is known of a method.

    paper: "arXiv 2402.03300", or another name of the source; year: of the paper. test: FILE::TEST in
    tests/algorithms (of methods of texts in tests/texts), which compares the method's own part with an independent
    computation: a slow loop, or the paper's worked example.

    needs: needs that only some runs provide (`jaxrl_llm.core.needs`), and what each is to the method. A run is refused
    unless it provides each or excludes it by name (--algorithm.without). beside: parts of the paper that are not here,
    and without which the method is still the paper's: variants, ablations, stages before the run, other models, and
    choices that a run makes by its data, rewards or environment; `jaxrl algorithms NAME` shows them.
    """

    paper: str
    year: int
    test: str
    needs: Mapping[str, str] = field(default_factory=dict)
    beside: Parts = field(default_factory=dict)

    def __post_init__(self) -> None:
        if wrong := [name for name, said in self.beside.items() if len(said) != 2]:
            raise InputError(f"a part of a method says what it is and what would provide it, unlike {shown(wrong)}")


def method(
    *, paper: str, test: str, year: int | None = None
) -> Callable[[Callable[Parameters, Built]], Callable[Parameters, Built]]:
    """Decorate the function that builds a method with its `Facts`, and check its hyper-parameters when it is called.

    The function has the name of its file, in a folder of `jaxrl_llm.algorithms` or in `jaxrl_llm.texts.methods`; its
    parameters are annotated with ranges and origins (`core.arguments.hyperparameters`), and its docstring has the
    equations after a line with its title. year: None is that of the paper's number in arXiv. Needs, and parts that are
    not here, are said by decorators below this one, `run_needs` and `beside`.
    """
    published = year or _year_of(paper)

    def decorate(build: Callable[Parameters, Built]) -> Callable[Parameters, Built]:
        made = checked_method(build)
        needs, others = (getattr(build, name, {}) for name in ("needs", "beside"))
        made.__dict__["facts"] = Facts(paper, published, test, needs, others)
        return made

    return decorate


def run_needs(**needs: str) -> Callable[[Decorated], Decorated]:
    """Decorate a method's function with needs that only some runs provide, `Facts.needs`; below `@method`."""

    def decorate(build: Decorated) -> Decorated:
        _check_below_method("run_needs", build)
        build.__dict__["needs"] = {**needs, **getattr(build, "needs", {})}
        return build

    return decorate


def beside(part: str, what: str, provider: str) -> Callable[[Decorated], Decorated]:
    """Decorate a method's function with a part of its paper that is not here, `Facts.beside`; below `@method`."""

    def decorate(build: Decorated) -> Decorated:
        _check_below_method("beside", build)
        build.__dict__["beside"] = {part: (what, provider), **getattr(build, "beside", {})}
        return build

    return decorate


def _check_below_method(decorator: str, build: Callable[..., Any]) -> None:
    """InputError for a decorator that `@method`, which reads what it says, does not see."""
    if facts_of(build) is not None:
        raise InputError(f"@{decorator} stands above @method, which reads it: write it below, next to the function")


def _year_of(paper: str) -> int:
    """The year that a paper's number in arXiv says. InputError for another source.

    >>> _year_of("arXiv 2402.03300")
    2024
    """
    numbered = re.fullmatch(r"arXiv (\d\d)\d\d\.\d+", paper)
    if numbered is None:
        raise InputError(f"{shown(paper)} is no number in arXiv, which has the year: give year=... too")
    return 2000 + int(numbered[1])


def facts_of(build: Callable[..., Any]) -> Facts | None:
    """The facts of a method; None for what has no `@method`."""
    found = getattr(build, "facts", None)
    return found if isinstance(found, Facts) else None


def presets(**sets: Mapping[str, Any]) -> Callable[[Build], Build]:
    """Add the parameter `preset` to a method, the name of one of the sets, whose values replace the method's defaults.

    For methods whose paper and released code differ in several choices. Explicit arguments override the preset; with
    None the defaults are those of the signature. Values must be literals, because the command line reads them from the
    source. InputError if a set names an unknown parameter, and, when the method is called, for an unknown preset.

        @presets(paper={"average": "prompt"}, code={"average": "token", "dual_clip": 10.0})
        def dapo(clip_low: float = 0.2, ..., average: str = "token", dual_clip: float | None = None) -> Algorithm:
    """

    def decorate(build: Build) -> Build:
        signature = inspect.signature(build)
        for name in (name for values in sets.values() for name in values if name not in signature.parameters):
            raise unknown(f"hyper-parameter of {build.__name__}", name, signature.parameters)

        @functools.wraps(build)
        def method(*args: Any, preset: str | None = None, **given: Any) -> Algorithm:
            if preset is None:
                return build(*args, **given)
            if preset not in sets:
                raise InputError(
                    f"{build.__name__}: preset is {shown(preset)}, but must be one of {', '.join(sets)}, or left out"
                )
            return build(**{**sets[preset], **dict(zip(signature.parameters, args, strict=False)), **given})

        kind = Literal[tuple(sets)] | None  # type: ignore[valid-type]
        parameter = inspect.Parameter("preset", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        with_preset = signature.replace(parameters=[*signature.parameters.values(), parameter])
        method.__dict__.update(presets=sets, __signature__=with_preset)
        method.__annotations__ = {**build.__annotations__, "preset": kind}
        return method

    return decorate


def presets_of(build: Build) -> dict[str, Mapping[str, Any]]:
    """The presets of a method by name; empty if it has none."""
    return dict(getattr(build, "presets", {}))


@dataclass(frozen=True)
class RunSetting:
    """One setting of a run, by its `name` in the configuration.

    take: the value of a run that has the default, of the method's hyper-parameters. fits: (configuration,
    hyper-parameters) -> whether a run is as the method needs. why: what the setting is to the method.
    """

    name: str
    take: Callable[[Given], Any]
    fits: Callable[[Any, Given], bool]
    why: str


def run_settings(*settings: RunSetting) -> Callable[[Decorated], Decorated]:
    """Decorate a method's function with the settings of a run that it needs, such as groups of one sample.

    A run by the method's name takes these settings where its own are at their defaults, says so, and is refused where
    they contradict the method (`training.config.method_settings`). InputError for anything that is no `RunSetting`.
    """
    for setting in settings:
        expect("what a method needs of a run", setting, RunSetting)

    def decorate(build: Decorated) -> Decorated:
        build.__dict__["run_settings"] = settings
        return build

    return decorate


def run_settings_of(build: Callable[..., Any]) -> tuple[RunSetting, ...]:
    """The settings of a run that a method needs; none for what has no `@run_settings`."""
    return tuple(getattr(build, "run_settings", ()))


def exactly(name: str, value: Any, why: str) -> RunSetting:
    """One value of a setting, or what a function of the hyper-parameters gives."""
    take = value if callable(value) else lambda given: value
    return RunSetting(name, take, lambda config, given: getattr(config, name) == take(given), why)


def several_steps(why: str, epochs: int = 2) -> RunSetting:
    """More than one gradient step on a batch, by epochs or minibatches."""
    return RunSetting("epochs", lambda given: epochs, lambda config, given: config.epochs * config.minibatches > 1, why)


def one_reward_of(*rewards: str, why: str) -> RunSetting:
    """One of the named reward functions, or one of a file or module of the user's."""

    def fits(config: Any, given: Given) -> bool:
        return any(":" in spec or _name(spec) in rewards for spec in config.rewards)

    return RunSetting("rewards", lambda given: rewards[:1], fits, why)


def given_responses(group_size: int | None) -> tuple[RunSetting, ...]:
    """Responses and their rewards from the data set, cut after 1,024 tokens as in TRL.

    group_size: how many a row has; None: up to the run's.
    """
    return (
        RunSetting(
            "max_new_tokens", lambda given: 1024, lambda config, given: config.max_new_tokens != 128, "whole responses"
        ),
        exactly("rewards", ("given",), "the verdicts of the data set"),
        *([] if group_size is None else [exactly("group_size", group_size, "the responses of a row as a group")]),
        exactly("same_task", "row", "all responses to a prompt"),
    )


def judge_among_rewards() -> tuple[RunSetting, ...]:
    """Of a method with a hyper-parameter `judge`: its verdict is the reward, and held-out prompts are not judged."""

    def fits(config: Any, given: Given) -> bool:
        return given.get("judge") is None or any(_name(spec) == "judge" for spec in config.rewards)

    def evaluates(config: Any, given: Given) -> bool:
        return given.get("judge") is None or not config.eval_size or len(config.rewards) > 1

    return (
        RunSetting("rewards", lambda given: ("judge",), fits, "the verdicts of its judge"),
        RunSetting("eval_size", lambda given: 0, evaluates, "a reward beside the judge for held-out prompts"),
    )


def _name(spec: str) -> str:
    return spec.partition("(")[0].partition("*")[0].strip()
