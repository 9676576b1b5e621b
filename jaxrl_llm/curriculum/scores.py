"""Rules of a curriculum that score prompts, or leave them out: by their success rate, their set, or their stage.

Scores are log-weights, see `compose.choose_prompts`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import numpy as np

from jaxrl_llm.core.arguments.ranges import Count, Fraction, NonNegative, NonNegativeInt, Positive, Range
from jaxrl_llm.core.parts import batch_part, part
from jaxrl_llm.core.source import Step
from jaxrl_llm.curriculum.excluded import Why, where
from jaxrl_llm.curriculum.records import Array, PromptFacts, Prompts, State, changed, results_of
from jaxrl_llm.curriculum.rules import Machine, ModelOf, Outcome, RuleOf, posterior_mean, posterior_sample, prefer
from jaxrl_llm.utils.errors import InputError, shown

_TINY = 1e-30


@part
def least_tried() -> RuleOf:
    """Draw the prompts that were tried in the fewest steps, so that every pass over the set tries each prompt once."""
    return lambda facts: Machine(score=lambda state, prompts, random: -1e9 * prompts.tries)


@part
def uncertain(least: Positive = 0.05, model: ModelOf = posterior_mean) -> RuleOf:
    """Weights sqrt(v (1 - v)) + least, with v the success rate that the model predicts. `least` is above 0."""
    return prefer(lambda v: np.log(np.sqrt(v * (1 - v)) + least), model)


@part
def near_target(target: Fraction = 0.5, temperature: Positive = 1e-3, model: ModelOf = posterior_mean) -> RuleOf:
    """Weights exp(-|v - target| / temperature), with v the success rate that the model predicts."""
    return prefer(lambda v: -np.abs(v - target) / temperature, model)


@part
def thompson() -> RuleOf:
    """Weights p (1 - p), with p drawn from the prompt's Beta posterior; use it without noise, as p is random itself."""
    return prefer(lambda p: np.log(np.maximum(p * (1 - p), _TINY)), posterior_sample)


@part
def retry_failed(boost: Positive = 4.0, most: Count = 3) -> RuleOf:
    """Multiply the weight of prompts without a success in their last group by `boost`, up to `most` tries."""
    return lambda facts: Machine(
        score=lambda state, prompts, random: np.where((prompts.rate == 0) & (prompts.tries <= most), np.log(boost), 0.0)
    )


@part
def mixed_sets(column: str, weights: Mapping[Any, NonNegative]) -> RuleOf:
    """Draw from several sets in proportion to their weights, and uniformly within each.

    column: names the set of each prompt. Raises InputError for a set without a weight.
    """
    if not weights:
        raise InputError("mixed_sets has no weights: give one of each set")

    def make(facts: PromptFacts) -> Machine:
        names, place = sets_of(facts, column)
        if unknown := [name for name in names if name not in weights]:
            raise InputError(f"the set {unknown[0]!r} of the column {column!r} has no weight: add it to the weights")
        shares = np.array([weights[name] for name in names], np.float64)
        if not shares.sum() > 0:
            raise InputError("mixed_sets: all weights are 0, but one must be above 0")
        return Machine(score=lambda state, prompts, random: set_scores(shares / shares.sum(), place[prompts.ids]))

    return make


@batch_part
def adversarial_sets(
    facts: PromptFacts, column: str, rate: NonNegative = 0.1, floor: Fraction = 0.5, smoothing: Fraction = 0.1
) -> Machine:
    """Draw more from the sets where the policy fails more: exponentiated gradient ascent on the weights q of K sets.

    With S the moving average of a set's share of failures (1 - mean reward), updated for sets in the step's batch,

        S <- (1 - smoothing) S + smoothing (1 - r),    q <- q exp(rate (S - mean S)), normalised

    and draws use the mixture of q and the uniform weights 1/K that is nearest to q and has an entropy of at least
    floor log K. Within a set prompts are drawn uniformly.
    """
    names, place = sets_of(facts, column)
    K = len(names)

    def observe(state: State, outcome: Outcome) -> State:
        at = place[outcome.results.ids]
        count = np.bincount(at, minlength=K)
        failed = np.bincount(at, 1 - outcome.results.mean, K) / np.maximum(count, 1)
        S = np.where(np.isnan(state["loss"]), failed, state["loss"] + smoothing * (failed - state["loss"]))
        S = np.where(count > 0, S, state["loss"])
        known = ~np.isnan(S)
        pull = np.where(known, S - np.mean(S[known]), 0.0) if known.any() else np.zeros(K)
        log_q = state["log_weights"] + rate * pull
        return {"loss": S, "log_weights": log_q - np.log(np.sum(np.exp(log_q - log_q.max()))) - log_q.max()}

    def weights(state: State) -> Array:
        if len(state["log_weights"]) != K:
            raise InputError(f"the column {column!r} has {K} sets, but its state is of another number: undo that")
        return with_entropy(np.exp(state["log_weights"]), floor)

    return Machine(
        {"loss": np.full(K, np.nan), "log_weights": np.full(K, -np.log(K))},
        score=lambda state, prompts, random: set_scores(weights(state), place[prompts.ids]),
        observe=observe,
        metrics=lambda state: {f"weight/{name}": float(q) for name, q in zip(names, weights(state), strict=True)},
    )


