"""What users of other frameworks reported is right here; see experiments/attacks/public_reports.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from chat_templates import NAMES

from experiments.attacks import public_formulas, public_messages, public_worlds
from experiments.attacks.public_reports import MENDED, NONE, RIGHT, Report, holds, reports, table

needs_templates = pytest.mark.skipif(not NAMES, reason="there is no TRL beside the environment: make .dev")


def wrong(found: list[Report]) -> list[str]:
    return [report.where for report in found if not holds(report)]


def test_there_are_more_than_eighty_each_with_a_number_and_a_trial() -> None:
    found = reports()
    assert len(found) > 80
    names = [report.where for report in found]
    assert len(set(names)) == len(names)
    for report in found:
        assert report.where.rpartition("#")[2].isdigit()
        assert report.found in (RIGHT, MENDED, NONE)
        assert (report.holds is None) == (report.found == NONE)
        assert report.why or report.found == RIGHT


def test_formulas_and_rewards() -> None:
    assert wrong(public_formulas.REPORTS) == []


@needs_templates
def test_messages_and_calls() -> None:
    assert wrong(public_messages.REPORTS) == []


@pytest.mark.heavy
def test_data_environments_and_files() -> None:
    assert wrong(public_worlds.REPORTS) == []


def test_a_trial_that_fails_is_told() -> None:
    fails = Report("some/where#1", "a | b", RIGHT, "", lambda: bool(1 / 0))
    assert not holds(fails)
    assert "| some/where#1 | a \\| b | wrong |" in table([(fails, holds(fails))])
