"""Progress of a training run: a live bar on a terminal, one line per step elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any, TextIO, cast

from jaxrl_llm.errors import InputError, missing_package, shown
from jaxrl_llm.process import FailsafeStream

# (label, metric key, format)
_SHOWN = (
    ("reward", "reward/mean", ".3f"),
    ("KL", "kl", ".2g"),
    ("entropy", "entropy", ".3f"),
    ("length", "completion/length", ".1f"),
    ("tokens/s", "tokens_per_second", ",.0f"),
)


class Progress:
    """Context manager that shows a run's progress, main metrics, elapsed time and time left.

    `total_steps` is the run's number of steps, `start_step` the first step to take (not 0 on resume). `plain=None`
    prints plain lines if `stream` (default: stdout) is not a terminal, e.g. a log file. The live bar needs the package
    rich. If the stream fails, e.g. because its reader has gone, printing stops and the run continues.
    Raises InputError for steps that are not whole numbers, or a start beyond the end.

        with Progress(total_steps=100) as progress:
            for step in range(100):
                progress.update(step, {"reward/mean": 0.5})
    """

    def __init__(
        self, total_steps: int, start_step: int = 0, *, plain: bool | None = None, stream: TextIO | None = None
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
        if not self._plain:
            try:
                from rich.console import Console
            except ImportError as error:
                raise missing_package("rich", "run", "the live progress bar") from error
            self._console = Console(file=cast(TextIO, self._stream), force_terminal=True)

    def __enter__(self) -> Progress:
        self._began = self._latest_update = time.monotonic()
        if not self._plain:
            from rich.live import Live

            self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
            print(f"step {self._done}/{self._total}  {self._numbers()}  {times}", file=self._stream, flush=True)
        elif self._live is not None:
            self._live.refresh()

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self._plain:
            print(text, file=self._stream, flush=True)
        else:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _numbers(self) -> str:
        return "  ".join(f"{label} {_format(self._metrics.get(key), how)}" for label, key, how in _SHOWN)

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
        return Group(bar, Text(self._numbers(), style="dim"))


def _format(value: Any, how: str) -> str:
    try:
        number = math.nan if value is None else float(value)
    except (TypeError, ValueError, OverflowError):  # a metric that is not a number must not end the run
        number = math.nan
    return format(number, how) if math.isfinite(number) else "-"


def _clock(seconds: float | None) -> str:
    return "-" if seconds is None else str(timedelta(seconds=round(seconds)))
