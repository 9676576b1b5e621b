"""A model's folder appears whole or not at all: whatever ends the writing, nobody's files are lost."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxrl_llm import load_policy, save_policy
from jaxrl_llm.models import lora
from jaxrl_llm.models.io import folders
from jaxrl_llm.models.parameters import combine
from jaxrl_llm.models.stacks import unstack
from jaxrl_llm.utils.errors import InputError


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, hidden ones too."""
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


def refused(message: str, folder: Path, model: Any, **options: Any) -> None:
    """Saving there is refused, and changes nothing anywhere."""
    top = folder.parent
    before = contents(top)
    with pytest.raises(InputError, match=message) as caught:
        save_policy(folder, model.policy, model.params, model.tokenizer, **options)
    assert "\n" not in str(caught.value)
    assert contents(top) == before


@pytest.fixture
def model(vectors: Callable[[str], Any]) -> Any:
    return vectors("llama")


def test_new_and_empty_folders(model: Any, tmp_path: Path) -> None:
    for folder in (tmp_path / "new", tmp_path / "deep" / "er", tmp_path / "empty"):
        if folder.name == "empty":
            folder.mkdir()
        assert save_policy(folder, model.policy, model.params, model.tokenizer) == folder
        assert load_policy(folder)[0] == model.policy
        modes = {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()}
        assert len(modes) == 1  # those who may read the settings may read the weights
    assert {path.name for path in tmp_path.iterdir()} == {"new", "deep", "empty"}


def test_files_of_others_are_never_replaced(model: Any, tmp_path: Path) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    refused("is not empty .it holds notes.txt.: .* --overwrite", folder, model)
    refused("holds notes.txt, which is no file of a model", folder, model, overwrite=True)
    (folder / "notes.txt").unlink()
    (folder / "config.json").write_text("{}")
    refused("is not empty .it holds config.json.", folder, model)
    save_policy(folder, model.policy, model.params, overwrite=True)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    refused("is a file", folder / "config.json", model, overwrite=True)
    refused("cannot be made, since .*config.json is a file", folder / "config.json" / "x", model)


