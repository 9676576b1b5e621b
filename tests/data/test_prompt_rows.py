"""Digests of rows: the same in every process, and another one for any other value."""

from __future__ import annotations

import datetime
import doctest
import subprocess
import sys

import numpy as np
import pytest

from jaxrl_llm.data import prompt_rows, rows_digest

ROWS = """[
    {"prompt": "a", "answer": 1, "tags": {"x", "y", "z", "w"}, "raw": b"ab", "at": datetime.date(2024, 2, 29)},
    {"prompt": [{"role": "user", "content": "\\ud800"}], "numbers": np.arange(5000), "what": object(), "how": len},
    {"prompt": "c", 3: {(1, 2): {None: 1}}, "big": 10**5000, "nan": float("nan"), "f": lambda: 0},
]"""


def test_examples_in_docstrings() -> None:
    assert doctest.testmod(prompt_rows) == (0, 1)


def test_every_process_gives_the_same() -> None:
    code = f"import datetime, numpy as np; from jaxrl_llm.data import rows_digest; print(rows_digest({ROWS}))"
    here = rows_digest(eval(ROWS))
    for seed in ("1", "2"):  # of the order of sets of texts
        run = [sys.executable, "-c", code]
        done = subprocess.run(run, capture_output=True, text=True, timeout=120, env={"PYTHONHASHSEED": seed})
        assert done.stdout.strip() == here, done.stderr
    assert len(here) == 32


@pytest.mark.parametrize(
    "value, other",
    [
        ("1", 1), (1, 2), (1, 1.0), (True, 1), (None, "None"), ("a", "b"), (b"a", "a"), ({1}, {2}), ([1, 2], [2, 1]),
        (np.arange(5000), np.arange(5000)[::-1]), (np.zeros(2, np.int32), np.zeros(2, np.int64)),
        (datetime.date(2024, 1, 1), datetime.date(2024, 1, 2)), (10**5000, 10**5000 + 1), ({1: "a"}, {1: "b"}),
        ({(1, 2): 3}, {(1, 2): 4}), ({"a": {}}, {"a": []}),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_another_value_gives_another_digest(value: object, other: object) -> None:
    assert rows_digest([{"prompt": "a", "x": value}]) != rows_digest([{"prompt": "a", "x": other}])


def test_order_counts_among_rows_but_not_among_columns() -> None:
    a, b = {"prompt": "a", "answer": 1}, {"answer": 2, "prompt": "b"}
    assert rows_digest([a, b]) != rows_digest([b, a])
    assert rows_digest([a, b]) == rows_digest([dict(reversed(a.items())), b])
    assert rows_digest([a]) != rows_digest([a, a])
    assert rows_digest([]) != rows_digest([{}])


def test_a_value_that_holds_itself_ends() -> None:
    loop: dict = {"prompt": "a"}
    loop["self"] = [loop]
    assert rows_digest([loop]) == rows_digest([loop])
