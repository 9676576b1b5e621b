"""Shared by tests of whole runs: a configuration that takes seconds, rewards, and runs in separate processes."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.algorithms import CATALOGUE
from jaxrl_llm.cli.program import main
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.source import Source
from jaxrl_llm.learner.optimizer import OptimizerConfig, make_optimizer
from jaxrl_llm.models import load_policy
from jaxrl_llm.rewards.scoring import Scored
from jaxrl_llm.rollouts.runtime.replay_log import PartialSample, Pool
from jaxrl_llm.training import begin, loop, method
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.config.json_text import to_dict
from jaxrl_llm.training.folder.checkpoints import Checkpoints

MODEL = Path(__file__).resolve().parents[1] / "vectors" / "llama_tied"
TIMED = ("rollout/tokens_per_second", "rollout/first_token_seconds", "rollout/compiles", "rollout/moved_seconds")

# `even` looks at token ids, so that a policy that writes noise scores between 0 and 1, and seldom alike in a group.
REWARDS = """
import os
import time


def even(completions, completion_ids):
    time.sleep(float(os.environ.get("REWARD_SECONDS", 0)))
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def starts_even(completions, completion_ids):
    return [float(ids[0] % 2 == 0) for ids in completion_ids]


def constant(completions):
    return [0.5] * len(completions)


def picky(completions, completion_ids):
    if any(ids[-1] % 3 == 0 for ids in completion_ids):
        raise ValueError("a last token\\nthat three divides")
    return [1.0] * len(completions)


def hanging(completions):
    time.sleep(60)


def short(completions):
    return [1.0]


def unscored(completions):
    return [None] * len(completions)


def needy(completions, solution):
    return [1.0] * len(completions)


def from_answer(completions, answer):
    return [float(value) for value in answer]
"""


def _share_values() -> None:
    """Give runs of equal settings the same method and optimiser: update programs are kept by these.

    Else each run traces and loads its update again, which is most of its time.
    """
    make, made = method.make_algorithm, dict[str, Algorithm]()

    def make_algorithm(config: TrainConfig, given: Any = None) -> Algorithm:
        algorithm = make(config, given)
        if given is not None or config.algorithm not in CATALOGUE:
            return algorithm
        facts = config.algorithm, config.hyperparameters, config.model, config.max_new_tokens, config.steps
        return made.setdefault(repr((*facts, config.overlong_tokens, config.optimizer, algorithm)), algorithm)

    method.make_algorithm = make_algorithm
    method.make_optimizer = cache(make_optimizer)


_share_values()


def write_rewards(folder: Path) -> Path:
    """The file of the rewards above."""
    path = folder / "rewards.py"
    path.write_text(REWARDS)
    return path


def write_prompts(path: Path, count: int = 12, first: int = 0) -> Path:
    """A file of `count` prompts of 10 tokens, with the column "answer"."""
    rows = [{"prompt": f"number {i:02d}:", "answer": str(i % 2)} for i in range(first, first + count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def small_config(folder: Path, **changes: Any) -> TrainConfig:
    """A run into folder/run: a reference policy, nucleus sampling and two minibatches; 4 steps of 4 x 4 completions.

    Other data, rewards, steps and files reuse its compiled programs; other changes recompile.
    """
    reward = f"{write_rewards(folder)}:{changes.pop('reward', 'even')}"
    settings: dict[str, Any] = {
        "model": str(MODEL),
        "output": str(folder / "run"),
        "prompts": str(folder / "prompts.jsonl"),
        "rewards": (reward,),
        "steps": 4,
        "prompts_per_step": 4,
        "group_size": 4,
        "max_new_tokens": 6,
        "top_p": 0.9,
        "minibatches": 2,
        "optimizer": OptimizerConfig(learning_rate=2e-3),
        "remat": False,
        "eval_size": 4,
        "checkpoint_every": 2,
        "log_completions_every": 1,
        "tensorboard": False,
        **changes,
    }
    if settings["prompts"] == str(folder / "prompts.jsonl"):
        write_prompts(folder / "prompts.jsonl")
    return TrainConfig(**settings)


class Taken(NamedTuple):
    """What a run's source gave in a step."""

    scored: Scored
    before: Any  # states of the source
    after: Any
    params: Any  # of the policy then

    @property
    def pool(self) -> Pool:
        """Groups that go on in the next step."""
        return self.after.pool

    @property
    def waiting(self) -> list[PartialSample]:
        """Their samples, as far as they are."""
        return [answer for log in self.pool for answer in log.drawn.values()]


