"""Run the comparisons: python -m experiments.experience [--families a c] [--seeds 5]"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from experiments.experience.compare import read_results, run_family, with_family, write_results
from experiments.experience.families import FAMILIES
from experiments.experience.tables import draw, table

FOLDER = Path(__file__).parent
PAGE = FOLDER.parent / "RESULTS.md"
BEGIN, END = "<!-- experience -->", "<!-- end of experience -->"


def with_table(page: str, text: str) -> str:
    """The page with the table between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def main() -> None:
    """Run families, and write results.json, the figure and the table of RESULTS.md."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--families", nargs="*", default=None, choices=sorted(FAMILIES), help="default: all")
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    path = FOLDER / "results.json"
    for key in sorted(FAMILIES) if arguments.families is None else arguments.families:
        began = time.process_time()
        name = FAMILIES[key].task.__name__
        same = [one["runs"][0] for one in read_results(path)["families"] if one["task"] == name and one["key"] != key]
        found = run_family(FAMILIES[key], range(arguments.seeds), base=same[0] if same else None)
        found["seconds"] = round(time.process_time() - began)
        write_results(path, with_family(read_results(path), found))
    results = read_results(path)
    draw(results, FOLDER / "curves.svg")
    if BEGIN in (page := PAGE.read_text()):
        PAGE.write_text(with_table(page, table(results)))


if __name__ == "__main__":
    main()
