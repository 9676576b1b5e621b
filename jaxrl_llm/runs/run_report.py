"""The report of runs, with the settings that differ from the defaults first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm import reporting
from jaxrl_llm.errors import InputError
from jaxrl_llm.runs.config import TrainConfig
from jaxrl_llm.runs.config_json import to_dict
from jaxrl_llm.signatures import options


def write_report(
    run_folder: str | Path | Sequence[str | Path],
    more: Mapping[str, str] | None = None,
    output: str | Path | None = None,
) -> Path:
    """`reporting.write_report` of runs of `TrainConfig`: of one run, or of several in one page."""
    return reporting.write_report(run_folder, more, defaults=defaults_of, output=output)


def defaults_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults of a run's settings, those of its algorithm's hyper-parameters among them.

    config: the contents of its config.json; an algorithm that the catalogue does not have has no defaults.
    """
    found = to_dict(TrainConfig())
    given = config.get("hyperparameters")
    preset = given.get("preset") if isinstance(given, dict) else None
    try:
        parameters = options(config.get("algorithm", TrainConfig.algorithm), preset)
    except (InputError, TypeError):  # TypeError: a damaged file may hold anything there
        return {**found, "hyperparameters": {}}
    return {**found, "hyperparameters": {one.name: one.default for one in parameters} | {"preset": None}}
