"""The laboratory as one call: every method on every task, and a folder with what was found.

Each task has a start, a tiny decoder after some supervised steps, from which every run continues by reinforcement
learning. Runs of one method are one program, seeds and points of the grid together, spread over the devices. They take
turns on a device, and each is bit by bit what it is alone (`LabSettings.exact`).
"""

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxrl_llm.algorithms import constructor, get
from jaxrl_llm.algorithms.parts import missing
from jaxrl_llm.core.arguments.ranges import check_number
from jaxrl_llm.core.needs import need_of
from jaxrl_llm.in_jax.lab.config import OPTIONS, Grid, LabConfig, Point, grid_parameters, points
from jaxrl_llm.in_jax.lab.outcome import CURVES, Measuring, RunOutcome, curves_of, measure
from jaxrl_llm.in_jax.lab.results import Start, outcome_line, read_results, start_line, write_results
from jaxrl_llm.in_jax.lab.statistics import Floats
from jaxrl_llm.in_jax.rollout import evaluate_task
from jaxrl_llm.in_jax.settings import LabSettings, check_lab_settings
from jaxrl_llm.in_jax.tasks import TASKS, Task, get_task
from jaxrl_llm.in_jax.train import (
    LABORATORY,
    QUICK_COMPILE,
    build,
    make_train,
    task_provides,
    unsupported_parts,
    warm_start,
)
from jaxrl_llm.models.parameters import without_critic
from jaxrl_llm.models.policy import Params
from jaxrl_llm.utils.errors import InputError, gather, require_choice, unknown
from jaxrl_llm.utils.process import use_compile_cache


def run_lab(
    config: LabConfig, folder: Path, say: Callable[[str], None] = print, devices: Sequence[Any] = ()
) -> list[RunOutcome]:
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
        known = set[str]().union(*map(grid_parameters, config.algorithms))
        for name in config.grid:
            if name not in known:
                raise unknown("hyper-parameter of --grid", name, known)
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
    gather(*tasks, grid, *([baseline] if config.baseline else []), once, partial(check_lab_settings, config.settings))


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


RUNS = "runs"  # the mesh's axis
# What a hyper-parameter that shapes the program may raise where it is traced, beside InputError.
UNTRACEABLE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerBoolConversionError,
    jax.errors.TracerIntegerConversionError,
)


class Ran(NamedTuple):
    """R runs."""

    params: Any  # arrays [R, ...] on the host
    metrics: dict[str, Floats]  # f64[R, iterations]
    seconds: dict[str, float]  # "compile" and "run"


def lacking(name: str, task: Task) -> list[str]:
    """What a method lacks in the laboratory: needs that only some runs provide, and what precedes the batch."""
    method = get(name)
    named = missing(name)
    needs = {need_of(need).name for need in method.needs if need_of(need).provider}
    return [*named, *sorted(needs - set(named)), *sorted(unsupported_parts(method, task))]


def check_points(name: str, settings: LabSettings, task: Task, grid: Grid) -> None:
    """InputError where a method refuses a point of the grid. Ranges are checked of plain numbers only."""
    for point in points(grid, grid_parameters(name)):
        check_number("learning_rate", point.get("learning_rate", 0), least=0)
        build(constructor(name), settings, task, {**LABORATORY.get(name, {}), **point})


def run_method(
    name: str,
    how: Measuring,
    settings: LabSettings,
    start: Params,
    seeds: int,
    grid: Grid,
    mesh: Mesh,
    first_seed: int = 0,
) -> list[RunOutcome]:
    """Train a method with so many seeds, from `first_seed` on, at each point of the grid; an outcome for each.

    A method's hyper-parameters are the catalogue's defaults, except those of the grid and of `LABORATORY`; those of
    the grid that it does not have are left out. The same seed is the same run, however many others there are. Where the
    method refuses its hyper-parameters, the outcome says so (`Outcome.error`).
    """
    task = how.task
    make = constructor(name)
    without = tuple(need for need in lacking(name, task) if need not in task_provides(task))
    note = f"without {', '.join(without)}" if without else ""
    known = inspect.signature(make).parameters
    at = points(grid, grid_parameters(name))
    fixed = LABORATORY.get(name, {})
    several = [key for key in at[0] if len(grid[key]) > 1]
    traced = [key for key in several if key == "learning_rate" or "float" in str(known[key].annotation)]
    try:
        check_points(name, settings, task, grid)
        train = make_train(task, name, settings, without)
        run = partial(_at_points, train, fixed, start, range(first_seed, first_seed + seeds), mesh)
        try:
            ran = run(at, traced)
        except (InputError, *UNTRACEABLE):
            if not traced:
                raise
            ran = run(at, [])
    except InputError as error:
        none = {"compile": 0.0, "run": 0.0}
        return [RunOutcome(task.name, name, point, {}, {}, none, note, str(error)) for point in at]
    outcomes = []
    for point, found in zip(at, ran, strict=True):
        measures = measure(found.metrics, *evaluate_runs(found.params, task, settings), how)
        outcomes.append(RunOutcome(task.name, name, point, measures, curves_of(found.metrics), found.seconds, note))
    return outcomes


