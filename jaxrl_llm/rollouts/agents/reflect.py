"""Agents that reflect on an episode and try it again from the turn where it went wrong."""

from __future__ import annotations

from typing import NamedTuple


class Guided(NamedTuple):
    """Where an episode has the guidance of its retry."""

    row: int
    """The row that has it first; those before have nothing that is trained on."""
    place: int | None
    """Of its segments, that with the guidance; None: its prompt."""
    plain: tuple[int, ...]
    """That segment without it."""
