"""Every example in a docstring runs and shows what it says."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import jaxrl_kernels
import pytest

import jaxrl_llm

OWN = ("jaxrl_llm", "jaxrl_kernels")
MODULES = sorted(
    module.name
    for package in (jaxrl_llm, jaxrl_kernels)
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".", onerror=lambda name: None)
)


@pytest.mark.parametrize("name", [*OWN, *MODULES])
def test_examples(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] in OWN:
            raise
        pytest.skip(f"the optional package {error.name} is not installed")
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert result.failed == 0, f"{result.failed} of {result.attempted} examples of {name} fail"


@pytest.mark.parametrize("name", ["jaxrl_llm.advantages.group", "jaxrl_llm.core.shapes", "jaxrl_kernels.logprob"])
def test_examples_are_found(name: str) -> None:
    tests = doctest.DocTestFinder().find(importlib.import_module(name))
    assert any(test.examples for test in tests)
