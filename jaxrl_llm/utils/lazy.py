"""Lazy imports of a package's names."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def imported_at_first_use(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """A `__getattr__` for a package that imports on first use. modules: {module in the package: its public names}.

    Modules of the package are imported by their own names too. The package's `dir` has what its `__all__` lists.
    """
    module_of = {name: module for module, names in modules.items() for name in names.split()}
    names = vars(sys.modules[package])
    names["__dir__"] = lambda: sorted({*names, *names["__all__"]})

    def get(name: str) -> Any:
        if name in module_of:
            value = getattr(importlib.import_module(f"{package}.{module_of[name]}"), name)
        else:
            missing = AttributeError(f"module {package!r} has no attribute {name!r}")
            if name.startswith("_"):
                raise missing
            try:
                value = importlib.import_module(f"{package}.{name}")
            except ModuleNotFoundError as error:
                if error.name != f"{package}.{name}":
                    raise
                raise missing from None
        setattr(sys.modules[package], name, value)
        return value

    return get


def names_of(package: str, module: str) -> Callable[[str], Any]:
    """A `__getattr__` for a package that has taken the place of a module, whose names it keeps for one release.

    module: where in the package they are now.
    """

    def get(name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{module}"), name)

    return get
