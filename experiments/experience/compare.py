"""Methods against GRPO: seeds, means, standard errors, and the file that keeps them."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from experiments.experience.measure import Measured, Task, measured
from experiments.experience.tiny import write_model

Results = dict[str, Any]  # {"families": [{"key", "title", "task", "runs": [...]}]}


@dataclass(frozen=True)
class Method:
    """A method by name, with hyper-parameters that differ from its defaults."""

    name: str
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of its runs."""
    why: str = ""
    """Why it does not help here."""

    @property
    def title(self) -> str:
        """The name with the hyper-parameters."""
        given = {**self.hyperparameters, **self.settings}
        return self.name + (f" ({', '.join(f'{name} {value}' for name, value in given.items())})" if given else "")


GRPO = Method("grpo", {"kl_coefficient": 0.0})


@dataclass(frozen=True)
class Family:
    """A family of methods, and the task that is made for it."""

    key: str
    title: str
    text: str
    """The task in a sentence."""
    task: Callable[[], Task]
    methods: Sequence[Method]


def run_family(
    family: Family, seeds: Sequence[int], say: Callable[[str], object] = print, base: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Run GRPO and the methods with all seeds; the entry of a family in the results.

    base: GRPO's entry, where another family has the same task.

    A seed is that of prompts, samples and random weights. A policy that was taught before is the same for all seeds.
    """
    task = family.task()
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="experience-models-") as folder:
        models = {
            seed: write_model(Path(folder) / str(seed), task.letters, seed, task.examples, task.taught_steps)
            for seed in ([0] if task.taught_steps else seeds)
        }
        for method in (GRPO, *family.methods):
            if method is GRPO and base is not None:
                runs.append(base)
                continue
            found: list[Measured] = []
            for seed in seeds:
                model = models.get(seed, models[min(models)])
                found.append(measured(task, model, method.name, method.hyperparameters, seed, **method.settings))
                say(f"{family.key}  {method.title}, seed {seed}: {found[-1].final:.3f}")
            runs.append({
                "method": method.title, "finals": [round(one.final, 4) for one in found],
                "areas": [round(one.area, 4) for one in found], "tokens": [one.tokens for one in found],
                "steps": [one.steps for one in found], "compiles": [one.compiles for one in found],
                "curves": np.mean([one.curve for one in found], axis=0).round(4).tolist(), "why": method.why,
            })  # fmt: skip
    about = {
        "tokens": task.tokens, "rate": task.rate, "rows": len(task.rows), "step": task.prompts_per_step,
        "group": task.group_size, "length": task.length,
    }  # fmt: skip
    return {
        "key": family.key,
        "task": family.task.__name__,
        "title": family.title,
        "text": family.text,
        "about": about,
        "runs": runs,
    }


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error.

    >>> mean_and_error([1.0, 2.0, 3.0])
    (2.0, 0.5773502691896258)
    """
    x = np.asarray(values, np.float64)
    return float(x.mean()), float(x.std(ddof=1) / math.sqrt(len(x)))


def difference(values: Sequence[float], others: Sequence[float]) -> float:
    """The difference of two means, in standard errors of the difference; infinite if neither varies.

    >>> difference([1.0, 2.0, 3.0], [0.0, 1.0, 2.0])
    1.224744871391589
    """
    (a, a_error), (b, b_error) = mean_and_error(values), mean_and_error(others)
    error = math.hypot(a_error, b_error)
    return (a - b) / error if error else math.copysign(math.inf, a - b) if a != b else 0.0


def read_results(path: Path) -> Results:
    """The results so far; none if there is no file."""
    return json.loads(path.read_text()) if path.exists() else {"families": []}


def with_family(results: Results, found: dict[str, Any]) -> Results:
    """The results with a family's, instead of earlier ones of it, in the order of their keys."""
    others = [one for one in results["families"] if one["key"] != found["key"]]
    return {**results, "families": sorted([*others, found], key=lambda one: one["key"])}


def write_results(path: Path, results: Results) -> None:
    """Write them, a run a line."""
    text = json.dumps(results, indent=1)
    path.write_text(text + "\n")
