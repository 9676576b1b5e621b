"""One host of a run, which kills itself where it is told to: `python -m experiments.attacks.host PLACE NTH DELAY ...`.

PLACE is one of PLACES, or "-" for a host that lives. Where it comes there for the NTH time, SIGKILL follows after DELAY
seconds, which it goes on for. The rest are arguments of `jaxrl`.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

# Module, what it calls, and whether the place is before or after that.
PLACES = {
    "join": ("jaxrl_llm.distributed.connect", "connect", "after"),
    "load": ("jaxrl_llm.training.setup", "load_model", "before"),
    "restore": ("jaxrl_llm.training.folder.checkpoints", "Checkpoints.latest", "before"),
    "evaluate": ("jaxrl_llm.training.loop", "evaluate_run", "before"),
    "rollout": ("jaxrl_llm.rollouts.runtime.source", "_round", "before"),
    "rewards": ("jaxrl_llm.rollouts.runtime.source", "_score", "before"),
    "exchange": ("jaxrl_llm.rollouts.runtime.source", "of_all_hosts", "before"),
    "update": ("jaxrl_llm.training.loop", "learn", "before"),
    "save": ("jaxrl_llm.training.folder.checkpoints", "Checkpoints.save", "before"),
    "saving": ("jaxrl_llm.training.folder.checkpoints", "Checkpoints.save", "after"),
    "report": ("jaxrl_llm.training.loop", "write_report", "before"),  # of the first host
    "leave": ("jaxrl_llm.distributed.connect", "leave", "before"),
}


def die() -> None:
    """SIGKILL, to this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def dying(call: Callable[..., Any], when: str, nth: int, delay: float) -> Callable[..., Any]:
    """The function, which kills the process before or after its nth call."""
    calls = 0

    def count() -> None:
        nonlocal calls
        calls += 1
        if calls == nth and delay:
            threading.Timer(delay, die).start()
        elif calls == nth:
            die()

    def wrapped(*arguments: Any, **named: Any) -> Any:
        if when == "before":
            count()
        found = call(*arguments, **named)
        if when == "after":
            count()
        return found

    return wrapped


def main(place: str, nth: int, delay: float, arguments: list[str]) -> None:
    """Run the command and end as it does."""
    if place != "-":
        module, name, when = PLACES[place]
        holder: Any = importlib.import_module(module)
        *path, name = name.split(".")
        for part in path:
            holder = getattr(holder, part)
        setattr(holder, name, dying(getattr(holder, name), when, nth, delay))
    sys.argv[1:] = arguments
    from jaxrl_llm.cli.program import main as jaxrl

    sys.exit(jaxrl())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
