"""Names of a package that are imported when they are first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def imported_at_first_use(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's `__getattr__`: public names, each with its module in the package, and modules by their own names."""

    def get(name: str) -> Any:
        if name in modules:
            value = getattr(importlib.import_module(f"{package}.{modules[name]}"), name)
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
