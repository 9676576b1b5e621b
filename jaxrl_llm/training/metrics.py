"""Metrics and counts of each step, and notes on what they say."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.advantages.group import TOLERANCE
from jaxrl_llm.core.source import Step
from jaxrl_llm.core.trajectory import Trajectories, map_rows
from jaxrl_llm.rewards.scoring import Scored
from jaxrl_llm.rewards.specs import GIVEN
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.setup import RunParts
from jaxrl_llm.utils.process import compiles


class Learned(NamedTuple):
    """What a step's learning gives besides the new state."""

    batch: Trajectories  # after preparation, with any rows that pad it to its full size
    metrics: dict[str, float]  # of the update
    filled: float  # fraction of positions in packed rows that hold a token


def batch_metrics(found: Sequence[Scored], seconds: float) -> dict[str, float]:
    """Metrics of scored samples, in one or more batches: rewards, lengths, uniform groups, failures, speed."""
    batches = [scored.batch for scored in found]
    reward = np.concatenate([np.asarray(batch.reward) for batch in batches])
    length = np.concatenate([np.asarray(batch.action_mask).sum(axis=1) for batch in batches])
    known = reward[~np.isnan(reward)]
    out: dict[str, Any] = {"reward/unscored": 1.0 - len(known) / len(reward)}
    if len(known):
        out |= {f"reward/{name}": getattr(known, name)() for name in ("mean", "std", "min", "max")}
    for name in batches[0].rewards or {}:
        values = np.concatenate([np.asarray((batch.rewards or {})[name]) for batch in batches])
        if not np.isnan(values).all():
            out[f"rewards/{name}"] = np.nanmean(values)
        out[f"rewards/{name}/scored"] = 1.0 - np.isnan(values).mean()
        failed = sum(scored.failures[name] for scored in found)
        out[f"rewards/{name}/failed"] = failed / max(len(reward), failed)  # failed groups leave no rows
    out |= {
        "completion/length": length.mean(),
        "completion/longest": length.max(),
        "completion/tokens": length.sum(),
        "completion/truncated": np.concatenate([np.asarray(batch.truncated) for batch in batches]).mean(),
        "groups/uniform": np.concatenate([_uniform(batch) for batch in batches]).mean(),
        "tokens_per_second": length.sum() / max(seconds, 1e-9),
    }
    return {name: float(value) for name, value in out.items()}


def trained_metrics(scored: Scored) -> dict[str, float]:
    """The same of the samples that are trained on, where others were sampled too: those that differ."""
    found = batch_metrics([scored], 1.0)
    names = {"reward/mean": "reward", "completion/tokens": "tokens", "groups/uniform": "uniform"}
    return {f"trained/{short}": found[name] for name, short in names.items() if name in found}


def _uniform(batch: Trajectories) -> np.ndarray:
    """bool[N]: samples of groups whose rewards are all equal, or of which one at most is scored."""
    reward, (_, place) = np.asarray(batch.reward, np.float64), np.unique(np.asarray(batch.group), return_inverse=True)
    low, high = np.full(place.max() + 1, np.inf), np.full(place.max() + 1, -np.inf)
    known = ~np.isnan(reward)
    np.minimum.at(low, place[known], reward[known])
    np.maximum.at(high, place[known], reward[known])
    spread = np.where(high > low, high - low, 0.0)
    return (spread <= TOLERANCE * np.maximum(np.abs(np.where(np.isfinite(high), high, 0.0)), 1.0))[place]


def step_metrics(parts: RunParts, found: Step, learned: Learned, took: float, taken: int) -> dict[str, float]:
    """All metrics of a step, but for those of `goodput.lap_metrics`.

    took: seconds of the step so far. taken: gradient steps before it.
    """
    scored, batch = without_padding(found, learned), learned.batch
    metrics = {**learned.metrics, "signal": signal(batch), "packing/filled": learned.filled}
    shaped, reward = np.asarray(batch.need("reward"))[: len(scored.texts)], np.asarray(scored.batch.need("reward"))
    if not np.array_equal(shaped, reward, equal_nan=True) and not np.isnan(shaped).all():
        metrics["reward/shaped"] = float(np.nanmean(shaped))
    sampled = [found.sampled or scored, *(one for one, _ in found.others)]
    metrics |= batch_metrics(sampled, took) | found.metrics
    metrics["tokens_per_second"] = metrics["completion/tokens"] / max(took, 1e-9)
    metrics |= trained_metrics(scored) if len(sampled) > 1 or found.sampled is not None else {}
    values: dict[str, list[float]] = {}  # that reward functions logged, of which the means count
    for name, value in (found.sampled or scored).logged.metrics:
        values.setdefault(f"logged/{name}" if name == "step" or name in metrics else name, []).append(value)
    metrics |= {name: float(np.mean(own)) for name, own in values.items() if np.isfinite(np.mean(own))}
    return metrics | {"learning_rate": float(parts.rate(taken)), "compiles": compiles()[0]}


