"""One run of the host loop that ends when its tokens are sampled, with what its policy scores on the way."""

from __future__ import annotations

import contextlib
import io
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import jaxrl_llm
from jaxrl_llm.core.source import MakeCurriculum, Source
from jaxrl_llm.learner.optimizer import OptimizerConfig
from jaxrl_llm.rewards import Reward
from jaxrl_llm.sampling import completion_texts
from jaxrl_llm.sampling.stats import Stats
from jaxrl_llm.training import loop
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.inputs import DatasetPrompts, Inputs
from jaxrl_llm.training.method import provided_by
from jaxrl_llm.training.setup import RunParts
from jaxrl_llm.training.source import source_of
from jaxrl_llm.utils.process import compiles

Row = dict[str, Any]
Judge = Callable[[str, Row], float]  # (completion, row) -> score
REWARDS = Path(__file__).with_name("rewards.py")
POINTS = 4  # measurements of a run


@dataclass(frozen=True)
class Task:
    """A set of prompts whose right answers are known."""

    rows: Sequence[Row]
    """With "prompt" and "answer", and the columns that methods read."""
    letters: str
    """Of the vocabulary."""
    judge: Judge
    """The true score, in [0, 1]."""
    reward: str = "exact"
    """Function of rewards.py that the runs get."""
    measured: Sequence[int] = ()
    """Places of the rows that count; by default all."""
    length: int = 2
    """Most tokens of a completion."""
    tokens: int = 20_000
    """Sampled tokens of a run."""
    prompts_per_step: int = 8
    group_size: int = 8
    rate: float = 3e-3
    """Learning rate."""
    examples: Any = None
    """What the policy is taught before, see `tiny.taught`."""
    taught_steps: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    """Further settings of the runs."""
    curriculum: MakeCurriculum | None = None
    """The order of the prompts; None: the method's."""


class Measured(NamedTuple):
    """What a run came to."""

    final: float  # mean score of samples at the end
    area: float  # mean over the measurements
    tokens: int  # sampled, all of them
    steps: int
    curve: list[float]
    compiles: int  # of programs, after the first measurement


class SpentError(Exception):
    """The run has sampled its tokens."""


def mean_score(task: Task, parts: RunParts, params: Any, seed: int, samples: int = 8) -> float:
    """Mean score of samples at temperature 1 of the prompts that count."""
    places = list(task.measured) or list(range(len(task.rows)))
    batch = jaxrl_llm.sample(
        parts.policy, params, [parts.prompts.ids[i] for i in places], jax.random.key(seed), group_size=samples,
        max_new_tokens=task.length,
    )  # fmt: skip
    texts, groups = completion_texts(parts.tokenizer, batch), np.asarray(batch.group)
    return float(np.mean([task.judge(text, task.rows[places[g]]) for text, g in zip(texts, groups, strict=True)]))


def counting(task: Task, config: TrainConfig, found: dict[str, Any]) -> Callable[[RunParts], Source]:
    """Makes the standard source, which raises SpentError once all tokens are sampled, and measures on the way.

    found: gets "curve", "tokens" and "steps". Tokens are those that the engines drew: repeated groups, trees and
    rewritten prompts with them.
    """

    def make(parts: RunParts) -> Source:
        stats: list[Stats] = []
        choose = task.curriculum
        order = None if choose is None else lambda rows: choose(rows, config.seed)
        inner = source_of(config, parts, lambda name: contextlib.nullcontext(), order, watch=stats.append)

        def measure(params: Any) -> None:
            found["curve"].append(mean_score(task, parts, params, seed=10_000 * config.seed + len(found["curve"])))

        def following(state: Any, params: Any, key: Any, step: int) -> Any:
            if found["tokens"] >= len(found["curve"]) * task.tokens / POINTS:
                if len(found["curve"]) == 1:
                    found["compiled"] = compiles()[0]
                measure(params)
            if found["tokens"] >= task.tokens:
                raise SpentError
            out = inner.next(state, params, key, step)
            tokens = sum(one.tokens for one in stats)
            if not tokens:  # the tokens of given texts, where nothing is sampled
                tokens = int(np.asarray(out[0].scored.batch.action_mask).sum())
            stats.clear()
            found["tokens"], found["steps"] = found["tokens"] + tokens, step + 1
            return out

        return inner._replace(next=following, provides=inner.provides | provided_by(config, parts.algorithm))

    return make


def measured(
    task: Task, model: Path, algorithm: str, hyperparameters: Mapping[str, Any], seed: int, **settings: Any
) -> Measured:
    """Train one policy on a task by the host loop until its tokens are sampled."""
    from experiments.experience import rewards

    folder = Path(tempfile.mkdtemp(prefix="experience-"))
    nominal = task.prompts_per_step * task.group_size * task.length
    config = TrainConfig(
        model=str(model), output=str(folder / "run"), prompts="given by the program", seed=seed,
        rewards=(f"{REWARDS}:{task.reward}",),
        algorithm=algorithm, hyperparameters=dict(hyperparameters), steps=8 * -(-task.tokens // nominal),
        **{
            "prompts_per_step": task.prompts_per_step, "group_size": task.group_size, "max_new_tokens": task.length,
            "optimizer": OptimizerConfig(learning_rate=task.rate), "remat": False,
            "epochs": 4, "eval_size": 0, "checkpoint_every": 0, "log_completions_every": 0, "tensorboard": False,
            **task.settings, **settings,
        },
    )  # fmt: skip
    inputs = Inputs(DatasetPrompts([dict(row) for row in task.rows], [], 0), [Reward(getattr(rewards, task.reward))])
    found: dict[str, Any] = {"curve": [], "tokens": 0, "steps": 0, "compiled": 0}
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            loop.train(config, inputs=inputs, source=counting(task, config, found))
        raise RuntimeError(f"the run ended after {found['steps']} steps, before its {task.tokens} tokens were sampled")
    except SpentError:
        pass
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    curve = found["curve"]
    late = compiles()[0] - found["compiled"]
    return Measured(curve[-1], float(np.mean(curve[1:])), found["tokens"], found["steps"], curve, late)
