"""Curves: what is drawn, thinned and labelled, and what a pointer over a chart can read."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from sample_runs import write_run

from jaxrl_llm.reporting import plot_runs
from jaxrl_llm.reporting.html.charts import Curve, curve_chart, histogram_chart, moving_mean
from jaxrl_llm.reporting.html.curves import LIGHT, folder_names, main_metrics, pass_at_k_chart
from jaxrl_llm.reporting.html.run_data import RunData
from jaxrl_llm.reporting.statistics import pass_at_k
from jaxrl_llm.utils.errors import InputError

pytest.importorskip("matplotlib")


def texts(svg: str) -> list[str]:
    return [text.strip() for text in re.findall(r"<text[^>]*>([^<]*)</text>", svg)]


def test_axes_have_labels_and_units() -> None:
    x = np.arange(5.0)
    chart = curve_chart("Entropy", "entropy", [Curve("", x, 2 * x)], "nats per token")
    assert {"step", "nats per token"} <= set(texts(chart.svg))
    assert 'aria-label="Entropy (nats per token): from 0 at 0 to 8 at 4"' in chart.svg
    assert chart.last == 8


def test_a_pointer_can_read_the_numbers_where_they_are_drawn() -> None:
    """The frame that the chart gives maps the numbers to the points of the drawn path."""
    x, y = np.arange(4.0), np.array([0.5, math.nan, 2.0, 1.0])
    chart = curve_chart("A", "a", [Curve("run", x, y, colour=2)], "value")
    data = json.loads(chart.data)
    (line,) = data["lines"]
    assert (line["name"], line["colour"], line["x"], line["y"]) == ("run", 2, [0, 1, 2, 3], [0.5, None, 2.0, 1.0])
    left, top, right, bottom, x0, y1, x1, y0 = data["view"]
    (path,) = re.findall(r'<path d="([^"]*)"[^>]*stroke: var\(--line2\)', chart.svg)
    drawn = [tuple(map(float, point)) for point in re.findall(r"[ML] (\S+) (\S+)", path)]
    expected = [
        (left + (right - left) * (a - x0) / (x1 - x0), bottom - (bottom - top) * (b - y0) / (y1 - y0))
        for a, b in zip(x, y, strict=True)
        if math.isfinite(b)
    ]
    np.testing.assert_allclose(drawn, expected, atol=0.02)


def test_curves_that_do_not_move_have_plain_axes() -> None:
    x = np.arange(9.0)
    chart = curve_chart("", "rate", [Curve("", x, np.full(9, 3e-5))], "learning rate")
    *_, high, _, low = json.loads(chart.data)["view"]
    assert low == pytest.approx(1.5e-5)
    assert high == pytest.approx(4.5e-5)
    assert all(len(text) < 14 for text in texts(chart.svg))
    share = json.loads(curve_chart("", "s", [Curve("", x, np.linspace(0.8, 0.9, 9))], "share").data)["view"]
    assert -0.1 < share[-1] < 0 < share[5]


def test_a_long_curve_has_its_moving_mean() -> None:
    values = np.sin(np.arange(100.0))
    svg = curve_chart("", "a", [Curve("", np.arange(100.0), values)], "value").svg
    assert [float(width) for width in re.findall(r"var\(--line0\).*?stroke-width: ([\d.]+)", svg)] == [0.7, 1.7]
    smooth = moving_mean(values)
    assert np.abs(smooth[10:-10]).max() < 0.4
    np.testing.assert_allclose(moving_mean(np.full(50, 3.0)), 3.0)
    assert np.isnan(moving_mean([1.0, math.nan, 3.0])).tolist() == [False, True, False]
    assert moving_mean([]).size == 0


def test_histograms_are_shares() -> None:
    chart = histogram_chart("Rewards", [[0.0, 0.0, 1.0, 1.0], [1.0]], "reward")
    first, second = json.loads(chart.data)["lines"]
    assert (first["y"][0], first["y"][-1], sum(first["y"])) == (0.5, 0.5, 1.0)
    assert second["y"][-1] == 1.0
    assert {"reward", "share of samples"} <= set(texts(chart.svg))


def test_groups_without_signal_and_entropy_are_main_curves(tmp_path: Path) -> None:
    run = RunData(write_run(tmp_path / "run"))
    titles = [title for title, _ in main_metrics([run])]
    assert titles[:3] == ["Reward", "Groups without signal", "Entropy"]


def test_pass_at_k_of_training_groups_and_of_evaluations(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    run = RunData(folder)
    chart, labels = pass_at_k_chart([run]) or (None, [])
    assert chart is not None
    data = json.loads(chart.data)
    # Logged are the steps 0, 6 ... 42 and 47: a quarter of these nine are two.
    assert [label for _, label in labels] == ["training, steps 0 to 6", "training, steps 42 to 47"]
    counts = [
        sum(bool(row.correct) for row in run.rows if row.step == step and row.prompt_id == prompt)
        for step, prompt in dict.fromkeys((row.step, row.prompt_id) for row in run.rows if row.phase == "train")
        if step >= 42
    ]
    assert data["lines"][1]["x"] == [1, 2, 4]
    expected = [100 * pass_at_k(counts, 4, k).mean() for k in (1, 2, 4)]
    np.testing.assert_allclose(data["lines"][1]["y"], expected, rtol=1e-3)
    assert data["log"] is True
    assert {"k, samples per prompt", "pass@k, %", "1", "2", "4"} <= set(texts(chart.svg))
    pass_at = {str(k): {"value": k / 16, "low": k / 32, "high": k / 10} for k in (8, 1, 2, 4)}
    (folder / "eval-after.json").write_text(json.dumps({"accuracy": 0.1, "pass_at": pass_at}))
    (folder / "eval-odd.json").write_text(json.dumps({"pass_at": {"one": 3}}))
    chart, labels = pass_at_k_chart([RunData(folder)]) or (None, [])
    assert chart is not None
    assert labels[0][1] == "held-out, eval-after"
    line = json.loads(chart.data)["lines"][0]
    assert (line["x"], line["y"]) == ([1, 2, 4, 8], [6.25, 12.5, 25.0, 50.0])
    # Several runs are compared by their evaluations only.
    assert len((pass_at_k_chart([RunData(folder), run]) or ((), []))[1]) == 2
    assert pass_at_k_chart([RunData(write_run(tmp_path / "a")), RunData(write_run(tmp_path / "b"))]) is None


def test_a_plot_for_notebooks_and_files(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name / "run", seed=seed, steps=12) for seed, name in enumerate("ab")]
    one = plot_runs(runs[0], ["entropy"])
    assert repr(one) == "1 curves of run: entropy"
    document = one.svgs["entropy"]
    ElementTree.fromstring(document)  # well-formed by itself
    assert LIGHT[0] in document
    assert "var(" not in document
    both = plot_runs(runs)
    assert {"reward/mean", "groups/uniform", "entropy"} <= both.svgs.keys()
    page = both._repr_html_()
    assert page.count("<svg") == len(both.charts)
    assert str(runs[0]) in page  # runs of the same name are told apart by their folders
    assert folder_names([RunData(runs[0])]) == ["run"]
    with pytest.raises(InputError, match="did you mean 'entropy'"):
        plot_runs(runs[0], ["entropie"])
    with pytest.raises(InputError, match="no runs to plot"):
        plot_runs([])
    with pytest.raises(InputError, match="no run in"):
        plot_runs(tmp_path / "nowhere")
