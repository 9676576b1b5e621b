"""Progress of a training run: a live bar on a terminal, one line per step elsewhere."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TextIO, cast

from jaxrl_llm.utils.errors import InputError, optional_package, shown
from jaxrl_llm.utils.process import FailsafeStream

# (label, metric key, format)
_SHOWN = (
    ("reward", "reward/mean", ".3f"),
    ("KL", "kl", ".2g"),
    ("entropy", "entropy", ".3f"),
    ("length", "completion/length", ".1f"),
    ("uniform", "groups/uniform", ".0%"),
    ("tokens/s", "tokens_per_second", ",.0f"),
)
# The same of methods that learn from given responses, which report one of these accuracies.
_ACCURACIES = ("mean_token_accuracy", "rewards/accuracies")
QUIET, LONGEST = 10.0, 60.0  # seconds without a line in a log, after which it says what the run is doing


class Progress:
    """Context manager that shows a run's progress, main metrics, elapsed time and time left.

    `total_steps` is the run's number of steps, `start_step` the first step to take (not 0 on resume). `plain=None`
    prints plain lines if `stream` (default: stdout) is not a terminal, e.g. a log file. The live bar needs the package
    rich. `doing` returns what the run is doing right now, "" for nothing to say: the bar shows it, and a log gets it as
    a line after QUIET seconds without one, then after twice as long and so on, up to LONGEST. It is called from another
    thread. If the stream fails, e.g. because its reader has gone, printing stops and the run continues.
    Raises InputError for steps that are not whole numbers, or a start beyond the end.

        with Progress(total_steps=100) as progress:
            for step in range(100):
                progress.update(step, {"reward/mean": 0.5})
    """

    def __init__(
        self,
        total_steps: int,
        start_step: int = 0,
        *,
        plain: bool | None = None,
        stream: TextIO | None = None,
        doing: Callable[[], str] | None = None,
    ) -> None:
        for name, value in (("total_steps", total_steps), ("start_step", start_step)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise InputError(f"{name} is {shown(value)}, but must be a whole number, at least 0")
        if start_step > total_steps:
            raise InputError(f"{start_step} steps are done, more than the {total_steps} of the run: raise its steps")
        self._total, self._start, self._done = total_steps, start_step, start_step
        self._stream = FailsafeStream(sys.stdout if stream is None else stream)
        self._plain = not self._stream.isatty() if plain is None else plain
        self._metrics: Mapping[str, Any] = {}
        self._began = time.monotonic()
        self._first_update: tuple[float, int] | None = None  # when, and how many steps were done then
        self._latest_update = self._began
        self._live: Any = None
        self._doing, self._ended, self._lines = doing, threading.Event(), threading.Lock()
        # When a line was last printed, and how long after comes another.
        self._printed, self._quiet = self._began, QUIET
        if not self._plain:
            with optional_package("rich", "run", "the live progress bar"):
                from rich.console import Console
            self._console = Console(file=cast(TextIO, self._stream), force_terminal=True)

    def __enter__(self) -> Progress:
        self._began = self._latest_update = time.monotonic()
        if not self._plain:
            from rich.live import Live

            self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=4)
            self._live.start()
        elif self._doing is not None:
            threading.Thread(target=self._tell, name="progress", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Report that `step`, counted from 0, is done, with its metrics; missing or non-finite ones show as "-"."""
        self._done, self._metrics = step + 1, metrics
        self._latest_update = time.monotonic()
        if self._first_update is None:
            self._first_update = (self._latest_update, self._done)
        if self._plain:
            times = f"elapsed {_clock(self._elapsed())}  left {_clock(self._left())}"
            self._print(f"step {self._done}/{self._total}  {self._numbers()}  {times}")
        elif self._live is not None:
            self._live.refresh()

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self._plain:
            self._print(text)
        else:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _print(self, text: str) -> None:
        with self._lines:
            print(text, file=self._stream, flush=True)
            self._printed, self._quiet = time.monotonic(), QUIET

    def _tell(self) -> None:
        """Print what the run is doing whenever no line has been printed for long."""
        while not self._ended.wait(0.5):
            self._tell_now()

    def _tell_now(self) -> None:
        assert self._doing is not None
        if time.monotonic() - self._printed < self._quiet or self._ended.is_set() or not (text := self._doing()):
            return
        longer = min(2 * self._quiet, LONGEST)
        place = f"step {self._done + 1}/{self._total}: " if self._done < self._total else ""
        self._print(f"{place}{text}  elapsed {_clock(self._elapsed())}")
        self._quiet = longer

    def _numbers(self) -> str:
        shown: tuple[tuple[str, str, str], ...] = _SHOWN
        if accuracy := next((name for name in _ACCURACIES if name in self._metrics), None):
            shown = (("loss", "loss", ".4g"), ("accuracy", accuracy, ".1%"), *_SHOWN[2:4], _SHOWN[5])
        return "  ".join(f"{label} {_format(self._metrics.get(key), how)}" for label, key, how in shown)

    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    def _left(self) -> float | None:
        """Seconds left at the mean pace, minus the time since the last step ended; None while unknown."""
        if self._done >= self._total:
            return 0.0
        if self._first_update is None:
            return None
        when, done = self._first_update
        if self._done > done:  # exclude the first step, which compiles
            pace = (self._latest_update - when) / (self._done - done)
        else:
            pace = (when - self._began) / max(done - self._start, 1)
        return max(pace * (self._total - self._done) - (time.monotonic() - self._latest_update), 0.0)

    def _render(self) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        bar = Table.grid(padding=(0, 1), expand=True)
        for ratio in (None, 1, None):
            bar.add_column(ratio=ratio, no_wrap=True)
        bar.add_row(
            Text(f"step {self._done}/{self._total}", style="bold"),
            ProgressBar(total=max(self._total, 1), completed=self._done),
            Text(f"elapsed {_clock(self._elapsed())}  left {_clock(self._left())}"),
        )
        doing = self._doing() if self._doing is not None else ""
        return Group(bar, Text("  ".join(filter(None, [self._numbers(), doing])), style="dim"))


def _format(value: Any, how: str) -> str:
    try:
        number = math.nan if value is None else float(value)
    except (TypeError, ValueError, OverflowError):  # a metric that is not a number must not end the run
        number = math.nan
    return format(number, how) if math.isfinite(number) else "-"


def _clock(seconds: float | None) -> str:
    return "-" if seconds is None else str(timedelta(seconds=round(seconds)))
