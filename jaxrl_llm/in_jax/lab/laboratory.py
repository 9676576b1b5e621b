"""The laboratory as one call: every method on every task, and a folder with what was found.

Each task has a start, a tiny decoder after some supervised steps, from which every run continues by reinforcement
learning.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.algorithms import constructor
from jaxrl_llm.in_jax.lab.config import OPTIONS, LabConfig, hyperparameters_of
from jaxrl_llm.in_jax.lab.outcome import Measuring, Outcome
from jaxrl_llm.in_jax.lab.results import Start, outcome_line, read_results, start_line, write_results
from jaxrl_llm.in_jax.lab.runs import RUNS, check_points, run_method
from jaxrl_llm.in_jax.rollout import evaluate_task
from jaxrl_llm.in_jax.settings import check_settings
from jaxrl_llm.in_jax.tasks import TASKS, Task, get_task
from jaxrl_llm.in_jax.train import warm_start
from jaxrl_llm.utils.errors import InputError, gather, require_choice
from jaxrl_llm.utils.process import use_compile_cache


def run_lab(
    config: LabConfig, folder: Path, say: Callable[[str], None] = print, devices: Sequence[Any] = ()
) -> list[Outcome]:
    """Run what the folder does not hold yet, write it there after each method, and return all outcomes.

    say: is told of each outcome. devices: over which the runs are spread; empty: all. Raises InputError for unknown
    names and settings out of range, and for a folder with results of other settings.
    """
    check_config(config)
    use_compile_cache()
    starts, outcomes = read_results(folder, config)
    mesh = Mesh(np.array(devices or jax.devices()), (RUNS,))
    folder.mkdir(parents=True, exist_ok=True)
    for name in config.tasks:
        there = {o.method for o in outcomes if o.task == name}
        methods = [method for method in config.algorithms if method not in there]
        if not methods:
            continue
        task, steps = get_task(name, **OPTIONS.get(name, {})), config.steps_before(name)
        params = warm_start(jax.random.key(0), task, config.settings, steps)
        starts[name] = _start(task, config, steps, params)
        say(start_line(name, starts[name]))
        how = Measuring(task, starts[name]["threshold"], config.window)
        for method in methods:
            new = run_method(method, how, config.settings, params, config.seeds, config.grid, mesh, config.first_seed)
            outcomes += new
            for outcome in new:
                say(outcome_line(outcome))
            write_results(folder, config, starts, outcomes)
    write_results(folder, config, starts, outcomes)
    return outcomes


def check_config(config: LabConfig) -> None:
    """InputError, with all problems, for what can be known before anything is compiled."""
    gather(*(partial(constructor, name) for name in config.algorithms))

    def grid() -> None:
        for name in config.grid:
            if not any(name in hyperparameters_of(method) for method in config.algorithms):
                raise InputError(f"--grid {name}: none of the algorithms has this hyper-parameter")
        refused: list[InputError] = []
        for name in config.algorithms if config.grid and set(config.tasks) <= set(TASKS) else ():
            try:
                check_points(name, config.settings, get_task(config.tasks[0]), config.grid)
            except InputError as error:
                refused.append(error)
        if refused and len(refused) == len(config.algorithms):
            raise refused[0]

    def once() -> None:
        for what, named in (("algorithms", config.algorithms), ("tasks", config.tasks)):
            if twice := [name for name in named if named.count(name) > 1]:
                raise InputError(f"{what} names {twice[0]} twice: name each once")

    tasks = (partial(require_choice, "task", name, TASKS) for name in config.tasks)
    baseline = partial(require_choice, "baseline among the algorithms", config.baseline, config.algorithms)
    gather(*tasks, grid, *([baseline] if config.baseline else []), once, partial(check_settings, config.settings))


def _start(task: Task, config: LabConfig, steps: int, params: Any) -> Start:
    """What is known of a task before reinforcement learning."""
    found = evaluate_task(params, task, config.settings, jax.random.key(2))
    rewards = {name: round(float(value.mean()), 4) for name, value in found.items()}
    half = 0.5 * (rewards["reward"] + task.best)
    return {
        "rewards": rewards,
        "best": task.best,
        "threshold": round(half if config.threshold is None else config.threshold, 4),
        "steps": steps,
    }
