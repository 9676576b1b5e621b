"""Settings of a run that a method needs, as data on the method.

`@run_settings(...)` on a method's function says what of a run the method rests on, such as groups of one sample or
several gradient steps on a batch. A run by the method's name takes these settings where its own are at their defaults,
says so, and is refused where they contradict the method (`training.config.method_settings`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from jaxrl_llm.core.arguments.checks import expect

Build = TypeVar("Build", bound=Callable[..., Any])
Given = Mapping[str, Any]  # hyper-parameters of the method, with their defaults


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


def run_settings(*settings: RunSetting) -> Callable[[Build], Build]:
    """Decorate a method's function with the settings of a run that it needs. InputError for anything else."""
    for setting in settings:
        expect("what a method needs of a run", setting, RunSetting)

    def decorate(build: Build) -> Build:
        build.__dict__["run_settings"] = settings
        return build

    return decorate


def run_settings_of(build: Callable[..., Any]) -> tuple[RunSetting, ...]:
    """The settings of a run that a method needs; none for what has no `@run_settings`."""
    return tuple(getattr(build, "run_settings", ()))


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
    taken: dict[str, tuple[Any, str]] = {
        "rewards": (("given",), "the verdicts of the data set"),
        "group_size": (group_size, "the responses of a row as a group"),
        "same_task": ("row", "all responses to a prompt"),
    }
    if group_size is None:
        taken.pop("group_size")
    longest = 1024
    room = RunSetting(
        "max_new_tokens", lambda given: longest, lambda config, given: config.max_new_tokens != 128, "whole responses"
    )
    return room, *(_exactly(name, x, why) for name, (x, why) in taken.items())


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


def _exactly(name: str, value: Any, why: str) -> RunSetting:
    return RunSetting(name, lambda given: value, lambda config, given: getattr(config, name) == value, why)


def _name(spec: str) -> str:
    return spec.partition("(")[0].partition("*")[0].strip()
