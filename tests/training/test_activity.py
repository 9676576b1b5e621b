"""What a run says it is doing."""

from __future__ import annotations

import pytest

from jaxrl_llm.sampling.stats import Stats
from jaxrl_llm.training.health import goodput
from jaxrl_llm.training.health.goodput import Activity, Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(goodput, "compiles", lambda: (0, 0.0))
    return Clock()


def test_phases_have_words_and_what_compiles_is_said(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    activity, compiles = Activity(clock), [True]
    monkeypatch.setattr(goodput, "compiling", lambda: compiles[0])
    assert activity.text() == ""
    for visit in range(2):
        once = "" if visit else ", once"
        with clock("sample"):
            stats = Stats()
            activity.watch(stats)
            stats.asked = 128
            assert activity.text() == f"compiling the sampler{once} (0/128 sampled)"
            compiles[0] = False
            assert activity.text() == "sampling 0/128", "a program that is read from the cache is at work at once"
            compiles[0] = True
            stats.finished = 37
            assert activity.text() == "sampling 37/128"
        assert activity.text() == "", "what an engine counted is forgotten with its phase"
        with clock("score"):
            assert activity.text() == "scoring"
        with clock("update"):
            assert activity.text() == f"compiling the update{once}"
            compiles[0] = False
            assert activity.text() == "update"
            compiles[0] = True


def test_engines_of_one_phase_are_counted_together(clock: Clock) -> None:
    activity = Activity(clock)
    with clock("evaluate"):
        for finished in (3, 4):
            activity.watch(Stats(asked=8, finished=finished))
        assert activity.text() == "evaluating 7/16"
    with clock("evaluate"):
        activity.watch(Stats(asked=5))
        assert activity.text() == "evaluating 0/5"


def test_phases_without_words_are_named(clock: Clock) -> None:
    with clock("wait"):
        assert Activity(clock).text() == "waiting for other hosts"
    with clock("shuffle"):
        assert Activity(clock).text() == "shuffle"
