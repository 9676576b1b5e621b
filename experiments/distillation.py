"""What a teacher's knowledge costs in sampled tokens: on-policy distillation against supervised steps on its texts.

    python -m experiments.distillation --output /tmp/distillation

The teacher is SmolLM2 after the demo (sums of two numbers); the student is SmolLM2. Two ways to teach it, each with
every learning rate of --rates and every seed of --seeds, by the same steps of --prompts x --samples responses to the
same questions:

on_policy  the student samples them, and learns by GKD at beta 1, KL(student || teacher) on them.
texts      the teacher samples them, and the student learns them by supervised steps.

After every step the KL of the student to the teacher is measured, nats a response: the mean log-ratio of 4 fresh
samples to each of 48 held-out questions. The last lines say after how many sampled tokens it is half of what it was at
first, with straight lines between steps.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from jaxrl_llm import algorithms, load_policy, sample
from jaxrl_llm.cli.demo import demo_config, run
from jaxrl_llm.cli.program import main as command
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.data.load import load_prompts
from jaxrl_llm.distributed import mesh_of
from jaxrl_llm.learner.microbatches import plan_steps
from jaxrl_llm.learner.outputs import outputs_of
from jaxrl_llm.learner.step import Learner, learn_batch
from jaxrl_llm.learner.teacher import FrozenPolicy
from jaxrl_llm.learner.train_state import init_state
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.training.health.first_checks import read_value

MODEL = "smollm2-135m"
NEW, HELD_OUT, EACH = 16, 48, 4  # tokens of a response, held-out questions, samples of each
DEMO = demo_config(MODEL, 0, "runs/demo", 9)
METHODS = {"on_policy": ("gkd", {"beta": 1.0}), "texts": ("sft", {})}


def questions(seed: int, count: int) -> list[str]:
    """Questions of the demo's task."""
    options = {name: read_value(text) for name, text in DEMO.task_options.items()}
    return [row["prompt"] for row in load_prompts(DEMO.prompts, task_options=options, seed=seed, limit=count)]


def sampled(policy: Policy, params: Params, asked: list[str], each: int, key: jax.Array) -> Trajectories:
    """`each` responses to every question."""
    talks: Any = [[{"role": "user", "content": text}] for text in asked]
    batch = sample(policy, params, talks, key, group_size=each, max_new_tokens=NEW)
    return batch.replace(reward=np.zeros(len(batch.tokens), np.float32))


def divergence(policy: Policy, params: Params, teacher: Params) -> tuple[float, float]:
    """KL(student || teacher), nats a response, and its standard error."""
    batch = sampled(policy, params, questions(999, HELD_OUT), EACH, jax.random.key(11))
    theirs = np.asarray(outputs_of(policy, teacher, batch, plan_steps(batch)).logp)
    ratios = ((np.asarray(batch.behaviour_logp) - theirs) * np.asarray(batch.action_mask)).sum(axis=1)
    by_question = ratios.reshape(HELD_OUT, -1).mean(axis=1)
    return float(by_question.mean()), float(by_question.std(ddof=1) / HELD_OUT**0.5)


def curve(way: str, teacher: Params, rate: float, seed: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Sampled tokens and KL before the first step and after each."""
    steps, prompts, samples = options.steps, options.prompts, options.samples
    policy, params, _ = load_policy(MODEL)
    name, settings = METHODS[way]
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))
    learner = Learner(
        policy, algorithms.get(name, **settings), optimizer, mesh_of("fsdp=1"), teacher=FrozenPolicy(policy, teacher)
    )
    state, memory, tokens, found = init_state(params, optimizer), None, 0, list[dict[str, Any]]()
    for step in range(steps + 1):
        kl, error = divergence(policy, state.params, teacher)
        found.append({"way": way, "rate": rate, "seed": seed, "step": step, "tokens": tokens, "kl": kl, "error": error})
        print(json.dumps(found[-1]), flush=True)
        if step < steps:
            asked = questions(5 + seed, steps * prompts)[step * prompts : (step + 1) * prompts]
            author = state.params if way == "on_policy" else teacher
            batch = sampled(policy, author, asked, samples, jax.random.fold_in(jax.random.key(seed), step))
            tokens += int(np.asarray(batch.action_mask).sum())
            if memory is None:
                memory = learner.algorithm.transform.init(None)
            learned = learn_batch(learner, state, memory, batch, seed=(seed, step))
            state, memory = learned.state, learned.memory
    return found


def tokens_to_half(found: list[dict[str, Any]]) -> float:
    """Sampled tokens after which the KL is half of what it was at first; infinite where it is not reached."""
    half = found[0]["kl"] / 2
    for before, after in itertools.pairwise(found):
        if after["kl"] <= half:
            share = (before["kl"] - half) / (before["kl"] - after["kl"])
            return float(before["tokens"] + share * (after["tokens"] - before["tokens"]))
    return float("inf")


def teacher_model(output: Path) -> Params:
    """The demo's model, trained where the folder has none yet."""
    folder = output / "teacher-model"
    if not folder.exists():
        run(MODEL, 0, str(output / "teacher"), 9)
        if command(["export", str(output / "teacher"), str(folder)]):
            raise SystemExit("the teacher was not exported")
    return load_policy(str(folder))[1]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--output", type=Path, required=True, help="a new folder, or one with a teacher")
    parser.add_argument("--ways", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-5, 3e-5, 1e-4], help="learning rates")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of questions and samples")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=4, help="questions of a step")
    parser.add_argument("--samples", type=int, default=4, help="responses to each")
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    teacher, lines = teacher_model(options.output), []
    with (options.output / "curves.jsonl").open("a") as file:
        for rate in options.rates:
            for way in options.ways:
                each = [curve(way, teacher, rate, seed, options) for seed in options.seeds]
                file.writelines(json.dumps(row) + "\n" for found in each for row in found)
                file.flush()
                costs, last = [tokens_to_half(found) for found in each], [found[-1]["kl"] for found in each]
                shown = ", ".join(f"{cost:.0f}" for cost in costs)
                lines.append(f"{way:10} rate {rate:g}: half after {shown} tokens, KL {np.mean(last):.2f} at the end")
    print("\n".join(lines), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
