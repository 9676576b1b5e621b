"""Configuration files: settings read from YAML or TOML, checked, and turned into arguments."""

import dataclasses
import typing
from collections.abc import Collection
from pathlib import Path
from typing import Any

from jaxrl_llm.learner.optimizer_config import OptimizerConfig
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.utils.errors import InputError, nearest, optional_package, shown, unknown


def read_config(path: Path) -> dict[str, Any]:
    """The settings in a .toml file, or in a YAML file of any other name."""
    import tomllib

    if not path.is_file():
        raise InputError(f"there is no configuration file {path}")
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text) if path.suffix == ".toml" else _yaml(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise InputError(f"{path} must hold settings by name")
    settings = {name.replace("-", "_"): value for name, value in values.items()}
    if twice := [name for name in values if name != name.replace("-", "_") and name.replace("-", "_") in values]:
        raise InputError(f"{path} sets {twice[0]} twice, with dashes and with underscores: remove one")
    return settings


def _yaml(text: str) -> Any:
    with optional_package("pyyaml", "run", "reading a YAML file"):
        import yaml

    class Loader(yaml.SafeLoader):
        """A SafeLoader that rejects duplicate keys, as TOML does."""

    def mapping(loader: Any, node: Any) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key.value, str)]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise yaml.YAMLError(f"{twice[0]} is given twice (line {node.start_mark.line + 1} and later)")
        return yaml.SafeLoader.construct_mapping(loader, node, deep=True)

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    try:
        return yaml.load(text, Loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from None


def in_sections(values: dict[str, Any]) -> dict[str, Any]:
    """Settings with the options' names (optimizer.learning_rate, algorithm.clip_high) moved to their sections.

    InputError for one that is given in its section too.
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        section, dot, inside = name.partition(".")
        section = {"algorithm": "hyperparameters"}.get(section, section)
        if not dot or section not in ("optimizer", "hyperparameters"):
            if isinstance(found.get(name), dict) and isinstance(value, dict):  # a dotted name came first
                if twice := sorted({*found[name]} & {*value}):
                    raise InputError(f"{name}.{twice[0]} is set twice: remove one")
                value = {**found[name], **value}
            found[name] = value
            continue
        inner = found.setdefault(section, {})
        if not isinstance(inner, dict):
            raise InputError(f"{section} must hold settings by name, found {shown(inner)}")
        if inside in inner:
            raise InputError(f"{name} is set twice: remove one")
        found[section] = {**inner, inside: value}
    return found


def check_names(values: dict[str, Any], algorithm: str, parameters: Collection[str]) -> None:
    """InputError for an unknown setting in a file, at the top level or in a section."""

    own, of_optimizer = ([field.name for field in dataclasses.fields(kind)] for kind in (TrainConfig, OptimizerConfig))
    if (name := next((name for name in values if name not in own), None)) is not None:
        if name in of_optimizer:
            raise InputError(f"{name!r} is a setting of the section optimizer: write optimizer.{name}")
        if name in parameters:
            raise InputError(f"{name} is a hyper-parameter of {algorithm}: write algorithm.{name}")
        inside = {f"optimizer.{one}": one for one in of_optimizer} | {f"algorithm.{one}": one for one in parameters}
        near = None if nearest(name, own) else nearest(name, inside.values())
        if near is not None:
            raise InputError(f"unknown setting {name!r}: did you mean {next(x for x in inside if inside[x] == near)}?")
        raise unknown("setting", name, own)
    sections = {
        "optimizer": ("optimizer setting", of_optimizer),
        "hyperparameters": (f"hyper-parameter of {algorithm}", parameters),
    }
    for section, (kind, known) in sections.items():
        inner = {} if values.get(section) is None else values[section]
        if not isinstance(inner, dict):
            raise InputError(f"{section} must hold settings by name, found {shown(inner)}")
        for name in inner:
            if str(name).replace("-", "_") not in known:
                raise unknown(kind, str(name), known)


def check_kinds(values: dict[str, Any], kinds: dict[str, Any], prefix: str = "") -> None:
    """InputError for a value in a file whose type would be lost as an argument, such as true for a number."""
    for name, value in values.items():
        full, kind = prefix + str(name), kinds[str(name).replace("-", "_")]
        inner, origin = typing.get_args(kind), typing.get_origin(kind)
        if isinstance(kind, dict):
            check_kinds(value or {}, kind, f"{full}.")
        elif value is None and type(None) not in inner:
            raise InputError(f"{full} has no value: give one, or leave it out")
        elif isinstance(value, bool) != (kind is bool) and value is not None:
            wanted = "true or false, without quotes" if kind is bool else "a number or a text"
            raise InputError(f"{full} is {shown(value)}, but must be {wanted}")
        elif isinstance(value, dict) and origin is not dict:
            raise InputError(f"{full} is {shown(value)}, but has no settings inside")
        elif isinstance(value, list) and origin is not tuple:
            raise InputError(f"{full} is {shown(value)}, but must be a single value")
        elif isinstance(value, list) and any(entry is None or isinstance(entry, bool | dict | list) for entry in value):
            raise InputError(f"{full} is {shown(value)}, but must be a list of texts")
