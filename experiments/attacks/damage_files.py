"""What may happen to the files of a run: each damage is a function of the run's folder and a source of randomness."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

from experiments.attacks.tiny import steps_kept


def newest(run: Path) -> Path:
    """The folder of the newest checkpoint."""
    return run / "checkpoints" / str(steps_kept(run)[-1])


def files(folder: Path, pattern: str = "**/*") -> list[Path]:
    """Files below a folder, none empty; by their folders and sizes, as the names of some are random."""
    found = [path for path in folder.glob(pattern) if path.is_file() and path.stat().st_size]
    return sorted(found, key=lambda path: (str(path.parent), path.stat().st_size, path.name))


def harm(path: Path, how: str, rng: random.Random, other: Path | None = None) -> str:
    """Damage one file; `other` is what to swap it with or to replace it by. What was done."""
    content = bytearray(path.read_bytes())
    place = rng.randrange(max(len(content), 1))
    if how == "flipped":
        content[place] ^= 1 << rng.randrange(8)
    elif how == "truncated":
        del content[place:]
    elif how == "zeroed":
        content[place : place + 512] = bytes(len(content[place : place + 512]))
    elif how == "noise":
        content[place : place + 64] = rng.randbytes(len(content[place : place + 64]))
    elif how == "longer":
        content += rng.randbytes(100)
    elif how == "empty":
        content.clear()
    elif how == "swapped" and other is not None:
        path.write_bytes(other.read_bytes())
        other.write_bytes(content)
        return f"{path.name} swapped with {other.name}"
    elif how == "replaced" and other is not None:
        content = bytearray(other.read_bytes())
    else:
        path.unlink()
        return f"{path.name} removed"
    path.write_bytes(content)
    return f"{path.name} {how} at {place} of {path.stat().st_size}"


def unreadable(path: Path, how: str) -> str:
    """Put something in the place of a file or folder that cannot be read."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    if how == "loop":
        path.symlink_to(path.name)
    elif how == "dangling":
        path.symlink_to("nothing")
    elif how == "folder":
        path.mkdir()
    elif how == "pipe":
        os.mkfifo(path)
    else:  # reading this gives an input/output error
        path.symlink_to("/proc/self/mem")
    return f"{path.name} is now a {how}"


HARMS = ("flipped", "truncated", "zeroed", "noise", "longer", "empty", "removed", "swapped", "replaced")
UNREADABLE = ("loop", "dangling", "folder", "pipe", "error")
CLASSES = {  # of the files in a checkpoint
    "numbers": "params/**/d/*", "moments": "state/**/d/*", "manifest": "**/manifest.ocdbt", "structure": "*/_METADATA",
    "meta": "meta/metadata", "marks": "**/commit_success.txt", "outer": "_CHECKPOINT_METADATA", "pool": "arrays/**/*",
}  # fmt: skip


def in_checkpoint(run: Path, rng: random.Random, of: str, how: str) -> str:
    """Damage a file of the newest checkpoint: one in four is of an older one, which does no harm."""
    steps = steps_kept(run)
    step = steps[-1] if rng.random() < 0.75 else rng.choice(steps)
    folder = run / "checkpoints" / str(step)
    found = files(folder, CLASSES[of]) or files(folder)
    path, other = rng.choice(found), None
    if how == "swapped":
        other = rng.choice([file for file in files(folder) if file != path])
    elif how == "replaced":
        older = run / "checkpoints" / str(rng.choice([s for s in steps if s != step]))
        same = files(older, CLASSES[of]) or files(older)
        other = min(same, key=lambda file: abs(file.stat().st_size - path.stat().st_size))
    return f"{step}: {harm(path, how, rng, other)}"


def parts(run: Path, rng: random.Random, how: str) -> str:
    """Damage a part of the newest checkpoint, or the checkpoint, as a whole."""
    folder, older = newest(run), run / "checkpoints" / str(steps_kept(run)[0])
    part = rng.choice(sorted(path.name for path in folder.iterdir() if path.is_dir()))
    if how == "removed":
        shutil.rmtree(folder / part)
    elif how == "older":
        shutil.rmtree(folder / part)
        shutil.copytree(older / part, folder / part)
    elif how == "empty":
        shutil.rmtree(folder)
        folder.mkdir()
        return f"{folder.name} is an empty folder"
    elif how == "renamed":
        folder.rename(folder.with_name(str(int(folder.name) + 1)))
        return f"{folder.name} is called {int(folder.name) + 1}"
    else:
        shutil.rmtree(folder)
        shutil.copytree(older, folder)
        return f"{folder.name} is a copy of {older.name}"
    return f"{folder.name}/{part} {how}"


