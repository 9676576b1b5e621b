"""Settings that a run takes from its method, see `algorithms.method.run_settings`."""

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

from jaxrl_llm.algorithms import CATALOGUE
from jaxrl_llm.algorithms.method import RunSetting, run_settings_of
from jaxrl_llm.core.arguments.signatures import hyperparameters
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.utils.errors import InputError, gather, shown
from jaxrl_llm.utils.settings import raise_error


def catalogue_hyperparameters(config: TrainConfig) -> dict[str, Any]:
    """The hyper-parameters of a method of the catalogue, where names have one meaning: defaults too. Else none."""
    if config.algorithm not in CATALOGUE:
        return {}
    return {one.name: one.default for one in hyperparameters(config.algorithm)} | config.hyperparameters


def fitted(config: TrainConfig) -> TrainConfig:
    """The configuration with the settings that its method needs, where its own are the defaults.

    A method of the catalogue alone has some. InputError, in one line, for a setting that contradicts the method.
    """
    for setting in _settings(config):
        given: dict[str, Any] = catalogue_hyperparameters(config)
        if not setting.fits(config, given):
            if getattr(config, setting.name) != _default(config, setting.name):
                continue  # `check_settings` says so
            taken: dict[str, Any] = {setting.name: setting.take(given)}
            config = dataclasses.replace(config, **taken)
    return config


def check_settings(config: TrainConfig) -> None:
    """InputError, naming the setting and what it could be, where one contradicts the method."""

    given = catalogue_hyperparameters(config)
    wrong = (
        f"{config.algorithm} needs {one.why}, but {one.name} is {_shown(getattr(config, one.name))}: give "
        f"{_shown(one.take(given))}, or choose another method"
        for one in _settings(config)
        if not one.fits(config, given)
    )
    gather(*(partial(raise_error, InputError(text)) for text in wrong))


def setting_notes(config: TrainConfig) -> list[str]:
    """What to say of settings that are not a run's usual ones because the method needs them."""
    usual: dict[str, Any] = {one.name: _default(config, one.name) for one in _settings(config)}
    plain, given = dataclasses.replace(config, **usual), catalogue_hyperparameters(config)
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
