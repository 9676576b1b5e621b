"""`jaxrl lab`: compare methods on small tasks that are all JAX, over seeds and hyper-parameters."""

import dataclasses
import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from jaxrl_llm.cli.options import Checks, parse
from jaxrl_llm.core.arguments.ranges import Range
from jaxrl_llm.training.config.hyperparameters import options_of
from jaxrl_llm.utils.errors import InputError, require_choice

# The names of `in_jax.tasks.TASKS`, whose import takes seconds.
TASK_NAMES = (
    "addition", "sequence_lock", "sorting", "noisy_copying", "brackets", "maze", "correct_and_short", "long_tail",
    "noisy_verifier", "preferences", "text_maze", "tool_first", "search",
)  # fmt: skip


def lab_command(arguments: list[str]) -> int:
    """Compare methods on small tasks over seeds, all in JAX: --algorithms grpo rloo --tasks addition maze --output lab.

    A tiny decoder is trained on a task's examples until it earns some reward; each method goes on from there by
    reinforcement learning, once per seed. Results are rewards, pass@k, entropy, area under the curve, steps to a
    threshold, collapses and the probability of improvement over a baseline, with bootstrap intervals: results.json,
    RESULTS.md, curves.svg and finals.svg in the folder --output. The same command again goes on where it was, and more
    --algorithms and --tasks join what is there. Runs are spread over all devices; on CPUs, over the cores.
    """

    @dataclasses.dataclass(frozen=True)
    class Arguments:
        output: str
        """Folder of the results."""
        algorithms: tuple[str, ...] = ("grpo", "dapo", "rloo", "reinforce")
        """Methods of jaxrl algorithms, or all."""
        tasks: tuple[str, ...] = ("addition",)
        """addition, sequence_lock, sorting, noisy_copying, brackets, maze, correct_and_short, long_tail,
        noisy_verifier, preferences, text_maze, tool_first, search, or all."""
        seeds: Annotated[int, Range(least=1, most=2**16)] = 8
        """Runs of each method."""
        first_seed: Annotated[int, Range(least=0, most=2**30)] = 0
        """Number of the first of these runs; others repeat an experiment with fresh chance."""
        iterations: Annotated[int, Range(least=1, most=2**20)] = 200
        """Batches of each run."""
        prompts: int = 16
        """Prompts of a batch."""
        group_size: int = 8
        """Completions of each prompt."""
        minibatches: int = 1
        """Gradient steps for each batch; with more than one the later ones are off-policy."""
        learning_rate: float = 1e-3
        """Of Adam."""
        grid: tuple[str, ...] = ()
        """Numeric hyper-parameters to vary: learning_rate=1e-3,3e-3 clip_low=0.1,0.2. Methods run every combination of
        those that they have."""
        baseline: str = ""
        """Method to compare with; default: grpo if it is there, else the first."""
        threshold: float | None = None
        """Reward to reach; default: halfway from the start to the best."""
        warm_steps: int | None = None
        """Supervised steps before; default: by task."""

    args = parse(Arguments, arguments, "jaxrl lab", lab_command.__doc__, _checks)
    _spread_over_cores(args.seeds)
    from jaxrl_llm import algorithms  # here: importing JAX takes seconds, and reads what was set
    from jaxrl_llm.in_jax.lab.config import LabConfig, parse_grid
    from jaxrl_llm.in_jax.lab.laboratory import run_lab
    from jaxrl_llm.in_jax.settings import LabSettings
    from jaxrl_llm.in_jax.tasks import TASKS

    given = dataclasses.asdict(args) | {"grid": parse_grid(args.grid)}
    everything = {"algorithms": algorithms.names(), "tasks": TASKS}
    given |= {name: tuple(known) for name, known in everything.items() if given[name] == ("all",)}
    of_runs = {one.name: given.pop(one.name) for one in dataclasses.fields(LabSettings) if one.name in given}
    output = given.pop("output")
    config = LabConfig(**given, settings=LabSettings(**of_runs))
    outcomes = run_lab(config, Path(output), say=lambda text: print(text, flush=True))
    print(f"results: {Path(output) / 'RESULTS.md'}")
    return 1 if all(outcome.error for outcome in outcomes) else 0


def _checks(args: Any) -> Checks:
    yield partial(_check_folder, args.output)
    yield from (partial(options_of, name) for name in args.algorithms if args.algorithms != ("all",))
    yield from (partial(require_choice, "task", name, TASK_NAMES) for name in args.tasks if args.tasks != ("all",))


def _check_folder(output: str) -> None:
    """InputError unless the folder can be made, or is one."""
    path = Path(output)
    if not output or (path.exists() and not path.is_dir()) or not path.absolute().parent.is_dir():
        raise InputError(f"--output {output!r} cannot be written: give the name of a folder beside others that exist")


def _spread_over_cores(runs: int) -> None:
    """Have JAX see a CPU device for each core, at most one for each run; only where it has not begun, nor was told."""
    devices, threads = "--xla_force_host_platform_device_count", "--xla_cpu_multi_thread_eigen"
    flags = os.environ.get("XLA_FLAGS", "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if "jax" not in sys.modules and devices not in flags and min(cores, runs) > 1:
        # Runs side by side, each on a core of its own, take half of the time of runs that share the cores.
        alone = "" if threads in flags else f"{threads}=false"
        os.environ["XLA_FLAGS"] = " ".join(f"{flags} {devices}={min(cores, runs)} {alone}".split())
