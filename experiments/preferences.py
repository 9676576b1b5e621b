"""A made preference: answers with fewer commas. DPO, and a reward model that GRPO then trains with, on SmolLM2.

    python -m experiments.preferences dpo reward_model grpo --output /tmp/preferences

The data are the model's own samples, eight answers to each of --prompts questions, in the order of their commas: the
first and the last are a pair, the second and the last but one, and so on, where they differ by three at least. Then

dpo           trains on the first pair of each question. Its win rate is how often its sampled answer to a held-out
              question has fewer commas than one of the first model, ties counting half; its KL is the mean log-ratio of
              its own answers.
reward_model  trains on all pairs, and is evaluated on those of held-out questions.
grpo          samples with the reward model's score as the only reward; the true reward is the number of commas.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_llm import load_policy, sample
from jaxrl_llm.cli.program import main as command
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.learner.outputs import outputs_of
from jaxrl_llm.reporting.statistics import wilson_interval
from jaxrl_llm.sampling import completion_texts

MODEL = "smollm2-135m"
PLACES = (
    "kitchen", "garden", "school", "library", "harbour", "forest", "desert", "museum", "theatre", "market", "farm",
    "station", "hospital", "bakery", "castle", "island", "cave", "bridge", "tower", "village", "office", "factory",
    "stadium", "church", "beach", "river", "lake", "mountain", "valley", "city",
)  # fmt: skip
ASKED = (
    "What do people do in a {}?", "Describe a {}.", "Why would one go to a {}?", "Who works in a {}?",
    "What can you hear in a {}?", "Tell me about an old {}.", "What is dangerous in a {}?", "Draw a {} in words.",
)  # fmt: skip
NEW, HELD_OUT, EACH, APART = 48, 48, 8, 3


def commas(text: str) -> int:
    """What is preferred to be few."""
    return text.count(",")


def questions() -> list[str]:
    """All questions, the held-out ones first."""
    every = [text.format(place) for place in PLACES for text in ASKED]
    return [every[i] for i in np.random.default_rng(0).permutation(len(every))]


def answers(model: str, asked: list[str], each: int, seed: int) -> tuple[list[str], Trajectories, Any, Any]:
    """Texts, each * len(asked) of them, their batch, and the policy with its parameters."""
    policy, params, tokenizer = load_policy(model)
    batch = sample(
        policy, params, [[{"role": "user", "content": text}] for text in asked], jax.random.key(seed),
        group_size=each, max_new_tokens=NEW,
    )  # fmt: skip
    return completion_texts(tokenizer, batch), batch, policy, params


def write_pairs(folder: Path, prompts: int) -> None:
    """pairs.jsonl and held_out.jsonl."""
    asked = questions()[: HELD_OUT + prompts]
    texts, *_ = answers(MODEL, asked, EACH, 1)
    held_out = set(asked[:HELD_OUT])
    files: dict[str, list[str]] = {"pairs": [], "held_out": [], "all_pairs": [], "all_held_out": []}
    for number, text in enumerate(asked):
        order = sorted(texts[EACH * number : EACH * (number + 1)], key=commas)
        name = "held_out" if text in held_out else "pairs"
        for place in range(EACH // 2):
            chosen, rejected = order[place], order[-1 - place]
            if commas(rejected) - commas(chosen) >= APART:
                line = json.dumps({"prompt": text, "chosen": chosen, "rejected": rejected}) + "\n"
                files[f"all_{name}"].append(line)
                files[name] += [line] * (place == 0)
    for name, lines in files.items():
        (folder / f"{name}.jsonl").write_text("".join(lines))
        print(f"{name}: {len(lines)} pairs", flush=True)


def train(folder: Path, name: str, algorithm: str, every: bool, *more: str, evaluated: bool = True) -> float:
    """Run a method on the first or on all pairs, export it; seconds. evaluated: on held-out pairs."""
    begin = time.perf_counter()
    pairs, held_out = (str(folder / f"{'all_' * every}{kind}.jsonl") for kind in ("pairs", "held_out"))
    evaluation = ["--eval-prompts", held_out] if evaluated else ["--eval-size", "0"]
    arguments = [
        "train", "--algorithm", algorithm, "--model", MODEL, "--output", str(folder / name), "--prompts", pairs,
        *evaluation, "--max-prompt-tokens", "64", "--max-new-tokens", str(NEW), "--no-tensorboard",
        "--checkpoint-every", "0", *more,
    ]  # fmt: skip
    if command(arguments) or command(["export", str(folder / name), str(folder / f"{name}-model")]):
        raise SystemExit(f"{name} failed")
    return time.perf_counter() - begin


def win_rate(folder: Path, model: str) -> str:
    """Of sampled answers of a model against the first one's, with a 95 % interval, and its KL."""
    asked, each = questions()[:HELD_OUT], 2
    first, *_ = answers(MODEL, asked, each, 7)
    texts, batch, policy, params = answers(model, asked, each, 8)
    counts = [(commas(a), commas(b)) for a, b in zip(texts, first, strict=True)]
    wins = sum((a < b) + 0.5 * (a == b) for a, b in counts)
    low, high = wilson_interval(round(wins), len(texts))
    _, reference, _ = load_policy(MODEL)
    action = np.asarray(batch.action_mask)
    own, other = (np.asarray(outputs_of(policy, weights, batch).logp) for weights in (params, reference))
    kl = ((own - other) * action).sum(axis=1).mean()
    length = action.sum(axis=1).mean()
    return (
        f"win rate {wins / len(texts):.1%} ({low:.1%} to {high:.1%}), commas {np.mean([a for a, _ in counts]):.2f} and "
        f"{np.mean([b for _, b in counts]):.2f}, KL {kl:.2f} nats an answer, {length:.1f} tokens an answer"
    )


