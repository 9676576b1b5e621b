"""The groups that no step has taken, and the learner that waits until those of a step are complete."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from jaxrl_llm.rollouts.asynchronous.staleness import Waiting
from jaxrl_llm.rollouts.runtime.group_run import GroupRun
from jaxrl_llm.rollouts.runtime.replay_log import GroupKey
from jaxrl_llm.utils.process import stop_if

LOOK = 0.2  # seconds between two looks for Ctrl-C, and for threads that have ended, while something waits
Choose = Callable[[Sequence[Waiting]], list[GroupKey] | None]


class Waitlist:
    """The groups in flight of a host's samplers, in the order in which they were admitted. For several threads."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._groups: dict[GroupKey, Waiting] = {}
        self._admitted = 0
        self._error: BaseException | None = None

    def admit(self, keys: Iterable[GroupKey]) -> None:
        """Groups come after those there are; of one that is there already, that it is not complete any more."""
        with self._news:
            for key in keys:
                place = self._groups[key].place if key in self._groups else self._admitted
                self._admitted += key not in self._groups
                self._groups[key] = Waiting(key, place)

    def ended(self, ended: Iterable[tuple[GroupRun, int]]) -> None:
        """Groups are complete, each since a chunk of its sampler."""
        self.complete((group.before.key, chunk) for group, chunk in ended)

    def complete(self, ended: Iterable[tuple[GroupKey, int]]) -> None:
        """`ended`, by the keys of groups."""
        with self._news:
            for key, chunk in ended:
                self._groups[key] = self._groups[key]._replace(ended=chunk)
            self._news.notify_all()

    def fail(self, error: BaseException) -> None:
        """No group will be complete any more: whoever waits has this error."""
        with self._news:
            self._error = error
            self._news.notify_all()

    def wait(
        self, choose: Choose, interrupted: Callable[[], bool], meanwhile: Callable[[], object]
    ) -> tuple[list[GroupKey], int]:
        """Wait until `choose` names groups, which are complete: (their keys, how many were complete at first).

        choose: (groups that no step has taken) -> keys, or None to wait. meanwhile: called again and again. Raises
        KeyboardInterrupt after Ctrl-C.
        """
        with self._news:
            complete = sum(one.ended is not None for one in self._groups.values())
        while True:
            with self._news:
                if (keys := choose(list(self._groups.values()))) is not None:
                    for key in keys:
                        del self._groups[key]
                    return keys, complete
                if self._error is not None:
                    raise self._error
                self._news.wait(LOOK)
            stop_if(interrupted())
            meanwhile()