def strays(run: Path, rng: random.Random) -> str:
    """Something that is no checkpoint beside the checkpoints."""
    what = rng.choice(("9", "9.orbax-checkpoint-tmp", "5.orbax-checkpoint-tmp-1700000000", "notes", "9 file"))
    path = run / "checkpoints" / what.split(" ")[0]
    if "file" in what or what == "notes":
        path.write_text("not a checkpoint")
    else:
        path.mkdir()
        (path / "half").write_text("of something")
    return f"{what} beside the checkpoints"


def all_checkpoints(run: Path, rng: random.Random, how: str) -> str:
    """Damage every checkpoint so that none is good."""
    for step in steps_kept(run):
        folder = run / "checkpoints" / str(step)
        if how == "no meta":
            shutil.rmtree(folder / "meta")
        elif how in UNREADABLE:
            unreadable(folder / "meta" / "metadata", how)
        else:
            for path in files(folder, "params/**/d/*"):
                harm(path, how, rng)
    return f"all checkpoints: {how}"


def checkpoints_folder(run: Path, rng: random.Random) -> str:
    """Damage the folder of all checkpoints."""
    path, how = run / "checkpoints", rng.choice(("removed", "empty", "file", "loop"))
    shutil.rmtree(path)
    if how == "empty":
        path.mkdir()
    elif how == "file":
        path.write_text("")
    elif how == "loop":
        path.symlink_to(path.name)
    return f"checkpoints: {how}"


def cannot_read(run: Path, rng: random.Random, how: str) -> str:
    """Make a file of the newest checkpoint unreadable."""
    path = rng.choice(files(newest(run), CLASSES[rng.choice(("numbers", "moments", "manifest", "structure", "meta"))]))
    return f"{newest(run).name}: {unreadable(path, how)}"


def in_file(run: Path, rng: random.Random, names: tuple[str, ...], how: str) -> str:
    """Damage one of these files of the run."""
    path = run / rng.choice(names)
    if how in UNREADABLE:
        return unreadable(path, how)
    if how == "line":  # one that is in the middle is no JSON
        lines = path.read_text().splitlines(keepends=True)
        lines[rng.randrange(len(lines) - 1)] = '{"step": 1, "half\n'
        path.write_text("".join(lines))
        return f"{path.name} with a broken line"
    if how == "half":
        with path.open("a") as file:
            file.write('{"step": 5, "half')
        return f"{path.name} with half a line at its end"
    return harm(path, how, rng, run / ("config.json" if path.name == "metrics.jsonl" else "metrics.jsonl"))


def scalars(run: Path, rng: random.Random) -> str:
    """Damage what TensorBoard reads, which is a copy."""
    folder, how = run / "tensorboard", rng.choice(("flipped", "truncated", "removed", "file"))
    if how != "file":
        return harm(files(folder)[0], how, rng)
    shutil.rmtree(folder)
    folder.write_text("")
    return "tensorboard is a file"


def edit(run: Path, rng: random.Random, changes: dict[str, Any]) -> str:
    """Change settings of the run's configuration."""
    path = run / "config.json"
    config = json.loads(path.read_text())
    for name, value in changes.items():
        config[name] = {**config[name], **value} if value and isinstance(value, dict) else value
    path.write_text(json.dumps(config, indent=2) + "\n")
    return f"config.json: {changes}"


def other_prompts(run: Path, rng: random.Random) -> str:
    """Let the configuration name another file of prompts, of as many rows."""
    config = json.loads((run / "config.json").read_text())
    path = Path(config["prompts"])
    other = run.parent / "others.jsonl"
    other.write_text(path.read_text().replace("number", "figure"))
    return edit(run, rng, {"prompts": str(other)})


def in_input(run: Path, rng: random.Random, of: str) -> str:
    """Change one of the files that the run was made from."""
    inputs = Path(json.loads((run / "config.json").read_text())["model"]).parent
    if of == "prompts":
        path = inputs / "prompts.jsonl"
        path.write_text(path.read_text().replace("number 0", "figure 0"))
    elif of == "answers":
        path = inputs / "prompts.jsonl"
        path.write_text(path.read_text().replace('"answer": "0"', '"answer": "7"'))
    elif of == "fewer":
        path = inputs / "prompts.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    elif of == "rewards":
        path = inputs / "rewards.py"
        path.write_text(path.read_text().replace("== 0", "== 1"))
    elif of == "weights":
        path = inputs / "model" / "model.safetensors"
        content = bytearray(path.read_bytes())
        content[-1 - 4 * rng.randrange(1000)] ^= 1 << 3
        path.write_bytes(content)
    elif of == "same":
        path = inputs / "prompts.jsonl"
        path.write_bytes(path.read_bytes())
    else:
        path = inputs / of
        path.unlink()
    return f"{path.name} changed ({of})"