def without_padding(found: Step, learned: Learned) -> Scored:
    """The prepared batch without padding rows, with the rewards as scored and the actions of unscored rows, for the
    logs."""
    rows, batch, scored = len(found.scored.texts), learned.batch, found.scored
    if rows < batch.tokens.shape[0]:
        batch = map_rows(lambda x: x[:rows], batch)
    action, turn = np.asarray(batch.action_mask), np.asarray(batch.turn)
    used = np.any(action, axis=1, keepdims=True)  # the method saw others without their actions
    whole = np.asarray(scored.batch.action_mask)
    if "window" in (scored.batch.info or {}):  # a row that waits for others has none in this step
        whole = whole & np.asarray(scored.batch.need("window")).astype(bool)
    batch = batch.replace(
        action_mask=np.where(used, action, whole),
        turn=np.where(used, turn, np.asarray(scored.batch.turn)),
        reward=scored.batch.reward,
        rewards=scored.batch.rewards,
    )
    return scored._replace(batch=batch)


def without_nan(found: Step, metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics without those of the rollout that are NaN, such as means over finished completions when none is."""
    undefined = {name for name, value in found.metrics.items() if np.isnan(value)}
    return {name: value for name, value in metrics.items() if name not in undefined}


SINGLE = "does the model expect another chat template?"


def count_step(
    counts: dict[str, int], step: int, metrics: dict[str, float], config: TrainConfig
) -> tuple[dict[str, int], list[str]]:
    """Add a step to the run's counts; returns them with the notes to print (the first time, then every tenth).

    counts: "tokens" sampled, "trained" of them and of replayed ones, "silent" steps (no token has a learning signal),
    "single" steps (every completion has one token), prompts "dropped" when they were drawn, and steps with a fallback
    (see `fallback_notes`), if there were any.
    """
    notes = {
        "silent": (metrics["signal"] == 0.0, f"no learning signal: {_why_silent(metrics)}"),
        "single": (
            GIVEN not in config.rewards and metrics["completion/longest"] <= 1 < config.max_new_tokens,
            f"every completion is a single token: {SINGLE}",
        ),
    }
    new, texts = {"tokens": counts.get("tokens", 0) + int(metrics["completion/tokens"])}, []
    new["trained"] = counts.get("trained", 0) + int(metrics.get("trained/tokens", metrics["completion/tokens"]))
    if dropped := counts.get("dropped", 0) + int(metrics.get("prompts/dropped", 0)):
        new["dropped"] = dropped
    new |= grown_counts(counts, metrics)
    for name, (is_so, text) in {**notes, **fallback_notes(counts, metrics)}.items():
        if (number := counts.get(name, 0) + is_so) or name in notes:
            new[name] = number
        if is_so and text and (new[name] == 1 or new[name] % 10 == 0):
            texts.append(f"step {step + 1}: {text}")
    return new, texts


def _why_silent(metrics: dict[str, float]) -> str:
    if metrics.get("reward/unscored") == 1.0:
        return "no completion was scored: the reward functions return None or NaN for all of them"
    if (unscored := metrics.get("reward/unscored", 0.0)) >= 0.5:
        return f"{unscored:.0%} of the completions were not scored; the log says why"
    failed = {name: share for name, share in metrics.items() if name.endswith("/failed") and share >= 0.5}
    if failed:
        return f"reward functions failed on {max(failed.values()):.0%} of the completions ({', '.join(failed)})"
    if metrics.get("trained/uniform", metrics["groups/uniform"]) == 1.0:
        return (
            f"all rewards are equal within every group (mean {metrics.get('reward/mean', float('nan')):.3g}); the task "
            "is too hard or too easy, or the reward is wrong"
        )
    return "the method gives every token the advantage 0"


def signal(batch: Trajectories) -> float:
    """The share of rows with a learning signal, 0 to 1, in a batch that a method's transform has prepared.

    A row has one where an advantage that counts in the loss is not 0; what regularises (a KL penalty, an entropy bonus)
    is none. Methods without advantages compare rewards in their objective: with those of the other samples of a
    prompt, or, where every prompt has one sample, with those of the batch. Rows without actions, or that are only
    measured, are left out; 0 where all are. Reads the batch on the host, and compiles nothing.
    """
    rows: Any = np.asarray(batch.action_mask).any(axis=1)
    marks = (batch.info or {}).get("measured")
    if marks is not None:
        rows &= ~(np.asarray(marks) > 0)
    if not rows.any():
        return 0.0
    if batch.advantages is None:
        return float(_compared(batch)[rows].mean())
    pushed = (np.asarray(batch.loss_weights) != 0) & (np.asarray(batch.advantages) != 0)
    return float(pushed.any(axis=1)[rows].mean())


def _compared(batch: Trajectories) -> np.ndarray:
    """bool[N]: rows of groups whose scored rows differ in their reward; of the whole batch, with groups of one."""
    if batch.reward is None:
        return np.ones(batch.tokens.shape[0], bool)
    reward, group = np.asarray(batch.reward, np.float64), np.asarray(batch.group)
    scored = ~np.isnan(reward) & np.asarray(batch.action_mask).any(axis=1)
    if np.unique(group[scored], return_counts=True)[1].max(initial=1) == 1:
        group = np.zeros_like(group)
    out = np.zeros(len(reward), bool)
    for name in np.unique(group):
        own = reward[(group == name) & scored]
        if own.size > 1 and np.ptp(own) > 1e-6 * max(1.0, float(np.abs(own).max())):
            out[group == name] = True
    return out


_GROWING = {"curriculum/forced": "forced_prompts", "curriculum/restarts": "restarted"}  # metrics, and their last value


def fallback_notes(counts: Mapping[str, int], metrics: Mapping[str, float]) -> dict[str, tuple[bool, str]]:
    """The fallbacks by name: whether a step had them, and what to say. counts: of the steps before.

    >>> [text for is_so, text in fallback_notes({}, {"curriculum/forced": 4.0}).values() if is_so]
    ['the curriculum leaves out all prompts: 4 were drawn all the same']
    """
    forced, restarts = (int(metrics.get(name, 0)) - counts.get(count, 0) for name, count in _GROWING.items())
    unhinted = metrics.get("rollout/unhinted", 0.0)
    return {
        "forced": (forced > 0, f"the curriculum leaves out all prompts: {forced} were drawn all the same"),
        "restarts": (restarts > 0, "the policy solves all prompts: those that were dropped are drawn again"),
        "unhinted": (unhinted > 0, f"{unhinted:.0%} of the groups failed and got no hint, because there was none"),
        "unreplayed": (metrics.get("replay/share") == 0.0, ""),
    }


def grown_counts(counts: Mapping[str, int], metrics: Mapping[str, float]) -> dict[str, int]:
    """The last values of metrics that grow over a run, as far as they have begun to."""
    now = {count: int(metrics.get(name, counts.get(count, 0))) for name, count in _GROWING.items()}
    return {count: value for count, value in now.items() if value}


def fallback_warnings(counts: Mapping[str, int], steps: int) -> list[str]:
    """The warnings of a run of so many steps, for its summary.

    >>> fallback_warnings({"unreplayed": 9}, 9)
    ['nothing was replayed in any of the 9 steps: the store was empty, or no group called for its rows']
    """
    out = []
    if counts.get("unreplayed") == steps:
        out.append(
            f"nothing was replayed in any of the {steps} steps: the store was empty, or no group called for its rows"
        )
    if forced := counts.get("forced_prompts"):
        out.append(
            f"the curriculum left out all prompts in {counts.get('forced', 0)} of {steps} steps: {forced} were drawn "
            "all the same; add prompts"
        )
    if restarts := counts.get("restarts"):
        out.append(f"the policy solved all prompts, so that they came back, in {restarts} of {steps} steps: add harder")
    if (unhinted := counts.get("unhinted", 0)) > steps // 2:
        out.append(f"in {unhinted} of {steps} steps groups failed and got no hint, because there was none")
    return out