def with_entropy(q: Array, floor: float) -> Array:
    """The mixture (1 - g) q + g/K with the smallest g whose entropy is at least floor log K; q f64[K] sums to 1.

    >>> with_entropy(np.array([0.9, 0.1]), 0.9).round(3).tolist(), with_entropy(np.array([0.4, 0.6]), 0.9).tolist()
    ([0.684, 0.316], [0.4, 0.6])
    """
    K = len(q)

    def mixture(g: float) -> Array:
        return (1 - g) * q + g / K

    def entropy(p: Array) -> float:
        return float(-np.sum(p * np.log(np.maximum(p, _TINY))))

    if entropy(q) >= floor * np.log(K):
        return q
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if entropy(mixture(middle)) >= floor * np.log(K) else (middle, high)
    return mixture(high)


def sets_of(facts: PromptFacts, column: str) -> tuple[list[Any], Array]:
    """The distinct values of a column, ascending, and the place int32[P] of each prompt's among them.

    Raises InputError where values cannot be ordered.
    """
    values = facts.column(column)
    try:
        names = sorted(set(values))
    except TypeError:
        raise InputError(
            f"the column {column!r} has values such as {shown(values[0])}, but must have numbers only, or texts only"
        ) from None
    places = {name: place for place, name in enumerate(names)}
    return names, np.array([places[value] for value in values], np.int32)


def set_scores(shares: Array, place: Array) -> Array:
    """Log-weights f64[n] with which set k gets shares[k] of the draws among prompts in the sets place[n]."""
    count = np.bincount(place, minlength=len(shares))
    with np.errstate(divide="ignore"):
        return (np.log(shares) - np.log(np.maximum(count, 1)))[place]


Measure = Callable[[Step], tuple[Array, Array]]  # the prompts of a step, ids int[n], and how far each is solved, f64[n]


def mean_reward(step: Step) -> tuple[Array, Array]:
    """The mean reward of each prompt's samples, each clipped to [0, 1]."""
    results = results_of(step)
    return results.ids, results.mean


@batch_part
def drop_solved(
    facts: PromptFacts,
    at: Fraction = 1.0,
    visits: Annotated[int, Range(least=1, most=255)] = 1,
    back: Count | None = None,
    *,
    measure: Measure = mean_reward,
    start: NonNegativeInt = 0,
) -> Machine:
    """Drop prompts whose `measure` is at least `at` in `visits` visits in a row.

    back: steps after which a dropped prompt is drawn again (None: never). If it is then not solved, it stays; the
    metric curriculum/returned counts those. start: visits count from this step on.
    """

    def left_out(state: State, prompts: Prompts) -> Array:
        since = state["since"][prompts.ids]
        out = since >= 0
        return where(Why.SOLVED, out if back is None else out & (prompts.step - since < back))

    def observe(state: State, outcome: Outcome) -> State:
        step = outcome.before.step
        if step < start:
            return {}
        ids, solved = measure(outcome.step)
        streak = np.where(solved >= at, np.minimum(state["streak"][ids].astype(np.int64) + 1, 255), 0)
        out = streak >= visits
        was = state["since"][ids] >= 0
        return {
            "since": changed(state["since"], ids, np.where(out, step, -1)),
            "streak": changed(state["streak"], ids, streak),
            "returned": state["returned"] + int(np.sum(was & ~out)),
        }

    def metrics(state: State) -> dict[str, float]:
        return {"returned": float(state["returned"])} if back is not None or state["returned"] else {}

    empty = {"since": np.full(facts.size, -1, np.int32), "streak": np.zeros(facts.size, np.uint8), "returned": 0}
    return Machine(empty, excluded=left_out, observe=observe, metrics=metrics, reasons=(Why.SOLVED,))


@batch_part
def staged(
    facts: PromptFacts,
    column: str,
    steps: Count,
    earlier: Annotated[float, Range(least=0, below=1)] = 0.0,
    order: Sequence[Any] = (),
) -> Machine:
    """Stages of `steps` steps each, one for each value of a column; the last stage lasts to the end of the run.

    Values are in ascending order, or in the `order` given. earlier: the share of prompts of earlier stages.
    Raises InputError where the order lacks a value of the column.
    """
    names, place = sets_of(facts, column)
    if order:
        if unknown := [name for name in names if name not in order]:
            raise InputError(f"the order of stages has no {unknown[0]!r}, which the column {column!r} has: add it")
        ranks = np.array([list(order).index(name) for name in names], np.int32)
        place = np.unique(ranks[place], return_inverse=True)[1].astype(np.int32)
    last = int(place.max())

    def stage(step: int) -> int:
        return min(step // steps, last)

    def left_out(state: State, prompts: Prompts) -> Array:
        mine = place[prompts.ids]
        now = stage(prompts.step)
        return where(Why.LATER, mine > now) + where(Why.EARLIER, (mine < now) & (earlier == 0))

    def score(state: State, prompts: Prompts, random: np.random.Generator) -> Array:
        current = (place[prompts.ids] == stage(prompts.step)).astype(np.int32)
        return set_scores(np.array([earlier, 1 - earlier]), current)

    def observe(state: State, outcome: Outcome) -> State:
        return {"stage": stage(outcome.before.step + 1)}

    return Machine(
        {"stage": 0}, score, left_out, observe=observe, metrics=lambda state: {"stage": float(state["stage"])},
        reasons=(Why.LATER, Why.EARLIER) if earlier == 0 else (Why.LATER,),
    )  # fmt: skip
