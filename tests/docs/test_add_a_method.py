"""Adding a method as the page of contributing shows it: its file, its line, its test."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
from doc_pages import DOCS, write_files

from jaxrl_llm import InputError, algorithms
from jaxrl_llm.algorithms.describe import listing, method_card, page, parameters

sys.path.append(str(Path(__file__).parents[1] / "algorithms"))  # for the test on that page


def test_a_method_is_one_file_and_one_test(importable_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(DOCS / "contributing.md", importable_folder)
    name = "median_grpo"
    made, test = importlib.import_module(name), importlib.import_module(f"test_{name}")
    # What a file in a folder of `algorithms.FAMILIES` is by itself.
    monkeypatch.setitem(algorithms.CATALOGUE, name, getattr(made, name))
    assert name in algorithms.names()
    assert method_card(name).facts.paper == "arXiv 2601.00000"
    assert [(one.name, one.origin) for one in parameters(name)] == [("clip_low", "paper"), ("clip_high", "paper")]
    assert f"def {name}(" in page(name)
    assert name in listing("median as baseline")
    with pytest.raises(InputError, match="median_grpo: clip_low"):
        algorithms.get(name, clip_low=-1.0)
    tests = [function for function in vars(test) if function.startswith("test_")]
    assert [f"test_{name}.py::{function}" for function in tests] == [method_card(name).facts.test]
    getattr(test, tests[0])()


def test_the_test_of_that_method_can_fail(importable_folder: Path) -> None:
    write_files(DOCS / "contributing.md", importable_folder)
    source = (importable_folder / "median_grpo.py").read_text()
    (importable_folder / "median_grpo.py").write_text(source.replace('baseline="median"', 'baseline="best"'))
    test = importlib.import_module("test_median_grpo")
    with pytest.raises(AssertionError):
        test.test_it_is_the_loop()