def _at_points(
    train: Any, fixed: Mapping[str, Any], start: Params, seeds: range, mesh: Mesh, at: list[Point], traced: list[str]
) -> list[Ran]:
    """The runs of each point: in one program where only the hyper-parameters in `traced` differ."""
    programs: dict[tuple[float, ...], list[int]] = {}
    for number, point in enumerate(at):
        programs.setdefault(tuple(value for name, value in point.items() if name not in traced), []).append(number)
    found: dict[int, Ran] = {}
    for numbers in programs.values():
        plain = {name: value for name, value in at[numbers[0]].items() if name not in traced}
        keys = [seed_key(seed) for _ in numbers for seed in seeds]
        each = [{name: at[number][name] for name in traced} for number in numbers for _ in seeds]
        ran = together(train, keys, each, {**fixed, **plain}, start, mesh)
        for i, number in enumerate(numbers):
            mine = slice(i * len(seeds), (i + 1) * len(seeds))
            params, metrics = jax.tree.map(lambda x, mine=mine: x[mine], (ran.params, ran.metrics))
            found[number] = Ran(params, metrics, ran.seconds)
    return [found[number] for number in range(len(at))]


def seed_key(seed: int) -> jax.Array:
    """The key of a seed's run."""
    return jax.random.fold_in(jax.random.key(1), seed)


def together(
    train: Any, keys: Sequence[jax.Array], each: Sequence[Point], fixed: Mapping[str, Any], start: Params, mesh: Mesh
) -> Ran:
    """R runs in one program, an equal number on each device of the mesh, whose only axis is "runs".

    keys, each: R keys, and hyper-parameters by the same names, which are traced. fixed: those that are the same for
    all, which may be left out of the program (a coefficient of 0). Where the devices do not divide R, some runs are
    made twice, and dropped.
    """
    count = len(keys)
    filled = [i % count for i in range(-(-count // mesh.size) * mesh.size)]
    stacked = jnp.stack([keys[i] for i in filled])
    traced = {name: jnp.array([each[i][name] for i in filled], jnp.float32) for name in each[0]}

    def one(key: jax.Array, traced: dict[str, jax.Array], start: Params) -> tuple[Any, dict[str, jax.Array]]:
        run = train(key, {**fixed, **traced}, start)
        # A critic ends with its run.
        return without_critic(run.params), {name: run.metrics[name] for name in CURVES}

    function: Any = jax.vmap(one, (0, 0, None))
    if mesh.size > 1:
        rows, all_ = PartitionSpec(RUNS), PartitionSpec()
        function = jax.shard_map(function, mesh=mesh, in_specs=(rows, rows, all_), out_specs=rows, check_vma=False)
    begin = time.perf_counter()
    program = jax.jit(function, compiler_options=QUICK_COMPILE).lower(stacked, traced, start).compile()
    compiled = time.perf_counter()
    params, metrics = jax.tree.map(lambda x: np.asarray(x)[:count], program(stacked, traced, start))
    seconds = {"compile": compiled - begin, "run": time.perf_counter() - compiled}
    return Ran(params, {name: np.asarray(value, np.float64) for name, value in metrics.items()}, seconds)


def evaluate_runs(
    params: Any, task: Task, settings: LabSettings, prompts: int = 64, samples: int = 16
) -> tuple[Floats, Floats]:
    """Rewards, and 1 where the completion is right, f64[R, prompts, samples], of fresh prompts, the same for all runs.

    params: arrays [R, ...]. One program for all methods of a task.
    """
    evaluate = partial(evaluate_task, task=task, settings=settings, prompts=prompts, samples=samples)
    found = []
    for i in range(len(jax.tree.leaves(params)[0])):
        of_run = evaluate(jax.tree.map(lambda x, i=i: x[i], params), key=jax.random.key(2))
        found.append(jax.tree.map(lambda x: np.asarray(x, np.float64), (of_run["reward"], of_run[task.correct])))
    rewards, right = (np.stack(x).reshape(-1, prompts, samples) for x in zip(*found, strict=True))
    return rewards, right
