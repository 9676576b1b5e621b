"""Signs of life of a run's hosts: each beats in the coordinator's store, and watches the counters of the others.

A host that fails leaves its words there, and the others end with them. One that dies is silent, and the others end with
`LOST`. Until then its death shows as any error of any collective, so what a host raises is held (`Watch.hold`) until
the others have shown that they live.
"""

import contextlib
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

BEAT, SILENT = 1.0, 20.0  # seconds between two signs of life, and after which a host counts as dead
LOST = 75  # exit status of the hosts that go on when another has died: a scheduler may start the job again
SAID, ALIVE = "jaxrl/said", "jaxrl/alive"
SURE = 2  # beats after an error that prove that a host lives: the first may have been under way when it died


class Watch:
    """Shows that this host is alive, and ends it when another one has failed or died, whatever its main thread does.

    client: of the coordinator's store. end: called with a line and an exit status; it does not return. beat, silent: in
    seconds, see `BEAT` and `SILENT`.
    """

    def __init__(
        self, client: Any, index: int, count: int, *, beat: float = BEAT, silent: float = SILENT,
        end: Callable[[str, int], object] | None = None,
    ) -> None:  # fmt: skip
        self._client, self._index, self._count, self._beat, self._silent = client, index, count, beat, silent
        self._end = end or _end
        self._own = uuid.uuid4().hex  # so that a host that is started again is not taken for the one that died
        self._failing: str | None = None  # the words with which this host is about to end by itself
        self._done = threading.Event()
        self._answered = time.monotonic()  # when the coordinator last did
        threads = self._run, self._watch_coordinator
        self._threads = [threading.Thread(target=run, daemon=True, name="alive") for run in threads]

    def start(self) -> None:
        """Begin to beat and to watch, in threads."""
        self._answered = time.monotonic()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """No longer beat; the others do not watch any more either."""
        self._done.set()
        for thread in self._threads:
            thread.join()

    def hold(self, error: BaseException) -> None:
        """Return once every other host has shown that it lives: then the error is this host's own.

        If one is dead, or has said why it ends, the process ends here, with a line about that one.
        """
        self._failing = _words(error)
        before: dict[int, int] = {}
        living: set[int] = set()
        while len(living) < self._count - 1:
            with contextlib.suppress(Exception):  # the watch finds out whether the coordinator is gone
                seen = _directory(self._client, ALIVE)
                living |= _directory(self._client, SAID).keys() - {self._index}
                for other in set(range(self._count)) - {self._index}:
                    beats = int(seen.get(other, "").partition(" ")[2] or 0)
                    if beats - before.setdefault(other, beats) >= SURE:
                        living.add(other)
            time.sleep(self._beat)

    def tell(self, error: BaseException) -> None:
        """Leave last words for the other hosts, and give them time to read them."""
        self._failing = _words(error)
        with contextlib.suppress(Exception):  # the coordinator may be gone
            self._client.key_value_set(f"{SAID}/{self._index}", self._failing)
            time.sleep(3 * self._beat)

    def _run(self) -> None:
        judge, first, beats = silent_since(self._silent), dict[int, str](), 0
        while not self._done.is_set():
            beats += 1
            with contextlib.suppress(Exception):  # see `_watch_coordinator`
                self._client.key_value_set(f"{ALIVE}/{self._index}", f"{self._own} {beats}", allow_overwrite=True)
                said, seen = _directory(self._client, SAID), _directory(self._client, ALIVE)
                self._answered = time.monotonic()
                self._judge(said, seen, judge, first)
            self._done.wait(self._beat)

    def _watch_coordinator(self) -> None:
        """Apart from `_run`, whose calls may wait for minutes where the coordinator's machine is gone."""
        while not self._done.wait(self._beat):
            if time.monotonic() - self._answered > self._silent:
                self._end(f"the coordination service, on host 0, has not answered for {self._silent:.0f} s", LOST)

    def _judge(
        self, said: dict[int, str], seen: dict[int, str], judge: Callable[[dict[int, str], float], list[int]],
        first: dict[int, str],
    ) -> None:  # fmt: skip
        for other, text in said.items():
            if other != self._index and text != self._failing:  # hosts that fail alike each say so themselves
                self._end(f"host {other} ended: {text}", 2)
        for other, value in seen.items():
            process = value.partition(" ")[0]
            if first.setdefault(other, process) != process:
                self._end(f"host {other} was started again", LOST)
        beating = {other: seen.get(other, "") for other in range(self._count) if other not in said}
        if dead := judge(beating, time.monotonic()):
            self._end(f"host {dead[0]} has shown no sign of life for {self._silent:.0f} s", LOST)


def silent_since(limit: float) -> Callable[[dict[int, str], float], list[int]]:
    """A function of (each host's counter, the time in seconds) that returns the hosts without a change for `limit`.

    The one without a change for longest comes first: others may have ended because of it.
    """
    changed: dict[int, tuple[str, float]] = {}

    def judge(seen: dict[int, str], now: float) -> list[int]:
        for host, value in seen.items():
            if host not in changed or changed[host][0] != value:
                changed[host] = value, now
        silent = [host for host in seen if now - changed[host][1] > limit]
        return sorted(silent, key=lambda host: changed[host][1])

    return judge


def _words(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _directory(client: Any, name: str) -> dict[int, str]:
    return {int(key.rsplit("/", 1)[-1]): value for key, value in client.key_value_dir_get(name)}


def _end(text: str, status: int) -> None:
    """End this process with a line, whatever its main thread waits for."""
    advice = "; what is saved is good: jaxrl train --resume RUN goes on" if status == LOST else ""
    print(f"error: {text}{advice}", file=sys.stderr, flush=True)
    os._exit(status)
