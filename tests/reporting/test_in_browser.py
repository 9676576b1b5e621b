"""Reports in a real browser: their elements work, nothing is logged as an error, and they fit a phone's width."""

from __future__ import annotations

import html
import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sample_runs import write_run

from jaxrl_llm.reporting.html.curves import plot_runs
from jaxrl_llm.reporting.html.report import write_report

pytest.importorskip("matplotlib")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [pytest.mark.heavy, pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")]

# The page runs in a frame of the asked width, since the browser's own window cannot be as narrow as a phone.
OUTER = """<!doctype html><meta charset="utf-8"><pre id="found"></pre>
<iframe id="frame" style="width:{width}px;height:900px;border:0" srcdoc="{page}"></iframe>
<script>
const frame = document.getElementById("frame");
frame.onload = () => {{
  const page = frame.contentDocument, view = frame.contentWindow;
  const all = selector => [...page.querySelectorAll(selector)];
  const shown = selector => all(selector).filter(x => x.getClientRects().length).length;
  const set = (selector, value, event) => {{
    const x = page.querySelector(selector);
    x.value = value;
    x.dispatchEvent(new view.Event(event, {{bubbles: true}}));
  }};
  let found;
  try {{ found = (() => {{ {probe} }})(); }} catch (error) {{ found = {{failed: String(error)}}; }}
  document.getElementById("found").textContent = JSON.stringify(found);
}};
</script>"""


def look(page: Path, probe: str, width: int = 1200, folder: Path | None = None) -> tuple[dict[str, Any], list[str]]:
    """What a script finds in a page, and what the browser's console said."""
    folder = folder or page.parent
    outer = folder / "outer.html"
    text = html.escape(page.read_text(encoding="utf-8"), quote=True)
    outer.write_text(OUTER.format(width=width, page=text, probe=probe), encoding="utf-8")
    command = [
        str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}",
        "--enable-logging=stderr", "--virtual-time-budget=5000", "--window-size=1400,1000", "--dump-dom",
        outer.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    match = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.S)
    assert match, done.stdout[:500]
    found = json.loads(html.unescape(match[1]))
    assert "failed" not in found, found
    return found, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return write_run(folder / "first"), write_run(folder / "second", seed=1, after=0.4, algorithm="dapo")


