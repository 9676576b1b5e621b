"""Notes of a run on the screen, and its final summary."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_llm.data.prompt_set import PromptSet
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.config.method_settings import setting_notes
from jaxrl_llm.training.health.goodput import goodput
from jaxrl_llm.training.metrics import SINGLE, fallback_warnings
from jaxrl_llm.training.rollout import fork_notes, strategy_of
from jaxrl_llm.training.setup import RunParts
from jaxrl_llm.utils.errors import several

TREND = 10  # steps of a run from which a trend is seen


def opening_notes(config: TrainConfig, parts: RunParts, first: int, resumed: bool) -> list[str]:
    """Lines printed when a run starts or resumes."""
    policy, prompts, strategy = parts.policy, parts.prompts, strategy_of(config, parts.algorithm)
    devices = f"{jax.device_count()} {jax.devices()[0].platform} device{'s' if jax.device_count() > 1 else ''}"
    devices += f" of {parts.hosts.count} hosts" if parts.hosts.count > 1 else ""
    devices += f", {parts.hosts.together} of which sample as one" if parts.hosts.together > 1 else ""
    devices += f" ({', '.join(f'{name}={size}' for name, size in parts.mesh.shape.items())})" if config.mesh else ""
    text = [
        f"{config.algorithm} on {config.model} ({policy.config.family}), {several(len(prompts.rows), 'prompt')} from "
        f"{config.prompts or 'seeds'}, {config.prompts_per_step} x {config.group_size} completions per step, "
        f"{devices}, output in {config.output}"
    ]
    text += [*parts.notes, *setting_notes(config)]
    if prompts.ahead is not None:
        text.append(
            "too many prompts to read them all at the start: each is read and checked when it is drawn, and repeated "
            "prompts are not removed"
        )
    if prompts.skipped or prompts.shortened:
        text.append(f"prompts longer than allowed: {prompts.skipped} skipped, {prompts.shortened} cut on the left")
    if prompts.conflicting:
        text.append(
            f"{prompts.conflicting} duplicate prompts have other columns, such as another answer: the first is used "
            "(--same-task row keeps them)"
        )
    text += fork_notes(config, parts.algorithm)
    if strategy is not None:
        segment = f", at most {strategy.segment_tokens} new tokens of each" if strategy.segment_tokens else ""
        text.append(
            f"partial rollouts: {strategy.in_flight(config.prompts_per_step)} prompts in flight a step{segment}; "
            "unfinished completions continue in the next step"
        )
    if resumed:
        text.append(f"resuming from step {first}" if first else "no checkpoint to resume from: starting at step 0")
    return text


def closing_summary(
    config: TrainConfig, steps: int, prompts: PromptSet, counts: dict[str, int], seconds: dict[str, float],
    undone: float,
) -> dict[str, Any]:  # fmt: skip
    """The final entries of summary.json after some steps. `had_signal`: whether any had a learning signal.

    undone: see `goodput.goodput`.
    """
    warnings, silent, single = [], counts.get("silent", 0), counts.get("single", 0)
    if silent == steps:
        warnings.append("nothing was learned: no step had a learning signal (no token had an advantage)")
    elif silent > steps // 2:
        warnings.append(f"{silent} of {steps} steps had no learning signal")
    if single > steps // 2:
        warnings.append(f"{single} of {steps} steps had only completions of a single token: {SINGLE}")
    warnings += fallback_warnings(counts, steps)
    return {
        "steps": steps,
        "mesh": config.mesh,
        "steps_without_signal": silent,
        "had_signal": silent < steps,
        "warnings": warnings,
        "tokens": {"sampled": counts.get("tokens", 0), "trained": counts.get("trained", 0)},
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "goodput": round(goodput(seconds, undone), 4),
        "prompts": {
            "training": len(prompts.rows),
            "skipped": prompts.skipped + counts.get("dropped", 0),
            "truncated": prompts.shortened,
            "conflicting": prompts.conflicting,
        },
    }


def trend_warnings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the metrics of a run's steps say is wrong: entropy that fell far, and groups that teach nothing.

    rows: those of metrics.jsonl. The first and the last tenth of the steps are compared; fewer than TREND say nothing.

    >>> trend_warnings([{"entropy": 1.0 - 0.09 * step} for step in range(11)])
    ['entropy fell from 1 to 0.1 nats a token: samples of a prompt become alike; see --algorithm.entropy-coefficient']
    """
    if len(rows) < TREND:
        return []
    tenth, out = max(len(rows) // 10, 1), []
    first, last = _mean_of(rows[:tenth], "entropy"), _mean_of(rows[-tenth:], "entropy")
    given = _mean_of(rows, "rollout/steps") == 0  # nothing is sampled
    if last < first / 3 and not given:
        out.append(
            f"entropy fell from {first:.2g} to {last:.2g} nats a token: samples of a prompt become alike; see "
            "--algorithm.entropy-coefficient"
        )
    taught = "trained/uniform" if any("trained/uniform" in row for row in rows) else "groups/uniform"
    if (uniform := _mean_of(rows[-tenth:], taught)) > 0.5 and not _mean_of(rows[-tenth:], "signal") > 0.5:
        out.append(
            f"in the end {uniform:.0%} of the groups had equal rewards and taught nothing: prompts are too easy or too "
            "hard; --algorithm dapo replaces such groups"
        )
    return out


def _mean_of(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    """The mean of a metric over the rows that have it; NaN if none has."""
    found = [row[name] for row in rows if isinstance(row.get(name), int | float)]
    return float(np.mean(found)) if found else float("nan")


def accuracy_line(figures: dict[str, Any], of: str = "held-out prompts") -> str:
    """An evaluation as one line of text. of: what the prompts are.

    >>> accuracy_line({"accuracy": 0.5, "low": 0.4, "high": 0.6, "prompts": 256, "length": 4.2})
    'accuracy 50.0 % (40.0 to 60.0) on 256 held-out prompts, 4.2 tokens a completion'
    """
    low, value, high = (100 * figures[name] for name in ("low", "accuracy", "high"))
    one = figures["prompts"] == 1
    on = f"{figures['prompts']} {of.replace('prompts', 'prompt', 1) if one else of}, "
    on += f"{figures['length']:.1f} tokens a completion"
    left_out = f", {figures['unscored']} not scored" if figures.get("unscored") else ""
    if failed := figures.get("failed_environments"):
        left_out += f", {several(failed, 'environment')} failed"
    return f"accuracy {value:.1f} % ({low:.1f} to {high:.1f}) on {on}{left_out}"
