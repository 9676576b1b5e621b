"""Replays: what of earlier steps joins the batch of a step, from stores of rows (`replay.buffers`).

A mixed batch has consecutive group numbers and info["replayed"] f32[N], 1 on rows from a store. Replayed tokens keep
the log-probability and the step of the policy that drew them (`behaviour_logp`, `policy_step`), so ratios to the
behaviour policy and limits of staleness hold for each token. Rows are drawn before those of the step are added.
Replays that change rows within groups are in `replay.into_groups`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl_llm.core.arguments.ranges import Count, Fraction, NonNegative, NonNegativeInt, Positive, ZeroOrOne
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.source import Replay
from jaxrl_llm.replay import buffers
from jaxrl_llm.replay.buffers import Store, count, join, keep, take, to_rows, to_scored, with_columns
from jaxrl_llm.rewards.scoring import Scored

Draw = Callable[[np.ndarray, int, np.random.Generator], np.ndarray]
"""(step of each item int[m], how many, generator) -> indices of items, which may repeat; fewer if there are few."""
TOLERANCE = 1e-7  # rewards that differ by less are equal


@part
def uniformly() -> Draw:
    """Draw items with equal probabilities, each at most once."""
    return lambda steps, wanted, random: random.permutation(len(steps))[:wanted]


@part
def faded(sharpness: NonNegative = 7.0, power: Positive = 2.0, tail: NonNegative = 0.0) -> Draw:
    """Draw items with replacement, with probabilities that fade with age: see `fading_weights`."""

    def draw(steps: np.ndarray, wanted: int, random: np.random.Generator) -> np.ndarray:
        if not len(steps):
            return np.zeros(0, np.int64)
        weights = fading_weights(steps, sharpness, power, tail)
        total = weights.sum()
        return random.choice(len(steps), wanted, p=weights / total if total > 0 else None)

    return draw


def fading_weights(steps: np.ndarray, sharpness: float = 7.0, power: float = 2.0, tail: float = 0.0) -> np.ndarray:
    """tanh(sharpness x^power + tail x^2), f64[m], with x = i/n for items of the i-th of n steps, the newest at 1.

    >>> fading_weights(np.arange(5)).round(3)
    array([0.273, 0.808, 0.987, 1.   , 1.   ])
    """
    _, rank = np.unique(steps, return_inverse=True)
    x = (rank + 1) / (rank.max(initial=0) + 1)
    return np.tanh(sharpness * x**power + tail * x**2)


def times_as_many(ratio: float) -> dict[str, Any]:
    """The arguments of `whole_groups` for so many earlier groups for each of a step, which may be above 1.

    >>> times_as_many(0.5), times_as_many(3.0)
    ({'share': 0.5, 'times': 1}, {'share': 1.0, 'times': 3})
    """
    times = max(math.ceil(ratio), 1)
    return {"share": ratio / times, "times": times}


@part
def whole_groups(
    share: Fraction = 1.0,
    draw: Draw | None = None,
    groups: NonNegativeInt = 1024,
    max_age: NonNegativeInt | None = None,
    until: float | None = None,
    equal: bool = False,
    times: Count = 1,
) -> Replay:
    """Add earlier groups as they were, round(share times n) of them to the n groups of a step that have a score.

    A replayed group is compared within itself. The store has the newest `groups` groups with different rewards, of at
    most `max_age` steps before; equal: also groups of equal rewards. draw: which of them (None: `uniformly()`). until:
    steps with replay (None: all). times: so many times the share, for more earlier groups than those of a step; see
    `times_as_many`.
    """
    share *= times
    choose = uniformly() if draw is None else draw

    def mix(state: Store, scored: Scored, step: int, seed: int) -> tuple[Scored, Store]:
        store, fresh = buffers.younger(state, step, max_age), to_rows(scored)
        group, past, numbers = np.asarray(scored.batch.group), dict[str, np.ndarray](), np.zeros(0, np.int64)
        mean, deviation = group_moments(scored)
        n = len(np.unique(group[~np.isnan(mean)]))
        wanted = round(share * n) if until is None or step < until else 0
        if count(store) and wanted:
            items, first = np.unique(store["of:item"], return_index=True)
            chosen = items[choose(store["of:step"][first], wanted, np.random.default_rng(seed))]
            members = [np.flatnonzero(store["of:item"] == item) for item in chosen]
            past = take(store, np.concatenate(members))
            numbers = np.repeat(group.max() + 1 + np.arange(len(chosen)), [len(rows) for rows in members])
        kept = ~np.isnan(mean) if equal else deviation > TOLERANCE
        added = with_columns(fresh, item=buffers.next_item(store) + group, step=step)
        store = buffers.newest(join(store, keep(added, kept)), groups)
        return mixed(scored, fresh, past, group, numbers), store

    return Replay(dict, mix, frozenset({"replayed"}), buffers.metrics, lambda rows: rows + round(share * rows), True)


@part
def refilled(
    rows: NonNegativeInt = 2048, max_age: NonNegativeInt | None = None, ddof: ZeroOrOne = 1, epsilon: NonNegative = 1e-6
) -> Replay:
    """Replace rows of groups with equal rewards by earlier rows, drawn in proportion to their absolute advantage.

    The store has the newest `rows` rows with an advantage, A = (r - mean_g)/(std_g + epsilon) of their own group, of at
    most `max_age` steps before. Each is drawn at most once a step; where the store has too few, groups stay. A drawn
    row is a group of its own with info["replay_advantage"] = A.
    """

    def mix(state: Store, scored: Scored, step: int, seed: int) -> tuple[Scored, Store]:
        store, fresh, past = buffers.younger(state, step, max_age), to_rows(scored), dict[str, np.ndarray]()
        group, (mean, deviation) = np.asarray(scored.batch.group), group_moments(scored, ddof)
        silent, left = ~(deviation > TOLERANCE), np.ones(len(group), bool)
        for number in np.unique(group[silent]):  # whole groups, as far as the store can replace their rows
            if int((~left).sum() + (group == number).sum()) <= count(store):
                left &= group != number
        if not left.all():
            size = np.abs(store["of:advantage"]).astype(np.float64)
            drawn = np.random.default_rng(seed).choice(len(size), int((~left).sum()), False, size / size.sum())
            past = take(store, drawn)
        advantage = (np.asarray(scored.batch.need("reward")) - mean) / (deviation + epsilon)
        known = ~silent & ~np.isnan(advantage) & (np.abs(advantage) > TOLERANCE)
        item = buffers.next_item(store) + np.arange(len(group))
        added = with_columns(fresh, item=item, step=step, advantage=advantage.astype(np.float32))
        numbers = group.max() + 1 + np.arange(count(past))
        found = mixed(scored, keep(fresh, left), past, group[left], numbers, with_advantage=True)
        return found, buffers.newest(join(store, keep(added, known)), rows)

    return Replay(dict, mix, frozenset({"replayed", "replay_advantage"}), buffers.metrics, by_row=True)


def mixed(
    scored: Scored, fresh: Store, past: Store, group: np.ndarray, numbers: np.ndarray, with_advantage: bool = False
) -> Scored:
    """The batch of the rows of a step and of a store, sorted by group, with info["replayed"].

    group, numbers: of the groups of fresh and past rows; they are made consecutive. with_advantage: also
    info["replay_advantage"], of:advantage of past rows and 0 of others. Columns of the rows of the step decide.
    """
    n, m = count(fresh), count(past)
    if not m and n == len(scored.texts):
        zeros: Any = np.zeros(n, np.float32)
        more = {"replayed": zeros, **({"replay_advantage": zeros} if with_advantage else {})}
        return scored._replace(batch=scored.batch.with_info(**more))
    own, other = {"row:info:replayed": np.zeros(n, np.float32)}, {"row:info:replayed": np.ones(m, np.float32)}
    if with_advantage:
        own["row:info:replay_advantage"] = np.zeros(n, np.float32)
        other["row:info:replay_advantage"] = past["of:advantage"]
    rows = join(fresh | own, past | other, like_first=True) if m else fresh | own
    number = np.concatenate([group, numbers])
    order = np.argsort(number, kind="stable")
    _, consecutive = np.unique(number[order], return_inverse=True)
    return to_scored(take(rows, order), consecutive, scored.batch.tokens.shape[1], scored.failures)


def group_moments(scored: Scored, ddof: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of the scores of each row's group, f64[N]; NaN and 0 where no row is scored."""
    score = np.asarray(scored.batch.need("reward"), np.float64)
    _, index = np.unique(np.asarray(scored.batch.group), return_inverse=True)
    known = ~np.isnan(score)
    number = np.bincount(index, known)
    mean = np.bincount(index, np.where(known, score, 0.0)) / np.where(number > 0, number, np.nan)
    squares = np.bincount(index, np.where(known, (score - mean[index]) ** 2, 0.0))
    deviation = np.sqrt(squares / np.maximum(number - ddof, 1)) * (number > ddof)
    return mean[index], deviation[index]


