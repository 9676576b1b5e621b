"""How much code one training step runs: the files and lines to read in order to understand it.

    python experiments/reading.py [ALGORITHM]

Records which lines run in the first step of a tiny run, from the request for a batch to its metrics; in that step
jitted functions are traced in Python, so they count too. (The closure of imports would also hold every branch that is
not taken.) Set-up, evaluation, checkpoints and reports are excluded, and so are the kernels, which are another package.

Every file is listed with the lines that ran. The last lines leave aside those in which the step runs nothing of the
method itself: checks of inputs and the text of errors (CHECKS), and what concerns worker processes, the run's folder,
the clock and the screen (SURROUNDINGS); then also those of which it runs fewer than FEW lines, in calls whose names say
what they do (`k3`, `Algorithm.needs`).
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
PACKAGE = ROOT / "jaxrl_llm"
CHECKS = ("utils/errors.py", "core/shapes.py", "models/checks.py", "learner/checks.py", "sampling/checks.py")
SURROUNDINGS = (
    "utils/process.py", "distributed/hosts.py", "rewards/workers/", "rollouts/runtime/multihost_gather.py",
    "training/folder/", "training/health/", "reporting/logging/",
)  # fmt: skip
FEW = 20


def lines_of_a_step(algorithm: str) -> dict[Path, set[int]]:
    """The lines of the library that one step runs: file -> their numbers."""
    from jaxrl_llm.training import begin, journal, loop
    from jaxrl_llm.training.config import TrainConfig

    make_source, ran = begin.source_of, dict[str, set[int]]()

    def trace(frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(str(PACKAGE)):
            return None
        ran.setdefault(frame.f_code.co_filename, set()).add(frame.f_lineno)
        return trace

    def tracing(on: bool) -> None:
        threading.settrace(trace if on else None)  # type: ignore[arg-type]
        sys.settrace(trace if on else None)
        frame = sys._getframe()
        while frame := frame.f_back:  # type: ignore[assignment]
            frame.f_trace = trace if on else None  # the functions that are under way

    def source_of(*arguments: Any) -> Any:
        source = make_source(*arguments)

        def next_traced(*rest: Any) -> Any:
            tracing(True)
            return source.next(*rest)

        return source._replace(next=next_traced)

    class Progress(journal.Progress):
        def update(self, *arguments: Any) -> None:
            tracing(False)

    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"prompt": f"{i} + 1 =", "answer": str(i + 1)}) + "\n" for i in range(8)))
        begin.__dict__["source_of"], journal.__dict__["Progress"] = source_of, Progress
        loop.train(TrainConfig(
            model=str(ROOT / "tests" / "vectors" / "llama_tied"), prompts=str(prompts), output=f"{folder}/run",
            rewards=("exact_match",), algorithm=algorithm, steps=1, prompts_per_step=2, group_size=2, max_new_tokens=4,
            eval_size=0, log_completions_every=0, tensorboard=False,
        ))  # fmt: skip
    return {Path(file): lines for file, lines in ran.items()}


if __name__ == "__main__":
    files = lines_of_a_step(*sys.argv[1:2] or ["grpo"])
    rows = [
        (len(files[path]), len(path.read_text().splitlines()), path.relative_to(PACKAGE).as_posix())
        for path in sorted(files)
    ]
    for used, length, name in rows:
        print(f"{used:5} of {length:5} lines  {name}")
    rest = [row for row in rows if not row[2].startswith((*CHECKS, *SURROUNDINGS))]
    parts: tuple[tuple[str, list[tuple[int, int, str]]], ...] = (
        ("all", rows),
        ("without input checks, processes, clock and screen", rest),
        (f"of these, with at least {FEW} lines", [row for row in rest if row[0] >= FEW]),
    )
    for what, some in parts:
        used, length = sum(row[0] for row in some), sum(row[1] for row in some)
        print(f"{what}: {used} of {length} lines in {len(some)} files")
