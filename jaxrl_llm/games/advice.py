"""Advice: one player knows the way, the other goes it, and the adviser may be an enemy."""

from __future__ import annotations

from collections.abc import Sequence

from jaxrl_llm.games.extensive import CHANCE, Node

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
    return Node(
        ADVISER, f"adviser, {role}: the {free} way is free", sayings,
        tuple(_walked(free, role, said) for said in sayings),
    )  # fmt: skip


def _walked(free: str, role: str, said: str) -> Node:
    gains = [1.0 if way == free else -1.0 for way in SIDES]
    ends = tuple(Node(payoffs=(gain, gain if role == "a friend" else -gain)) for gain in gains)
    return Node(WALKER, f"walker: the adviser says {said}", SIDES, ends)
