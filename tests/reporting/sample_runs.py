"""A run's folder as a short training on sums would leave it, written in milliseconds, for tests of reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.reporting.statistics import wilson_interval


def write_run(
    folder: Path,
    seed: int = 0,
    steps: int = 48,
    prompts: int = 64,
    before: float = 0.1,
    after: float = 0.6,
    **config: Any,
) -> Path:
    """A run of GRPO with groups of 4 whose accuracy goes from `before` to `after` on as many held-out prompts."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    settings = {
        "model": "smollm2-135m", "output": str(folder), "seed": seed, "steps": steps, "prompts": "sums.jsonl",
        "rewards": ["number_match"], "algorithm": "grpo", "hyperparameters": {"clip_low": 0.2, "clip_high": 0.2},
        "optimizer": {"learning_rate": 3e-5, "warmup_steps": 0}, "max_new_tokens": 16, "eval_reward": None, **config,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(settings))
    rate = np.linspace(before, after, steps)
    metrics, rows = [], []
    for step in range(steps):
        reward = rng.binomial(32, rate[step]) / 32
        metrics.append(
            {
                "step": step, "reward/mean": reward, "reward/std": (reward * (1 - reward)) ** 0.5, "reward/min": 0.0,
                "reward/max": 1.0, "entropy": 1.3 * 0.96**step + 0.02 * rng.random(), "kl": 0.004 * step,
                "groups/uniform": float(rng.binomial(8, 0.5)) / 8, "completion/length": 12 - step / 8 + rng.random(),
                "completion/truncated": 0.05, "clip/high": 0.01 * rng.random(), "clip/low": 0.0,
                "grad_norm": 0.5 + rng.exponential(0.2), "learning_rate": 3e-5, "mismatch": 1e-6,
                "goodput": 0.9, "signal": 0.5, "rewards/number_match/failed": 0.0, "seconds/sample": 3 + rng.random(),
            }
        )  # fmt: skip
        if step % 6 == 0 or step == steps - 1:
            for prompt in range(4):
                right = rng.random(4) < rate[step]
                scores = right.astype(float)
                scale = scores.std()
                advantages = (scores - scores.mean()) / scale if scale else np.zeros(4)
                for n in range(4):
                    rows.append(_line(rng, step, "train", prompt + 4 * step, n, bool(right[n]), float(advantages[n])))
    summary: dict[str, Any] = {"steps": steps, "warnings": [], "tokens": {"sampled": 20_000}, "goodput": 0.9}
    draws = rng.random(prompts)
    for phase, step, share in (("eval_before", -1, before), ("eval_after", steps, after)):
        # A few prompts go against the trend, so that there are broken ones too.
        found = (draws < share) ^ (rng.random(prompts) < 0.06)
        low, high = wilson_interval(int(found.sum()), prompts)
        summary[phase] = {
            "accuracy": float(found.mean()), "low": low, "high": high, "prompts": prompts, "samples": 1,
            "length": 12.0, "truncated": 0.0, "reward": float(found.mean()),
        }  # fmt: skip
        rows += [_line(rng, step, phase, prompt, 0, bool(right), None) for prompt, right in enumerate(found)]
    summary["seconds"] = {"compile": 12.0, "sample": 150.0, "update": 90.0, "evaluate": 20.0, "other": 3.5}
    (folder / "summary.json").write_text(json.dumps(summary))
    for name, lines in (("metrics.jsonl", metrics), ("completions.jsonl", rows)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def _line(
    rng: np.random.Generator, step: int, phase: str, prompt: int, sample: int, right: bool, advantage: float | None
) -> dict[str, Any]:
    one, two = (prompt * 7) % 90 + 3, (prompt * 13) % 80 + 5
    said = one + two if right else one + two + int(rng.integers(1, 9))
    tokens = ["The", " sum", " of", f" {one}", " and", f" {two}", " is", f" {said}", ".", "<|im_end|>"]
    logp = [round(-float(rng.exponential(0.4)), 4) for _ in tokens]
    return {
        "step": step, "phase": phase, "prompt_id": prompt, "sample": sample, "prompt": f"Calculate {one} + {two}.",
        "tokens": tokens, "advantage": None if advantage is None else [round(advantage, 4)] * len(tokens), "logp": logp,
        "entropy": [round(-x * 1.5, 4) for x in logp], "reward": float(right),
        "rewards": {"number_match": float(right)}, "answer": str(one + two), "truncated": False,
    }  # fmt: skip
