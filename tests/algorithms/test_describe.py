"""The output of `jaxrl algorithms`: correct for every method, with a composition that runs as a standalone file."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest

from jaxrl_llm import algorithms
from jaxrl_llm.algorithms.composition import composition
from jaxrl_llm.algorithms.describe import MARK, STAGES, START, by_stage, choices, listing, origins, page, parameters
from jaxrl_llm.algorithms.proofs import PROOFS, proof
from jaxrl_llm.algorithms.unfinished import NEEDED, UNFINISHED
from jaxrl_llm.utils.errors import InputError

ROOT = Path(__file__).parents[2]
every = pytest.mark.parametrize("name", algorithms.names())


@every
def test_its_composition_is_a_program_that_makes_it(name: str) -> None:
    text = composition(algorithms.constructor(name))
    assert f"{name}\n\n\n" not in text
    made: dict[str, Any] = {"__name__": "pasted"}
    exec(compile(text, f"{name}.py", "exec"), made)
    mine, own = made["algorithm"], algorithms.get(name)
    assert isinstance(mine, algorithms.Algorithm)
    assert (mine.needs, mine.strategy, mine.curriculum is None) == (own.needs, own.strategy, own.curriculum is None)
    assert inspect.signature(made[name]) == inspect.signature(algorithms.constructor(name))
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
        assert one.values in line
        assert (one.origin or "") in line
    assert "Defaults. " not in said
    assert f"algorithm = {name}()" in program
    assert f"Tested by: tests/algorithms/{PROOFS[name]}" in program


@every
def test_the_origin_of_every_default_is_told_once(name: str) -> None:
    told = origins(inspect.getdoc(algorithms.constructor(name)) or "")
    wanted = {one.name for one in parameters(name)} - {"preset"}
    assert set(told) == wanted, f"{name}: not told {sorted(wanted - set(told))}, unknown {sorted(set(told) - wanted)}"
    for one in parameters(name):
        if told.get(one.name) == "the run's":
            assert one.default is None, f"{name}: {one.name} is the run's, but has a default"


def test_origins_are_read_from_the_last_paragraph() -> None:
    text = """Title (arXiv 1).

    Defaults. This is none. Paper: nothing.

    Defaults. Paper: a, b_1. Code: c,
    d. Ours: e. Run: f.
    """
    assert origins(text) == {
        "a": "paper", "b_1": "paper", "c": "code", "d": "code", "e": "ours", "f": "the run's"
    }  # fmt: skip
    assert origins("Title.\n\nNo such paragraph.") == {}
    with pytest.raises(ValueError, match="'Mine' is not an origin"):
        origins("Defaults. Mine: a.")
    with pytest.raises(ValueError, match="the default of a has two origins"):
        origins("Defaults. Paper: a. Ours: a.")


def test_choices_are_those_that_the_method_takes() -> None:
    assert choices(algorithms.constructor("grpo"), "scale") == ("std", "none", "batch", "sum", "mean")
    for name in algorithms.names():
        for one in parameters(name):
            for text in choices(algorithms.constructor(name), one.name) if isinstance(one.default, str) else ():
                if (name, one.name) != ("rlgf", "begins"):  # others than the default need a guide
                    algorithms.get(name, **{one.name: text})


@every
def test_its_proof_is_a_test_of_it(name: str) -> None:
    where = proof(name)
    assert where is not None
    file, _, test = where.partition("::")
    text = (ROOT / file).read_text()
    tests = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    assert test in tests
    assert name in text


def test_the_table_has_each_method_once_by_stage() -> None:
    stages = by_stage()
    assert sorted(name for methods in stages.values() for name in methods) == algorithms.names()
    assert [*stages] == [*STAGES]
    start, _, table = listing().partition("\n\n")
    assert [line.split()[0] for line in start.splitlines()[1:]] == [*START]
    assert {*START} <= {*algorithms.names()}
    assert len(START) == 7
    lines = table.splitlines()
    assert [line for line in lines if line and not line.startswith((" ", MARK))] == [*STAGES]
    named = [line.split() for line in lines if line.startswith("  ")]
    assert sorted(words[0] for words in named) == algorithms.names()
    assert {words[0] for words in named if words[1] == MARK} == {*UNFINISHED, *NEEDED}


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
