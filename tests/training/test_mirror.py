"""Runs and prompts at URLs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import tiny_runs as runs
from fsspec.implementations.memory import MemoryFileSystem

from jaxrl_llm.cli.program import main
from jaxrl_llm.data.load import load_prompts
from jaxrl_llm.training import begin, loop
from jaxrl_llm.training.folder.files import RunFolder
from jaxrl_llm.training.folder.load_run import load_run
from jaxrl_llm.training.folder.remote_folder import COMPLETE, Mirror
from jaxrl_llm.utils import storage
from jaxrl_llm.utils.errors import InputError
from jaxrl_llm.utils.process import Preempted

URL = "memory://bucket/run"


class Forbidden(MemoryFileSystem):
    """A bucket that may be read and not written."""

    protocol = "forbidden"
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        raise PermissionError("403 Forbidden: this account\nmay not write")


fsspec.register_implementation("forbidden", Forbidden, clobber=True)


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An empty bucket, and machines with empty caches: each call of this moves to another."""
    count = 0

    def another() -> None:
        nonlocal count
        count += 1
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"machine-{count}"))

    another()
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    yield another
    fs.store.clear()


def there() -> dict[str, bytes]:
    """The files at the URL."""
    fs = fsspec.filesystem("memory")
    return {name.removeprefix("/bucket/run/"): fs.cat_file(name) for name in fs.find("/bucket/run")}


def write(mirror: Mirror, **files: str) -> None:
    for name, text in files.items():
        path = mirror.path / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def local(mirror: Mirror) -> dict[str, bytes]:
    paths = [path for path in mirror.path.rglob("*") if path.is_file()]
    return {path.relative_to(mirror.path).as_posix(): path.read_bytes() for path in paths}


def test_what_is_complete_comes_back_elsewhere(machine: Any) -> None:
    mirror = Mirror(URL)
    write(mirror, config="{}", checkpoints__2__data="two", checkpoints__4__data="four", new="x")
    write(mirror, **{"checkpoints__6.orbax-checkpoint-tmp__data": "half", "summary.new": "half", "run.lock": "1"})
    mirror.push()
    mirror.wait()
    kept = {"config", "new", "checkpoints/2/data", "checkpoints/4/data"}
    assert set(there()) == kept | {f"checkpoints/{step}/{COMPLETE}" for step in (2, 4)}
    # A newer one is cut off; an older one has been pruned.
    fsspec.filesystem("memory").pipe_file("/bucket/run/checkpoints/8/data", b"cut")
    machine()
    other = Mirror(URL)
    assert other.path != mirror.path
    write(other, checkpoints__4__data="other", checkpoints__9__data="stale")
    other.pull()
    assert other.checkpoints(1) == other.path / "checkpoints"
    assert set(local(other)) == kept
    assert local(other)["checkpoints/4/data"] == b"four"
    (other.path / "checkpoints/2/data").unlink()
    (other.path / "checkpoints/2").rmdir()
    write(other, checkpoints__6__data="six", config="{1}")
    other.push()
    other.wait()
    assert {name for name in there() if name.startswith("checkpoints")} == {
        f"checkpoints/{step}/{name}" for step in (4, 6) for name in ("data", COMPLETE)
    }
    assert there()["config"] == b"{1}"


def test_only_what_changed_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    mirror, sent = Mirror(URL), list[str]()
    write(mirror, log="a", other="b", checkpoints__2__data="two")
    mirror.push()
    mirror.wait()
    for name in ("pipe_file", "put_file"):
        inner = getattr(MemoryFileSystem, name)

        def watch(self: Any, *arguments: Any, inner: Any = inner, **kwargs: Any) -> Any:
            sent.append(str(arguments[0] if isinstance(arguments[1], bytes) else arguments[1]).rpartition("run/")[2])
            return inner(self, *arguments, **kwargs)

        monkeypatch.setattr(MemoryFileSystem, name, watch)
    write(mirror, log="ab", checkpoints__4__data="four")
    mirror.push()
    mirror.wait()
    assert sent == ["log", "checkpoints/4/data", f"checkpoints/4/{COMPLETE}"]


