"""What the site is made of: docstrings as reStructuredText, their equations as TeX, pages of the catalogue."""

from __future__ import annotations

import doctest
import importlib.util
import inspect
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from doc_pages import DOCS, ROOT

sys.path.insert(0, str(DOCS))

import extensions.tex
from extensions.docstrings import is_equation, restructured
from extensions.tex import GREEK, display, tex

from jaxrl_llm import algorithms
from jaxrl_llm.algorithms.describe import START, by_stage, parameters
from jaxrl_llm.algorithms.method import Facts
from jaxrl_llm.texts import method as texts

PACKAGES = ("sphinx", "myst_parser", "furo")


@pytest.mark.parametrize(
    ("plain", "expected"),
    [
        ("A_i = r_i - mean_g", r"A_{i} = r_{i} - \operatorname{mean}_{g}"),
        ("1/|o_i| sum_{t=1..T_i} rho^2", r"\frac{1}{|o_{i}|} \sum_{t=1}^{T_{i}} \rho^{2}"),
        ("x <- clip(x, -limit, 1e-6)", r"x \leftarrow \operatorname{clip}(x, -\text{limit}, 10^{-6})"),
        ("gamma^(s - t) sqrt(var + clip_low)", r"\gamma^{s - t} \sqrt{\operatorname{var} + \mathrm{clip\_low}}"),
        ("d'_t where A >= 0, the policy's", r"d'_{t} \ \text{where} \ A \ge 0, \text{the policy's}"),
    ],
)
def test_equations_as_tex(plain: str, expected: str) -> None:
    assert tex(plain) == expected


def test_the_example_of_the_converter() -> None:
    result = doctest.testmod(extensions.tex)
    assert (result.attempted, result.failed) == (1, 0)


@pytest.mark.parametrize("name", algorithms.names())
def test_equations_of_a_method_are_well_formed(name: str) -> None:
    for block in (inspect.getdoc(algorithms.constructor(name)) or "").split("\n\n"):
        if block.startswith("    ") and is_equation(block):
            found = display(block)
            assert found.count("{") - found.count(r"\{") == found.count("}") - found.count(r"\}")
            assert not re.search(r"(?<!\\)[#%$]|__|\^\^", found)
            commands = set(re.findall(r"\\([a-zA-Z]+)", found))
            assert commands <= KNOWN, commands - KNOWN


TEXT_COMMANDS = (
    "text mathrm mathtt texttt operatorname frac sqrt hat bar tilde sum min max exp log arg dots cdot quad qquad"
)
KNOWN = set(re.findall(r"\w+", TEXT_COMMANDS + " leftarrow to le ge ne lt gt sim")) | GREEK


def test_docstrings_as_restructured_text() -> None:
    text = """What `it` does with *x* and |y|.

    loss = -sum_i A_i

    reward: of each row, f32[N].
    clip, dual: bounds.

    1. first
       and more;
    2. second.

    >>> f(1)
    2"""
    assert restructured(inspect.cleandoc(text)) == WANTED


WANTED = [
    r"What ``it`` does with \*x\* and \|y\|.", "",
    r"loss = -sum\_i A\_i", "",
    "* ``reward``: of each row, f32[N].", "", "* ``clip``, ``dual``: bounds.", "",
    "#. first and more;", "", "#. second.", "",
    ">>> f(1)", "2", "",
]  # fmt: skip


def test_pages_of_the_catalogue_have_every_method() -> None:
    from extensions.catalogue import pages, slug, with_code

    found = pages()
    for stage, methods in by_stage().items():
        text = found[f"methods/{slug(stage)}.rst"]
        for name in methods:
            assert f".. _method-{name}:" in text
            section = text.split(f".. _method-{name}:")[1].split(".. _method-")[0]
            assert f"algorithm = {name}()" in section
            assert all(f"``{one.name}``" in section for one in parameters(name))
    index = found["methods/index.rst"]
    assert index.count("     - whole") == len(algorithms.names()) + len(texts.names())
    assert all(f"   * - {name}\n" in index for name in texts.names())
    table = re.findall(r"^\| `(\w+)` \|", (DOCS / "algorithms.md").read_text(), flags=re.MULTILINE)
    assert table == list(START)
    assert len(table) == 7
    assert with_code("clip_low of it\n\n    clip_low", ["clip_low", "k"]) == "`clip_low` of it\n\n    clip_low"
    assert "jaxrl_llm.objectives.clip" in found["api/jaxrl_llm.objectives.rst"]


def test_the_extent_of_a_method() -> None:
    from extensions.catalogue import extent

    some = Facts("a", 2026, "b::c", beside={"x": ("the x_y", "z")})
    assert extent(some) == r"whole; not here\: the x\_y"
    assert extent(Facts("a", 2026, "b::c")) == "whole"


@pytest.mark.heavy
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install -e '.[docs]'")
    began = time.monotonic()
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", str(tmp_path / "trees"), "-b", "html"]
    done = subprocess.run([*command, str(DOCS), str(tmp_path / "site")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 120
    from extensions.catalogue import slug

    (stage,) = (stage for stage, methods in by_stage().items() if "ppo" in methods)
    page = (tmp_path / f"site/generated/methods/{slug(stage)}.html").read_text()
    assert r"\delta_{t} = r_{t}" in page, "equations"
    assert "clip_low" in page
