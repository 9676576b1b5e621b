"""What a run's report says first: whether held-out accuracy changed, and what to worry about."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxrl_llm.reporting.html.run_data import Row, RunData
from jaxrl_llm.reporting.statistics import as_number, difference_interval, paired_difference

# Where a warning begins. They are rules of thumb: a run on either side may be well.
_UNIFORM = 0.5  # share of groups without a learning signal, in the last quarter of the steps
_ENTROPY = 0.5  # entropy at the end as a share of that at the start
_TRUNCATED = 0.25  # share of completions cut off, in the last quarter of the steps
_MISMATCH = 0.02  # nats per token between sampler and trainer
_FEW = 4  # steps; with fewer, start and end of a run cannot be told from chance


class _Verdict(NamedTuple):
    """The result of a run in two sentences."""

    kind: str  # "better", "worse", "unclear" (no significant change) or "unknown"
    text: str
    detail: str


class Outcomes(NamedTuple):
    """Held-out prompts by whether they were answered correctly before and after; (before, after) of each prompt."""

    right: list[tuple[Row, Row]]
    fixed: list[tuple[Row, Row]]
    broken: list[tuple[Row, Row]]
    wrong: list[tuple[Row, Row]]

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """The number of prompts of each kind, in the order of the fields."""
        return len(self.right), len(self.fixed), len(self.broken), len(self.wrong)


def outcomes(before: Iterable[Row], after: Iterable[Row]) -> Outcomes:
    """Sort prompts by their outcome in two evaluations, of each the first completion; others are left out."""
    found = Outcomes([], [], [], [])
    known = {row.prompt_id: row for row in reversed(list(after)) if row.correct is not None}
    kinds = {(True, True): found.right, (False, True): found.fixed, (True, False): found.broken}
    for prompt, first in sorted({row.prompt_id: row for row in reversed(list(before))}.items()):
        if first.correct is not None and (last := known.get(prompt)) is not None:
            kinds.get((first.correct, bool(last.correct)), found.wrong).append((first, last))
    return found


def held_out(run: RunData) -> Outcomes:
    """The outcomes of a run's held-out prompts before and after training, as far as they are logged."""
    of = {phase: [row for row in run.rows if row.phase == phase] for phase in ("eval_before", "eval_after")}
    return outcomes(of["eval_before"], of["eval_after"])


def verdict(run: RunData, found: Outcomes) -> _Verdict:
    """The verdict of a run. found: its outcomes; if they are all of its held-out prompts, the test is a paired one."""
    before, after = (_figures(run.summary.get(name)) for name in ("eval_before", "eval_after"))
    if before is None or after is None:
        return _without_evaluation(run, before, after)
    rates = before["accuracy"], after["accuracy"]
    n = sum(found.counts)
    right, fixed, broken, _ = found.counts
    whole = n == before["prompts"] == after["prompts"]
    if whole and max(abs((right + broken) / n - rates[0]), abs((right + fixed) / n - rates[1])) < 1e-6:
        difference, low, high, p = paired_difference(*found.counts)
        significant = p < 0.05 and low * high > 0
        detail = f"{fixed} of {n} prompts were fixed and {broken} broken (McNemar's exact test: {p_text(p)})."
    else:
        scored = [_scored(one) for one in (before, after)]
        first, last = zip([round(rate * of) for rate, of in zip(rates, scored, strict=True)], scored, strict=True)
        difference, low, high = difference_interval(first, last)
        significant = low * high > 0
        on = f"{first[1]} prompts" if first[1] == last[1] else f"{first[1]} and {last[1]} prompts"
        detail = f"Measured on {on}, with the interval for independent samples: the outcomes of single prompts are not "
        detail += "all logged."
    values = f"from {_percent(before)} to {_percent(after)}"
    change = change_text(difference, low, high)
    if not significant:
        return _Verdict("unclear", f"No significant change: held-out accuracy went {values}, {change}.", detail)
    went, kind = ("rose", "better") if difference > 0 else ("fell", "worse")
    return _Verdict(kind, f"Held-out accuracy {went} {values}: {change}, a significant change.", detail)


