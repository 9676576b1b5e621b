"""Soft thoughts against discrete ones: python -m experiments.soft_thinking --output /tmp/soft

A tiny Llama over letters is taught to answer a word, in thoughts first, with the word reversed: `abcde>edcba.edcba`.
The teaching is short, and one time in two thoughts and answer are both the word as it is. Then the model is rewarded
for the right letters of the answer alone, and learns by `soft_grpo`, whose thoughts are mixtures until the full stop,
or by `grpo`, with as many samples, at the same learning rate. Accuracy is greedy (of soft thoughts without noise), on
256 words that no run has seen; reward is of samples, a mean over steps. Prints a line for each run, then means over
seeds with their standard errors.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from experiments.diffusion import words
from experiments.experience.tiny import write_model
from jaxrl_llm.training.config import OptimizerConfig, TrainConfig
from jaxrl_llm.training.loop import train

LETTERS, SIZE, COPIES = "abcdefgh", 5, 0.5
REWARD = f"{Path(__file__).resolve()}:answered"
USUAL = {"kl_coefficient": 0.001}
METHODS: dict[str, dict[str, Any]] = {
    "grpo": USUAL,
    "soft_grpo": {**USUAL, "end": "."},
    "soft_grpo, sum": {**USUAL, "end": ".", "density": "sum"},
}


def examples(random: np.random.Generator, count: int) -> list[tuple[str, str]]:
    """Prompts, and thoughts and answers, half of them of the word as it is."""
    drawn = ["".join(LETTERS[i] for i in random.integers(0, 8, SIZE)) for _ in range(count)]
    told = [word if random.uniform() < COPIES else word[::-1] for word in drawn]
    return [(f"{word}>", f"{own}.{own}<end>") for word, own in zip(drawn, told, strict=True)]


def write_rows(path: Path, seed: int, count: int) -> str:
    """A file of tasks: a word, and it reversed."""
    rows = [{"prompt": f"{word}>", "answer": word[::-1]} for word in words(seed, count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def answered(completions: Any = (), answer: Any = (), **columns: Any) -> list[float]:
    """The share of the letters after the first full stop that are right."""
    pairs = [(text.partition(".")[2], word) for text, word in zip(completions, answer, strict=True)]
    return [sum(a == b for a, b in zip(text, word, strict=False)) / max(len(text), SIZE) for text, word in pairs]


def measured(folder: Path, name: str, given: argparse.Namespace, **others: Any) -> tuple[float, ...]:
    """Held-out accuracy before and after a run, per cent, and the mean reward of samples in its first 5 and last 10
    steps; the run is made if it is not there."""
    if not (folder / "summary.json").exists():
        train(TrainConfig(
            algorithm=name.partition(",")[0], hyperparameters=METHODS[name], output=str(folder), steps=given.steps,
            rewards=(REWARD,), prompts_per_step=16, group_size=8, max_new_tokens=2 * SIZE + 3, eval_size=256,
            log_completions_every=0, checkpoint_every=0,
            optimizer=OptimizerConfig(learning_rate=given.rate, warmup_steps=5), **others,
        ))  # fmt: skip
    summary = json.loads((folder / "summary.json").read_text())
    reward = [json.loads(line)["reward/mean"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    accuracy = (100 * summary[at]["accuracy"] for at in ("eval_before", "eval_after"))
    return (*accuracy, float(np.mean(reward[:5])), float(np.mean(reward[-10:])))


def main() -> None:
    """Run all methods and seeds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--output", type=Path, default=Path("runs/soft"))
    parser.add_argument("--methods", nargs="+", default=[*METHODS], choices=[*METHODS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--taught", type=int, default=400, help="supervised steps")
    parser.add_argument("--rate", type=float, default=1e-3)
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    asked, held = write_rows(given.output / "asked.jsonl", 1, 4096), write_rows(given.output / "held.jsonl", 2, 256)
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in given.methods}
    for seed in given.seeds:
        model = given.output / f"taught-{seed}"
        if not model.exists():
            write_model(model, LETTERS + ">.", seed, examples, given.taught)
        for name in given.methods:
            folder = given.output / f"{name.replace(', ', '-')}-{seed}"
            one = measured(folder, name, given, model=str(model), prompts=asked, eval_prompts=held, seed=seed)
            found[name].append(one)
            print(f"RESULT seed {seed}, {name}: {one[0]:.1f} to {one[1]:.1f} %", flush=True)
    print("\n| method | accuracy before | after | gain | gains | reward at first | at last | gain |\n|" + "---|" * 8)
    for name, runs in found.items():
        before, after, first, last = np.array(runs).T
        each = ", ".join(f"{gain:.1f}" for gain in after - before)
        print(
            f"| {name} | {before.mean():.1f} | {after.mean():.1f} | {with_error(after - before, 1)} | {each} "
            f"| {first.mean():.3f} | {last.mean():.3f} | {with_error(last - first, 3)} |"
        )


def with_error(values: np.ndarray, digits: int) -> str:
    """The mean over seeds with its standard error.

    >>> with_error(np.array([1.0, 3.0]), 1)
    '2.0 \u00b1 1.0'
    """
    error = values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return f"{values.mean():.{digits}f} \u00b1 {error:.{digits}f}"


if __name__ == "__main__":
    main()
