"""Compiling for TPUs without one: the environment of a process that may load the libtpu wheel."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
from compiling import all_optimisations


def tpu_environment() -> dict[str, str]:
    """Environment variables for such a process; skips the test where libtpu is not installed.

    The wheel is importable, or in the folder `aot` of the virtual environment, where `make test` puts it: beside JAX
    it would make every start on a machine without a TPU print warnings.
    """
    folder = Path(sys.prefix) / "aot"
    if importlib.util.find_spec("libtpu") is None and not (folder / "libtpu").is_dir():
        pytest.skip("libtpu is not installed")
    paths = [str(folder), os.environ.get("PYTHONPATH", "")]
    return {
        **all_optimisations(),
        "PYTHONPATH": os.pathsep.join(p for p in paths if p),
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # there is no chip to fight for, and tests run side by side
        "JAX_PLATFORMS": "cpu",
    }
