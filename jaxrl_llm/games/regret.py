"""Counterfactual regret minimisation, and the rules by which regrets add up."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.core.arguments.ranges import check_number
from jaxrl_llm.games.extensive import CHANCE, END, Node, Strategy, information_sets, own_reach, probabilities

Array = np.ndarray[Any, Any]


class Regrets(NamedTuple):
    """What a rule remembers of an information set with K actions."""

    total: Array  # f64[K]
    volatility: float = 0.0


class RegretRule(NamedTuple):
    """How the regrets of one iteration, r f64[K], enter those of an information set; t counts iterations from 1."""

    observe: Callable[[Regrets, Array, int], Regrets]
    weight: Callable[[Regrets, Array, int], float]
    """Weight of the iteration's policy in the average, given the regrets after it."""


def regret_policy(regrets: Array) -> Array:
    """f64[K]: in proportion to the positive regrets f64[K]; uniform where there is none.

    >>> regret_policy(np.array([2.0, -1.0, 1.0])).round(6).tolist()
    [0.666667, 0.0, 0.333333]
    """
    positive = np.maximum(np.asarray(regrets, np.float64), 0)
    total = positive.sum()
    return positive / total if total > 0 else np.full(positive.shape, 1 / len(positive))


def regret_matching() -> RegretRule:
    """Regrets add up, and iterations count alike in the average (Hart and Mas-Colell 2000; CFR, Zinkevich 2007)."""
    return RegretRule(lambda old, r, t: Regrets(old.total + r), lambda regrets, r, t: 1.0)


def regret_matching_plus() -> RegretRule:
    """Sums that stay at or above 0, and iteration t with the weight t (CFR+, arXiv 1407.5042)."""
    return RegretRule(lambda old, r, t: Regrets(np.maximum(old.total + r, 0)), lambda regrets, r, t: float(t))


def volatility_adaptive(warm_up: int = 500) -> RegretRule:
    """VAD-CFR: discounts that follow how large regrets are (arXiv 2602.16928), without its optimistic term.

    With m = max |r|, v <- m / 10 + 9 v / 10 and w = min(1, v / 2), a regret R is multiplied by t^a / (t^a + 1), a =
    max(0.1, 1.5 - w / 2), or where it is negative by t^b / (t^b + 1), b = min(a, -0.1 - w / 2); then 1.1 r is added if
    r > 0, else r; the sum is at least -20. The policy of iteration t >= warm_up weighs t^g sqrt(1 + m / 2) / (1 +
    m^1.5) in the average, g = min(4, 2 + 1.5 w). InputError for a warm_up below 1.
    """
    check_number("warm_up", warm_up, least=1, whole=True)

    def share(regrets: Regrets) -> float:
        return min(1.0, regrets.volatility / 2)

    def observe(old: Regrets, r: Array, t: int) -> Regrets:
        new = Regrets(old.total, 0.1 * float(np.max(np.abs(r))) + 0.9 * old.volatility)
        a = max(0.1, 1.5 - 0.5 * share(new))
        b = min(a, -0.1 - 0.5 * share(new))
        power = np.where(old.total >= 0, float(t) ** a, float(t) ** b)
        total = power / (power + 1) * old.total + np.where(r > 0, 1.1 * r, r)
        return new._replace(total=np.maximum(total, -20.0))

    def weight(regrets: Regrets, r: Array, t: int) -> float:
        if t < warm_up:
            return 0.0
        m = float(np.max(np.abs(r)))
        return float(t ** min(4.0, 2 + 1.5 * share(regrets)) * np.sqrt(1 + m / 2) / (1 + m**1.5))

    return RegretRule(observe, weight)


def counterfactual_regrets(game: Node, strategy: Strategy) -> dict[str, Array]:
    """f64[actions] of each information set: what always taking an action there would gain its player, summed over the
    set's nodes, weighted by the probability that chance and the others lead there."""
    regrets = {name: np.zeros(len(actions)) for name, (_, actions) in information_sets(game).items()}

    def visit(node: Node, reach: Mapping[int, float]) -> Array:
        if node.player == END:
            return np.asarray(node.payoffs, np.float64)
        own = probabilities(node, strategy)
        values = np.stack(
            [
                visit(child, {**reach, node.player: reach.get(node.player, 1.0) * p})
                for p, child in zip(own, node.children, strict=True)
            ]
        )
        mean = own @ values
        if node.player != CHANCE:
            others = float(np.prod([p for player, p in reach.items() if player != node.player]))
            regrets[node.information] += others * (values - mean)[:, node.player]
        return np.asarray(mean)

    visit(game, {})
    return regrets


def cfr(game: Node, rule: RegretRule, iterations: int, start: Strategy | None = None) -> dict[str, Array]:
    """The average strategy of counterfactual regret minimisation, in which all players move at once.

    Of a two-player zero-sum game it tends to a Nash equilibrium. start: the regrets before the first iteration, by
    default 0; in proportion to a strategy, the first iteration plays that, so that of several equilibria one near it is
    found. Where no iteration has a weight in an information set
    it is the last policy. InputError for fewer than 1 iterations.
    """
    check_number("iterations", iterations, least=1, whole=True)
    before = {name: np.zeros(len(actions)) for name, (_, actions) in information_sets(game).items()} | {**(start or {})}
    kept = {name: Regrets(np.asarray(one, np.float64)) for name, one in before.items()}
    total = {name: np.zeros(len(one.total)) for name, one in kept.items()}
    strategy: dict[str, Array] = {}
    for t in range(1, iterations + 1):
        strategy = {name: regret_policy(one.total) for name, one in kept.items()}
        found, reach = counterfactual_regrets(game, strategy), own_reach(game, strategy)
        for name, r in found.items():
            kept[name] = rule.observe(kept[name], r, t)
            total[name] = total[name] + rule.weight(kept[name], r, t) * reach[name] * strategy[name]
    return {name: x / x.sum() if x.sum() > 0 else strategy[name] for name, x in total.items()}
