"""The report of runs: settings that differ from the defaults first, and its method beside others."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrl_llm import reporting
from jaxrl_llm.core.arguments.signatures import options
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.config.json_text import to_dict
from jaxrl_llm.utils.errors import InputError

if TYPE_CHECKING:
    from jaxrl_llm.core.trajectory import Trajectories
    from jaxrl_llm.reporting import Comparison


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


def credit_by_method(
    config: TrainConfig, others: Sequence[str], batch: Trajectories, after_steps: int = 0
) -> Comparison:
    """The credit that a run's own method and others give a batch; see `reporting.compare`.

    The own one comes first, with the run's hyper-parameters; a Python value, which a run's folder does not hold, is
    left out. Raises InputError for a method that is not known.
    """
    from jaxrl_llm.training.method import PYTHON, make_algorithm  # here: the module of reports needs no JAX

    own = {} if config.algorithm.startswith(PYTHON) else {f"{config.algorithm} (this run)": make_algorithm(config)}
    found = reporting.compare({**own, **{name: name for name in others}}, batch, after_steps=after_steps)
    return dataclasses.replace(found, later="--after-steps 3" if found.later else "")
