"""What `make demo` runs: GRPO on SmolLM2-135M-Instruct, sums and differences of two numbers, verifiable answers.

The task is reasoning-gym's chain_sum with two terms of one or two digits, the question as reasoning-gym words it. The
verifier is `number_match`: the last number of the completion must be the answer. The 256 held-out questions are not
among the training questions. Left out, to stay within minutes on a laptop: a KL reference (kl_coefficient 0).
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from jaxrl_llm.runs.config import OptimizerConfig, TrainConfig
from jaxrl_llm.runs.loop import train
from jaxrl_llm.runs.metrics import accuracy_line


def demo_config(model: str, seed: int, output: str, steps: int) -> TrainConfig:
    """The demo's settings."""
    return TrainConfig(
        model=model,
        output=output,
        seed=seed,
        steps=steps,
        prompts="reasoning-gym:chain_sum",
        task_options={"min_terms": "2", "max_terms": "2", "min_digits": "1", "max_digits": "2"},
        rewards=("number_match",),
        prompts_per_step=8,
        group_size=16,
        max_new_tokens=16,
        temperature=0.7,
        algorithm="grpo",
        hyperparameters={"kl_coefficient": 0.0},
        minibatches=2,
        optimizer=OptimizerConfig(learning_rate=2e-5, warmup_steps=2),
        eval_size=256,
        checkpoint_every=0,
        log_completions_every=5,
    )


def completions(folder: Path, phase: str) -> list[dict[str, Any]]:
    """The completions that the run wrote down in a phase, ordered by prompt."""
    lines = [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]
    return sorted((x for x in lines if x["phase"] == phase), key=lambda x: x["prompt_id"])


def main() -> None:
    """Train, then print the two accuracies and three completions before and after."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="runs/demo")
    parser.add_argument("--steps", type=int, default=16)
    arguments = parser.parse_args()
    begun = time.monotonic()
    summary = train(demo_config(arguments.model, arguments.seed, arguments.output, arguments.steps))
    folder = Path(arguments.output)
    print()
    pairs = zip(completions(folder, "eval_before"), completions(folder, "eval_after"), strict=True)
    for before, after in list(pairs)[:3]:
        print(before["prompt"])
        for name, line in (("before", before), ("after", after)):
            print(f"  {name:7}{'right' if line['reward'] == 1 else 'wrong'}  {''.join(line['tokens'])!r}")
    print(f"\nbefore  {accuracy_line(summary['eval_before'])}")
    print(f"after   {accuracy_line(summary['eval_after'])}")
    gain = 100 * (summary["eval_after"]["accuracy"] - summary["eval_before"]["accuracy"])
    print(f"gain    {gain:+.1f} percentage points in {(time.monotonic() - begun) / 60:.1f} minutes")
    print(f"report  {folder / 'report.html'}")


if __name__ == "__main__":
    main()
