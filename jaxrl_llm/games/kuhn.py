"""Kuhn poker: three cards, one each, one bet of one chip."""

from __future__ import annotations

from itertools import permutations

from jaxrl_llm.games.extensive import CHANCE, Node

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
