"""Groups in flight that outlive weights, engines and steps: what a sampler does to them between two turns."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from jaxrl_llm.rollouts.runtime.driver import Driver
from jaxrl_llm.rollouts.runtime.group_run import GroupRun
from jaxrl_llm.rollouts.runtime.in_flight import InFlight
from jaxrl_llm.sampling.requests import Completion
from jaxrl_llm.sampling.stats import Stats


def renew(run: InFlight, driver: Driver, keep: bool = False) -> None:
    """Go on with another driver, of new weights.

    Its engines take over what those in use have begun, and compute its keys, values and states again. keep: those in
    use go on instead, with caches that are of earlier weights.
    """
    with run.driver.lock:
        run.waiting += [] if keep else run.withdraw()
        run.driver = driver
        for draws, running in run.engines.items():
            stats = Stats()
            run.stats += [] if draws.temperature == 0 else [stats]
            engine = driver.make_engine((), draws, stats, running.engine)
            run.engines[draws] = running._replace(engine=engine, stats=stats)


def remove(run: InFlight, groups: Sequence[GroupRun]) -> None:
    """Forget groups that are complete."""
    gone = {id(group) for group in groups}
    run.groups = [group for group in run.groups if id(group) not in gone]
    run.ended = [(chunk, group) for chunk, group in run.ended if id(group) not in gone]
    run.complete = [place for place, group in enumerate(run.groups) if any(group is one for _, one in run.ended)]


def restart(run: InFlight) -> None:
    """Go on with new engines of the driver after those in use have failed, with the tokens that they gave."""
    note_running(run, suppress=(Exception,))
    for running in run.engines.values():
        run.waiting += [ticket for ticket in running.tickets.values() if ticket not in run.waiting]
    run.engines = {}


def note_running(run: InFlight, suppress: tuple[type[Exception], ...] = ()) -> None:
    """Note what the engines have drawn of the calls that are not answered. suppress: see `contextlib.suppress`."""
    for running in run.engines.values():
        engine: Any = running.engine  # `Engine`, not one that other hosts mirror
        with contextlib.suppress(*suppress):
            for number, tokens in engine.running():
                ticket = running.tickets[number]
                ticket.note(Completion(number, tokens, False, ticket.until))
