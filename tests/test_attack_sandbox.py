"""The attack on the sandbox; `experiments/attack.py --only sandbox` makes all of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))

from experiments.attacks import Outcome
from experiments.attacks.sandbox import KEPT, REACHED, attacked, cases, table
from jaxrl_llm.environments.sandbox import LAYERS, available

SOME = (
    "files: changed: mode", "files: read: open", "metadata: stat", "network: a datagram of a pair", "processes: limits",
    "wrongly credited: frames", "not credited: a long program", "not credited: threads",
)  # fmt: skip


def test_there_are_many_of_every_kind() -> None:
    names = list(cases())
    assert len(names) == len(set(names)) >= 250
    kinds = {name.partition(":")[0] for name in names}
    assert kinds == {
        "files", "metadata", "network", "processes", "memory", "resources", "end", "wrongly credited", "not credited"
    }  # fmt: skip


@pytest.mark.skipif(not set(LAYERS) <= available(), reason="this system has not all layers")
def test_all_layers_keep_what_they_promise() -> None:
    assert [(one.name, one.verdict, one.said) for one in attacked(LAYERS, SOME)] == [(n, "clear", KEPT) for n in SOME]


def test_the_table() -> None:
    found = [
        Outcome("sandbox", "all, root: files: a", "clear", 1.0, KEPT),
        Outcome("sandbox", "all, root: files: b", "wrong", 1.0, REACHED),
        Outcome("sandbox", "all, root: metadata: c", "clear", 1.0, REACHED),
        Outcome("sandbox", "all, root: not credited: d", "clear", 1.0, KEPT),
    ]
    assert table(found).splitlines()[2] == "| all, root | 1 kept, **1 broken** | 0 kept, 1 reached | 0 of 1 |"
