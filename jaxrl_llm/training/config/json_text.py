"""A run's configuration as a JSON object, and with the paths that it names resolved."""

import dataclasses
import os
from pathlib import Path
from typing import Any

from jaxrl_llm.data.sources.hub import is_hub_data
from jaxrl_llm.learner.optimizer_config import OptimizerConfig
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.config.checks import GENERATED
from jaxrl_llm.utils.errors import InputError, require_choice, shown
from jaxrl_llm.utils.storage import is_url


def to_dict(config: TrainConfig) -> dict[str, Any]:
    """The configuration as a JSON object."""
    return dataclasses.asdict(config)


def from_dict(raw: dict[str, Any]) -> TrainConfig:
    """The configuration from a JSON object; InputError for an unknown setting, or a value out of range."""

    def build(kind: Any, values: Any, section: str) -> Any:
        if not isinstance(values, dict):
            raise InputError(f"{section} is {shown(values)}, but must hold settings by name")
        known = {f.name for f in dataclasses.fields(kind)}
        for name in values:
            require_choice("setting", name, known)
        return kind(**{name: tuple(v) if isinstance(v, list) else v for name, v in values.items()})

    raw = dict(raw) if isinstance(raw, dict) else raw
    if isinstance(raw, dict) and "optimizer" in raw:
        raw["optimizer"] = build(OptimizerConfig, raw["optimizer"], "optimizer")
    return build(TrainConfig, raw, "the configuration")


def located(config: TrainConfig, folder: str | os.PathLike[str]) -> TrainConfig:
    """The configuration with relative paths of models, prompts, and files of functions resolved.

    folder: that they are relative to. `output` is left alone, and so are models and data sets of the hub, which have
    the form of a name there and are no existing path.
    """
    base = Path(folder)

    def path(text: str) -> str:
        return text if is_url(text) else str(base / Path(text).expanduser())

    def in_file(spec: str) -> str:
        file, mark, function = spec.rpartition(":")
        return f"{path(file)}:{function}" if mark and file.endswith(".py") and "(" not in file else spec

    changes: dict[str, Any] = {name: tuple(map(in_file, getattr(config, name))) for name in ("rewards", "tools")}
    for name in ("environment", "harness", "compact"):
        value = getattr(config, name)
        changes[name] = None if value is None else in_file(value)
    changes |= {name: in_file(getattr(config, name)) for name in ("rollout", "algorithm")}
    for name in ("prompts", "eval_prompts"):
        source = getattr(config, name)
        if source and not source.startswith(GENERATED) and not is_hub_data(source, base):
            changes[name] = path(source)
    if config.model.endswith(".gguf") or (base / Path(config.model).expanduser()).exists():
        changes["model"] = path(config.model)
    if config.adapter:
        changes["adapter"] = path(config.adapter)
    return dataclasses.replace(config, **changes)
