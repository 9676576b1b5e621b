"""One rule says where a name is: packages export what makes parts, their `.functional` what computes arrays."""

from __future__ import annotations

import importlib
import inspect
import typing
from types import ModuleType

import pytest

from jaxrl_llm import advantages, algorithms, objectives, selection
from jaxrl_llm.algorithms.composition import composition
from jaxrl_llm.core import repr
from jaxrl_llm.core.objective import Objective

PACKAGES = [advantages, objectives, selection]
COMPOSED = (Objective, objectives.Average)  # what functions of the packages compose of parts


def public(module: ModuleType) -> set[str]:
    return {name for name, one in vars(module).items() if not (name.startswith("_") or inspect.ismodule(one))}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda one: one.__name__)
def test_a_package_exports_what_makes_parts(package: ModuleType) -> None:
    assert package.__all__ == sorted(public(package))
    for name in package.__all__:
        one = getattr(package, name)
        is_type_of_parts = inspect.isclass(one) and one.__repr__ is repr.layout
        composes = inspect.isfunction(one) and typing.get_type_hints(one).get("return") in COMPOSED
        assert getattr(one, "makes_parts", False) or is_type_of_parts or composes, (
            f"{name} makes no part: see .functional"
        )


@pytest.mark.parametrize("package", PACKAGES, ids=lambda one: one.__name__)
def test_functional_has_functions_of_arrays_and_batches(package: ModuleType) -> None:
    functional = importlib.import_module(f"{package.__name__}.functional")
    assert functional.__all__ == sorted(public(functional))
    assert not set(functional.__all__) & set(package.__all__)
    for name in functional.__all__:
        one = getattr(functional, name)
        assert not getattr(one, "makes_parts", False), f"{name} makes a part: it is for {package.__name__}"
        signature = inspect.signature(one, eval_str=True)
        assert "jax.Array" in str(signature.return_annotation), f"{name} returns no arrays"
        kinds = " ".join(str(parameter.annotation) for parameter in signature.parameters.values())
        assert any(kind in kinds for kind in ("jax.Array", "Number", "Trajectories")), f"{name} takes no arrays"
        assert one.__doc__, name


def test_compositions_import_from_where_names_stay() -> None:
    text = composition(algorithms.constructor("dapo"))
    assert "from jaxrl_llm import Algorithm, chain\n" in text
    assert "from jaxrl_llm.advantages import drop_rows, group_relative\n" in text
    assert "from jaxrl_llm.advantages.functional import mixed_groups, uniform_groups\n" in text
    assert "from jaxrl_llm.algorithms import DynamicSampling\n" in text
