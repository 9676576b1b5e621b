"""Run the notebooks of colab/ with a real kernel and store their outputs, as GitHub shows them: make notebooks.

    python experiments/run_notebooks.py [NAME ...]   # those whose file names begin so; by default all

Each runs in an empty folder, on the CPU. A notebook with an error, a warning or a path of this machine in its outputs
is not stored. `execute` is what the tests call, too.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[1] / "colab"
LARGEST = 600_000  # bytes of a notebook with its outputs
# Run last in each notebook, and removed: the high-water marks of the memory of the kernel, and of its largest child.
PEAK = """
import re, resource
own = int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
print(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""
UNWANTED = re.compile(
    r"Traceback|[Ww]arning|(?<![\w./])/(?:home|root|tmp|work|usr|opt|content|Users)/|https?://\S*pypi"
)


class Peak(NamedTuple):
    """Most memory in use, in bytes."""

    kernel: int
    child: int  # of the largest child process, or of the kernel where it was larger as it started one


def read(path: Path) -> Any:
    """The notebook in a file."""
    return nbformat.read(path, as_version=4)


def execute(notebook: Any, folder: Path, timeout: float = 900) -> Peak:
    """Run all cells in a new kernel whose working directory is the folder; outputs are put into the notebook.

    Raises nbclient's CellExecutionError for a cell that fails, and CellTimeoutError for one that takes longer than
    `timeout` seconds.
    """
    notebook.cells.append(nbformat.v4.new_code_cell(PEAK))
    client = NotebookClient(
        notebook,
        timeout=timeout,
        record_timing=False,
        coalesce_streams=True,
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(folder)}},
    )
    # Without ipywidgets, which Colab has, tqdm would warn of it.
    environment = {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore:IProgress not found"}
    client.execute(env=os.environ | environment)
    return Peak(*(1024 * int(size) for size in notebook.cells.pop().outputs[0].text.split()))


def texts(notebook: Any) -> Iterator[str]:
    """What the outputs of all cells say, as text and as HTML."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            data = {name: text for name, text in output.get("data", {}).items() if name.startswith("text/")}
            yield from map("".join, [output.get("text", ""), *data.values()])


def unwanted(notebook: Any) -> list[str]:
    """Lines of outputs that should not be shown: errors, warnings, and paths of the machine."""
    return [line for text in texts(notebook) for line in text.splitlines() if UNWANTED.search(line)]


def main(names: list[str]) -> int:
    """Run and store the notebooks whose names begin with one of `names`; 1 if one was not stored."""
    failed = 0
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        if names and not path.name.startswith(tuple(names)):
            continue
        notebook, begin = read(path), time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            peak = execute(notebook, Path(folder))
        text = nbformat.writes(notebook) + "\n"
        problems = unwanted(notebook) + [f"{len(text)} characters"] * (len(text) > LARGEST)
        seconds = time.monotonic() - begin
        memory = f"{peak.kernel / 2**30:.1f} GiB, a child at most {peak.child / 2**30:.1f} GiB"
        print(f"{path.stem}: {seconds:.0f} s, {memory}, {len(text) / 1000:.0f} kB", flush=True)
        print(*(f"  not stored: {problem}" for problem in problems), sep="\n", end="\n" * bool(problems))
        failed += bool(problems)
        if not problems:
            path.write_text(text, encoding="utf-8")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
