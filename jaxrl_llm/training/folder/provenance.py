"""What a run was started with: versions, commit, devices and date. Written beside its settings, never compared.

A digest of the code is compared, between hosts of one run.
"""

import hashlib
import importlib.metadata
import json
import platform
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jaxrl_llm.reporting.logging.files import read_json
from jaxrl_llm.utils.errors import InputError
from jaxrl_llm.utils.storage import replace_file
from jaxrl_llm.version import __version__

NAME = "environment.json"
LIBRARY = Path(__file__).parents[2]
PACKAGES = (
    "jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint", "chex", "grain", "numpy", "safetensors",
    "tokenizers", "transformers", "huggingface-hub", "datasets", "reasoning-gym", "math-verify", "gguf",
    "wandb", "trackio", "mlflow",
)  # fmt: skip


def environment() -> dict[str, Any]:
    """Versions of this library, Python and the packages (None: not installed), the commit, the system, the devices."""
    import jax  # here: it takes a second

    devices = jax.devices()
    kinds = {kind: sum(device.device_kind == kind for device in devices) for kind in {x.device_kind for x in devices}}
    return {
        "jaxrl_llm": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "backend": jax.default_backend(),
        "devices": {kind: kinds[kind] for kind in sorted(kinds)},
        "hosts": jax.process_count(),
    }


def commit() -> str | None:
    """The commit of the clone that this library is run from, with "+" if files were changed; None outside of one."""
    # Asked about this file: the folder may lie in another project's clone, such as in its virtual environment.
    if not (LIBRARY.parent / "pyproject.toml").is_file() or _git(LIBRARY, "ls-files", "__init__.py") != "__init__.py":
        return None
    found = _git(LIBRARY, "rev-parse", "HEAD")
    return found and found + ("+" if _git(LIBRARY, "status", "--porcelain", "--untracked-files=no", ".") else "")


def record_start(folder: Path, step: int) -> None:
    """Add this start to the environment.json of a run's folder. step: steps taken before.

    The file is for people: one that is damaged is replaced, and one that cannot be written is left out.
    """
    path, starts = folder / NAME, []
    with suppress(InputError, OSError):
        starts = read_json(path).get("starts", [])
    now = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "step": step, "command": sys.argv[1:]}
    value = {"starts": [*(starts if isinstance(starts, list) else []), {**now, **environment()}]}
    with suppress(OSError):
        replace_file(path, json.dumps(value, indent=2) + "\n")


def as_text(found: dict[str, Any]) -> str:
    """An environment as lines of text."""
    devices = ", ".join(f"{count} x {kind}" for kind, count in found["devices"].items())
    lines = {
        "jaxrl_llm": found["jaxrl_llm"] + (f" (commit {found['commit']})" if found["commit"] else ""),
        "Python": found["python"],
        "system": found["system"],
        "devices": f"{devices} ({found['backend']}" + (f", {found['hosts']} hosts)" if found["hosts"] > 1 else ")"),
        **{name: version or "not installed" for name, version in found["packages"].items()},
    }
    width = max(map(len, lines))
    return "\n".join(f"{name:{width}}  {value}" for name, value in lines.items())


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(folder: Path, *arguments: str) -> str:
    """What git prints; "" where there is none, or it fails."""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=5, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""
    return ""


DECIDING = ("jax", "jaxlib", "numpy", "optax", "tokenizers")  # packages that decide numbers


def code_digest() -> str:
    """SHA-256 over the source files of jaxrl_llm and its kernels, and the versions of JAX and the like."""
    import jaxrl_kernels  # here: it imports JAX, which takes a second

    found = hashlib.sha256()
    for folder in (Path(__file__).parents[2], Path(str(jaxrl_kernels.__file__)).parent):
        for file in sorted(folder.rglob("*.py")):
            found.update(f"{file.relative_to(folder)}\0".encode() + file.read_bytes())
    for name in DECIDING:
        found.update(f"{name} {importlib.metadata.version(name)}".encode())
    return found.hexdigest()
