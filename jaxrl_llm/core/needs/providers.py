"""What of a run provides a need of a method, in words."""

from __future__ import annotations

OWN = "the method's own rollout"


def own_rollout(name: str) -> str:
    """What provides a need for which the library has no rollout."""
    return f"--rollout FILE.py:FUNCTION, which returns a Rollout with provides={{{name!r}}} and writes info[{name!r}]"


def own_source(name: str) -> str:
    """What provides a need that no rollout can know."""
    return f"a source (training.loop.train) with provides={{{name!r}}} and info[{name!r}] in its batches"


def reward_entry(name: str, *built_in: str) -> str:
    """What provides a need that reward functions may return beside their scores."""
    own = f"FILE.py:FUNCTION whose file says FUNCTION.provides = {{{name!r}}}"
    return f"--rewards {' or '.join([*built_in, own])}"
