"""Draw the README's pictures of a report and of a comparison: python experiments/report_figures.py runs/demo-seed0

Both are taken by a headless Chromium: report.png is the upper part of the run's report, and compare.png what five
methods make of the completions of a step of the run, two gradient steps after they were sampled.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image, ImageChops

from jaxrl_llm.core.trajectory import map_rows
from jaxrl_llm.reporting import Comparison, compare, logged_batch, logged_prompts
from jaxrl_llm.training.folder.report import write_report

METHODS = ("grpo", "dapo", "gspo", "rloo", "cispo")
NAMES = ("chromium", "chromium-browser", "google-chrome")


def picture(page: Path, target: Path, width: int, height: int) -> None:
    """The upper part of a page as a PNG of few colours, without the empty rows at its end."""
    browser = next(filter(None, map(shutil.which, NAMES)), None)
    if browser is None:
        raise SystemExit(f"none of {', '.join(NAMES)} is installed: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        shot = Path(folder) / "shot.png"
        subprocess.run(
            [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder}",
             f"--window-size={width},{height}", f"--screenshot={shot}", page.resolve().as_uri()],
            check=True, capture_output=True, timeout=120,
        )  # fmt: skip
        image = Image.open(shot).convert("RGB")
    ground = Image.new("RGB", image.size, image.getpixel((0, image.height - 1)))
    box = ImageChops.difference(image, ground).getbbox()
    end = min(image.height, box[3] + 16) if box else image.height
    image.crop((0, 0, width, end)).quantize(256, dither=Image.Dither.NONE).save(target, optimize=True)


def credit(run: Path, step: int | None) -> tuple[Comparison, list[list[str]], list[str]]:
    """The comparison on the groups of a step whose rewards differ, the texts of their tokens, and their prompts.

    First come short completions of one group, the best and the worst of them.
    """
    (batch, texts), prompts = logged_batch(run, step), logged_prompts(run, step)
    group, reward = np.asarray(batch.group), np.asarray(batch.reward)
    mixed = [number for number in np.unique(group) if np.ptp(reward[group == number]) > 0]
    rows = np.flatnonzero(np.isin(group, mixed)) if mixed else np.arange(len(group))
    # Text with line breaks is drawn over several lines, and counts as long.
    length = {n: sum(len(text) + 100 * text.count("\n") for text in texts[n]) for n in rows}
    own = sorted(rows[group[rows] == group[rows].min()], key=length.__getitem__)
    right, wrong = ([n for n in own if reward[n] == end] for end in (reward[own].max(), reward[own].min()))
    rows = np.array(list(dict.fromkeys([right[0], wrong[0], *right[1:2], *rows])))
    chosen = map_rows(lambda x: x[rows], batch)
    return compare(METHODS, chosen, after_steps=2), [texts[n] for n in rows], [prompts[n] for n in rows]


def main() -> None:
    """Draw both pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--step", type=int, default=None, help="whose completions are compared; default: the last")
    parser.add_argument("--output", type=Path, default=Path("experiments/results"))
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        page = write_report(arguments.run, output=Path(folder) / "report.html")
        picture(page, arguments.output / "report.png", 1240, 1330)
        found, texts, prompts = credit(arguments.run, arguments.step)
        page = Path(folder) / "compare.html"
        body = found.to_html(texts, rows=3, prompts=prompts)
        page.write_text(f'<!doctype html><meta charset="utf-8"><body style="margin:16px">{body}', encoding="utf-8")
        picture(page, arguments.output / "compare.png", 860, 1400)


if __name__ == "__main__":
    main()
