"""`Run`: a run's folder as a notebook reads it, while it goes on or after."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.reporting.html.run_data import iterate_completions
from jaxrl_llm.reporting.logging.writers import read_jsonl
from jaxrl_llm.reporting.prompt_table import PromptTable, read_table
from jaxrl_llm.reporting.statistics import as_number
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.folder.files import RunFolder
from jaxrl_llm.training.folder.load_run import load_run
from jaxrl_llm.utils.errors import InputError, optional_package, require_choice

# Drawn by default, where they were logged.
CURVES = ("reward/mean", "groups/uniform", "entropy", "completion/length", "grad_norm", "mismatch")
COLUMNS = 3


class Run:
    """The run in a folder, or at a URL. Each attribute reads the files anew, so that a run can be watched.

    Raises InputError if there is no run, and its attributes where a file is damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self._folder = RunFolder(path, reading=True)
        self._folder.read_config()

    @property
    def path(self) -> Path:
        """The folder; of a URL, its local copy."""
        return self._folder.path

    @property
    def config(self) -> TrainConfig:
        """The settings. `train(run.config, resume=True)` goes on with the run."""
        return self._folder.read_config()

    @property
    def metrics(self) -> dict[str, np.ndarray]:
        """f64[steps] by name, NaN where a step has no value; "step" counts from 1. `pandas.DataFrame` takes it."""
        lines = read_jsonl(self._folder.metrics) if self._folder.metrics.exists() else []
        names = sorted({name for line in lines for name in line})
        found = {name: np.array([as_number(line.get(name)) for line in lines], np.float64) for name in names}
        return {name: values.astype(np.int64) if name == "step" else values for name, values in found.items()}

    @property
    def completions(self) -> list[dict[str, Any]]:
        """The logged completions, each with step, phase ("train", "eval_before" ...), prompt, completion, tokens,
        reward, rewards by name, and advantage, logp and entropy of each token.

        Logged are those of some steps, and of the first groups of each: see `log_completions_every`.
        """
        path = self._folder.completions
        lines = [line for _, line in iterate_completions(path)] if path.exists() else []
        return [{**line, "completion": "".join(line["tokens"])} for line in lines]

    @property
    def prompts(self) -> PromptTable:
        """Which prompts were tried, how their solve rates moved, and what was left out and why: its `rows` are the
        most telling prompts, its other fields count all. It prints as a table.

        Raises InputError before the first step.
        """
        return read_table(self.path)

    @property
    def summary(self) -> dict[str, Any]:
        """What summary.json says: evaluations, counts, seconds and warnings; empty before the first evaluation."""
        return self._folder.read_summary()

    def policy(self) -> tuple[Policy, Params, Any]:
        """The trained policy, its parameters and tokenizer, from the newest checkpoint, as `load_policy` gives them.

        Raises InputError if there is no checkpoint yet, or the model has changed.
        """
        _, policy, params, tokenizer = load_run(str(self._folder.mirror.url if self._folder.mirror else self.path))
        return policy, params, tokenizer

    def plot(self, *names: str) -> Any:
        """A matplotlib figure with a curve of each metric, which a notebook shows; by default of the main ones.

        Raises InputError for an unknown metric, before the first step, and without matplotlib.
        """
        metrics = self.metrics
        if not metrics:
            raise InputError(f"{self.path} has no metrics yet: no step is complete")
        for name in names:
            require_choice("metric", name, metrics.keys() - {"step"})
        main = [name for name in CURVES if name in metrics] or sorted(metrics.keys() - {"step"})[:COLUMNS]
        return _drawn(metrics, names or main)

    def __repr__(self) -> str:
        config, summary = self.config, self.summary
        lines = self._folder.metrics.read_bytes().count(b"\n") if self._folder.metrics.exists() else 0
        found = [f"{config.algorithm} on {config.model}", f"{lines} of {config.steps} steps"]
        for name, when in (("eval_before", "before"), ("eval_after", "after")):
            if name in summary:
                found.append(f"accuracy {100 * summary[name]['accuracy']:.1f} % {when}")
        return f"Run({str(self.path)!r}: {', '.join(found)})"


def _drawn(metrics: Mapping[str, np.ndarray], names: Sequence[str]) -> Any:
    """A figure with the curves of some metrics."""
    with optional_package("matplotlib", "run", "drawing curves"):
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

    class Curves(Figure):
        """A figure that a notebook shows, also before pyplot is imported there."""

        def _repr_png_(self) -> bytes:
            buffer = io.BytesIO()
            self.savefig(buffer, format="png", dpi=110)
            return buffer.getvalue()

    wide = min(COLUMNS, len(names))
    rows = -(-len(names) // wide)
    figure = Curves(figsize=(4 * wide, 2.6 * rows), layout="constrained")
    for place, name in enumerate(names, start=1):
        axes, values = figure.add_subplot(rows, wide, place), metrics[name]
        axes.plot(metrics["step"], values, linewidth=1.4, marker="." if np.isfinite(values).sum() < 30 else "")
        axes.set_title(name, fontsize=10)
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.2)
    return figure
