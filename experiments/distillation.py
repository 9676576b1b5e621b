"""What a teacher's knowledge costs in sampled tokens: on-policy distillation against supervised steps on its texts.

    python -m experiments.distillation teacher on_policy texts --output /tmp/distillation

teacher    is SmolLM2 after the demo (sums of two numbers); the student is SmolLM2.
on_policy  trains the student by GKD at beta 1, KL(student || teacher) on the student's own samples.
texts      trains it by supervised steps on as many texts that the teacher sampled, and on twice as many.

A step has 64 responses either way, and the learning rate is the best of --rates by the KL after the last step. The KL
is that of the student to the teacher, nats a response: the mean log-ratio of 4 fresh samples to each of 96 held-out
questions. Tokens are those that were sampled for training.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_llm import load_policy, sample
from jaxrl_llm.cli.demo import demo_config, run
from jaxrl_llm.cli.program import main as command
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.data.load import load_prompts
from jaxrl_llm.learner.inputs import outputs_of
from jaxrl_llm.sampling import completion_texts
from jaxrl_llm.training.health.first_checks import read_value
from jaxrl_llm.training.loop import train

MODEL = "smollm2-135m"
PROMPTS, SAMPLES, NEW, HELD_OUT, STEPS = 8, 8, 16, 96, 8
DEMO = demo_config(MODEL, 0, "runs/demo", 9)


def questions(seed: int, count: int) -> list[str]:
    """Questions of the demo's task."""
    options = {name: read_value(text) for name, text in DEMO.task_options.items()}
    return [row["prompt"] for row in load_prompts(DEMO.prompts, task_options=options, seed=seed, limit=count)]


def sampled(model: str, asked: list[str], each: int, seed: int) -> tuple[Trajectories, list[str], Any, Any]:
    """`each` responses to every question, their texts, and the policy with its parameters."""
    policy, params, tokenizer = load_policy(model)
    talks: Any = [[{"role": "user", "content": text}] for text in asked]
    batch = sample(policy, params, talks, jax.random.key(seed), group_size=each, max_new_tokens=NEW)
    return batch, completion_texts(tokenizer, batch), policy, params


def divergence(student: str, teacher: str) -> tuple[float, float]:
    """KL(student || teacher), nats a response, and its standard error."""
    batch, _, policy, params = sampled(student, questions(999, HELD_OUT), 4, 11)
    _, other, _ = load_policy(teacher)
    own, theirs = (np.asarray(outputs_of(policy, weights, batch).logp) for weights in (params, other))
    ratios = ((own - theirs) * np.asarray(batch.action_mask)).sum(axis=1)
    by_question = ratios.reshape(HELD_OUT, -1).mean(axis=1)
    return float(by_question.mean()), float(by_question.std(ddof=1) / HELD_OUT**0.5)


def export(folder: Path) -> str:
    model = f"{folder}-model"
    if command(["export", str(folder), model]):
        raise SystemExit(f"{folder} was not exported")
    return model


def tokens_of(folder: Path) -> int:
    """Tokens of the responses that a run was trained on."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return round(sum(line["completion/tokens"] for line in lines))


def report(name: str, folder: Path, teacher: str, begin: float) -> None:
    kl, error = divergence(export(folder), teacher)
    row = {"run": name, "tokens": tokens_of(folder), "kl": kl, "error": error, "seconds": time.perf_counter() - begin}
    with (folder.parent / "results.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(f"{name}: {row['tokens']} tokens, KL {kl:.3f} ± {error:.3f}, {row['seconds']:.0f} s", flush=True)


def teacher(output: Path, rates: list[float]) -> None:
    run(MODEL, 0, str(output / "teacher"), 9)
    taught = export(output / "teacher")
    kl, error = divergence(MODEL, taught)
    print(f"before: KL {kl:.3f} ± {error:.3f}", flush=True)


def on_policy(output: Path, rates: list[float]) -> None:
    taught = str(output / "teacher-model")
    for rate in rates:
        begin, folder = time.perf_counter(), output / f"on_policy-{STEPS}-{rate:g}"
        optimizer = dataclasses.replace(DEMO.optimizer, learning_rate=rate, warmup_steps=0)
        train(
            dataclasses.replace(
                DEMO, output=str(folder), algorithm="gkd", hyperparameters={"beta": 1.0}, teacher=taught,
                steps=STEPS, minibatches=1, optimizer=optimizer, eval_size=0, log_completions_every=0,
            )
        )  # fmt: skip
        report(f"on-policy, {STEPS} steps, rate {rate:g}", folder, taught, begin)


def texts(output: Path, rates: list[float]) -> None:
    taught = str(output / "teacher-model")
    asked = questions(5, 2 * STEPS * PROMPTS)
    _, said, *_ = sampled(taught, asked, SAMPLES, 12)
    rows = [{"prompt": asked[at // SAMPLES], "completion": text} for at, text in enumerate(said)]
    path = output / "texts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for steps in (STEPS, 2 * STEPS):
        for rate in rates:
            begin, folder = time.perf_counter(), output / f"texts-{steps}-{rate:g}"
            arguments = [
                "train", "--algorithm", "sft", "--model", MODEL, "--prompts", str(path), "--output", str(folder),
                "--steps", str(steps), "--prompts-per-step", str(PROMPTS * SAMPLES), "--max-new-tokens", str(NEW),
                "--optimizer.learning-rate", str(rate), "--eval-size", "0", "--checkpoint-every", "0",
                "--no-tensorboard",
            ]  # fmt: skip
            if command(arguments):
                raise SystemExit(f"{folder} failed")
            report(f"texts, {steps} steps, rate {rate:g}", folder, taught, begin)


PARTS: dict[str, Callable[[Path, list[float]], None]] = {"teacher": teacher, "on_policy": on_policy, "texts": texts}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("what", nargs="+", choices=PARTS)
    parser.add_argument("--output", type=Path, required=True, help="a new folder, or one of an earlier part")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-5, 3e-5], help="learning rates to choose from")
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    for name in options.what:
        PARTS[name](options.output, options.rates)
    return 0


if __name__ == "__main__":
    sys.exit(main())
