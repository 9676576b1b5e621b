"""A digest of the library's code and of the packages that decide its numbers, to compare between hosts."""

from __future__ import annotations

import hashlib
import importlib.metadata
from pathlib import Path

import jaxrl_kernels

PACKAGES = ("jax", "jaxlib", "numpy", "optax", "tokenizers")


def code_digest() -> str:
    """SHA-256 over the source files of jaxrl_llm and its kernels, and the versions of JAX and the like."""
    found = hashlib.sha256()
    for folder in (Path(__file__).parents[2], Path(str(jaxrl_kernels.__file__)).parent):
        for file in sorted(folder.rglob("*.py")):
            found.update(f"{file.relative_to(folder)}\0".encode() + file.read_bytes())
    for name in PACKAGES:
        found.update(f"{name} {importlib.metadata.version(name)}".encode())
    return found.hexdigest()
