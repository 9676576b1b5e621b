"""Metric writers: round trips, resuming after a crash, and what reaches TensorBoard and Weights & Biases."""

import errno
import importlib
import io
import math
import os
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.reporting.logging.services import MLFLOW, TRACKIO, ServiceWriter, WandbWriter, check_writers
from jaxrl_llm.reporting.logging.writers import (
    JsonlWriter,
    TensorBoardWriter,
    all_of,
    read_jsonl,
)
from jaxrl_llm.utils.errors import InputError


class Recorder:
    def __init__(self, fails=False):
        self.rows, self.closed, self.flushed, self.fails = [], False, 0, fails

    def write(self, step, metrics):
        self.rows.append((step, dict(metrics)))

    def flush(self):
        self.flushed += 1

    def close(self):
        self.closed = True
        if self.fails:
            raise OSError("disk full")


def test_a_line_is_strict_json_with_sorted_metrics(tmp_path):
    path = tmp_path / "deep" / "metrics.jsonl"
    writer = JsonlWriter(path, sync=True)
    writer.write(3, {"b": np.float32(0.5), "a": jnp.float32(2.0), "count": 7, "bad": math.nan, "inf": -math.inf})
    # Read before closing: a reader beside the run sees complete lines.
    assert path.read_text() == '{"step": 3, "a": 2.0, "b": 0.5, "bad": null, "count": 7, "inf": null}\n'
    writer.close()
    writer.close()


def test_round_trip_and_append(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for step in range(3):
        writer = JsonlWriter(path)
        writer.write(step, {"reward": step / 4})
        writer.close()
    assert read_jsonl(path) == [{"step": 0, "reward": 0.0}, {"step": 1, "reward": 0.25}, {"step": 2, "reward": 0.5}]


@pytest.mark.parametrize(
    "metrics",
    [{"x": "high"}, {"x": "1.5"}, {"x": np.ones(2)}, {"x": np.ones(1)}, {"x": None}, {"x": 10**400}, {"step": 1}],
)
def test_what_is_no_scalar_is_refused_by_name_and_writes_nothing(tmp_path, metrics):
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    with pytest.raises(InputError, match=next(iter(metrics))):
        writer.write(0, metrics)
    writer.close()
    assert read_jsonl(tmp_path / "metrics.jsonl") == []


@pytest.mark.parametrize("step", [1.5, -1, True, None, "1", 2**63])
def test_what_is_no_step_is_refused(tmp_path, step):
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    with pytest.raises(InputError, match="whole number"):
        writer.write(step, {"x": 1})
    writer.write(jnp.int32(3), {"x": 1})
    writer.write(np.int64(4), {"x": 1})
    writer.close()
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [3, 4]


def test_opening_drops_a_half_written_line_but_not_one_that_lacks_only_its_newline(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0, "a": 1}\n\n{"step": 2, "rew')
    writer = JsonlWriter(path)
    writer.write(2, {"a": 3})
    writer.close()
    assert path.read_text() == '{"step": 0, "a": 1}\n{"step": 2, "a": 3}\n'
    path.write_bytes(b'{"step": 0}')
    writer = JsonlWriter(path)
    writer.write(1, {})
    writer.close()
    assert path.read_bytes() == b'{"step": 0}\n{"step": 1}\n'


def test_flush_waits_for_the_disk(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.path.realpath(f"/proc/self/fd/{number}")))
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path)
    writer.write(0, {"a": 1})
    assert synced == []
    writer.flush()
    assert synced == [str(path)]
    writer.close()


def test_a_full_disk_names_the_file(tmp_path):
    class Full(io.StringIO):
        def flush(self):
            raise OSError(errno.ENOSPC, "No space left on device")

    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    writer._file.close()
    writer._file = Full()
    with pytest.raises(OSError, match=r"No space left on device: '.*metrics\.jsonl'"):
        writer.write(0, {"a": 1})
    with pytest.raises(OSError, match=r"metrics\.jsonl"):
        writer.flush()
    writer._file.flush = lambda: None
    writer.close()


def test_all_of_writes_to_each_and_closes_all_even_after_a_failure():
    first, broken, last = Recorder(), Recorder(fails=True), Recorder()
    writer = all_of(first, broken, last)
    writer.write(1, {"a": 2.0})
    assert first.rows == last.rows == [(1, {"a": 2.0})]
    with pytest.raises(OSError, match="disk full"):
        writer.close()
    assert first.closed
    assert last.closed
    assert (first.flushed, last.flushed) == (0, 0)
    writer.flush()
    assert (first.flushed, last.flushed) == (1, 1)
    all_of().write(0, {})
    all_of().flush()


