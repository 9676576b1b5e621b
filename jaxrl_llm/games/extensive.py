"""Games in extensive form: trees of moves and chance, expected payoffs, best responses, exploitability; known games.

A strategy gives every information set the probabilities of its actions. It has those of all players: an information set
belongs to one of them. All numbers are exact sums over the tree in float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import permutations
from typing import Any

import numpy as np

from jaxrl_llm.utils.errors import InputError, shown

Array = np.ndarray[Any, Any]
Strategy = Mapping[str, Array]  # information set -> f64[its actions], probabilities
CHANCE, END = -1, -2  # players of nodes at which nobody decides


@dataclass(frozen=True)
class Node:
    """A state of a game, and the game that begins there.

    player: who moves, numbered from 0; CHANCE, or END. information: the name of the information set, which says who
    moves and what that player knows. actions: their names, and the node that each leads to. chance: their
    probabilities, of a chance node. payoffs: what each player gets, of an end.
    """

    player: int = END
    information: str = ""
    actions: tuple[str, ...] = ()
    children: tuple[Node, ...] = ()
    chance: tuple[float, ...] = ()
    payoffs: tuple[float, ...] = ()


def matrix_game(payoffs: Any, other: Any = None, names: Sequence[str] | None = None) -> Node:
    """Both players choose at once: the first a row, the second a column.

    payoffs: f[R, C], the first player's. other: the second's, f[R, C]; None: a zero-sum game. names: of the actions,
    at least as many as a player has; by default their numbers. The information sets are "first" and "second".
    InputError for what is no matrix of finite numbers.
    """
    first = np.asarray(payoffs, np.float64)
    second = -first if other is None else np.asarray(other, np.float64)
    if first.ndim != 2 or not first.size or first.shape != second.shape or not np.isfinite([first, second]).all():
        raise InputError(
            f"the payoffs are {shown(payoffs)}, but must be a matrix of finite numbers, as the other's are"
        )
    rows, columns = first.shape
    named = tuple(map(str, range(max(rows, columns)))) if names is None else tuple(names)
    if len(named) < max(rows, columns):
        raise InputError(f"names has {len(named)} entries, but the game has {max(rows, columns)} actions")
    ends = [[Node(payoffs=(float(first[r, c]), float(second[r, c]))) for c in range(columns)] for r in range(rows)]
    replies = tuple(Node(1, "second", named[:columns], tuple(row)) for row in ends)
    return Node(0, "first", named[:rows], replies)


def nodes(game: Node) -> Iterator[Node]:
    """All nodes, a parent before its children."""
    yield game
    for child in game.children:
        yield from nodes(child)


def information_sets(game: Node) -> dict[str, tuple[int, tuple[str, ...]]]:
    """The player and the actions of each information set, in the order of the tree.

    InputError where nodes of one set differ in either.
    """
    found: dict[str, tuple[int, tuple[str, ...]]] = {}
    for node in nodes(game):
        own = (node.player, node.actions)
        if node.player >= 0 and found.setdefault(node.information, own) != own:
            raise InputError(
                f"the information set {node.information!r} has nodes with different players or actions: name them apart"
            )
    return found


def payoff_range(game: Node) -> float:
    """The largest minus the smallest payoff that any player can have."""
    payoffs = [x for node in nodes(game) for x in node.payoffs]
    return max(payoffs) - min(payoffs)


def uniform_strategy(game: Node) -> dict[str, Array]:
    """All actions equally often."""
    return {name: np.full(len(actions), 1 / len(actions)) for name, (_, actions) in information_sets(game).items()}


FORFEIT = "anything else"


def with_forfeits(game: Node) -> Node:
    """The game in which a player may also do anything else (the last action, FORFEIT), which ends it: that player gets
    the smallest of the payoffs that it can have, and the others the largest of theirs."""
    payoffs = np.asarray([node.payoffs for node in nodes(game) if node.player == END])
    worst, best = payoffs.min(axis=0), payoffs.max(axis=0)

    def extended(node: Node) -> Node:
        children = tuple(map(extended, node.children))
        if node.player < 0:
            return replace(node, children=children)
        ends = [float((worst if player == node.player else best)[player]) for player in range(len(worst))]
        end = Node(payoffs=tuple(ends))
        return replace(node, actions=(*node.actions, FORFEIT), children=(*children, end))

    return extended(game)


def probabilities(node: Node, strategy: Strategy) -> Array:
    """f64[actions] at a node of chance or of a player. KeyError for an information set that the strategy lacks."""
    return np.asarray(node.chance if node.player == CHANCE else strategy[node.information], np.float64)


def expected_payoffs(game: Node, strategy: Strategy) -> Array:
    """f64[players] where all of them follow the strategy."""
    if game.player == END:
        return np.asarray(game.payoffs, np.float64)
    return np.asarray(probabilities(game, strategy) @ [expected_payoffs(child, strategy) for child in game.children])


def best_response(game: Node, strategy: Strategy, player: int) -> tuple[dict[str, Array], float]:
    """A pure best response of a player to the others' part of a strategy, and its expected payoff.

    It has the player's information sets alone; the first of equally good actions is taken. The player must remember
    all it knew (perfect recall): an information set is then decided after those that follow it.
    """
    members: dict[str, list[tuple[Node, float]]] = {}  # with the probability that the others and chance lead there

    def visit(node: Node, reach: float) -> None:
        if node.player == END:
            return
        if node.player == player:
            members.setdefault(node.information, []).append((node, reach))
        own = np.ones(len(node.children)) if node.player == player else probabilities(node, strategy)
        for p, child in zip(own, node.children, strict=True):
            visit(child, reach * p)

    @cache
    def choice(name: str) -> int:
        worth = np.sum([[reach * value(one) for one in node.children] for node, reach in members[name]], axis=0)
        return int(np.argmax(worth))

    def value(node: Node) -> float:
        if node.player == END:
            return float(node.payoffs[player])
        if node.player == player:
            return value(node.children[choice(node.information)])
        return float(probabilities(node, strategy) @ [value(child) for child in node.children])

    visit(game, 1.0)
    best = value(game)
    return {name: np.eye(len(some[0][0].actions))[choice(name)] for name, some in members.items()}, best


def nash_conv(game: Node, strategy: Strategy) -> float:
    """The sum over players of what a best response gains over the strategy; 0 in a Nash equilibrium."""
    payoffs = expected_payoffs(game, strategy)
    return float(sum(best_response(game, strategy, player)[1] - mean for player, mean in enumerate(payoffs)))


def exploitability(game: Node, strategy: Strategy) -> float:
    """`nash_conv` by players and by the range of payoffs, so that 0.05 is 5 % of the range."""
    return nash_conv(game, strategy) / len(expected_payoffs(game, strategy)) / payoff_range(game)


def average_strategy(game: Node, strategies: Sequence[Strategy], weights: Sequence[float] | Array) -> dict[str, Array]:
    """The strategy that plays as one of several does which is drawn, by each player alone, before the game.

    weights: their probabilities up to a factor. In an information set the actions of strategy i weigh as often as its
    player comes there by its own choices. A set that none comes to has the plain mean. With perfect recall it has the
    payoffs of that draw against every opponent.
    """
    shares = np.asarray(weights, np.float64)
    total = {name: np.zeros(len(actions)) for name, (_, actions) in information_sets(game).items()}
    for strategy, share in zip(strategies, shares, strict=True):
        for name, reach in own_reach(game, strategy).items():
            total[name] += share * reach * np.asarray(strategy[name])
    mean = {
        name: np.sum([w * np.asarray(s[name]) for s, w in zip(strategies, shares, strict=True)], axis=0)
        for name in total
    }
    used = {name: x if x.sum() > 0 else mean[name] for name, x in total.items()}
    return {name: x / x.sum() for name, x in used.items()}


def own_reach(game: Node, strategy: Strategy) -> dict[str, float]:
    """With which probability the player of each information set comes there by its own choices."""
    found: dict[str, float] = {}

    def visit(node: Node, reach: Mapping[int, float]) -> None:
        if node.player == END:
            return
        if node.player >= 0:
            found[node.information] = reach.get(node.player, 1.0)
        for p, child in zip(probabilities(node, strategy), node.children, strict=True):
            visit(child, {**reach, node.player: reach.get(node.player, 1.0) * p})

    visit(game, {})
    return found


WALKER, ADVISER = 0, 1
SIDES = ("left", "right")


def advice_game(enemies: float = 0.5, sayings: Sequence[str] = SIDES) -> Node:
    """A game of hidden roles: the adviser sees which way is free, and says one; the walker hears it, and goes one.

    enemies: how often the adviser is an enemy, from 0 to 1; the walker does not know. sayings: what it can say; these
    are words alone, of which the walker's information sets have the one that was said. The walker gets 1 for the free
    way and else -1; a friend gets the same, an enemy the opposite. Information sets are named "adviser, a friend: the
    left way is free", "walker: the adviser says left" and the like. At 1/2 nobody gains anything from words: the value
    is 0 for the walker.
    """
    free_and_role = [(free, role) for free in SIDES for role in ("a friend", "an enemy")]
    chance = tuple((enemies if role == "an enemy" else 1 - enemies) / 2 for _, role in free_and_role)
    names = tuple(f"{free}, {role}" for free, role in free_and_role)
    return Node(CHANCE, "", names, tuple(_advised(free, role, tuple(sayings)) for free, role in free_and_role), chance)


def _advised(free: str, role: str, sayings: tuple[str, ...]) -> Node:
    gains = [1.0 if way == free else -1.0 for way in SIDES]
    ends = tuple(Node(payoffs=(gain, gain if role == "a friend" else -gain)) for gain in gains)
    heard = tuple(Node(WALKER, f"walker: the adviser says {said}", SIDES, ends) for said in sayings)
    return Node(ADVISER, f"adviser, {role}: the {free} way is free", sayings, heard)


CARDS = ("jack", "queen", "king")  # the higher one wins


def kuhn_poker() -> Node:
    """The game of Kuhn (1950), whose value is -1/18 for the first player.

    Each player antes 1. The first checks or bets 1; after a bet the other folds or calls; after a check it checks or
    bets 1, to which the first folds or calls. The higher card wins the pot. Information sets are named "jack:", "king:
    check bet" and the like: the player's card and the moves so far.
    """
    deals = list(permutations(range(3), 2))
    children = tuple(_after((), deal) for deal in deals)
    names = tuple(f"{CARDS[a]} {CARDS[b]}" for a, b in deals)
    return Node(CHANCE, "", names, children, (1 / len(deals),) * len(deals))


def _after(moves: tuple[str, ...], deal: tuple[int, int]) -> Node:
    if moves[-1:] == ("fold",):
        winner, stake = len(moves) % 2, 1
    elif moves in (("check", "check"), ("bet", "call"), ("check", "bet", "call")):
        winner, stake = int(deal[1] > deal[0]), 1 + (moves[-1] == "call")
    else:
        player = len(moves) % 2
        actions = ("fold", "call") if moves[-1:] == ("bet",) else ("check", "bet")
        return Node(
            player, f"{CARDS[deal[player]]}:{''.join(f' {move}' for move in moves)}", actions,
            tuple(_after((*moves, action), deal) for action in actions),
        )  # fmt: skip
    return Node(payoffs=(float(stake), -float(stake)) if winner == 0 else (-float(stake), float(stake)))
