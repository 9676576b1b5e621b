"""Learning of a masked-diffusion model from rewards: python -m experiments.diffusion --output /tmp/diffusion

A tiny LLaDA over letters, from random weights, is taught by `masked_sft` to answer a word with its first letter, five
times over, or with its last one, seven times in ten the first. Then only the last one is rewarded, and it learns with
as many samples by each method, `grpo` and `bgpo`, at the temperature 1.2. Accuracy is greedy, on 256 words that no run
has seen. Prints a line for each run, then means over seeds with their standard errors.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.experience.tiny import tokenizer_of
from jaxrl_llm.cli.program import main as command
from jaxrl_llm.models import Policy, init_params, save_policy
from jaxrl_llm.models.config import Unmasking
from jaxrl_llm.models.families import from_hf
from jaxrl_llm.training.config import OptimizerConfig, TrainConfig
from jaxrl_llm.training.loop import train

LETTERS, SIZE = "abcdefgh", 5
FIRST = 0.7  # of the words that are taught, those answered with their first letter
REWARD = f"{Path(__file__).resolve()}:right_letters"
METHODS: dict[str, dict[str, Any]] = {"grpo": {"kl_coefficient": 0.0}, "bgpo": {}}


def words(seed: int, count: int) -> list[str]:
    """Different words, the same for each seed; those of one seed are among no other's that is as long."""
    random = np.random.default_rng(0)
    every = random.permutation(len(LETTERS) ** SIZE)[seed * 8192 :][:count]
    places = len(LETTERS) ** np.arange(SIZE)
    return ["".join(LETTERS[digit] for digit in number // places % len(LETTERS)) for number in every]


def write_rows(path: Path, seed: int, count: int, first: float = 0.0) -> str:
    """A file of tasks: a word, and its last letter five times, or with probability `first` its first one."""
    of_first = np.random.default_rng(seed).uniform(size=count) < first
    rows = [
        {"prompt": f"{word}>", "answer": SIZE * word[0 if by_first else -1]}
        for word, by_first in zip(words(seed, count), of_first, strict=True)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_model(folder: Path, seed: int) -> str:
    """A folder with random weights: a block has room for a word and the end."""
    tokenizer = tokenizer_of(LETTERS + ">")
    end = len(LETTERS) + 1
    config = from_hf({
        "model_type": "llada", "d_model": 48, "n_heads": 3, "n_kv_heads": 3, "n_layers": 2, "mlp_hidden_size": 96,
        "vocab_size": end + 2, "max_sequence_length": 32, "rope_theta": 10_000.0, "mask_token_id": end + 1,
        "eos_token_id": end, "weight_tying": False,
    })  # fmt: skip
    config = dataclasses.replace(config, unmasking=Unmasking(end + 1, SIZE + 2, 1))
    policy = Policy(config, tokenizer=tokenizer)
    params = init_params(jax.random.key(seed), config, scale=48**-0.5)
    return str(save_policy(folder, policy, params, tokenizer, overwrite=True))


def right_letters(completions: Any = (), answer: Any = (), **columns: Any) -> list[float]:
    """1 for the right word."""
    return [float(text == word) for text, word in zip(completions, answer, strict=True)]


def accuracies(folder: Path, config: TrainConfig) -> tuple[float, float]:
    """Held-out accuracy before and after a run, per cent; the run is made if it is not there."""
    if not (folder / "summary.json").exists():
        train(dataclasses.replace(config, output=str(folder)))
    summary = json.loads((folder / "summary.json").read_text())
    return tuple(100 * summary[name]["accuracy"] for name in ("eval_before", "eval_after"))  # type: ignore[return-value]


def teach(usual: TrainConfig, folder: Path, model: Path) -> None:
    """Supervised steps, and a model's folder."""
    start = dataclasses.replace(
        usual, output=str(folder), algorithm="masked_sft", hyperparameters={"samples": 4, "column": "answer"},
        prompts_per_step=64, group_size=1, rewards=("given",), eval_prompts=None, eval_size=0, steps=500,
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=20, schedule="linear"),
    )  # fmt: skip
    train(start)
    if command(["export", str(folder), str(model)]):
        raise SystemExit(f"{folder} was not exported")


def main() -> None:
    """Run all methods and seeds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--output", type=Path, default=Path("runs/diffusion"))
    parser.add_argument("--methods", nargs="+", default=[*METHODS], choices=[*METHODS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--temperature", type=float, default=1.2)
    parser.add_argument("--rate", type=float, default=1e-3)
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    taught = write_rows(given.output / "taught.jsonl", 0, 8192, FIRST)
    asked = write_rows(given.output / "asked.jsonl", 1, 4096)
    held = write_rows(given.output / "held.jsonl", 2, 256)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in given.methods}
    for seed in given.seeds:
        usual = TrainConfig(
            model=write_model(given.output / f"model-{seed}", seed), prompts=taught, seed=seed, max_new_tokens=SIZE + 2,
            eval_prompts=held, eval_size=256, log_completions_every=0,
        )  # fmt: skip
        model = given.output / f"taught-{seed}"
        if not model.exists():
            teach(usual, given.output / f"start-{seed}", model)
        for name in given.methods:
            config = dataclasses.replace(
                usual, algorithm=name, hyperparameters=METHODS[name], steps=given.steps, prompts=asked,
                rewards=(REWARD,), prompts_per_step=16, group_size=8, temperature=given.temperature, model=str(model),
                optimizer=OptimizerConfig(learning_rate=given.rate, warmup_steps=5),
            )  # fmt: skip
            one = accuracies(given.output / f"{name}-{seed}", config)
            found[name].append(one)
            print(f"RESULT seed {seed}, {name}: {one[0]:.1f} to {one[1]:.1f} %", flush=True)
    print("\n| method | before | after | gain, mean and standard error | gains |\n|---|---|---|---|---|")
    for name, runs in found.items():
        before, after = np.array(runs).T
        gains = after - before
        error = gains.std(ddof=1) / len(gains) ** 0.5 if len(gains) > 1 else float("nan")
        each = ", ".join(f"{gain:.1f}" for gain in gains)
        print(f"| {name} | {before.mean():.1f} | {after.mean():.1f} | {gains.mean():.1f} ± {error:.1f} | {each} |")


if __name__ == "__main__":
    main()