def test_the_report_of_a_run_works(runs: tuple[Path, Path], tmp_path: Path) -> None:
    page = write_report(runs[0], defaults=lambda config: {"seed": 0, "steps": 100}, output=tmp_path / "report.html")
    found, said = look(
        page,
        """
        const out = {};
        const cards = () => shown("#groups .group");
        out.verdict = all(".verdict .says").map(x => x.textContent.trim().slice(0, 12));
        out.fold = page.querySelector(".verdict").getBoundingClientRect().bottom;
        out.warnings = all(".warnings li").length;
        out.cells = Object.fromEntries(all(".cell").map(x => [x.dataset.kind, parseInt(x.textContent)]));
        out.squares = shown(".squares i");
        out.before = [shown("#held-out .group"), cards()];
        page.querySelector(".cell.o-fixed").click();
        out.fixed = shown("#held-out .group");
        out.pressed = all('.cell[aria-pressed="true"]').map(x => x.dataset.kind);
        page.querySelector(".cell.o-fixed").click();
        out.unpressed = shown("#held-out .group");
        set("#groups .filter", "mixed", "change");
        out.mixed = cards();
        out.count = page.querySelector("#groups .count").textContent;
        set("#groups .filter", "", "change");
        set("#groups .search", "CALCULATE 3 + 5", "input");
        out.searched = [cards(), shown("#groups .group .sample") > 0];
        set("#groups .search", "", "input");
        const rewards = () => all("#groups .group").map(x => Number(x.dataset.reward));
        set("#groups .sort", "-reward", "change");
        out.falling = rewards();
        set("#groups .sort", "reward", "change");
        out.rising = rewards();
        set("#groups .sort", "step", "change");
        out.steps = all("#groups .group").map(x => Number(x.dataset.step));
        const token = page.querySelector("#groups .tokens i[class^=a]");
        const back = () => view.getComputedStyle(token).backgroundColor;
        out.shades = [back()];
        page.querySelector("#groups input[value=entropy]").click();
        out.shades.push(back());
        token.click();
        out.picked = page.getElementById("picked").textContent;
        const chart = page.querySelector(".chart"), box = chart.querySelector("svg").getBoundingClientRect();
        const at = {bubbles: true, clientX: box.left + 0.975 * box.width, clientY: box.top + 30};
        chart.dispatchEvent(new view.PointerEvent("pointermove", at));
        out.reading = chart.querySelector(".reading").textContent;
        out.dots = chart.querySelectorAll(".dot").length;
        chart.dispatchEvent(new view.KeyboardEvent("keydown", {key: "ArrowLeft", bubbles: true}));
        out.earlier = chart.querySelector(".reading").textContent;
        chart.dispatchEvent(new view.PointerEvent("pointerleave"));
        out.left = chart.querySelectorAll(".dot").length + chart.querySelector(".reading").textContent.length;
        const label = x => x.labels && x.labels.length ? x.labels[0].textContent : x.textContent;
        out.unnamed = all("input, select, button").filter(x => !label(x).trim()).length;
        out.undescribed = all("svg").filter(x => !x.getAttribute("aria-label")).length;
        out.wide = page.documentElement.scrollWidth - page.documentElement.clientWidth;
        return out;
        """,
    )
    assert said == []
    assert found["verdict"] == ["▲ Held-out a"]
    assert 0 < found["fold"] < 600
    assert found["warnings"] == 1
    summary = json.loads((runs[0] / "summary.json").read_text())
    cells, prompts = found["cells"], summary["eval_before"]["prompts"]
    assert sum(cells.values()) == prompts == found["squares"]
    assert (cells["right"] + cells["fixed"]) / prompts == summary["eval_after"]["accuracy"]
    assert (cells["right"] + cells["broken"]) / prompts == summary["eval_before"]["accuracy"]
    pairs, groups = found["before"]
    assert pairs == found["unpressed"] == sum(min(count, 6) for count in cells.values())
    assert (found["fixed"], found["pressed"]) == (6, ["fixed"])
    assert 0 < found["mixed"] < groups
    assert found["count"] == f"{found['mixed']} of {groups} shown"
    assert found["searched"] == [1, True]
    assert found["rising"] == sorted(found["falling"])
    assert found["falling"] == sorted(found["falling"], reverse=True)
    assert found["rising"][0] < found["rising"][-1]
    assert found["steps"] == sorted(found["steps"])
    assert found["shades"][0] != found["shades"][1]
    assert "advantage" in found["picked"]
    last = json.loads((runs[0] / "metrics.jsonl").read_text().splitlines()[-1])
    assert found["reading"] == f"step 47{last['reward/mean']:.4g} reward"
    assert found["dots"] == 1
    assert found["earlier"].startswith("step 46")
    assert found["left"] == 0
    assert (found["unnamed"], found["undescribed"], found["wide"]) == (0, 0, 0)


def test_the_report_of_two_runs_works(runs: tuple[Path, Path], tmp_path: Path) -> None:
    page = write_report(runs, output=tmp_path / "both.html")
    found, said = look(
        page,
        """
        const chart = page.querySelector(".chart"), box = chart.querySelector("svg").getBoundingClientRect();
        const at = {bubbles: true, clientX: box.left + box.width / 2, clientY: box.top + 30};
        chart.dispatchEvent(new view.PointerEvent("pointermove", at));
        return {
          verdicts: all(".verdict").length,
          reading: [...chart.querySelectorAll(".reading div")].map(x => x.textContent.split(":")[0]),
          settings: all(".settings code").map(x => x.textContent),
          colours: new Set(all(".chart:first-of-type .dot").map(x => view.getComputedStyle(x).fill)).size,
          wide: page.documentElement.scrollWidth - page.documentElement.clientWidth,
        };
        """,
    )
    assert said == []
    assert found == {
        "verdicts": 2, "reading": ["first", "second"], "settings": ["seed", "algorithm"], "colours": 2, "wide": 0
    }  # fmt: skip


