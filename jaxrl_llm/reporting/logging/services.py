"""Experiment trackers that get copies of a run's metrics: Weights & Biases, Trackio and MLflow.

Each is a `_Service`: how a run of it is started, or gone on with, and what is called then. The id of its run is kept in
the folder of ours, so that a resumed run goes on with it.
"""

import importlib.util
import os
import re
import sys
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_llm.reporting.logging.files import python_number, step_of
from jaxrl_llm.utils.errors import InputError, missing_package, shown


class Started(NamedTuple):
    """A run of a service."""

    id: str
    log: Callable[[dict[str, float | int], int], object]  # (metrics, step)
    end: Callable[[], object]


class _Service(NamedTuple):
    """An experiment tracker."""

    title: str
    package: str  # which is the name of its extra, too
    hint: str  # what to do if it does not start
    start: Callable[[str, str, Mapping[str, Any], str, str | None], Started]
    """(project, name of the run, its settings, its folder, id of the run to go on with) -> its run."""


def _wandb(project: str, name: str, config: Mapping[str, Any], folder: str, known: str | None) -> Started:
    import wandb

    own = known or uuid.uuid4().hex[:8]
    run = wandb.init(project=project, name=name, config=dict(config), dir=folder, id=own, resume="allow")
    return Started(own, lambda metrics, step: run.log(metrics, step=step), lambda: run.finish())


def _trackio(project: str, name: str, config: Mapping[str, Any], folder: str, known: str | None) -> Started:
    import trackio

    # Trackio knows a run by its name, which another folder may have, too.
    own = known or f"{name}-{uuid.uuid4().hex[:8]}"
    run = trackio.init(project=project, name=own, config=dict(config), resume="allow", embed=False)
    return Started(own, lambda metrics, step: run.log(metrics, step=step), lambda: run.finish())


def _mlflow(project: str, name: str, config: Mapping[str, Any], folder: str, known: str | None) -> Started:
    import time

    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

    client = MlflowClient()
    if known is None:
        found = client.get_experiment_by_name(project)
        experiment = client.create_experiment(project) if found is None else found.experiment_id
        own = client.create_run(experiment, run_name=name).info.run_id
        settings = [Param(key, str(value)[:6000]) for key, value in config.items()]
        for first in range(0, len(settings), 100):  # the most that MLflow takes at a time
            client.log_batch(own, params=settings[first : first + 100])
    else:
        own = known
        client.update_run(own, status="RUNNING")

    def log(metrics: dict[str, float | int], step: int) -> None:
        now = int(1000 * time.time())
        named = {re.sub(r"[^\w\-. /]", "_", key): value for key, value in metrics.items()}
        client.log_batch(own, [Metric(key, float(value), now, step) for key, value in named.items()])

    return Started(own, log, lambda: client.set_terminated(own))


WANDB = _Service(
    "Weights & Biases", "wandb", "run `wandb login`, or set WANDB_MODE=offline, or train without --wandb", _wandb
)
TRACKIO = _Service("Trackio", "trackio", "train without --trackio", _trackio)
MLFLOW = _Service("MLflow", "mlflow", "set MLFLOW_TRACKING_URI, or train without --mlflow", _mlflow)
SERVICES = (WANDB, TRACKIO, MLFLOW)


class ServiceWriter:
    """Logs to a run of a service: `project` and `name` as shown there, `config` its settings.

    The run's id goes to `folder`: a writer that is made again there goes on with that run. Needs the service's package.
    Raises InputError if the run cannot be started.
    """

    def __init__(
        self, service: _Service, project: str, name: str | None, config: Mapping[str, Any],
        folder: str | os.PathLike[str],
    ) -> None:  # fmt: skip
        check_project(service, project)
        kept = Path(folder) / f"{service.package}_id.txt"
        kept.parent.mkdir(parents=True, exist_ok=True)
        known = kept.read_text().strip() if kept.exists() else None
        try:
            self._run = service.start(project, name or kept.parent.name, config, os.fspath(folder), known or None)
            kept.write_text(self._run.id + "\n")
        except Exception as error:  # e.g. a broken installation, no login, no network
            reason = " ".join(str(error).split()) or type(error).__name__
            raise InputError(f"{service.title} does not start: {reason[:300]}; {service.hint}") from error

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Log the metrics of one step. Raises InputError for a metric that is not a scalar."""
        self._run.log({name: python_number(name, value) for name, value in metrics.items()}, step_of(step))

    def flush(self) -> None:
        """Nothing to do: logged metrics are with the service's own process or server."""

    def close(self) -> None:
        """Mark the run as finished."""
        self._run.end()


WandbWriter = partial(ServiceWriter, WANDB)


def check_writers(tensorboard: bool, **projects: str | None) -> None:
    """InputError unless the packages of the writers are installed; fast, because it does not import them.

    projects: of each service, by its package; None or "" for none.
    """
    if tensorboard and not _installed("tensorboardX"):
        raise missing_package("tensorboardX", "run", "writing TensorBoard events")
    for service in SERVICES:
        if project := projects.get(service.package):
            check_project(service, project)


def check_project(service: _Service, project: str) -> None:
    """InputError for a name that the service does not take, and unless its package is installed."""
    if not isinstance(project, str) or len(project) > 128 or (service is not MLFLOW and set(project) & set("/\\#?%:")):
        raise InputError(
            f"{service.package} is {shown(project)}, but must be a project's name: at most 128 characters"
            + ("" if service is MLFLOW else ", none of / \\ # ? % :")
        )
    if not _installed(service.package):
        raise missing_package(service.package, service.package, f"logging to {service.title}")


def _installed(package: str) -> bool:
    """Whether a package is installed. A plain folder of its name, such as wandb's folder of logs, does not count."""
    if package in sys.modules:
        return sys.modules[package] is not None
    found = importlib.util.find_spec(package)
    return found is not None and found.origin is not None
