"""The folder of a run: configuration, metrics, groups, completions, checkpoints and summary."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrl_llm.core.arguments.signatures import TEXT_METHODS
from jaxrl_llm.reporting.logging.writers import read_json, truncate_jsonl
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.config.auto_dtype import with_kept_dtype
from jaxrl_llm.training.config.json_text import from_dict, located, to_dict
from jaxrl_llm.training.folder.completion_lines import completion_lines, group_line, write_left_out
from jaxrl_llm.training.folder.provenance import NAME as ENVIRONMENT
from jaxrl_llm.training.folder.provenance import record_start
from jaxrl_llm.training.folder.remote_folder import Mirror
from jaxrl_llm.training.folder.resume_checks import MAY_DIFFER, check_changes, settings_to_compare
from jaxrl_llm.utils.errors import InputError, InputErrors, shown
from jaxrl_llm.utils.storage import is_url, replace_file

if TYPE_CHECKING:
    import numpy as np

    from jaxrl_llm.core.source import Step
    from jaxrl_llm.rewards.scoring import Scored

FIGURES = ("accuracy", "low", "high", "prompts", "length")  # entries of an evaluation that `accuracy_line` reads
# Entries of config.json beside the settings: the folder that relative paths are resolved against, the mesh and the day
# of the run where no setting names them, and what is known of an algorithm that is not in the catalogue
# (`method.record_of`).
STARTED_IN, CHOSEN_MESH, COMPOSED, STARTED_ON = "started_in", "chosen_mesh", "composed", "started_on"
TEXT_SETTINGS = "text.yaml"  # of a run of jaxrl texts: the settings with which a run has its text in its prompts


class RunFolder:
    """Paths and small files of a run. JSON files are replaced atomically, so a kill leaves the old or the new one.

    folder: a path, or a URL such as s3://bucket/run: `path` is then a local folder, which is copied there at every
    checkpoint and at the end (`remote_folder.Mirror`). reading: the run is read and not gone on with.
    """

    def __init__(self, folder: str | Path, reading: bool = False) -> None:
        self.mirror = Mirror(str(folder), reading) if is_url(folder) else None
        self.path = self.mirror.path if self.mirror else Path(folder)
        self.config, self.summary = self.path / "config.json", self.path / "summary.json"
        self.metrics, self.completions = self.path / "metrics.jsonl", self.path / "completions.jsonl"
        self.groups, self.left_out = self.path / "groups.jsonl", self.path / "left_out.npz"
        self.checkpoints = self.path / "checkpoints"

    def check_free(self) -> None:
        """InputError if a new run cannot start here: the folder holds a run already, or is not writable."""
        if self.mirror:
            return self.mirror.check_free()
        try:
            there = next(folder for folder in (self.path, *self.path.absolute().parents) if folder.exists())
        except OSError as error:  # e.g. a name that is too long
            raise InputError(f"{self.path} cannot be the output: {error.strerror}") from None
        if self.config.exists():
            raise InputError(
                f"{self.path} holds a run already: resume it with --resume {self.path}, or choose another --output"
            )
        around = next((folder for folder in self.path.absolute().parents if RunFolder(folder).is_run()), None)
        if around is not None:
            raise InputError(f"{self.path} is inside the run {around}: choose another --output")
        if self.checkpoints.exists() or self.metrics.exists():
            raise InputError(f"{self.path} holds parts of a run without its config.json: choose another --output")
        if not there.is_dir():
            raise InputError(f"{self.path} cannot be the output: {there} is a file")
        if not os.access(there, os.W_OK | os.X_OK):
            raise InputError(f"{self.path} cannot be the output: {there} is not writable")

    def create(
        self, config: dict[str, Any], mesh: str = "", composed: Mapping[str, Any] | None = None, date: str = ""
    ) -> None:
        """Create the folder of a new run; its relative paths are those of the working directory now.

        mesh: the one that was chosen, where the configuration names none. composed: see `method.record_of`. date: that
        of the run, where the configuration names none.

        Raises InputError as `check_free` does.
        """
        self.check_free()
        self.path.mkdir(parents=True, exist_ok=True)
        if self.mirror:
            self.mirror.clear()
        chosen = {CHOSEN_MESH: mesh} if mesh and not config.get("mesh") else {}
        own: dict[str, Any] = {COMPOSED: dict(composed)} if composed else {}
        own |= {STARTED_ON: date} if date and not config.get("date") else {}
        self.write(self.config, {**config, STARTED_IN: os.getcwd(), **chosen, **own})

    def abandon(self) -> None:
        """Remove what a run that took no step has written, so that another can start here."""
        for path in (self.config, *self.logs, self.left_out, self.summary, self.path / ENVIRONMENT):
            path.unlink(missing_ok=True)
        shutil.rmtree(self.path / "tensorboard", ignore_errors=True)
        with suppress(OSError):  # there is none, or it is not empty
            self.checkpoints.rmdir()

    def begin(self, config: TrainConfig, step: int) -> None:
        """Write down that a run starts or resumes here: on what, and settings that a resumed run was given anew."""
        raw, now = read_json(self.config), to_dict(config)
        asked = MAY_DIFFER - {"output", "mesh", "sampling_mesh"}  # the meshes of this start may be chosen
        anew = {name: now[name] for name in asked if raw.get(name) != json.loads(json.dumps(now[name]))}
        if anew:
            self.write(self.config, {**raw, **anew})
        record_start(self.path, step)

    def read_config(self) -> TrainConfig:
        """The configuration of the run, with this folder as its output and other relative paths made absolute.

        Raises InputError if there is none, or it is damaged. Of a URL, all but the checkpoints is copied.
        """
        if self.mirror:
            self.mirror.pull()
        if not self.config.exists():
            raise InputError(f"{self.path} holds no run (no config.json): give the folder that jaxrl train wrote")
        if not self.config.is_file():
            raise InputError(f"{self.config} is not a regular file: put the file back")
        if not self.is_run():
            raise InputError(f"{self.path} holds a model, not a run: give the folder that jaxrl train wrote")
        raw, seen_from = read_json(self.config), self.started_in()
        for name in (STARTED_IN, CHOSEN_MESH, COMPOSED, STARTED_ON):
            raw.pop(name, None)
        try:
            config = from_dict({**raw, "output": self.mirror.url if self.mirror else str(self.path)})
        except InputErrors as errors:
            raise InputErrors(f"{self.config}: {problem}" for problem in errors.problems) from None
        except InputError as error:
            other = "; a run of another version of jaxrl_llm is read by that version" if error.known else ""
            raise InputError(f"{self.config}: {error}{other}") from None
        return located(config, seen_from)

    def started_in(self) -> str:
        """The folder that the run's relative paths are resolved against; the working directory if there is no run."""
        return self._recorded(STARTED_IN, STARTED_IN, os.getcwd(), "a folder")

    def recorded_mesh(self) -> str:
        """The mesh that the run began with, "" for one device; InputError for a malformed one."""
        return self._recorded("mesh", CHOSEN_MESH)

    def recorded_date(self) -> str:
        """The day on which the run began, as 2031-01-31; "" where it is not known, as of runs of earlier versions."""
        return self._recorded("date", STARTED_ON)

    def _recorded(self, setting: str, entry: str, default: str = "", what: str = "a text") -> str:
        """A setting's text in config.json, or that of the entry that stands for it; InputError for what is no text."""
        raw = read_json(self.config)
        text = raw.get(setting) or raw.get(entry, default)
        if not isinstance(text, str):
            raise InputError(f"{self.config}: {entry} is {shown(text)}, but must be {what}")
        return text

    def recorded_needs(self) -> frozenset[str] | None:
        """The needs of the run's algorithm, where it is not in the catalogue; else None. InputError for others."""
        record = read_json(self.config).get(COMPOSED)
        if record is None:
            return None
        found = record.get("needs") if isinstance(record, dict) else None
        if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
            raise InputError(f"{self.config}: {COMPOSED} is {shown(record)}, but must hold a list of needs")
        return frozenset(found)

    def record_composed(self, composed: Mapping[str, Any]) -> None:
        """Say in config.json what is trained from now on, where that has changed and was accepted."""
        raw = read_json(self.config)
        if composed and raw.get(COMPOSED) != composed:
            self.write(self.config, {**raw, COMPOSED: dict(composed)})

    def is_run(self) -> bool:
        """Whether the folder's config.json is a run's; model folders have a file of that name too."""
        if self.mirror:
            self.mirror.pull_file(self.config.name)
        try:
            return self.config.is_file() and "prompts_per_step" in read_json(self.config)
        except OSError:  # e.g. a name that is too long
            return False

    def last_write(self) -> float:
        """When the logs were last written to, in seconds since the epoch; 0 if there are none."""
        return max((file.stat().st_mtime for file in self.logs if file.exists()), default=0.0)

    @property
    def logs(self) -> tuple[Path, ...]:
        """What is appended to: metrics, completions and groups."""
        return self.metrics, self.completions, self.groups

    def read_summary(self) -> dict[str, Any]:
        """The contents of summary.json, empty if it does not exist. InputError for malformed evaluations."""
        summary = read_json(self.summary)
        for name, figures in summary.items():
            if name.startswith("eval_") and not (isinstance(figures, dict) and set(FIGURES) <= set(figures)):
                raise InputError(f"{self.summary}: {name} is {shown(figures)}, but must hold {', '.join(FIGURES)}")
        return summary

    def rewind(self, step: int) -> None:
        """Drop what was logged after `step` steps, which a resumed run writes again. InputError for damaged logs.

        The evaluation after training is dropped too: a run that goes on has another.
        """
        for file in self.logs:
            truncate_jsonl(file, step + 1, lambda line: line.get("phase") == "eval_after")

    @staticmethod
    def write(path: Path, value: dict[str, Any]) -> None:
        """Replace a JSON file atomically."""
        replace_file(path, json.dumps(value, indent=2, allow_nan=False, default=float) + "\n")

    def checkpoints_for(self, processes: int) -> Path | str:
        """Where a run of so many processes reads and writes its checkpoints. InputError as `Mirror.checkpoints`."""
        return self.mirror.checkpoints(processes) if self.mirror else self.checkpoints

    def push(self) -> None:
        """Start copying the folder to its URL, if it has one. InputError if the previous copy failed."""
        if self.mirror:
            self.mirror.push()

    def wait(self) -> None:
        """Wait until what was pushed is there. InputError if that failed."""
        if self.mirror:
            self.mirror.wait()

    def close(self) -> None:
        """Copy the folder to its URL, if it has one, and wait until it is there. InputError if that fails."""
        self.push()
        self.wait()

    def log_completions(
        self, step: int, phase: str, tokenizer: Any, scored: Scored, rows: Sequence[dict[str, Any]], groups: int = 4,
        judge: str | None = None,
    ) -> None:  # fmt: skip
        """Append the completions of the first `groups` groups to completions.jsonl, token by token, for the report.

        judge: the reward that is 1 for a correct answer, if any.
        """
        with self.completions.open("a") as file:
            for line in completion_lines(tokenizer, scored, rows, groups, judge):
                file.write(json.dumps({"step": step, "phase": phase, **line}) + "\n")

    def log_groups(self, step: int, found: Step, judge: str | None = None) -> None:
        """Append what a step sampled to groups.jsonl: see `completion_lines.group_line`."""
        with self.groups.open("a") as file:
            file.write(json.dumps({"step": step, **group_line(found, judge)}) + "\n")

    def write_left_out(self, step: int, why: np.ndarray | None) -> None:
        """Replace left_out.npz: see `completion_lines.write_left_out`. None: the curriculum leaves nothing out."""
        if why is not None:
            write_left_out(self.left_out, step, why)


def run_config(path_or_name: str) -> TrainConfig:
    """The configuration of a run, with its day, or the defaults with the given model.

    That of a run of jaxrl texts has the text that it found. InputError as `RunFolder.read_config`.
    """
    folder = RunFolder(path_or_name, reading=True)
    if not folder.is_run():
        return TrainConfig(model=path_or_name)
    config = dataclasses.replace(folder.read_config(), date=folder.recorded_date())
    return dataclasses.replace(config, **read_json(folder.path / TEXT_SETTINGS)) if is_of_texts(config) else config


def is_of_texts(config: TrainConfig) -> bool:
    """Whether a run optimises a text (`jaxrl_llm.texts`) and has the weights of its model."""
    return config.algorithm in TEXT_METHODS


def has_begun(config: TrainConfig, accept: bool) -> bool:
    """Whether the output of a configuration holds a run that it can go on with.

    Raises InputError as `resume_checks.check_changes` does, if the run there has other settings.
    """
    folder, here = RunFolder(config.output), os.getcwd()
    if not folder.is_run():
        return False
    check_changes(
        {"settings": settings_to_compare(folder.read_config(), here)}, with_kept_dtype(config), here, {}, accept
    )
    return True