def test_wandb_gets_the_run_and_its_numbers(tmp_path, monkeypatch):
    calls = []
    run = types.SimpleNamespace(
        log=lambda metrics, step: calls.append((step, metrics)), finish=lambda: calls.append("finished")
    )
    fake = types.SimpleNamespace(init=lambda **settings: calls.append(settings) or run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    writer = WandbWriter("maths", "first", {"seed": 1}, tmp_path / "logs")
    writer.write(2, {"a": np.float32(0.5)})
    writer.close()
    known = (tmp_path / "logs" / "wandb_id.txt").read_text().strip()
    settings = {"project": "maths", "name": "first", "config": {"seed": 1}, "dir": str(tmp_path / "logs")}
    settings |= {"id": known, "resume": "allow"}
    assert calls == [settings, (2, {"a": 0.5}), "finished"]
    assert type(calls[1][1]["a"]) is float


def test_a_writer_that_is_made_again_goes_on_with_the_run(tmp_path, monkeypatch):
    made = []
    fake = types.SimpleNamespace(init=lambda **settings: made.append(settings))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for folder in ("a", "a", "b"):
        WandbWriter("maths", None, {}, tmp_path / folder)
    first, again, other = (settings["id"] for settings in made)
    assert first == again != other
    assert {settings["resume"] for settings in made} == {"allow"}


def test_trackio_goes_on_with_the_run_of_its_folder(tmp_path, monkeypatch):
    made, calls = [], []
    run = types.SimpleNamespace(
        log=lambda metrics, step: calls.append((step, metrics)), finish=lambda: calls.append("finished")
    )
    fake = types.SimpleNamespace(init=lambda **settings: made.append(settings) or run)
    monkeypatch.setitem(sys.modules, "trackio", fake)
    for folder in ("a", "a", "b"):
        writer = ServiceWriter(TRACKIO, "maths", "first", {"seed": 1}, tmp_path / folder)
    writer.write(2, {"a": np.float32(0.5)})
    writer.close()
    first, again, other = (settings["name"] for settings in made)
    assert first == again != other
    assert first.startswith("first-")
    assert {settings["resume"] for settings in made} == {"allow"}
    assert calls == [(2, {"a": 0.5}), "finished"]


def test_mlflow_gets_settings_once_and_names_that_it_takes(tmp_path, monkeypatch):
    class Client:
        runs, experiments = {}, []

        def get_experiment_by_name(self, name):
            return types.SimpleNamespace(experiment_id=name) if name in self.experiments else None

        def create_experiment(self, name):
            self.experiments.append(name)
            return name

        def create_run(self, experiment, run_name):
            self.runs["one"] = [(experiment, run_name)]
            return types.SimpleNamespace(info=types.SimpleNamespace(run_id="one"))

        def log_batch(self, run, metrics=(), params=()):
            assert len(params) <= 100
            self.runs[run] += [*params, *((key, value, step) for key, value, _, step in metrics)]

        def update_run(self, run, status):
            self.runs[run].append(status)

        def set_terminated(self, run):
            self.runs[run].append("ended")

    monkeypatch.setitem(sys.modules, "mlflow", types.SimpleNamespace(MlflowClient=Client))
    parts = types.SimpleNamespace(Metric=lambda *x: x, Param=lambda *x: x)
    monkeypatch.setitem(sys.modules, "mlflow.entities", parts)
    for step in (0, 1):
        writer = ServiceWriter(MLFLOW, "maths", "first", {str(i): i for i in range(101)}, tmp_path)
        writer.write(step, {"pass@4": 0.5, "reward/mean": 1})
        writer.close()
    begin, *settings = Client.runs["one"][:102]
    assert begin == ("maths", "first")
    assert settings == [(str(i), str(i)) for i in range(101)]
    first = [("pass_4", 0.5, 0), ("reward/mean", 1.0, 0), "ended"]
    assert Client.runs["one"][102:] == [*first, "RUNNING", ("pass_4", 0.5, 1), ("reward/mean", 1.0, 1), "ended"]


def test_a_missing_package_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    monkeypatch.setitem(sys.modules, "tensorboardX.proto", None)
    with pytest.raises(InputError, match=r"pip install 'jaxrl_llm\[wandb\]'"):
        WandbWriter("p", None, {}, tmp_path)
    with pytest.raises(InputError, match=r"pip install 'jaxrl_llm\[run\]'"):
        TensorBoardWriter(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InputError, match=r"pip install 'jaxrl_llm\[wandb\]'"):
        check_writers(False, wandb="p")
    with pytest.raises(InputError, match=r"pip install 'jaxrl_llm\[run\]'"):
        check_writers(True)
    check_writers(False)
    check_writers(False, wandb="")


def test_what_is_not_installed_is_found_out_without_importing_anything(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()  # a folder of logs that wandb leaves behind is not the package
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(InputError, match=r"needs the package 'wandb'"):
        check_writers(False, wandb="p")
    (tmp_path / "wandb" / "__init__.py").write_text("raise RuntimeError('imported')")
    importlib.invalidate_caches()
    check_writers(False, wandb="p")


@pytest.mark.parametrize("project", ["a/b", "x" * 129, "50%", 3])
def test_a_project_that_wandb_would_not_take_is_refused_early(project, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", types.ModuleType("wandb"))
    with pytest.raises(InputError, match="must be a project's name"):
        check_writers(False, wandb=project)
    check_writers(False, wandb="maths")


def test_a_wandb_that_does_not_start_is_one_line(tmp_path, monkeypatch):
    def init(**settings):
        raise RuntimeError("api_key not configured\n  (no-tty)")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    with pytest.raises(InputError) as caught:
        WandbWriter("maths", None, {}, tmp_path)
    assert "does not start: api_key not configured (no-tty); run `wandb login`" in str(caught.value)
    assert "\n" not in str(caught.value)
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace())  # broken: nothing in it
    with pytest.raises(InputError, match=r"does not start: .*init"):
        WandbWriter("maths", None, {}, tmp_path)
