"""What a method may ask the loop for beyond a sampled and scored batch: each need as a value.

A transform or an objective names its needs as texts, "old_logp"; a name may carry a value after a colon:
"internal_logp:6".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.errors import InputError, unknown
from jaxrl_llm.trajectory import Trajectories

Drawn = Callable[[np.random.Generator, np.ndarray], np.ndarray]  # of the behaviour's log-probabilities f64[N, L]


class Need(NamedTuple):
    """One thing that methods ask for."""

    name: str
    where: str  # a field of the batch, or an entry of its info; with ":" the need's own value is part of the entry
    shape: str  # "[N, L]", "[N]" ...
    meaning: str
    stand_in: Drawn  # possible values for a laboratory or a test, before any model is there
    by_outputs: str | None = None  # the entry of outputs.extras with the same under the current weights

    @property
    def text(self) -> str:
        """Where it is, its shape and what it means."""
        current = "" if self.by_outputs is None else f" and outputs.extras[{self.by_outputs!r}] of the current weights,"
        return f"{self.where}{current} f32{self.shape}: {self.meaning}"

    def of(self, batch: Trajectories, value: float | None = None) -> Any:
        """What a batch has of it, an array or, for "feedback", a dict; None where it has nothing."""
        field, _, entry = self.where.removeprefix("batch.").partition("[")
        if not entry:
            return getattr(batch, field)
        key, _, carried = entry.strip("'\"]").partition(":")
        return (batch.info or {}).get(f"{key}:{value:g}" if carried and value is not None else key)


def near(scale: float) -> Drawn:
    """Log-probabilities that differ from the behaviour's by `scale`, never above 0."""
    return lambda random, logp: np.minimum(logp + scale * random.normal(size=logp.shape), 0.0)


def uniform(low: float, high: float, *more: int, rows: bool = False) -> Drawn:
    """Numbers between bounds, [N, L], or for rows [N, *more]."""
    return lambda random, logp: random.uniform(low, high, (logp.shape[0], *more) if rows else logp.shape)


_DISTRIBUTION = "sum over the vocabulary of"
NEEDS = {
    need.name: need
    for need in (
        Need(
            "old_logp", "batch.old_logp", "[N, L]",
            "log-probabilities under the weights before the update", near(0.05),
        ),
        Need(
            "reference_logp", "batch.reference_logp", "[N, L]",
            "log-probabilities under the frozen initial policy", near(0.2),
        ),
        Need(
            "values", "batch.values", "[N, L]",
            "a critic's value of each state, before the update; with several heads [N, L, H]",
            lambda random, logp: random.normal(size=logp.shape), by_outputs="values",
        ),
        Need(
            "feedback", "batch.feedback", "[] each",
            "metrics of the last update by name; 'updates' counts the updates",
            lambda random, logp: np.zeros(()),
        ),
        Need(
            "greedy_reward", "info['greedy_reward']", "[N]", "reward of the greedy completion of the row's prompt",
            lambda random, logp: random.integers(0, 2, logp.shape[0]).astype(float),
        ),
        Need(
            "squared_probability", "info['squared_probability']", "[N, L]", f"{_DISTRIBUTION} pi_old^2",
            uniform(0.2, 0.9),
        ),
        Need(
            "cubed_probability", "info['cubed_probability']", "[N, L]", f"{_DISTRIBUTION} pi_old^3", uniform(0.1, 0.8)
        ),
        Need(
            "hidden_square", "info['hidden_square']", "[N, L]",
            "squared norm of the last hidden state before each action",
            lambda random, logp: random.gamma(2.0, 0.5, logp.shape),
        ),
        Need(
            "effective_rank", "info['effective_rank']", "[N, 3]",
            "effective rank of a row's hidden states, its growth and the growth's growth", uniform(1, 5, 3, rows=True),
        ),
        Need(
            "reference_affinity", "info['reference_affinity']", "[N, L]",
            f"{_DISTRIBUTION} sqrt(pi_old pi_reference)", uniform(0.8, 1.0),
        ),
        Need(
            "tempered_logp", "info['tempered_logp:T']", "[N, L]",
            "log-probabilities of the old weights at T times their temperature", near(0.1),
        ),
        Need(
            "mean_logp", "info['mean_logp']", "[N, L]", "mean over the vocabulary of log pi at each action, of the old "
            "weights", uniform(-5, -3), by_outputs="mean_logp",
        ),
        Need(
            "internal_logp", "info['internal_logp']", "[N, L]",
            "log-probabilities of the policy that unembeds the hidden state after layer K, of the old weights",
            near(0.5), by_outputs="internal_logp",
        ),
    )
}  # fmt: skip


def need_of(need: str) -> Need:
    """The value of a need that is given as a text, "internal_logp:6"; InputError where there is no such name."""
    return NEEDS[value_of(need)[0]]


def value_of(need: str) -> tuple[str, float | None]:
    """Name and value of a need; InputError where there is no such name."""
    name, _, value = need.partition(":")
    if name not in NEEDS:
        raise unknown("need", name, NEEDS)
    try:
        return name, float(value) if value else None
    except ValueError:
        raise InputError(f"the need {need!r} has the value {value!r}, which is not a number") from None


def values_of(needs: Iterable[str], name: str) -> list[float]:
    """The values with which `name` is needed, ascending."""
    found = (value_of(need) for need in needs)
    return sorted(value for known, value in found if known == name and value is not None)
