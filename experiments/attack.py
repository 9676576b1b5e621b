"""Attack runs, agents, hosts, files, the command line, the Python API and the sandbox, and count what is clear.

    python experiments/attack.py [--kills N] [--agents N] [--damages N] [--invocations N] [--misuses N]
        [--sandbox N] [--hosts N] [--only NAME] [--seed S] [--output table.md] [--workers 2]

Counts are how many of each attack are made (all, or the numbers of experiments/RESULTS.md, by default; of the sandbox,
in each set of layers; of hosts, runs, some of which are killed twice); smaller shares are chosen by the seed. Status 1
if any outcome is not clear.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a script

from experiments.attacks import VERDICTS, Outcome

T = TypeVar("T")
ATTACKS = ("kills", "agents", "damages", "invocations", "misuses", "sandbox", "hosts")
DEFAULT = {"kills": 100, "agents": 60, "damages": 200}  # of the others, all that there are


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the attacks that the arguments ask for, print the table, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    for name in ATTACKS:
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"default: {DEFAULT.get(name, 'all')}")
    parser.add_argument("--only", choices=ATTACKS, help="make this attack alone")
    parser.add_argument("--seed", type=int, default=0, help="of shares and of what is done at random")
    parser.add_argument("--output", type=Path, help="file for the table, in Markdown")
    parser.add_argument("--workers", type=int, default=2, help="processes at a time")
    given = parser.parse_args(arguments)
    runners = {
        "kills": _kills,
        "agents": _agents,
        "damages": _damages,
        "invocations": _invocations,
        "misuses": _misuses,
        "sandbox": _sandbox,
        "hosts": _hosts,
    }
    outcomes: list[Outcome] = []
    for name, runner in runners.items():
        count = getattr(given, name)
        count = DEFAULT.get(name) if count is None else count
        if given.only in (None, name) and (count is None or count > 0):
            start = time.monotonic()
            found = runner(count, given.seed, given.workers)
            print(f"{name}: {len(found)} in {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
            outcomes += found
    text = report(outcomes)
    print(text)
    if given.output:
        given.output.write_text(text + "\n")
    return int(any(outcome.verdict != "clear" for outcome in outcomes))


def report(outcomes: Sequence[Outcome]) -> str:
    """The table of counts, the median time of errors that need no model, and every outcome that is not clear."""
    lines = [f"| attack | {' | '.join(VERDICTS)} |", "|---" * (1 + len(VERDICTS)) + "|"]
    for attack in ATTACKS:
        count = Counter(outcome.verdict for outcome in outcomes if outcome.attack == attack)
        if count:
            lines.append(f"| {attack}, {sum(count.values())} | {' | '.join(str(count[v]) for v in VERDICTS)} |")
    commands = [outcome for outcome in outcomes if outcome.attack == "invocations"]
    if commands:
        from experiments.attacks.invocations import median_seconds

        lines += ["", f"Errors of the command line that need no model: median {median_seconds(commands):.2f} s."]
    if programs := [outcome for outcome in outcomes if outcome.attack == "sandbox"]:
        from experiments.attacks.sandbox import table

        lines += ["", table(programs)]
    for outcome in outcomes:
        if outcome.verdict != "clear":
            said = f"{outcome.verdict}: {outcome.attack}: {outcome.name} ({outcome.seconds:.1f} s): {outcome.said}"
            lines.append(f"- {said}")
    return "\n".join(lines)


def share(names: Sequence[T], count: int | None, seed: int) -> list[T]:
    """`count` of the names, or of what there is (None: all), chosen by the seed, in their order."""
    if count is None or count >= len(names):
        return list(names)
    chosen = set(random.Random(seed).sample(list(names), count))
    return [name for name in names if name in chosen]


# Imported on use: attacks on the command line need no JAX.
def _kills(count: int | None, seed: int, workers: int) -> list[Outcome]:
    from experiments.attacks import kills

    return kills.run(count or DEFAULT["kills"], seed, workers)


def _agents(count: int | None, seed: int, workers: int) -> list[Outcome]:
    from experiments.attacks import kills
    from experiments.attacks.agents import AGENTS

    return kills.run(count or DEFAULT["agents"], seed, workers, tuple(AGENTS))


def _damages(count: int | None, seed: int, workers: int) -> list[Outcome]:
    from experiments.attacks import damages

    return damages.run(count or DEFAULT["damages"], seed, workers)


def _invocations(count: int | None, seed: int, workers: int) -> list[Outcome]:
    from experiments.attacks import invocations
    from experiments.attacks.table import read_table

    table = read_table()
    return invocations.run(table, share([row["name"] for row in table], count, seed), workers)


def _misuses(count: int | None, seed: int, workers: int) -> list[Outcome]:
    from experiments.attacks import misuses

    del workers  # they share a process
    return misuses.run(share(list(misuses.NAMES), count, seed))


def _sandbox(count: int | None, seed: int, workers: int) -> list[Outcome]:
    from experiments.attacks import sandbox

    return sandbox.run(count, seed, workers)


def _hosts(count: int | None, seed: int, workers: int) -> list[Outcome]:
    from experiments.attacks import hosts

    return hosts.run(share(hosts.RUNS, count, seed), workers)


if __name__ == "__main__":
    sys.exit(main())
