"""The kinds of damage that a run's files may have, and what a resumed run may answer to each."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from experiments.attacks import damage_files as act
from experiments.attacks.tiny import OTHER_MODEL

Damage = Callable[[Path, random.Random], str]  # run -> what was done, in words


class Kind(NamedTuple):
    """A kind of damage, and what a resumed run may answer."""

    name: str
    do: Damage
    refuse: str = "no"  # "no": it must go on; "may"; "must"
    names: str = ""  # pattern of what the answer must name, where it is refused or the result is another
    configurations: tuple[str, ...] = ("grpo",)
    base: str = "both"  # finished, interrupted or both
    without: tuple[str, ...] = ()  # parts of a run that are not compared
    inputs: bool = False  # it changes the run's inputs: refused, and accepted with --accept-changed-inputs


def kinds() -> list[Kind]:
    """All kinds, those of checkpoints first."""
    many = ("grpo", "grpo", "partial", "lora")
    found = []
    for of in act.CLASSES:
        for how in act.HARMS:
            where = ("partial",) if of == "pool" else many
            found.append(Kind(f"{of} {how}", partial(act.in_checkpoint, of=of, how=how), configurations=where))
    for how in ("removed", "older", "empty", "renamed", "copy"):
        refuse = "may" if how == "renamed" else "no"
        found.append(Kind(f"part {how}", partial(act.parts, how=how), refuse, configurations=many))
    found.append(Kind("stray", act.strays))
    for how in ("truncated", "empty", "no meta", "removed", *act.UNREADABLE):
        damage = partial(act.all_checkpoints, how=how)
        found.append(Kind(f"all checkpoints {how}", damage, "must", "checkpoint", configurations=many))
    found.append(Kind("checkpoints folder", act.checkpoints_folder, "may", "checkpoint"))
    for how in act.UNREADABLE:
        found.append(Kind(f"unreadable: {how}", partial(act.cannot_read, how=how), "may", "checkpoint", many))
    for name, names in {
        "config": ("config.json",), "logs": ("metrics.jsonl", "completions.jsonl"), "summary": ("summary.json",),
    }.items():  # fmt: skip
        hows: tuple[str, ...] = (*act.HARMS[:7], "replaced", *act.UNREADABLE)
        hows = (*hows, "line", "half") if name == "logs" else hows
        for how in hows:
            said = {"summary": "summary|evaluation from before training is lost", "config": r"config\.json"}.get(
                name, ""
            )
            said = "" if name == "config" and how not in act.UNREADABLE else said
            found.append(Kind(f"{name} {how}", partial(act.in_file, names=names, how=how), "may", said))
    found.append(Kind("tensorboard", act.scalars, "may", "tensorboard", without=("tensorboard",)))
    found += edits() + inputs()
    return found


def edits() -> list[Kind]:
    """Edited configurations: with another structure, another result, or neither."""
    structure: dict[str, dict[str, Any]] = {
        "param_dtype": {"param_dtype": "bfloat16"}, "lora_rank": {"lora_rank": 8}, "moments": {
            "optimizer": {"moments": "bfloat16"}}, "algorithm": {"algorithm": "ppo", "hyperparameters": {}},
        "model": {"model": str(OTHER_MODEL)}, "steps": {"steps": 3},
    }  # fmt: skip
    result: dict[str, dict[str, Any]] = {
        "seed": {"seed": 1}, "learning_rate": {"optimizer": {"learning_rate": 1e-4}}, "temperature": {
            "temperature": 0.5}, "group_size": {"group_size": 2}, "epochs": {"epochs": 2}, "steps": {"steps": 8},
    }  # fmt: skip
    neither: dict[str, dict[str, Any]] = {
        "reward_time_limit": {"reward_time_limit": 20.0}, "checkpoint_every": {"checkpoint_every": 3},
    }  # fmt: skip
    found = []
    for name, changes in structure.items():
        where = ("lora",) if name == "lora_rank" else ("grpo",)
        said = f"{name}|does not fit the run's settings: .* in the checkpoint, and .* here"
        found.append(Kind(f"edited {name}", partial(act.edit, changes=changes), "must", said, where))
    for name, changes in result.items():
        found.append(
            Kind(f"edited {name} {changes}", partial(act.edit, changes=changes), "may", name, base="interrupted")
        )
    for name, changes in neither.items():
        found.append(Kind(f"edited {name}", partial(act.edit, changes=changes), "may", name, base="interrupted"))
    found.append(Kind("edited prompts", act.other_prompts, "may", "prompts", base="interrupted"))
    return found


def inputs() -> list[Kind]:
    """Changed inputs: refused, and accepted where that is asked for."""
    found = [Kind("inputs the same", partial(act.in_input, of="same"))]
    for of, name in {"prompts": "prompts", "answers": "prompts", "fewer": "prompts", "rewards": "reward"}.items():
        damage = partial(act.in_input, of=of)
        found.append(Kind(f"inputs {of}", damage, "must", name, base="interrupted", inputs=True))
    weights = partial(act.in_input, of="weights")
    found.append(Kind("inputs weights", weights, "must", "model", ("grpo", "lora"), "interrupted", inputs=True))
    for of in ("prompts.jsonl", "rewards.py", "model/model.safetensors", "model/config.json"):
        found.append(Kind(f"inputs without {of}", partial(act.in_input, of=of), "must", Path(of).name.split(".")[0]))
    return found
