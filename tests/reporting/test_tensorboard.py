"""TensorBoard: written events survive a kill, and are read back as TensorBoard would show them."""

import errno
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from jaxrl_llm.reporting.logging.writers import TensorBoardWriter, read_scalars
from jaxrl_llm.utils.errors import InputError

pytest.importorskip("tensorboardX")


def write(folder, steps, purge_step=None, scale=1.0):
    writer = TensorBoardWriter(folder, purge_step=purge_step)
    for step in steps:
        writer.write(step, {"reward/mean": scale * step, "kl": np.float32(0.5)})
    writer.close()
    return sorted(folder.iterdir())[-1]


def test_scalars_read_back(tmp_path):
    write(tmp_path / "deep" / "folder", range(2))
    assert read_scalars(tmp_path / "deep" / "folder") == {"kl": {0: 0.5, 1: 0.5}, "reward/mean": {0: 0.0, 1: 1.0}}


def test_the_file_is_one_that_others_read(tmp_path):
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    data, events, at = write(tmp_path, [7], purge_step=7).read_bytes(), [], 0
    while at < len(data):  # each record: u64 length, u32 checksum, the event, u32 checksum
        size = int.from_bytes(data[at : at + 8], "little")
        record = data[at + 12 : at + 12 + size]
        assert int.from_bytes(data[at + 8 : at + 12], "little") == masked_crc32c(data[at : at + 8])
        assert int.from_bytes(data[at + 12 + size : at + 16 + size], "little") == masked_crc32c(record)
        events.append(Event.FromString(record))
        at += size + 16
    version, start, scalars = events
    assert version.file_version == "brain.Event:2"
    assert (start.step, start.session_log.status) == (7, 1)
    assert scalars.step == 7
    assert scalars.wall_time > 1e9
    assert {value.tag: value.simple_value for value in scalars.summary.value} == {"reward/mean": 7.0, "kl": 0.5}


def test_files_that_tensorboardx_wrote_are_read_too(tmp_path):
    import tensorboardX

    older = tensorboardX.SummaryWriter(logdir=str(tmp_path), purge_step=0)
    for step in range(4):
        older.add_scalar("reward/mean", 10.0 * step, step)
    older.close()
    write(tmp_path, range(2, 4), purge_step=2)
    assert read_scalars(tmp_path)["reward/mean"] == {0: 0.0, 1: 10.0, 2: 2.0, 3: 3.0}


def test_what_is_written_again_counts_once(tmp_path):
    write(tmp_path, range(6), scale=10.0)
    write(tmp_path, range(3, 5), purge_step=3)
    assert read_scalars(tmp_path)["reward/mean"] == {0: 0.0, 1: 10.0, 2: 20.0, 3: 3.0, 4: 4.0}
    write(tmp_path, [], purge_step=0)
    assert read_scalars(tmp_path) == {}


CHILD = """
import os, sys
from jaxrl_llm.reporting.logging.writers import TensorBoardWriter
writer = TensorBoardWriter(sys.argv[1])
for step in range(20):
    writer.write(step, {f"metric/{i}": step + i for i in range(50)})
    if sys.argv[2] == "flush":
        writer.flush()
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("how", ["flush", "write"])
def test_a_kill_loses_nothing(tmp_path, how):
    killed = subprocess.run([sys.executable, "-c", CHILD, str(tmp_path), how], timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert read_scalars(tmp_path) == {f"metric/{i}": {step: step + i for step in range(20)} for i in range(50)}


def test_a_half_written_record_is_left_out_and_damage_is_said(tmp_path):
    path = write(tmp_path, range(3))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert read_scalars(tmp_path)["kl"] == {0: 0.5, 1: 0.5}
    for at in (0, 20, len(whole) - 20):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(InputError, match=r"tfevents.*: damaged at byte \d+"):
            read_scalars(tmp_path)
    with pytest.raises(InputError, match="no TensorBoard event files"):
        read_scalars(tmp_path / "none")


def test_flush_waits_for_the_disk_and_a_full_one_names_the_file(tmp_path, monkeypatch):
    writer = TensorBoardWriter(tmp_path)
    (path,) = tmp_path.iterdir()
    synced = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.path.realpath(f"/proc/self/fd/{number}")))
    writer.flush()
    assert synced == [str(path)]

    def full(number):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: .*tfevents"):
        writer.flush()
    writer.close()
    writer.close()


def test_two_writers_of_one_moment_do_not_overwrite_each_other(tmp_path, monkeypatch):
    write(tmp_path, [0])
    write(tmp_path, [1])
    assert read_scalars(tmp_path)["kl"] == {0: 0.5, 1: 0.5}
    with pytest.raises(InputError, match=r"step is 1\.5"):
        TensorBoardWriter(tmp_path / "none", purge_step=1.5)
