"""Metric writers: round trips, resuming after a crash, and what reaches TensorBoard and Weights & Biases."""

import json
import math
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.errors import InputError
from jaxrl_llm.reporting.writers import (
    JsonlWriter,
    TensorBoardWriter,
    WandbWriter,
    all_of,
    iterate_jsonl,
    read_json,
    read_jsonl,
    truncate_jsonl,
)


class Recorder:
    def __init__(self, fails=False):
        self.rows, self.closed, self.fails = [], False, fails

    def write(self, step, metrics):
        self.rows.append((step, dict(metrics)))

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


@pytest.mark.parametrize("metrics", [{"x": "high"}, {"x": np.ones(2)}, {"x": None}, {"step": 1}])
def test_what_is_no_scalar_is_refused_by_name_and_writes_nothing(tmp_path, metrics):
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    with pytest.raises(InputError, match=next(iter(metrics))):
        writer.write(0, metrics)
    writer.close()
    assert read_jsonl(tmp_path / "metrics.jsonl") == []


@pytest.mark.parametrize(
    "half", [b'{"step": 2, "rew', '{"step": 2, "é'.encode()[:-1], b"\x00\x00", b"12", b'{"step": 2']
)
def test_a_half_written_last_line_is_ignored_and_then_dropped(tmp_path, half):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0, "a": 1}\n\n{"step": 1, "a": 2}\n' + half)
    assert [row["step"] for row in read_jsonl(path)] == [0, 1]
    writer = JsonlWriter(path)
    writer.write(2, {"a": 3})
    writer.close()
    assert path.read_text() == '{"step": 0, "a": 1}\n{"step": 1, "a": 2}\n{"step": 2, "a": 3}\n'


def test_a_last_line_that_lacks_only_its_newline_is_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}')
    writer = JsonlWriter(path)
    writer.write(1, {})
    writer.close()
    assert path.read_bytes() == b'{"step": 0}\n{"step": 1}\n'


def test_damage_before_the_last_line_is_an_error_with_its_place(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n{"step": 1, "re{"step": 1}\n{"step": 2}\n')
    with pytest.raises(InputError, match=r"metrics\.jsonl, line 2"):
        read_jsonl(path)
    with pytest.raises(InputError, match="line 2"):
        truncate_jsonl(path, 5)
    assert path.read_bytes().count(b"\n") == 3  # the original is untouched


def test_truncation_keeps_the_bytes_of_earlier_steps(tmp_path):
    path = tmp_path / "metrics.jsonl"
    kept = b'{"step":0,"x":1e-7}\n{"note":"no step"}\n{"step": 4, "text": "\\u00e9"}\n'
    path.write_bytes(kept + b'{"step": 5}\n{"step": 6}\n{"step": 7, "ha')
    truncate_jsonl(path, 5)
    assert path.read_bytes() == kept
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]
    truncate_jsonl(path, 0)
    assert path.read_bytes() == b'{"note":"no step"}\n'


def test_truncation_of_a_missing_file_does_nothing(tmp_path):
    truncate_jsonl(tmp_path / "metrics.jsonl", 3)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InputError, match="cannot read"):
        read_jsonl(tmp_path / "metrics.jsonl")


def test_offsets_find_each_line_again(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": "é"}\n\n{"a": 2}\n', encoding="utf-8")
    with open(path, "rb") as file:
        for offset, row in iterate_jsonl(path):
            file.seek(offset)
            assert json.loads(file.readline()) == row


def test_read_json(tmp_path):
    path = tmp_path / "config.json"
    assert read_json(path) == {}
    path.write_text('{"a": 1}')
    assert read_json(path) == {"a": 1}
    for damaged in ("[1]", '{"a":', ""):
        path.write_text(damaged)
        with pytest.raises(InputError, match=r"config\.json"):
            read_json(path)


def test_all_of_writes_to_each_and_closes_all_even_after_a_failure():
    first, broken, last = Recorder(), Recorder(fails=True), Recorder()
    writer = all_of(first, broken, last)
    writer.write(1, {"a": 2.0})
    assert first.rows == last.rows == [(1, {"a": 2.0})]
    with pytest.raises(OSError, match="disk full"):
        writer.close()
    assert first.closed
    assert last.closed
    all_of().write(0, {})


def test_tensorboard_events_read_back(tmp_path):
    event = pytest.importorskip("tensorboardX.proto.event_pb2")
    writer = TensorBoardWriter(tmp_path)
    writer.write(7, {"reward/mean": 0.25, "kl": np.float32(0.5)})
    writer.close()
    (path,) = tmp_path.glob("events.out.tfevents*")
    data, found, at = path.read_bytes(), {}, 0
    while at < len(data):  # each record: u64 length, u32 checksum, the event, u32 checksum
        size = int.from_bytes(data[at : at + 8], "little")
        record = event.Event.FromString(data[at + 12 : at + 12 + size])
        found |= {value.tag: (record.step, value.simple_value) for value in record.summary.value}
        at += size + 16
    assert found == {"reward/mean": (7, 0.25), "kl": (7, 0.5)}


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
    settings = {"project": "maths", "name": "first", "config": {"seed": 1}, "dir": str(tmp_path / "logs")}
    assert calls == [settings, (2, {"a": 0.5}), "finished"]
    assert type(calls[1][1]["a"]) is float


def test_a_missing_package_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(InputError, match=r"pip install 'jaxrl_llm\[wandb\]'"):
        WandbWriter("p", None, {}, tmp_path)
    with pytest.raises(InputError, match=r"pip install 'jaxrl_llm\[run\]'"):
        TensorBoardWriter(tmp_path)