@dataclass(frozen=True, repr=False)
class Swarm(Replay):
    """A replay among `nodes` policies that a run trains side by side, see `training.source.swarm`."""

    nodes: int = 2
    own: int = 4
    foreign: int = 4


def shared(scored: Scored, others: Sequence[Scored], own: int, foreign: int, seed: int) -> Scored:
    """`own` groups of a node's batch and `foreign` groups of the other nodes', uniformly and each at most once.

    Groups of others with equal rewards are dropped before they are drawn; fewer are taken where there are fewer. The
    rows of others have info["replayed"].
    """
    random, fresh, group = np.random.default_rng(seed), to_rows(scored), np.asarray(scored.batch.group)
    kept = np.isin(group, random.permutation(np.unique(group))[:own])
    pool, numbers = dict[str, np.ndarray](), np.zeros(0, np.int64)
    for other in others:
        varied = group_moments(other)[1] > TOLERANCE
        first = numbers.max(initial=group.max()) + 1
        pool = join(pool, keep(to_rows(other), varied))
        numbers = np.concatenate([numbers, first + np.asarray(other.batch.group)[varied]])
    chosen = np.flatnonzero(np.isin(numbers, random.permutation(np.unique(numbers))[:foreign]))
    if not kept.any() and not len(chosen):  # a step trains on one group at least
        kept = group == group[0]
    past = take(pool, chosen) if len(chosen) else {}
    return mixed(scored, keep(fresh, kept), past, group[kept], numbers[chosen])
