"""The output of `jaxrl algorithms`: correct for every method, with a composition that runs as a standalone file."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from jaxrl_llm import algorithms
from jaxrl_llm.algorithms.composition import composition
from jaxrl_llm.algorithms.describe import (
    MARK,
    START,
    by_stage,
    choices,
    listing,
    method_card,
    page,
    parameters,
    valid_values,
)
from jaxrl_llm.algorithms.parts import missing
from jaxrl_llm.core.arguments.hyperparameters import Origin
from jaxrl_llm.utils.errors import InputError

ROOT = Path(__file__).parents[2]
every = pytest.mark.parametrize("name", algorithms.names())


@every
def test_its_composition_is_a_program_that_makes_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = composition(algorithms.constructor(name))
    assert f"{name}\n\n\n" not in text
    module = types.ModuleType("pasted")
    monkeypatch.setitem(sys.modules, "pasted", module)  # where dataclasses look for the names of annotations
    made: dict[str, Any] = vars(module)
    exec(compile(text, f"{name}.py", "exec"), made)
    mine, own = made["algorithm"], algorithms.get(name)
    assert isinstance(mine, algorithms.Algorithm)
    assert (mine.needs, mine.strategy, mine.curriculum is None) == (own.needs, own.strategy, own.curriculum is None)
    taken = inspect.signature(made[name]).parameters.values()
    assert [(p.name, p.default) for p in taken] == [(one.name, one.default) for one in parameters(name)]
    assert not re.search(
        r"\b(Annotated|NonNegative|Count|Fraction|PAPER|Paper|Ours|Code)\b",
        text.partition(f"def {name}(")[2].partition(")")[0],
    )
    assert "@method" not in text
    assert inspect.getdoc(made[name]) is None
    imported = [node for node in ast.parse(text).body if isinstance(node, ast.ImportFrom)]
    used = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    for node in imported:
        for one in node.names:
            assert (one.asname or one.name) in used | {"annotations"}, f"{name} imports {one.name} and does not use it"


@every
def test_its_page_has_each_parameter_once(name: str) -> None:
    said, _, program = page(name).partition("Composition:")
    table = said.partition("Hyper-parameters")[2].partition("Needs beyond")[0]
    for one in parameters(name):
        (line,) = (line for line in table.splitlines() if line.startswith(f"  {one.name} = "))
        assert valid_values(name, one) in line
        assert (one.origin or "") in line
    assert f"algorithm = {name}()" in program
    assert f"Tested by: tests/algorithms/{method_card(name).facts.test}" in program


@every
def test_every_default_has_an_origin(name: str) -> None:
    for one in parameters(name):
        assert (one.origin is None) == (one.name == "preset"), f"{name}: {one.name}"
        if one.origin is Origin.RUN:
            assert one.default is None, f"{name}: {one.name} is the run's, but has a default"


def test_choices_are_those_that_the_method_takes() -> None:
    assert choices(algorithms.constructor("grpo"), "scale") == ("batch", "mean", "none", "std", "sum")
    for name in algorithms.names():
        for one in parameters(name):
            for text in choices(algorithms.constructor(name), one.name) if isinstance(one.default, str) else ():
                if (name, one.name) != ("rlgf", "begins"):  # others than the default need a guide
                    algorithms.get(name, **{one.name: text})


@every
def test_its_proof_is_a_test_of_it(name: str) -> None:
    file, _, test = method_card(name).facts.test.partition("::")
    text = (ROOT / "tests" / "algorithms" / file).read_text()
    tests = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    assert test in tests
    assert name in text


def test_the_table_has_each_method_once_by_stage() -> None:
    stages = by_stage()
    assert sorted(name for methods in stages.values() for name in methods) == algorithms.names()
    assert len(stages) == len(algorithms.FAMILIES)
    start, _, table = listing().partition("\n\n")
    assert [line.split()[0] for line in start.splitlines()[1:]] == [*START]
    assert {*START} <= {*algorithms.names()}
    assert len(START) == 7
    lines = table.splitlines()
    assert [line for line in lines if line and not line.startswith((" ", MARK))] == [*stages]
    named = [line.split() for line in lines if line.startswith("  ")]
    assert sorted(words[0] for words in named) == algorithms.names()
    assert {words[0] for words in named if words[1] == MARK} == {name for name in algorithms.names() if missing(name)}


def test_methods_are_found_by_what_they_say() -> None:
    found = listing("length constant")
    names = {line.split()[0] for line in found.splitlines() if line.startswith("  ")}
    assert {"dr_grpo", "hispo"} <= names < set(algorithms.names())
    assert listing("GREEDY_reward").split("\n")[1].split()[0] == "remax"
    assert MARK not in listing("remax").replace("* ", "")
    with pytest.raises(InputError, match="no method mentions 'quantum foam'"):
        listing("quantum foam")


def test_only_what_some_runs_do_without_is_told_as_needed() -> None:
    lines = listing().partition("\n\n")[2].splitlines()
    assert not any("feedback" in line.partition("[needs")[2] for line in lines)
    (line,) = (line for line in lines if line.startswith("  grpo "))
    assert line.endswith("[needs reference policy]")
    (line,) = (line for line in lines if line.startswith("  vapo "))
    assert line.endswith("[needs critic]")
    (line,) = (line for line in lines if line.startswith("  dapo "))
    assert "[needs" not in line
