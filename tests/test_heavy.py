"""Which tests are heavy: shares, and the list of slow ones."""

from __future__ import annotations

import re
from pathlib import Path

import heavy
import pytest


def test_slow_tests_are_there_and_in_order() -> None:
    names = heavy.SLOW.read_text().splitlines()
    assert names == sorted(set(names))
    root = Path(__file__).parents[1]
    for name in names:
        file, function = re.fullmatch(r"([^:]+)::(?:\w+::)?(\w+)(?:\[.*\])?", name).groups()  # type: ignore[union-attr]
        assert f"def {function}(" in (root / file).read_text(), f"{name} is gone: take it out of slow.txt"


def test_slow_ones_are_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heavy, "SLOW", tmp_path / "slow.txt")
    heavy.SLOW.write_text("tests/b.py::test\n")
    heavy.slow.cache_clear()
    measured = tmp_path / "seconds.txt"
    measured.write_text("0.10\ttests/a.py::fast\n9.00\ttests/a.py::long[x\\ty]\n9.00\ttests/docs/test_site.py::read\n")
    heavy.add_slow(measured)
    assert heavy.SLOW.read_text() == "tests/a.py::long[x\\ty]\ntests/b.py::test\n"
    heavy.slow.cache_clear()  # of the real list again


def test_each_test_is_in_one_share() -> None:
    for name in heavy.slow():
        assert sum(heavy.is_in_share(name, f"{number}/8") for number in range(8)) == 1