def test_a_run_in_a_bucket_is_resumed_and_read_on_other_machines(
    tmp_path: Path, machine: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Preempted after three of four steps; the second machine finishes; a third reads the model."""
    runs.write_prompts(tmp_path / "prompts.jsonl")
    fsspec.filesystem("memory").put_file(str(tmp_path / "prompts.jsonl"), "/bucket/prompts.jsonl")
    config = runs.small_config(tmp_path, output=URL, prompts="memory://bucket/prompts.jsonl")
    inner = begin.source_of

    def source_of(*arguments: Any) -> Any:
        source = inner(*arguments)

        def following(state: Any, params: Any, key: Any, step: int) -> Any:
            if step == 3:
                raise Preempted
            return source.next(state, params, key, step)

        return source._replace(next=following)

    with monkeypatch.context() as patch:
        patch.setattr(begin, "source_of", source_of)
        with pytest.raises(Preempted):
            runs.train(config)
    assert f"checkpoints/3/{COMPLETE}" in there()
    with pytest.raises(InputError, match="memory://bucket/run is not empty: resume the run there with --resume"):
        RunFolder(URL).check_free()
    machine()
    monkeypatch.setattr(loop, "write_report", lambda folder: folder)
    assert main(["train", "--resume", URL]) in (0, 1)
    assert "resuming from step 3" in capsys.readouterr().out
    assert {name.split("/")[1] for name in there() if name.startswith("checkpoints/")} == {"3", "4"}
    machine()
    _, _, params, _ = load_run(URL)
    runs.assert_equal_trees(params, runs.final_params(runs.finished_run()))
    reference = runs.reproducible(runs.finished_run() / "metrics.jsonl")
    assert runs.reproducible(RunFolder(URL, reading=True).metrics) == reference


@pytest.mark.parametrize(
    ("url", "said"),
    [
        (
            "forbidden://bucket/run",
            r"cannot write to forbidden://bucket/run \(PermissionError: 403 Forbidden: this account may not write\): "
            "check the name, and the rights of the credentials in use",
        ),
        ("nowhere://bucket/run", "nowhere://bucket/run: fsspec knows no nowhere://"),
        ("s3://bucket/run", "s3://bucket/run: s3:// needs another package: .*s3fs"),
    ],
)
def test_a_bucket_that_cannot_be_written_is_said_in_one_line(
    url: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = runs.small_config(tmp_path, output=url)
    assert main(["train", *runs.as_arguments(config)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    with pytest.raises(InputError, match=said):
        RunFolder(url).check_free()


def test_several_hosts_need_a_folder_that_all_see() -> None:
    with pytest.raises(InputError, match=r"memory://bucket/run cannot hold the checkpoints of several hosts: give a "):
        RunFolder(URL).checkpoints_for(2)
    assert RunFolder("gs://bucket/run/").checkpoints_for(2) == "gs://bucket/run/checkpoints"
    assert RunFolder("runs/a").checkpoints_for(2) == Path("runs/a/checkpoints")


def test_prompts_at_a_url(tmp_path: Path) -> None:
    fs = fsspec.filesystem("memory")
    fs.pipe_file("/data/a.jsonl", b'{"prompt": "one"}\n')
    assert [row["prompt"] for row in load_prompts("memory://data/a.jsonl")] == ["one"]
    first = storage.local_copy("memory://data/a.jsonl")
    assert storage.local_copy("memory://data/a.jsonl") == first
    fs.pipe_file("/data/a.jsonl", b'{"prompt": "two"}\n')
    assert [row["prompt"] for row in load_prompts("memory://data/a.jsonl")] == ["two"]
    with pytest.raises(InputError, match=r"there is nothing at memory://data/b\.jsonl"):
        load_prompts("memory://data/b.jsonl")


def test_a_data_set_folder_at_a_url(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([{"prompt": "a"}, {"prompt": "b"}]).save_to_disk(str(tmp_path / "set"))
    fsspec.filesystem("memory").put(str(tmp_path / "set"), "/data/set", recursive=True)
    assert [row["prompt"] for row in load_prompts("memory://data/set")] == ["a", "b"]


def test_settings_keep_urls(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({}))
    config = runs.small_config(tmp_path, prompts="gs://bucket/prompts.jsonl")
    assert storage.is_url(config.prompts)
    from jaxrl_llm.training.config.json_text import located

    assert located(config, tmp_path).prompts == "gs://bucket/prompts.jsonl"


def test_a_copy_that_is_put_in_its_place_while_its_bytes_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is renamed once it is whole, perhaps while it is looked through."""
    (tmp_path / "a").write_bytes(b"12345")

    def vanishing(folder: Path, pattern: str) -> Iterator[Path]:
        yield folder / "a"
        raise FileNotFoundError(folder)

    assert storage._bytes_in(tmp_path) == 5
    monkeypatch.setattr(Path, "rglob", vanishing)
    assert storage._bytes_in(tmp_path) == 5
