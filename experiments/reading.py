"""How much code one training step runs: the files and lines to read in order to understand it.

    python experiments/reading.py [ALGORITHM]

Records which functions run in the first step of a tiny run, from the request for a batch to its metrics; in that step
jitted functions are traced in Python, so they count too. (The closure of imports would also hold every branch that is
not taken.) Set-up, evaluation, checkpoints and reports are excluded, and so are the kernels, which are another package.

Every file is listed. The last lines leave aside those in which the step runs nothing of the method itself: checks of
inputs and the text of errors (CHECKS), and what concerns processes, the clock, the screen and the log files
(SURROUNDINGS); then also those of which it runs fewer than FEW lines, in calls whose names say what they do (`k3`,
`Algorithm.needs`).
"""

from __future__ import annotations

import ast
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
    "utils/process.py", "distributed/hosts.py", "rewards/workers/process.py", "rewards/workers/worker.py",
    "rollouts/runtime/mirrored_engine.py", "training/health/goodput.py", "reporting/logging/progress.py",
    "reporting/logging/writers.py",
)  # fmt: skip
FEW = 20


def functions_of_a_step(algorithm: str) -> dict[Path, set[int]]:
    """The functions of the library that one step calls: file -> first lines of their code."""
    from jaxrl_llm.training import begin, journal, loop, running
    from jaxrl_llm.training.config import TrainConfig

    make_source, codes = begin.source_of, {loop._run.__code__, running.steps.__code__, running.next_batch.__code__}

    def profile(on: bool) -> None:
        hook: Any = (lambda frame, *_: codes.add(frame.f_code)) if on else None
        threading.setprofile(hook)
        sys.setprofile(hook)

    def source_of(*arguments: Any) -> Any:
        source = make_source(*arguments)
        return source._replace(next=lambda *rest: (profile(True), source.next(*rest))[1])

    class Progress(journal.Progress):
        def update(self, *arguments: Any) -> None:
            profile(False)

    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"prompt": f"{i} + 1 =", "answer": str(i + 1)}) + "\n" for i in range(8)))
        begin.__dict__["source_of"], journal.__dict__["Progress"] = source_of, Progress
        loop.train(TrainConfig(
            model=str(ROOT / "tests" / "vectors" / "llama_tied"), prompts=str(prompts), output=f"{folder}/run",
            rewards=("exact_match",), algorithm=algorithm, steps=1, prompts_per_step=2, group_size=2, max_new_tokens=4,
            eval_size=0, log_completions_every=0, tensorboard=False,
        ))  # fmt: skip
    found: dict[Path, set[int]] = {}
    for code in codes:
        if PACKAGE in (path := Path(code.co_filename)).parents:
            found.setdefault(path, set()).add(code.co_firstlineno)
    return found


def used_lines(path: Path, called: set[int]) -> int:
    """Lines of a file's functions that were called, and of its classes without their other methods."""
    functions, used, classes = set[int](), set[int](), set[int]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            span = set(range(start, (node.end_lineno or start) + 1))
            (classes if isinstance(node, ast.ClassDef) else functions).update(span)
            used |= span if span & called and not isinstance(node, ast.ClassDef) else set()
    return len(used | (classes - functions))


if __name__ == "__main__":
    files = functions_of_a_step(*sys.argv[1:2] or ["grpo"])
    rows = [
        (used_lines(path, files[path]), len(path.read_text().splitlines()), path.relative_to(PACKAGE).as_posix())
        for path in sorted(files)
    ]
    for used, length, name in rows:
        print(f"{used:5} of {length:5} lines  {name}")
    rest = [row for row in rows if row[2] not in (*CHECKS, *SURROUNDINGS)]
    for what, some in (
        ("all", rows),
        ("without input checks, processes, clock and screen", rest),
        (f"of these, with at least {FEW} lines", [row for row in rest if row[0] >= FEW]),
    ):
        used, length = (sum(row[i] for row in some) for i in (0, 1))
        print(f"{what}: {used} of {length} lines in {len(some)} files")