def warnings(run: RunData) -> list[str]:
    """What to look at, each with its numbers and what it means; empty if nothing stands out."""
    said = run.summary.get("warnings")
    found = [text for text in said if isinstance(text, str)] if isinstance(said, list) else []
    total = run.config.get("steps")
    done = len(run.steps)
    if isinstance(total, int) and done < total and "steps" not in run.summary and done:
        found.append(f"The run has not ended: {done:,} of {total:,} steps are logged.")
    last_quarter = {key: _end(run.metric(key), 4) for key in ("groups/uniform", "completion/truncated")}
    last_quarter["groups/uniform"] = _end(run.metric("trained/uniform", "groups/uniform"), 4)
    if (share := last_quarter["groups/uniform"]) >= _UNIFORM:
        reward = _end(run.metric("reward/mean"), 4)
        found.append(
            f"{share:.0%} of the groups in the last quarter of the steps had equal rewards (mean {reward:.3g}), which "
            "teach most methods nothing: take harder or easier prompts, larger groups, or a method that resamples."
        )
    if len(run.steps) >= _FEW:
        entropy = run.metric("entropy", "entropy/mean")
        first, last = _start(entropy, 10), _end(entropy, 10)
        if first > 0 and last < _ENTROPY * first:
            found.append(
                f"Entropy fell from {first:.3g} to {last:.3g} nats per token ({last / first - 1:.0%}): samples become "
                "alike. Look at pass@k; an entropy bonus, a higher upper clip or a KL penalty keep variety."
            )
    if (share := last_quarter["completion/truncated"]) >= _TRUNCATED:
        limit = run.config.get("max_new_tokens")
        found.append(
            f"{share:.0%} of the completions in the last quarter of the steps were cut off by the token limit"
            + (f" (max_new_tokens {limit})" if isinstance(limit, int) else "")
            + ": their rewards judge half an answer."
        )
    for key in run.metrics:
        if key.startswith("rewards/") and key.endswith("/failed") and (share := run.metric(key).mean()) > 0:
            name = key.removeprefix("rewards/").removesuffix("/failed")
            found += [f"The reward {name} failed on {share:.2%} of the completions: they got a default score or none."]
    if (share := _mean(run.metric("reward/unscored"))) > 0:
        found.append(f"{share:.2%} of the completions have no score.")
    if (gap := _mean(run.metric("mismatch"))) > _MISMATCH:
        found.append(
            f"Sampler and trainer differ by {gap:.2g} nats per token on average: importance ratios are not 1 at first."
        )
    return found


def _without_evaluation(run: RunData, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> _Verdict:
    reward = run.metric("reward/mean")
    if before is not None or after is not None:
        known, missing = ("before", "after") if before is not None else ("after", "before")
        text = f"Held-out accuracy is known only {known} training: {_percent(before or after or {})}."
        detail = f"There is no evaluation {missing} training."
    else:
        text, detail = "Held-out accuracy was not measured.", "Without held-out prompts nothing shows what was learned."
    if reward.size:
        tenth = "first and last" if len(reward) < 20 else "mean of the first and of the last tenth"
        values = f"{_start(reward, 10):.3g} to {_end(reward, 10):.3g}"
        detail += f" The reward of training samples went from {values} ({tenth})."
    return _Verdict("unknown", text, detail)


def _figures(value: Any) -> Mapping[str, Any] | None:
    """An evaluation with numbers that can be tested; None for anything else."""
    if not isinstance(value, dict):
        return None
    accuracy, prompts = (as_number(value.get(name)) for name in ("accuracy", "prompts"))
    return value if 0 <= accuracy <= 1 and prompts >= 1 and prompts == int(prompts) else None


def _scored(figures: Mapping[str, Any]) -> int:
    """The number of prompts that an evaluation scored."""
    prompts, unscored = int(figures["prompts"]), as_number(figures.get("unscored", 0))
    return prompts - int(unscored) if 0 <= unscored < prompts else prompts


def _percent(figures: Mapping[str, Any]) -> str:
    """An accuracy with its interval, where it has one.

    >>> _percent({"accuracy": 0.5, "low": 0.4, "high": 0.6})
    '50.0 % (40.0 to 60.0)'
    """
    low, high = (100 * as_number(figures.get(name)) for name in ("low", "high"))
    return f"{100 * figures['accuracy']:.1f} %" + (f" ({low:.1f} to {high:.1f})" if low <= high else "")


def change_text(difference: float, low: float, high: float) -> str:
    """A difference of rates with its interval."""
    return f"{100 * difference:+.1f} points (95 % interval {100 * low:+.1f} to {100 * high:+.1f})"


def p_text(value: float) -> str:
    """A p-value."""
    return "p < 0.001" if value < 0.001 else f"p = {value:.2g}"


def _mean(values: npt.NDArray[Any]) -> float:
    return float(values.mean()) if values.size else math.nan


def _start(values: npt.NDArray[Any], parts: int) -> float:
    """The mean of the first of so many parts of a series, at least one value; NaN for an empty series."""
    return _mean(values[: max(1, len(values) // parts)])


def _end(values: npt.NDArray[Any], parts: int) -> float:
    return _mean(np.asarray(values)[-max(1, len(values) // parts) :])
