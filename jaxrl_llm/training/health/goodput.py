"""Where the wall time of a run goes, and goodput: the share of it that brought the parameters that the run has now.

As in ML Goodput (Google Cloud, 2024), time that a restart or a rollback throws away counts as lost, as do loading,
compiling, checkpoints and evaluation. `Activity` says in a few words what a run is doing right now: "sampling 37/128",
"update", "compiling the update, once".
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from time import perf_counter, time
from typing import NamedTuple

import jax

from jaxrl_llm.sampling.stats import Stats
from jaxrl_llm.utils.process import compiles, compiling

USEFUL = ("sample", "score", "update")
LOST, DOWN = "lost", "down"  # thrown away by a restart: while the run was at work, and while it was not
OTHER, COMPILE = "other", "compile"
VISITS = 32  # of each phase, over which `Clock.typical` takes the median

WORDS = {
    "sample": "sampling", "score": "scoring", "update": "update", "evaluate": "evaluating", "checkpoint": "saving",
    "load": "loading", "wait": "waiting for other hosts",
    "groups": "waiting for groups", "transfer": "taking weights to the sampler", OTHER: "",
}  # fmt: skip
COMPILED = {"sample": "the sampler", "evaluate": "the sampler", "update": "the update"}


class _Mark(NamedTuple):
    """What the clock shows at a moment; it changes whenever the run makes progress that the clock can see."""

    phase: str
    switches: int  # between phases, so far
    compiled: int  # programs, so far


class Clock:
    """Divides the wall time of a run among its phases, so that their seconds add up to it.

    Every moment belongs to one phase: the innermost that is open, else "other". Compilation is a phase of its own,
    "compile", wherever it happens (as `process.compiles` counts it: tracing stays with the phase around it). Phases
    are annotations in profiles too. One thread switches phases; `mark` and `typical` may be read by others.
    """

    def __init__(self, seconds: Mapping[str, float] | None = None) -> None:
        self.began = time()  # seconds since the epoch
        self.step: int | None = None  # the step under way, set by the loop
        self.failed = ""  # the innermost phase that an exception left
        self._seconds = dict(seconds or {})
        self._told: dict[str, float] = {}  # as of the last `lap`
        self._open, self._took, self._switches = [OTHER], [0.0], 0
        self._visits: dict[str, tuple[float, ...]] = {}  # replaced as a whole, for other threads
        self._since, self._compiled = perf_counter(), compiles()[1]

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time what runs inside as this phase."""
        self._settle()
        self._open.append(phase)
        self._took.append(0.0)
        try:
            with jax.profiler.TraceAnnotation(phase):
                yield
        except BaseException:
            self.failed = self.failed or phase
            raise
        finally:
            self._settle()
            self._open.pop()
            self._visits[phase] = (*self._visits.get(phase, ())[1 - VISITS :], self._took.pop())

    def _settle(self) -> None:
        """Book the time since the last call."""
        now, compiled = perf_counter(), compiles()[1]
        passed = now - self._since
        compiling = min(compiled - self._compiled, passed)  # programs may compile at the same time, in threads
        for phase, spent in ((self._open[-1], passed - compiling), (COMPILE, compiling)):
            self._seconds[phase] = self._seconds.get(phase, 0.0) + spent
        self._took[-1] += passed - compiling
        self._since, self._compiled, self._switches = now, compiled, self._switches + 1

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each phase until now."""
        self._settle()
        return dict(self._seconds)

    def lap(self) -> dict[str, float]:
        """Seconds of each phase since the last call."""
        now, before = self.seconds, self._told
        self._told = now
        return {name: value - before.get(name, 0.0) for name, value in now.items()}

    def go_on(self, past: Mapping[str, float], lost: Mapping[str, float]) -> None:
        """Add the seconds until the checkpoint that the run resumes from, and those lost since, for the next lap."""
        for spent in (past, lost):
            for name, value in spent.items():
                self._seconds[name] = self._seconds.get(name, 0.0) + value
        for name, value in past.items():
            self._told[name] = self._told.get(name, 0.0) + value

    @property
    def mark(self) -> _Mark:
        return _Mark(self._open[-1], self._switches, compiles()[0])

    def visited(self, phase: str) -> bool:
        """Whether a phase has ended before."""
        return phase in self._visits

    def typical(self, phase: str) -> float:
        """The median seconds of a phase, over its last visits; 0 before the first has ended."""
        return median(self._visits.get(phase, (0.0,)))


class Activity:
    """Reads a run's clock, and the counts of the engines that are at work. `text` may be called from any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._engines: tuple[int, tuple[Stats, ...]] = (0, ())  # replaced as a whole, for other threads

    def watch(self, stats: Stats) -> None:
        """Count the completions of an engine, until the clock's phase ends."""
        visit, engines = self._engines
        now = self._clock.mark.switches
        self._engines = (now, (*engines, stats) if visit == now else (stats,))

    def text(self) -> str:
        """The phase and how far it is; "" between phases. While one of its programs is compiled, it says that."""
        mark, (visit, engines) = self._clock.mark, self._engines
        engines = engines if visit == mark.switches else ()
        finished, asked = (sum(getattr(one, name) for one in engines) for name in ("finished", "asked"))
        if mark.phase in COMPILED and not finished and compiling():
            once = "" if self._clock.visited(mark.phase) else ", once"  # later it is a program of another shape
            return f"compiling {COMPILED[mark.phase]}{once}" + (f" (0/{asked} sampled)" if asked else "")
        return WORDS.get(mark.phase, mark.phase) + (f" {finished}/{asked}" if asked else "")


def useful(seconds: Mapping[str, float]) -> float:
    """Seconds of rollouts, rewards and updates."""
    return sum(seconds.get(name, 0.0) for name in USEFUL)


def goodput(seconds: Mapping[str, float], undone: float = 0.0) -> float:
    """Useful seconds over all, 0 to 1. undone: useful seconds whose updates were rolled back.

    >>> goodput({"sample": 3.0, "score": 1.0, "update": 2.0, "other": 1.0, "lost": 1.0}, undone=2.0)
    0.5
    """
    return max(useful(seconds) - undone, 0.0) / max(sum(seconds.values()), 1e-9)


def lap_metrics(clock: Clock, undone: float) -> dict[str, float]:
    """Metrics of a step: seconds of each phase since the last step's metrics, and the goodput of the run so far."""
    spent = {f"seconds/{name}": value for name, value in clock.lap().items()}
    return spent | {"goodput": goodput(clock.seconds, undone)}


def lost_time(saved: float, alive: float, now: float) -> dict[str, float]:
    """Seconds between a checkpoint and a restart from it: of work that is repeated ("lost"), and of none ("down").

    saved: when the checkpoint was taken. alive: the run's last sign of life. now: when it was restarted. All in seconds
    since the epoch, maybe of different machines: differences below 0 count as 0.

    >>> lost_time(saved=100.0, alive=160.0, now=220.0)
    {'lost': 60.0, 'down': 60.0}
    """
    alive = min(max(alive, saved), max(now, saved))
    return {LOST: alive - saved, DOWN: max(now - alive, 0.0)}
