"""What a run is doing right now, in a few words: "sampling 37/128", "update", "compiling the update, once"."""

from __future__ import annotations

from jaxrl_llm.sampling.stats import Stats
from jaxrl_llm.training.health.goodput import OTHER, Clock
from jaxrl_llm.utils.process import compiling

WORDS = {
    "sample": "sampling", "score": "scoring", "update": "update", "evaluate": "evaluating", "checkpoint": "saving",
    "load": "loading", "wait": "waiting for other hosts",
    "groups": "waiting for groups", "transfer": "taking weights to the sampler", OTHER: "",
}  # fmt: skip
COMPILED = {"sample": "the sampler", "evaluate": "the sampler", "update": "the update"}


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
