"""Hyper-parameters of a run's method by its name, and settings that the method needs (`algorithms.run_settings`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from jaxrl_llm.algorithms import CATALOGUE
from jaxrl_llm.algorithms.run_settings import RunSetting, run_settings_of
from jaxrl_llm.core.arguments.hyperparameters import Hyperparameter
from jaxrl_llm.core.arguments.signatures import NOT_GIVEN, PYTHON, hyperparameters, is_in_file, of_function, options
from jaxrl_llm.rewards.workers.loading import check_file
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.utils.errors import InputError, gather, shown


def hyperparameters_of(config: TrainConfig) -> dict[str, Any]:
    """The hyper-parameters of a method of the catalogue, where names have one meaning: defaults too. Else none."""
    if config.algorithm not in CATALOGUE:
        return {}
    return {one.name: one.default for one in hyperparameters(config.algorithm)} | config.hyperparameters


def fitted(config: TrainConfig) -> TrainConfig:
    """The configuration with the settings that its method needs, where its own are the defaults.

    A method of the catalogue alone has some. InputError, in one line, for a setting that contradicts the method.
    """
    for setting in _settings(config):
        given: dict[str, Any] = hyperparameters_of(config)
        if not setting.fits(config, given):
            if getattr(config, setting.name) != _default(config, setting.name):
                continue  # `check_settings` says so
            taken: dict[str, Any] = {setting.name: setting.take(given)}
            config = dataclasses.replace(config, **taken)
    return config


def check_settings(config: TrainConfig) -> None:
    """InputError, naming the setting and what it could be, where one contradicts the method."""

    def check(setting: RunSetting) -> None:
        given = hyperparameters_of(config)
        if not setting.fits(config, given):
            raise InputError(
                f"{config.algorithm} needs {setting.why}, but {setting.name} is "
                f"{_shown(getattr(config, setting.name))}: give {_shown(setting.take(given))}, or choose another method"
            )

    gather(*(lambda one=one: check(one) for one in _settings(config)))


def setting_notes(config: TrainConfig) -> list[str]:
    """What to say of settings that are not a run's usual ones because the method needs them."""
    usual: dict[str, Any] = {one.name: _default(config, one.name) for one in _settings(config)}
    plain, given = dataclasses.replace(config, **usual), hyperparameters_of(config)
    return [
        f"{config.algorithm} runs with {one.name} {_shown(getattr(config, one.name))}, because it needs {one.why}"
        for one in _settings(config)
        if not one.fits(plain, given) and getattr(config, one.name) == one.take(given)
    ]


def _settings(config: TrainConfig) -> Iterator[RunSetting]:
    yield from run_settings_of(CATALOGUE[config.algorithm]) if config.algorithm in CATALOGUE else ()


def _default(config: TrainConfig, name: str) -> object:
    of_world = TrainConfig(environment=config.environment, harness=config.harness)
    return getattr(of_world if name == "rewards" else TrainConfig, name)


def _shown(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else shown(value)


def options_of(method: str, preset: str | None = None) -> list[Hyperparameter]:
    """The options of a method: of the catalogue (`signatures.options`), or in a file, which is run.

    Raises InputError for an unknown method or preset, and for a file that cannot be loaded.
    """
    if not is_in_file(method):
        return options(method, preset)
    if method.startswith(PYTHON):
        return []  # its function is not known
    check_file(method, "the algorithm")
    from jaxrl_llm.algorithms import constructor  # here: importing JAX takes seconds

    return of_function(constructor(method), method)


def check_named(method: str, given: bool = False) -> None:
    """InputError if a method's name cannot say what to train: its file is missing, or a Python program gave it.

    given: the program gives it again.
    """
    if method.startswith(PYTHON):
        if not given:
            raise InputError(NOT_GIVEN.format(method.removeprefix(PYTHON)))
    elif is_in_file(method):
        check_file(method, "the algorithm")