@pytest.mark.parametrize("part", ["config.json", "metrics.jsonl", "checkpoints"])
def test_runs_are_never_written_to(part: str, model: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.json").write_text('{"prompts_per_step": 4}')
    (run / "metrics.jsonl").write_text("{}\n")
    for folder in (run, run / "model", run / "checkpoints" / "a" / "b"):
        refused("the folder of a run: choose a folder outside", folder, model, overwrite=True)
    for other in {"config.json", "metrics.jsonl", "checkpoints"} - {part}:
        shutil.rmtree(run / other) if (run / other).is_dir() else (run / other).unlink()
    refused("the folder of a run", run, model, overwrite=True)
    (tmp_path / "link").symlink_to(run)
    refused("the folder of a run", tmp_path / "link", model, overwrite=True)


def test_overwriting_leaves_only_the_new_model(model: Any, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    save_policy(folder, model.policy, model.params, model.tokenizer, shard_bytes=60_000)
    save_policy(folder, model.policy, model.params, overwrite=True)
    assert set(contents(folder)) == {"config.json", "generation_config.json", "model.safetensors"}
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_link_to_a_folder_stays_one(model: Any, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for _ in range(2):
        save_policy(tmp_path / "link", model.policy, model.params, overwrite=True)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "real" / "config.json").is_file()


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("where", ["weights", "tokenizer", "sync", "rename"])
def test_a_full_disk(where: str, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "m"
    save_policy(folder, model.policy, model.params, model.tokenizer)
    place = {
        "weights": "safetensors.numpy.save_file",
        "tokenizer": f"{type(model.tokenizer).__module__}.{type(model.tokenizer).__name__}.save_pretrained",
        "sync": "os.fsync",
        "rename": "os.rename",
    }[where]
    monkeypatch.setattr(place, full)
    for target in (folder, tmp_path / "new"):
        refused(
            r"cannot be written to .*No space left on device.*nothing there was changed", target, model, overwrite=True
        )
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_rename_that_fails_puts_the_old_model_back(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "m"
    save_policy(folder, model.policy, model.params)
    rename, calls = os.rename, []

    def second_fails(source: Any, target: Any) -> None:
        calls.append(target)
        if len(calls) == 2:
            full()
        rename(source, target)

    monkeypatch.setattr("os.rename", second_fails)
    refused("No space left", folder, model, overwrite=True)
    assert len(calls) == 3


def test_what_appears_meanwhile_is_not_replaced(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "m"

    def also_writes(new: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("somebody else's")

    monkeypatch.setattr(folders, "_sync", also_writes)
    with pytest.raises(InputError, match="is not empty"):
        save_policy(folder, model.policy, model.params)
    assert contents(tmp_path) == {"m/config.json": b"somebody else's"}


LIMITED = """
    import resource, sys, jax
    jax.config.update("jax_platforms", "cpu")
    from jaxrl_llm import load_policy, save_policy
    from jaxrl_llm.utils.errors import InputError
    policy, params, tokenizer = load_policy(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        save_policy(sys.argv[2], policy, params, tokenizer)
    except InputError as error:
        print(error)
"""


def program(source: str, *arguments: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(source), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.heavy
def test_a_file_that_may_not_grow(model: Any, tmp_path: Path) -> None:
    """The real error of the library that writes the weights."""
    said, _ = program(LIMITED, model.folder, tmp_path / "m").communicate(timeout=120)
    assert "cannot be written to" in said
    assert "File too large" in said
    assert not list(tmp_path.iterdir())


# Without JAX, so that it can fork.
KILLED = """
    import os, signal, sys
    from pathlib import Path
    from jaxrl_llm.models.io import folders

    def end(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    def second(source, target, rename=os.rename):
        os.rename = end
        rename(source, target)

    for moment in ("begun", "half", "sync", "rename", "second rename", "rmtree"):
        if os.fork():
            os.wait()
            continue
        with folders.written_whole(Path(sys.argv[1]) / moment / "m", overwrite=True) as new:
            if moment == "begun": end()
            (new / "config.json").write_text("new")
            if moment == "half": end()
            (new / "model.safetensors").write_text("new")
            if moment == "sync": os.fsync = end
            if moment == "rename": os.rename = end
            if moment == "second rename": os.rename = second
            if moment == "rmtree": folders.shutil.rmtree = end
        os._exit(1)
"""


@pytest.mark.heavy
def test_a_kill_at_any_moment_leaves_the_old_or_the_new(model: Any, tmp_path: Path) -> None:
    old, new = ({name: text for name in ("config.json", "model.safetensors")} for text in (b"old", b"new"))
    moments = {"begun": old, "half": old, "sync": old, "rename": old, "second rename": None, "rmtree": new}
    for moment in moments:
        (tmp_path / moment / "m").mkdir(parents=True)
        for name, text in old.items():
            (tmp_path / moment / "m" / name).write_bytes(text)
    process = program(KILLED, tmp_path)
    process.communicate(timeout=120)
    assert process.returncode == 0
    for moment, expected in moments.items():
        folder = tmp_path / moment / "m"
        beside = {path.name.split("-")[0]: path for path in folder.parent.iterdir() if path != folder}
        assert beside  # it was killed
        if expected is None:  # between the two renames: both stand beside
            assert not folder.exists()
            assert (contents(beside[".m.old"]), contents(beside[".m.partial"])) == (old, new)
        else:
            assert contents(folder) == expected
        # The next one removes what is left.
        save_policy(folder, model.policy, model.params, overwrite=True)
        assert [path.name for path in folder.parent.iterdir()] == ["m"]


def test_what_another_process_is_writing_is_left_alone(model: Any, tmp_path: Path) -> None:
    import socket

    names = {
        f".m.partial-{socket.gethostname()}-{os.getppid()}-0a": True,
        ".m.partial-another-host-1-0a": True,
        f".other.partial-{socket.gethostname()}-999999999-0a": True,
        f".m.partial-{socket.gethostname()}-999999999-0a": False,
        f".m.old-{socket.gethostname()}-999999999-0a": False,
    }
    for name in names:
        (tmp_path / name).mkdir()
    save_policy(tmp_path / "m", model.policy, model.params)
    assert {name: (tmp_path / name).exists() for name in names} == names


def test_parameters_that_are_not_finite_are_named(model: Any, tmp_path: Path) -> None:
    for value, word in ((jnp.nan, "NaN"), (jnp.inf, "infinity")):
        layers = {**model.params["layers"], "query": model.params["layers"]["query"].at[1, 2, 3, 4].set(value)}
        bad = model._replace(params={**model.params, "layers": layers})
        refused(f"the parameter layers/query holds {word} at 1 of", tmp_path / "m", bad)
        half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), bad.params)
        refused(f"the parameter layers/query holds {word} at 1 of", tmp_path / "m", bad._replace(params=half))


def test_layers_as_a_tuple_and_adapters_are_written_as_others(model: Any, tmp_path: Path) -> None:
    save_policy(tmp_path / "tuple", model.policy, unstack(model.params, model.policy.config))
    save_policy(tmp_path / "stacked", model.policy, model.params)
    assert contents(tmp_path / "tuple") == contents(tmp_path / "stacked")
    adapters = lora.init(jax.random.key(0), model.policy.config, 2)
    save_policy(tmp_path / "adapted", model.policy, combine(model.params, adapters))
    assert contents(tmp_path / "adapted") == contents(tmp_path / "stacked")


def test_no_tokenizer_of_transformers(model: Any, tmp_path: Path) -> None:
    refused("the tokenizer is 'x', but must be", tmp_path / "m", model._replace(tokenizer="x"))


def test_signals_are_no_errors(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("safetensors.numpy.save_file", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background of a shell it is ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            save_policy(tmp_path / "m", model.policy, model.params)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not list(tmp_path.iterdir())
