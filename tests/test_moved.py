"""Old paths of modules: they are the same modules, and all but those that stay say so."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import subprocess
import sys
import warnings

import pytest

import jaxrl_llm
from jaxrl_llm.moved import GONE, MOVED, STAY


@pytest.mark.parametrize("name", [*MOVED, *STAY])
def test_an_old_path_is_the_same_module(name: str) -> None:
    sys.modules.pop(f"jaxrl_llm.{name}", None)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        old = importlib.import_module(f"jaxrl_llm.{name}")
    new = importlib.import_module(f"jaxrl_llm.{MOVED.get(name) or STAY[name]}")
    assert old is new
    assert old.__spec__ is not None
    assert old.__spec__.name == new.__name__ == f"jaxrl_llm.{MOVED.get(name) or STAY[name]}"
    moved = [str(one.message) for one in said if one.category is DeprecationWarning and "old path" in str(one.message)]
    assert moved == (
        [] if name in STAY else [f"jaxrl_llm.{name} is now {new.__name__}; the old path goes with the next release"]
    )


@pytest.mark.parametrize("package", GONE)
def test_what_was_never_shown_is_not_found_by_its_old_path(package: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=rf"No module named 'jaxrl_llm.{package}.statistic'"):
        importlib.import_module(f"jaxrl_llm.{package}.statistic")


def test_the_library_uses_no_old_path() -> None:
    modules = "jaxrl_llm.cli.options, jaxrl_llm.training.loop, jaxrl_llm.in_jax.lab.laboratory"
    program = (
        f"import sys, {modules}; print([name for name in {[*MOVED, *GONE]} if f'jaxrl_llm.{{name}}' in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_names_that_are_imported_at_first_use_have_no_old_path() -> None:
    packages = [one.name for one in pkgutil.walk_packages(jaxrl_llm.__path__, "jaxrl_llm.") if one.ispkg]
    tables = {name: getattr(importlib.import_module(name), "_MODULES", None) for name in ("jaxrl_llm", *packages)}
    found = {
        f"{package}.{module}".removeprefix("jaxrl_llm.")
        for package, table in tables.items() if isinstance(table, dict) for module in table
    }  # fmt: skip
    assert {"models.policy", "training.loop"} <= found
    assert not found & {*MOVED}


def test_no_old_path_takes_the_place_of_a_name() -> None:
    """A module that is imported by its old path becomes an attribute of its package there."""
    for old in MOVED:
        package, _, name = f"jaxrl_llm.{old}".rpartition(".")
        with contextlib.suppress(ModuleNotFoundError):  # packages that are gone
            assert name not in getattr(importlib.import_module(package), "__all__", ()), old


@pytest.mark.parametrize(
    ("package", "name", "module"),
    [
        ("data.chat", "encode_prompt", "encode"),
        ("advantages.trees", "tree_of", "credit"),
        ("environments.tools", "with_tools", "base"),
        ("rollouts.agents", "agent", "program"),
    ],
)
def test_a_package_in_the_place_of_a_module_has_its_names(package: str, name: str, module: str) -> None:
    found = importlib.import_module(f"jaxrl_llm.{package}")
    assert getattr(found, name) is getattr(importlib.import_module(f"jaxrl_llm.{package}.{module}"), name)
    with pytest.raises(AttributeError, match="no_such_name"):
        found.no_such_name  # noqa: B018
