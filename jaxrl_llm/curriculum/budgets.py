"""Rules of a curriculum that divide a step's samples among its prompts, and the apportionment that they share."""

from collections.abc import Callable

import numpy as np

from jaxrl_llm.core.arguments.ranges import Count, NonNegative, OpenFraction, check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.curriculum.records import Array, PromptFacts, Prompts, State
from jaxrl_llm.curriculum.rules import Machine, ModelOf, RuleOf, posterior_mean
from jaxrl_llm.utils.errors import InputError


def apportion(weights: Array, total: int, least: int = 1, most: int | None = None) -> Array:
    """Whole numbers int64[n] that add up to `total`, as near as can be to `total` in proportion to weights f64[n] >= 0.

    Each is at least `least` and at most `most`; a bound that the total does not allow is relaxed to its mean. What is
    left by rounding goes to the largest remainders. Weights that are all 0 count as equal.

    >>> apportion(np.array([1.0, 1.0, 2.0]), 8).tolist(), apportion(np.array([0.0, 0.0]), 5).tolist()
    ([2, 2, 4], [3, 2])
    """
    n = len(weights)
    if total < n:
        raise InputError(f"{total} samples cannot be divided among {n} prompts: each needs at least one")
    least = min(least, total // n)
    most = total if most is None else max(most, -(-total // n))
    w = np.nan_to_num(np.asarray(weights, np.float64), nan=0.0, posinf=0.0)
    w = np.maximum(w, 0.0) if np.any(w > 0) else np.ones(n)
    w = np.where(w > 0, np.maximum(w / w.max(), 1e-9), 0.0)
    # Ideal shares within the bounds: total = sum clip(scale w, least, most) for one scale, found by bisection.
    low, high = 0.0, most / float(w[w > 0].min())
    for _ in range(100):
        scale = (low + high) / 2
        low, high = (scale, high) if np.sum(np.clip(scale * w, least, most)) < total else (low, scale)
    ideal = np.clip(high * w, least, most)
    out = np.clip(np.floor(ideal + 1e-9), least, most).astype(np.int64)
    for remainders in (ideal - out, w):  # by remainders first; weights of 0 leave some for a second pass
        while (left := total - int(out.sum())) > 0 and np.any(room := out < most):
            places = np.argsort(-np.where(room, remainders, -np.inf), kind="stable")[: min(left, int(room.sum()))]
            out[places] += 1
    while (over := int(out.sum()) - total) > 0:
        places = np.argsort(np.where(out > least, ideal - out, np.inf), kind="stable")
        out[places[: min(over, int(np.sum(out > least)))]] -= 1
    return out


def check_budget(rule: str, prompts: int, total: int, least: int, most: int | None) -> None:
    """InputError if `total` samples cannot be divided among so many prompts with `least` to `most` each.

    Bounds that cannot be kept would give every prompt as many samples as a plain group has.
    """
    each = f"{rule}: {prompts} prompts share {total} samples"
    if total < least * prompts:
        raise InputError(f"{each}, but each gets at least {least}: raise group_size, or lower the least")
    if most is not None and total > most * prompts:
        raise InputError(f"{each}, but each gets at most {most}: lower group_size, or raise the most")


# (success rates f64[n], their prompts, the most samples of one) -> weights f64[n]: samples are in proportion to them
Budget = Callable[[Array, Prompts, int], Array]


def by_variance(v: Array, prompts: Prompts, most: int) -> Array:
    """v (1 - v)."""
    return v * (1 - v)


def by_deviation(v: Array, prompts: Prompts, most: int) -> Array:
    """sqrt(v (1 - v)), which minimises the variance of the mean gradient."""
    return np.sqrt(v * (1 - v))


def by_failure(v: Array, prompts: Prompts, most: int) -> Array:
    """1 - v, more for hard prompts."""
    return 1 - v


@part
def by_bound(exploration: NonNegative = 0.1) -> Budget:
    """sqrt(v (1 - v)) + exploration sqrt(log(1 + T) / tries), an upper confidence bound with T the steps so far."""

    def weigh(v: Array, prompts: Prompts, most: int) -> Array:
        bonus: Array = exploration * np.sqrt(np.log1p(prompts.step) / np.maximum(prompts.tries, 1))
        return np.sqrt(v * (1 - v)) + bonus

    return weigh


@part
def by_mixed(target: OpenFraction = 0.9) -> Budget:
    """The smallest group of n samples that has right and wrong ones with probability 1 - v^n - (1 - v)^n >= target.

    >>> by_mixed(0.9)(np.array([0.5, 0.1, 0.0]), None, 64).tolist()
    [5, 22, 64]
    """

    def weigh(v: Array, prompts: Prompts, most: int) -> Array:
        low, high = np.ones(len(v), np.int64), np.full(len(v), most)
        while np.any(low < high):  # the probability grows with the group
            n = (low + high) // 2
            enough = 1 - v**n - (1 - v) ** n >= target
            low, high = np.where(enough, low, np.minimum(n + 1, high)), np.where(enough, n, high)
        return high

    return weigh


@part
def divide(
    budget: Budget = by_deviation, model: ModelOf = posterior_mean, *, least: Count = 1, most: int | None = None
) -> RuleOf:
    """Divide a step's samples by the success rates that a model predicts.

    budget: such as `by_variance`. Each prompt gets from `least` to `most` samples; the total is exact. InputError where
    these do not allow it.
    """
    check_number("divide: most", most, least=least, whole=True, or_none=True)

    def make(facts: PromptFacts) -> Machine:
        own = model(facts)

        def counts(state: State, prompts: Prompts, total: int, random: np.random.Generator) -> Array:
            check_budget("divide", len(prompts.ids), total, least, most)
            v = own.predict(state, prompts, random)
            return apportion(budget(v, prompts, most or total), total, least, most)

        return own.rule(counts=counts)

    return make
