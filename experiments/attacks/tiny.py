"""Runs that take a second: their configurations, their inputs, and how two of them are compared, bit by bit."""

from __future__ import annotations

import json
import shutil
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.attacks.agents import AGENTS, with_worlds, write_template
from jaxrl_llm.reporting.logging.tensorboard import read_scalars

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "tests" / "vectors" / "llama_tied"
OTHER_MODEL = ROOT / "tests" / "vectors" / "qwen2"
STEPS = 6
TIMED = (
    "seconds/", "tokens_per_second", "compiles", "rollout/tokens_per_second", "rollout/first_token_seconds",
    "rollout/compiles", "rollout/moved_seconds", "goodput",
)  # fmt: skip

# They look at token ids, so that a policy that writes noise scores between 0 and 1, and seldom alike in a group.
REWARDS = """
def even(completions, completion_ids):
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def starts_even(completions, completion_ids):
    return [float(ids[0] % 2 == 0) for ids in completion_ids]
"""

# Of all configurations. Four checkpoints are kept: nothing that a damaged run held has to make room for a new one.
COMMON: dict[str, Any] = {
    "steps": STEPS, "prompts_per_step": 4, "group_size": 4, "max_new_tokens": 6, "top_p": 0.9, "minibatches": 2,
    "optimizer": {"learning_rate": 2e-3}, "remat": False, "eval_size": 4, "eval_every": 3, "checkpoint_every": 2,
    "keep_checkpoints": 4, "log_completions_every": 1, "tensorboard": True,
}  # fmt: skip
# Some 20 of the 257 tokens end a completion, so that lengths differ; learning slowly, they do not become all alike.
ENDS: dict[str, Any] = {"stop": list(string.ascii_letters[:20]), "optimizer": {"learning_rate": 3e-4}}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "ppo": {"algorithm": "ppo", "critic_steps": 2, "epochs": 2, "checkpoint_every": 1},
    "dapo": {"algorithm": "dapo", "reward": "starts_even", "checkpoint_every": 1, "overlong_tokens": 2, **ENDS},
    "partial": {
        "oversample": 2.0, "segment_tokens": 5, "max_new_tokens": 12, "slots": 6, "checkpoint_every": 1,
        "minibatches": 1, **ENDS,
    },
    "windows": {
        "algorithm": "t_ppo", "segment_tokens": 5, "max_new_tokens": 12, "critic": "shared", "prompts_per_step": 3,
        "group_size": 2, "minibatches": 1, "top_p": 1.0, **ENDS,
    },
    "lora": {
        "lora_rank": 4, "hyperparameters": {"kl_coefficient": 0.01}, "stream_rewards": True, "checkpoint_every": 1,
        **ENDS,
    },
}  # fmt: skip


def write_inputs(folder: Path) -> None:
    """Prompts, rewards and a copy of the model, which a damage may change, into a new folder."""
    folder.mkdir(parents=True)
    hint = {"solution": "first add, then halve", "hint": "add"}
    rows = [{"prompt": f"number {i:02d}:", "answer": str(i % 2), **hint} for i in range(12)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(REWARDS)
    shutil.copytree(MODEL, folder / "model", ignore=shutil.ignore_patterns("vectors.npz"))


def write_settings(name: str, inputs: Path) -> Path:
    """The configuration of this name as a file for `jaxrl train --config`; the output is not in it."""
    values = with_worlds({**COMMON, **{**CONFIGURATIONS, **AGENTS}[name]})
    own = "environment" in values and "reward" not in values
    reward = values.pop("reward", "even")
    values["rewards"] = ["environment" if own else f"{inputs / 'rewards.py'}:{reward}"]
    if {"environment", "tools"} & values.keys():
        write_template(inputs / "model")
    path = inputs / f"{name}.yaml"
    text = {"model": str(inputs / "model"), "prompts": str(inputs / "prompts.jsonl"), **values}
    path.write_text(json.dumps(text, indent=1))  # which is YAML as well
    return path


def steps_kept(run: Path) -> list[int]:
    """Steps of the complete checkpoints in a run's folder, ascending."""
    names = [path.name for path in (run / "checkpoints").glob("*") if path.is_dir()]
    return sorted(int(name) for name in names if name.isdigit())


def newest_meta(run: Path) -> dict[str, Any]:
    """The JSON object of the newest checkpoint: checksums of all arrays, position in the prompts, counts, feedback.

    Without seconds, what covers them (its own checksum, those of the logs), the summary, which is compared by itself,
    and the folder that the run is in.
    """
    steps = steps_kept(run)
    if not steps:
        return {}
    meta = json.loads((run / "checkpoints" / str(steps[-1]) / "meta" / "metadata").read_bytes())
    for name in ("seconds", "saved", "logs", "summary"):
        meta.pop(name, None)
    meta.get("settings", {}).pop("output", None)
    meta.get("checksums", {}).pop("meta", None)
    return {"newest": steps[-1], **meta}


def _metrics(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(TIMED)} for line in lines]


def _summary(run: Path) -> dict[str, Any]:
    return {
        name: x
        for name, x in json.loads((run / "summary.json").read_text()).items()
        if name not in ("seconds", "goodput")
    }


def _scalars(run: Path) -> dict[str, dict[int, float]]:
    found = read_scalars(run / "tensorboard")
    return {tag: values for tag, values in found.items() if not tag.startswith(TIMED)}


PARTS = {
    "checkpoint": newest_meta,
    "metrics.jsonl": _metrics,
    "completions.jsonl": lambda run: (run / "completions.jsonl").read_bytes().splitlines(),
    "summary.json": _summary,
    "tensorboard": _scalars,
}


def differences(run: Path, reference: Path, without: tuple[str, ...] = ()) -> str:
    """What differs between two finished runs, in one line; empty where all is equal bit by bit.

    without: names of `PARTS` that are not compared.
    """
    found = []
    for name, part in PARTS.items():
        if name in without:
            continue
        try:
            ours = part(run)
        except (OSError, ValueError, KeyError, AttributeError) as error:
            found.append(f"{name}: {type(error).__name__} {error}")
            continue
        if where := next(_unequal(ours, part(reference)), ""):
            found.append(f"{name}: {where}")
    return " ".join("; ".join(found).split())[:400]


def _unequal(a: Any, b: Any, path: str = "") -> Iterator[str]:
    """Where two trees of JSON values differ."""
    if type(a) is not type(b):
        yield f"{path} is {str(a)[:40]}, not {str(b)[:40]}"
    elif isinstance(a, dict):
        if a.keys() != b.keys():
            less, more = sorted(map(str, b.keys() - a.keys())), sorted(map(str, a.keys() - b.keys()))
            yield f"{path} has {less[:3]} less, {more[:3]} more"
        for name in [name for name in a if name in b]:
            yield from _unequal(a[name], b[name], f"{path}/{name}")
    elif isinstance(a, list):
        if len(a) != len(b):
            yield f"{path} has {len(a)} lines, not {len(b)}"
        for i, (x, y) in enumerate(zip(a, b, strict=False)):
            yield from _unequal(x, y, f"{path}[{i}]")
    elif a != b and not (a != a and b != b):  # NaN equals NaN
        yield f"{path} is {str(a)[:40]}, not {str(b)[:40]}"