def dpo(folder: Path) -> None:
    print("before: " + win_rate(folder, MODEL), flush=True)
    seconds = train(
        folder, "dpo", "dpo", False, "--prompts-per-step", "8", "--steps", "24", "--optimizer.learning-rate", "2e-5",
        "--reference-memory", "disk",
    )  # fmt: skip
    print(f"dpo: {seconds:.0f} s, {win_rate(folder, str(folder / 'dpo-model'))}", flush=True)


def reward_model(folder: Path) -> None:
    seconds = train(
        folder, "judge", "reward_model", True, "--prompts-per-step", "8", "--steps", "120", "--optimizer.learning-rate",
        "1e-4", "--eval-size", "64",
    )  # fmt: skip
    found = json.loads((folder / "judge" / "summary.json").read_text())["eval_after"]
    print(f"reward model: {seconds:.0f} s, accuracy {found['accuracy']:.1%} on {found['prompts']} pairs", flush=True)


def grpo(folder: Path) -> None:
    seconds = train(
        folder, "grpo", "grpo", False, "--rewards", f"model:{folder}/judge-model", "--prompts-per-step", "4",
        "--group-size", "8", "--steps", "16", "--optimizer.learning-rate", "1e-5", evaluated=False,
    )  # fmt: skip
    lines = [json.loads(line) for line in (folder / "grpo" / "metrics.jsonl").read_text().splitlines()]
    for name in ("reward/mean", "entropy"):
        ends = [np.mean([line[name] for line in some]) for some in (lines[:3], lines[-3:])]
        print(f"grpo: {name} {ends[0]:.2f} to {ends[1]:.2f}", flush=True)
    print(f"grpo: {seconds:.0f} s, {win_rate(folder, str(folder / 'grpo-model'))}", flush=True)


PARTS: dict[str, Callable[[Path], None]] = {"dpo": dpo, "reward_model": reward_model, "grpo": grpo}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("what", nargs="+", choices=PARTS)
    parser.add_argument("--output", type=Path, required=True, help="a new folder, or one of an earlier part")
    parser.add_argument("--prompts", type=int, default=192, help="questions of the training pairs, at most 192")
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    if not (options.output / "pairs.jsonl").exists():
        write_pairs(options.output, options.prompts)
    for name in options.what:
        PARTS[name](options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