@pytest.mark.parametrize("width", [360, 768])
def test_reports_fit_narrow_screens(runs: tuple[Path, Path], tmp_path: Path, width: int) -> None:
    one = write_report(runs[0], defaults=lambda config: {"seed": 5, "prompts": ""}, output=tmp_path / "one.html")
    both = write_report(runs, output=tmp_path / "both.html")
    probe = """
        const most = page.documentElement.clientWidth, right = x => x.getBoundingClientRect().right;
        const wide = all("main *").filter(x => !x.closest(".scroll, svg") && right(x) > most + 1);
        return {over: page.documentElement.scrollWidth - most, wide: wide.map(x => x.outerHTML.slice(0, 80))};
    """
    for page in (one, both):
        found, said = look(page, probe, width)
        assert said == []
        assert found == {"over": 0, "wide": []}


def test_no_word_of_a_table_is_broken_on_a_phone(runs: tuple[Path, Path], tmp_path: Path) -> None:
    changed = {"seed": 5, "prompts": "", "max_new_tokens": 1, "environment": "world.py:Countdown"}
    page = write_report(runs[0], defaults=lambda config: {name: changed.get(name, -1) for name in config})
    probe = """
        page.querySelectorAll("details").forEach(one => one.open = true);
        const broken = [], walker = page.createTreeWalker(page.body, 4), range = page.createRange();
        while (walker.nextNode()) {
          const node = walker.currentNode;
          if (!node.parentElement.closest(".facts")) continue;
          for (const word of node.textContent.matchAll(/[^\\s-]+/g)) {
            range.setStart(node, word.index);
            range.setEnd(node, word.index + word[0].length);
            if (new Set([...range.getClientRects()].map(one => one.top)).size > 1) broken.push(word[0]);
          }
        }
        return {tables: all(".facts").length, broken};
    """
    found, said = look(page, probe, 420, tmp_path)
    assert said == []
    assert found["tables"] > 2
    assert found["broken"] == []


def test_a_plot_in_a_notebook_has_its_curves(runs: tuple[Path, Path], tmp_path: Path) -> None:
    page = tmp_path / "plot.html"
    page.write_text("<!doctype html><body>" + plot_runs(list(runs), ["reward/mean"])._repr_html_())
    probe = """
        const lines = all("svg path").map(x => view.getComputedStyle(x).stroke);
        return {blue: lines.filter(x => x === "rgb(31, 102, 199)").length,
                orange: lines.filter(x => x === "rgb(184, 77, 6)").length};
    """
    found, said = look(page, probe)
    assert (said, found) == ([], {"blue": 2, "orange": 2})  # the values, and their moving mean


def test_the_pictures_of_the_readme_are_drawn(
    runs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Path(__file__).parents[2] / "experiments" / "report_figures.py"
    monkeypatch.setattr(sys, "argv", ["report_figures.py", str(runs[0]), "--step", "24", "--output", str(tmp_path)])
    runpy.run_path(str(script), run_name="__main__")
    sizes = {}
    for name in ("report.png", "compare.png"):
        head = (tmp_path / name).read_bytes()[:24]
        assert head.startswith(b"\x89PNG")
        sizes[name] = (int.from_bytes(head[16:20]), int.from_bytes(head[20:24]))
    assert sizes["report.png"] == (1240, 1330)
    assert sizes["compare.png"][0] == 860
    assert 300 < sizes["compare.png"][1] < 1400  # cut below its last line


def test_the_console_is_read(tmp_path: Path) -> None:
    """The tests above would see an error."""
    page = tmp_path / "wrong.html"
    page.write_text("<!doctype html><script>missing.call()</script>")
    found, said = look(page, "return {title: page.title};")
    assert found == {"title": ""}
    assert any("missing is not defined" in line for line in said)
