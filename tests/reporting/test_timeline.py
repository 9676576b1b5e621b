"""The timeline of an asynchronous run: times by hand, and none of a run that samples and learns in turn."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from sample_runs import write_run

from jaxrl_llm.reporting import write_report
from jaxrl_llm.reporting.html.run_data import RunData
from jaxrl_llm.reporting.html.timeline import COLOURS, SHOWN, Timeline, timeline

# Steps of 10, 4 and 6 seconds.
STEPS = [
    {"seconds/groups": 6.0, "seconds/update": 3.0, "seconds/sample": 1.0, "decoding": 8.0, "idle": 2.0},
    {"seconds/transfer": 1.0, "seconds/update": 3.0, "decoding": 1.0, "idle": 3.0},
    {"seconds/groups": 2.0, "seconds/update": 4.0, "decoding": 12.0, "idle": 0.0},
]


def of_steps(folder: Path, steps: list[dict[str, float]]) -> Timeline | None:
    folder.mkdir()
    lines = [
        {"step": number, **{name if "/" in name else f"sampler/{name}_seconds": x for name, x in step.items()}}
        for number, step in enumerate(steps)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return timeline(RunData(folder))


def bars(found: Timeline) -> list[tuple[float, float, float, str]]:
    """(x, width, y, title) of each bar, in seconds of 20 in all."""
    rule = r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)".*?<title>(.*?)</title>'
    return [(float(x) / 50, float(w) / 50, float(y), title) for x, y, w, title in re.findall(rule, found.svg)]


def test_times_by_hand(tmp_path: Path) -> None:
    found = of_steps(tmp_path / "run", STEPS)
    assert found is not None
    learner = sorted((x, width, title.partition(",")[0]) for x, width, y, title in bars(found) if y > 0)
    assert learner == [
        (0.0, 6.0, "step 1: waits for groups"), (6.0, 3.0, "step 1: update"), (9.0, 1.0, "step 1: other"),
        (10.0, 1.0, "step 2: transfer"), (11.0, 3.0, "step 2: update"), (14.0, 2.0, "step 3: waits for groups"),
        (16.0, 4.0, "step 3: update"),
    ]  # fmt: skip
    sampler = sorted((x, width, title.partition(",")[0]) for x, width, y, title in bars(found) if y == 0)
    assert sampler == [  # a time that is longer than the step ends with it
        (0.0, 8.0, "step 1: decodes"), (8.0, 2.0, "step 1: waits at the bound"), (10.0, 1.0, "step 2: decodes"),
        (11.0, 3.0, "step 2: waits at the bound"), (14.0, 6.0, "step 3: decodes"),
    ]  # fmt: skip
    assert (found.first, found.waits, found.idle) == (0, pytest.approx(8 / 20), pytest.approx(5 / 20))
    assert [phase for _, phase in found.legend] == [
        "decodes", "waits at the bound", "transfer", "waits for groups", "update", "other",
    ]  # fmt: skip
    assert all(COLOURS[phase] == colour for colour, phase in found.legend)


def test_the_last_steps_are_shown(tmp_path: Path) -> None:
    found = of_steps(tmp_path / "run", [STEPS[1]] * (SHOWN + 5))
    assert found is not None
    assert found.first == 5
    assert "step 6: " in found.svg
    assert "step 5: " not in found.svg


def test_a_run_that_samples_and_learns_in_turn_has_none(tmp_path: Path) -> None:
    assert timeline(RunData(write_run(tmp_path / "run"))) is None
    assert 'id="timeline"' not in write_report(tmp_path / "run").read_text()
    of_steps(tmp_path / "other", STEPS)
    text = write_report(tmp_path / "other").read_text()
    assert "The learner waits for groups for 40 % of the time" in text
    assert "waits at the bound on staleness for 25 %" in text
