"""What users of other frameworks reported, tried here: each report is an entry with a trial that can be run again.

    python experiments/attacks/public_reports.py        # prints the table of experiments/RESULTS.md

A report is the number of an issue or a pull request of a public tracker. Its fault is tried on our code in a few lines;
what was wrong is mended, and stays here. Status 1 if a trial fails.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs as a script

RIGHT, MENDED, NONE = "right", "wrong and mended", "not applicable"


class Report(NamedTuple):
    """A fault that somebody met elsewhere."""

    where: str  # repository#number
    fault: str  # what was seen there
    found: str  # RIGHT, MENDED or NONE: what our code did when it was tried first
    why: str  # in a few words
    holds: Callable[[], bool] | None = None  # whether we give the right value; None: not applicable


def refuses(function: Callable[[], object], *words: str) -> bool:
    """Whether it is refused in one line that has these words."""
    from jaxrl_llm.utils.errors import InputError

    try:
        function()
    except InputError as error:
        return all(word in str(error) for word in words) and "\n" not in str(error)
    return False


def reports() -> list[Report]:
    """All of them."""
    from experiments.attacks import public_formulas, public_messages, public_worlds

    return [*public_formulas.REPORTS, *public_messages.REPORTS, *public_worlds.REPORTS]


def holds(report: Report) -> bool:
    """Whether we give the right value. False where the trial raises."""
    try:
        return report.holds is None or bool(report.holds())
    except Exception as error:  # what a trial raises is a finding, too
        print(f"{report.where}: {type(error).__name__}: {error}", file=sys.stderr)
        return False


def table(found: Sequence[tuple[Report, bool]]) -> str:
    """The reports in Markdown, with how many of each kind there are."""
    count = Counter(report.found if right else "wrong" for report, right in found)
    lines = [", ".join(f"{number} {name}" for name, number in count.most_common()) + ":", ""]
    lines += ["| report | what was seen there | here | |", "|---|---|---|---|"]
    for report, right in found:
        cells = (report.where, report.fault, report.found if right else "wrong", report.why)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Try all reports, print the table, and return the exit status."""
    found = [(report, holds(report)) for report in reports()]
    print(table(found))
    return int(not all(right for _, right in found))


if __name__ == "__main__":
    from experiments.attacks.public_reports import main as run  # the module that the others import

    sys.exit(run())
