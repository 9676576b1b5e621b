"""Hosts that are killed: two of the kills of experiments/attack.py, and that their judge notices what is wrong."""

from __future__ import annotations

import pytest

from experiments.attacks import hosts
from experiments.attacks.host import PLACES, dying
from experiments.attacks.hosts import RUNS, Host, Moment, judge
from jaxrl_llm.distributed.alive import LOST

LINE = "error: host 1 has shown no sign of life for 20 s; what is saved is good: jaxrl train --resume RUN goes on\n"
DEAD, GOOD = Host(-9, ""), Host(LOST, LINE)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "moment", [Moment(2, 1, "exchange", 2), Moment(2, 0, "temporary", 4)], ids=lambda one: str(one.place)
)
def test_a_host_that_is_killed_ends_the_other_with_a_line_and_the_run_goes_on(moment: Moment) -> None:
    """In a collective, and while all hosts write a checkpoint."""
    (found,) = hosts.run([(moment,)])
    assert found.verdict == "clear", found


@pytest.mark.parametrize(
    ("other", "verdict"),
    [
        (GOOD, "clear"),
        (Host(None, LINE), "hang"),
        (Host(1, "Traceback (most recent call last):\nJaxRuntimeError: Gloo AllGather failed"), "wrong"),
        (Host(2, "error: checkpoint 2 could not be written: free space there"), "wrong"),
        (Host(LOST, ""), "unclear"),
        (Host(LOST, f"Exception in thread alive:\n{LINE}"), "unclear"),
        (Host(LOST, LINE.replace("host 1", "host 0")), "unclear"),
    ],
)
def test_what_the_other_hosts_do_is_judged(other: Host, verdict: str) -> None:
    moment = Moment(3, 1, "update")
    assert judge([other, DEAD, GOOD], moment)[0] == verdict
    assert judge([GOOD, DEAD, other], moment)[0] == verdict


def test_a_moment_that_did_not_come_is_told() -> None:
    assert judge([GOOD, Host(0, "")], Moment(2, 1, "update"))[0] == "wrong"


def test_kills_are_those_that_were_promised() -> None:
    """At least twelve of two hosts and of four, at least six while saving; every place is there."""
    moments = [moment for each in RUNS for moment in each]
    assert min(sum(moment.hosts == count for moment in moments) for count in (2, 4)) >= 12
    saving = ("save", "saving", "temporary", "complete")
    assert sum(moment.place in saving for moment in moments) >= 6
    assert {moment.place for moment in moments} == {*PLACES, "temporary", "complete"}
    assert {moment.victim for moment in moments} == set(range(4))


def test_a_host_dies_at_the_call_that_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("experiments.attacks.host.die", lambda: said.append("dies"))
    for when in ("before", "after"):
        call = dying(lambda text: said.append(text), when, 2, 0.0)
        call("first")
        call("second")
    assert said == ["first", "dies", "second", "first", "second", "dies"]
