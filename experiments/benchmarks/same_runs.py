"""Train fifteen configurations of twelve methods on a tiny model, and compare what is logged with another checkout's.

    python experiments/benchmarks/same_runs.py FOLDER [--against OTHER_FOLDER]

Run it in two checkouts, each into a folder of its own, the second time with `--against` the first. What depends on the
machine's speed is left out. Prints the metrics that differ, and where they first do; status 1 if any does.
"""

from __future__ import annotations

import argparse
import json
import shutil
import string
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

MODEL = ROOT / "tests" / "vectors" / "llama_tied"
REWARD = """
def even(completions, completion_ids):
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def starts_even(completions, completion_ids):
    return [float(ids[0] % 2 == 0) for ids in completion_ids]


class Even:  # two replies, of an even number of letters each
    def reset(self, seed=None):
        self.replies = 0
        return "go", {}

    def step(self, text):
        self.replies += 1
        return f"{len(text)}", float(len(text) % 2 == 0), self.replies == 2, False, {}
"""
ENDS = list(string.ascii_letters[:20])  # so that completions differ in length
COMMON = ["--steps=10", "--prompts-per-step=4", "--group-size=4", "--max-new-tokens=12", "--eval-size=0", "--no-remat",
          "--no-tensorboard", "--log-completions-every=1", "--checkpoint-every=5", "--optimizer.learning-rate=1e-3",
          "--stop", *ENDS]  # fmt: skip
RUNS = {
    "grpo": ["--minibatches=2", "--top-p=0.9"],
    "grpo-streamed": ["--stream-rewards", "--slots=6"],
    "dapo": ["--algorithm=dapo"],
    "ppo": ["--algorithm=ppo"],
    "remax": ["--algorithm=remax"],
    "t_ppo": ["--algorithm=t_ppo", "--segment-tokens=5"],
    "oversample": ["--oversample=2", "--slots=6"],
    "segments": ["--oversample=1.5", "--segment-tokens=5"],
    "treepo": ["--algorithm=treepo", "--algorithm.segment=4", "--algorithm.first-most=2", "--algorithm.rounds=1"],
    "scaf_grpo": ["--algorithm=scaf_grpo", "--algorithm.hints-from=0"],
    "xrpo": ["--algorithm=xrpo"],
    "arpo_replay": ["--algorithm=arpo_replay"],
    "sapo_swarm": ["--algorithm=sapo_swarm"],
    "gigpo": ["--algorithm=gigpo", "--environment=FOLDER/rewards.py:Even", "--turns=2"],
    "seeupo": ["--algorithm=seeupo", "--environment=FOLDER/rewards.py:Even", "--turns=2"],
}
BINARY = ("dapo", "scaf_grpo", "xrpo", "arpo_replay")  # by a reward of 0 and 1: some groups are uniform
TIMED = ("seconds/", "goodput", "tokens_per_second", "compiles", "rollout/tokens_per_second",
         "rollout/first_token_seconds", "rollout/compiles", "rollout/moved_seconds")  # fmt: skip


def main() -> int:
    """Train into the folder, compare where asked, and return the exit status."""
    from experiments.attacks.agents import write_template

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--against", type=Path)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    (given.folder / "rewards.py").write_text(REWARD)
    hints = [["even"], ["even letters", "b"]]
    prompts = [{"prompt": f"number {i:02d}:", "hints": hints} for i in range(12)]
    (given.folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    shutil.copytree(MODEL, given.folder / "model", dirs_exist_ok=True)
    write_template(given.folder / "model")
    differences = 0
    for name, options in RUNS.items():
        train(given.folder, name, options)
        if given.against is not None:
            found = different(given.folder / name, given.against / name)
            print(f"{name}: {found or 'the same'}")
            differences += bool(found)
    return int(differences > 0)


def train(folder: Path, name: str, options: list[str]) -> None:
    """One run into folder/name."""
    from jaxrl_llm.cli.program import main as jaxrl

    agents = any(option.startswith("--environment") for option in options)
    reward = "environment" if agents else f"{folder / 'rewards.py'}:{'starts_even' if name in BINARY else 'even'}"
    status = jaxrl([
        "train", f"--model={folder / 'model' if agents else MODEL}", f"--output={folder / name}",
        f"--prompts={folder / 'prompts.jsonl'}", "--rewards", reward, *COMMON,
        *(option.replace("FOLDER", str(folder)) for option in options),
    ])  # fmt: skip
    if status:
        raise SystemExit(f"{name} ended with status {status}")


def different(run: Path, other: Path) -> str:
    """In which metrics, and from which step on, two runs differ; which it lacks; and whether completions differ."""
    found = []
    ours, theirs = (read(path / "metrics.jsonl") for path in (run, other))
    if gone := sorted({name for line in theirs for name in line} - {name for line in ours for name in line}):
        found.append(f"without {', '.join(gone)}")
    if new := sorted({name for line in ours for name in line} - {name for line in theirs for name in line}):
        print(f"{run.name}: only here: {', '.join(new)}")
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        names = sorted(name for name in (a.keys() | b.keys()) - {*new, *gone} if a.get(name) != b.get(name))
        if names:
            found.append(f"step {step}: {', '.join(names)}")
            break
    completions = ["completion", "tokens"]
    texts = [
        [[row.get(name) for name in completions] for row in read(path / "completions.jsonl")] for path in (run, other)
    ]
    if texts[0] != texts[1]:
        found.append("completions")
    return "; ".join(found)


def read(path: Path) -> list[dict[str, object]]:
    """The objects of a file of JSON lines, without what is timed."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(TIMED)} for line in lines]


if __name__ == "__main__":
    sys.exit(main())