@contextlib.contextmanager
def watched(taken: list[Taken]) -> Iterator[None]:
    """Context manager that records what the sources of runs inside it return."""
    inner = begin.source_of

    def source_of(*arguments: Any) -> Source:
        source = inner(*arguments)

        def following(state: Any, params: Any, key: Any, step: int) -> Any:
            weights = jax.tree.map(np.array, params)  # the update donates them
            found, after = source.next(state, params, key, step)
            taken.append(Taken(found.scored, state, after, weights))
            return found, after

        return source._replace(next=following)

    begin.source_of = source_of
    try:
        yield
    finally:
        begin.source_of = inner


def train(config: TrainConfig, **options: Any) -> dict[str, Any]:
    """`loop.train` without the report, whose charts take longer than such a run."""
    before = loop.write_report
    loop.write_report = lambda folder: folder
    try:
        return loop.train(config, **options)
    finally:
        loop.write_report = before


@cache
def _scratch() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="jaxrl-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def finished_run() -> Path:
    """The folder of a run of `small_config` with its report, from the command line, which printed `said.txt` beside it.

    It is shared: copy it before changing it.
    """
    said = (_scratch() / "said.txt").open("w")
    with said, contextlib.chdir(_scratch()), contextlib.redirect_stdout(said):
        assert main(["train", *as_arguments(small_config(_scratch(), tensorboard=True))]) == 0
    return _scratch() / "run"


def resumed_copy(folder: Path, without: Iterable[int]) -> Path:
    """A copy of the run in folder/run, resumed as after a kill before the checkpoints of the steps `without`."""
    copy = folder / "copy" / "run"
    shutil.copytree(folder / "run", copy)
    for step in without:
        shutil.rmtree(copy / "checkpoints" / str(step), ignore_errors=True)
    loop.resume(str(copy))
    return copy


def as_arguments(config: TrainConfig) -> list[str]:
    """The options that give this configuration."""

    def options(values: Iterable[tuple[str, Any]], prefix: str) -> list[str]:
        out = []
        for name, value in values:
            flag = prefix + name.replace("_", "-")
            if isinstance(value, dict):
                out += options(value.items(), flag + ".")
            elif isinstance(value, bool):
                out.append(flag if value else f"{prefix}no-{name.replace('_', '-')}")
            elif isinstance(value, tuple):
                out += [flag, *value]
            elif value is not None:
                out.append(f"{flag}={value}")
        return out

    default, values = to_dict(TrainConfig()), to_dict(config)
    changed = {name: value for name, value in values.items() if value != default[name]}
    named = [("algorithm" if name == "hyperparameters" else name, value) for name, value in changed.items()]
    return options(named, "--")


def environment(**changes: str) -> dict[str, str]:
    """Environment of a process that computes as this one does and shares its compiled programs."""
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        **changes,
    }


def start(*arguments: str, code: str = "", **changes: str) -> subprocess.Popen[str]:
    """Start the command line in a process of its own, `code` running before it; `changes` are of its environment."""
    source = f"import sys\n{code}\nfrom jaxrl_llm.cli.program import main\nsys.exit(main(sys.argv[1:]))"
    return subprocess.Popen(
        [sys.executable, "-c", source, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**changes),
    )


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines; none where there is no file yet."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def finite_lines_of(folder: Path) -> list[dict[str, Any]]:
    """What is logged of the run in a test's folder, without infinite numbers."""
    lines = lines_of(folder / "run" / "metrics.jsonl")
    assert all(np.isfinite(value) for line in lines for value in line.values() if isinstance(value, float))
    return lines


def reproducible(path: Path) -> list[dict[str, Any]]:
    """The metrics of a run without those that depend on the machine's speed."""
    timed = ("seconds/", "goodput", "tokens_per_second", "compiles", *TIMED)
    return [{k: v for k, v in line.items() if not k.startswith(timed)} for line in lines_of(path)]


def final_params(run: Path) -> Any:
    """The parameters of a run's newest checkpoint, as NumPy arrays."""
    _, shapes, _ = load_policy(MODEL)
    restored = Checkpoints(run / "checkpoints").latest(shapes)
    assert restored is not None
    return jax.tree.map(np.asarray, restored.params)


def assert_equal_trees(a: Any, b: Any) -> None:
    """Bit for bit, dtypes too."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
