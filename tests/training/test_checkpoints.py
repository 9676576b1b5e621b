"""Checkpoints are restored exactly as written, or rejected."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_runs import assert_equal_trees

from jaxrl_llm.training.folder.checkpoints import Checkpoints
from jaxrl_llm.training.folder.checksums import checksum_of_json
from jaxrl_llm.utils.errors import InputError

META = {"prompts": {"position": 3}, "seconds": {"load": 0.1}, "config": {"stop": ["a"]}}


def params_of(value: float, dtype: Any = jnp.float32) -> dict[str, Any]:
    return {"embed": jnp.full((40, 8), value, dtype), "layers": {"norm": jnp.arange(8, dtype=dtype) + value}}


def state_of(value: float) -> dict[str, Any]:
    return {"rest": ((jnp.full((40, 8), -value), ()), jnp.int32(value)), "memory": ()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the checkpoints 1, 2 and 3, whose arrays hold that number."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=3)
    for step in (1, 2, 3):
        checkpoints.save(step, params_of(step), state_of(step), META)
    checkpoints.close()
    return tmp_path / "checkpoints"


@pytest.fixture
def opened(folder: Path) -> Iterator[Checkpoints]:
    checkpoints = Checkpoints(folder, keep=3)
    yield checkpoints
    checkpoints.close()


def step_read(folder: Path, with_state: bool = True) -> int | None:
    """The step of the newest good checkpoint, whose arrays must be those of that step; None where all are damaged."""
    checkpoints = Checkpoints(folder, keep=3)
    try:
        restored = checkpoints.latest(params_of(0), state_of(0) if with_state else None)
    except InputError as error:
        if "can be used: all are damaged; nothing was changed" not in str(error):
            raise
        return None
    finally:
        checkpoints.close()
    assert restored is not None
    assert_equal_trees(restored.params, params_of(restored.step))
    if with_state:
        assert_equal_trees(restored.state, state_of(restored.step))
    return restored.step


def data_files(checkpoint: Path) -> list[Path]:
    """Every file that holds array data or the JSON object, the largest first."""
    files = [path for path in checkpoint.rglob("*") if path.is_file() and path.parent.name in ("d", "meta")]
    return sorted((path for path in files if path.name != "commit_success.txt"), key=lambda path: -path.stat().st_size)


def test_all_comes_back(opened: Checkpoints) -> None:
    assert opened.steps() == [1, 2, 3]
    restored = opened.latest(params_of(0), state_of(0))
    assert restored is not None
    assert restored.step == 3
    assert restored.meta == META
    assert_equal_trees(restored.params, params_of(3))
    assert_equal_trees(restored.state, state_of(3))


def test_shapes_are_enough_to_read_and_the_state_may_stay_unread(opened: Checkpoints) -> None:
    shapes = jax.eval_shape(lambda: params_of(0))
    restored = opened.latest(shapes)
    assert restored is not None
    assert restored.state is None
    assert_equal_trees(restored.params, params_of(3))


@pytest.mark.parametrize("value", [1.0, -0.0, 3e-39, float("inf"), 257.0])
def test_bfloat16_keeps_its_bits(tmp_path: Path, value: float) -> None:
    params = params_of(value, jnp.bfloat16)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, params, state_of(1), META)
    checkpoints.wait()
    restored = checkpoints.latest(params, state_of(0))
    checkpoints.close()
    assert restored is not None
    assert restored.params["embed"].dtype == jnp.bfloat16
    assert_equal_trees(restored.params, params)


def test_only_the_last_are_kept_and_at_least_two(tmp_path: Path) -> None:
    for keep, left in ((1, [4, 5]), (2, [4, 5]), (3, [3, 4, 5])):
        checkpoints = Checkpoints(tmp_path / str(keep), keep=keep)
        for step in range(1, 6):
            checkpoints.save(step, params_of(step), state_of(step), META)
        checkpoints.wait()
        assert checkpoints.steps() == left
        checkpoints.close()


def test_buffers_may_be_donated_at_once(tmp_path: Path) -> None:
    """The next update overwrites the buffers that are being saved; the checkpoint must not change."""

    @partial(jax.jit, donate_argnums=0)
    def update(params: jax.Array) -> jax.Array:
        return params * 3 + 1

    checkpoints = Checkpoints(tmp_path, keep=9)
    params = jnp.arange(2_000_000, dtype=jnp.float32)
    copies = {}
    for step in range(1, 4):
        copies[step] = np.array(params)
        checkpoints.save(step, {"w": params}, {"x": params}, META)
        old, params = params, update(params)
        # On CPUs JAX keeps a donated buffer that orbax still refers to.
        assert old.is_deleted() or np.array_equal(old, copies[step])
    checkpoints.wait()
    for _ in copies:
        restored = checkpoints.latest({"w": params}, {"x": params})
        assert restored is not None
        checkpoints.set_aside_after(restored.step - 1)
        assert_equal_trees(restored.params["w"], copies[restored.step])
        assert_equal_trees(restored.state["x"], copies[restored.step])
    assert checkpoints.steps() == []
    checkpoints.close()


def test_a_host_s_view_keeps_the_bits_of_a_donated_buffer() -> None:
    """What `save` relies on where a copy to the host is the buffer itself, as on CPUs."""
    x = jnp.arange(1000, dtype=jnp.float32)
    view, bits = np.asarray(x), np.array(x, copy=True)
    y = jax.jit(lambda x: x * 3 + 1, donate_argnums=0)(x).block_until_ready()
    assert view.tobytes() == bits.tobytes() != np.asarray(y).tobytes()


def test_the_meta_may_be_changed_at_once(tmp_path: Path) -> None:
    """The loop's clock goes on while the checkpoint with its seconds is being written."""
    meta = {"seconds": {"sample": 1.0}}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, params_of(1), state_of(1), meta)
    for i in range(1000):
        meta["seconds"][f"phase {i}"] = float(i)
    checkpoints.wait()
    restored = checkpoints.latest(params_of(0), state_of(0))
    checkpoints.close()
    assert restored is not None
    assert restored.meta == {"seconds": {"sample": 1.0}}


@pytest.mark.parametrize("part", ["params", "state", "meta"])
@pytest.mark.parametrize("harm", ["truncated", "emptied", "removed"])
def test_a_damaged_checkpoint_is_skipped_with_a_warning(
    folder: Path, part: str, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    for path in data_files(folder / "3"):
        if part in path.relative_to(folder).parts:
            content = path.read_bytes()
            path.unlink()
            if harm != "removed":
                path.write_bytes(content[: len(content) // 2] if harm == "truncated" else b"")
    with caplog.at_level(logging.WARNING, logger="jaxrl_llm.checkpoints"):
        assert step_read(folder) == 2
    messages = [record.getMessage() for record in caplog.records if record.name == "jaxrl_llm.checkpoints"]
    assert len(messages) == 1
    assert f"{folder}/3 is damaged and skipped: " in messages[0]
    assert "\n" not in messages[0]


def test_a_checkpoint_under_the_name_of_another_counts_as_damage(folder: Path) -> None:
    shutil.rmtree(folder / "3")
    shutil.copytree(folder / "1", folder / "3")
    assert step_read(folder) == 2


@pytest.mark.parametrize("part", ["params", "state", "meta"])
def test_a_part_that_is_missing_as_a_whole_counts_as_damage(folder: Path, part: str) -> None:
    shutil.rmtree(folder / "3" / part)
    assert step_read(folder) == 2


@settings(max_examples=25, deadline=None)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), which=st.integers(0, 10**6))
def test_no_flipped_bit_gets_through(
    tmp_path_factory: pytest.TempPathFactory, place: float, bit: int, which: int
) -> None:
    """For any flipped bit, the restored arrays are those written, of this checkpoint or an older one."""
    folder = tmp_path_factory.mktemp("flip") / "checkpoints"
    shutil.copytree(_flippable(tmp_path_factory), folder)
    files = data_files(folder / "2")
    path = files[which % len(files)]
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1 << bit
    path.write_bytes(content)
    assert step_read(folder) in (1, 2)


def test_flipped_numbers_in_arrays_and_meta_are_found(folder: Path) -> None:
    """Damage that still parses is found only by checksums."""
    flipped = 0
    path = next(path for path in data_files(folder / "3") if path.parent.name == "meta")
    text = path.read_text()
    assert '"position": 3' in text or '"position":3' in text
    path.write_text(text.replace('"position": 3', '"position": 7').replace('"position":3', '"position":7'))
    assert step_read(folder) == 2
    path.write_text(text)
    assert step_read(folder) == 3
    raw = json.loads(text)
    for name in raw["checksums"]:
        flipped += 1
        changed = {**raw, "checksums": {**raw["checksums"], name: raw["checksums"][name] ^ 1}}
        path.write_text(json.dumps(changed))
        assert step_read(folder) == 2, name
    assert flipped == len(jax.tree.leaves((params_of(0), state_of(0)))) + 1


def test_checkpoints_of_another_version_are_no_damage(folder: Path) -> None:
    path = next(path for path in data_files(folder / "3") if path.parent.name == "meta")
    raw = json.loads(path.read_text())
    del raw["format"]
    raw["checksums"]["meta"] = checksum_of_json({name: x for name, x in raw.items() if name != "checksums"})
    path.write_text(json.dumps(raw))
    with pytest.raises(InputError, match=r"checkpoints/3 has format 1, and this version of jaxrl_llm reads 2"):
        step_read(folder)


_made: dict[str, Path] = {}


def _flippable(factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints, made once."""
    if not _made:
        _made["folder"] = factory.mktemp("sound") / "checkpoints"
        checkpoints = Checkpoints(_made["folder"])
        for step in (1, 2):
            checkpoints.save(step, params_of(step), state_of(step), META)
        checkpoints.close()
    return _made["folder"]


def test_half_written_folders_are_ignored(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(folder / "3", folder / "4.orbax-checkpoint-tmp")
    shutil.copytree(folder / "3", folder / "5.orbax-checkpoint-tmp-1700000000")
    shutil.rmtree(folder / "4.orbax-checkpoint-tmp" / "state")
    with caplog.at_level(logging.WARNING, logger="jaxrl_llm.checkpoints"):
        assert step_read(folder) == 3
    assert not [record for record in caplog.records if record.name == "jaxrl_llm.checkpoints"]
    checkpoints = Checkpoints(folder, keep=3)
    checkpoints.save(4, params_of(4), state_of(4), META)
    checkpoints.close()
    assert step_read(folder) == 4


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_where_all_are_damaged_that_is_said_and_nothing_is_lost(folder: Path, tmp_path: Path) -> None:
    for path in data_files(folder):
        path.write_bytes(b"no")
    before = contents(folder)
    assert step_read(folder) is None
    assert step_read(folder, with_state=False) is None
    assert contents(folder) == before
    checkpoints = Checkpoints(tmp_path / "empty")
    assert checkpoints.latest(params_of(0)) is None
    checkpoints.close()


@pytest.mark.parametrize(
    ("params", "state", "differs"),
    [
        (
            {"embed": jnp.zeros((40, 8))},
            state_of(0),
            "parameter layers/norm is float32[8] in the checkpoint, and not there",
        ),
        (
            {**params_of(0), "embed": jnp.zeros((41, 8))},
            state_of(0),
            "parameter embed is float32[40, 8] in the checkpoint, and float32[41, 8] here",
        ),
        (
            params_of(0, jnp.bfloat16),
            state_of(0),
            "parameter embed is float32[40, 8] in the checkpoint, and bfloat16[40, 8]",
        ),
        (
            params_of(0),
            {"rest": (), "memory": ()},
            "state rest/0/0 is int32[40, 8] in the checkpoint, and not there here",
        ),
        (
            params_of(0),
            {**state_of(0), "memory": jnp.zeros(3)},
            "state memory is empty in the checkpoint, and float32[3]",
        ),
        (
            params_of(0),
            {**state_of(0), "memory": ((),)},
            "state memory/0 is not there in the checkpoint, and empty here",
        ),
    ],
)
def test_another_structure_is_no_damage_and_is_said(
    opened: Checkpoints, folder: Path, params: Any, state: Any, differs: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = contents(folder)
    with pytest.raises(InputError, match=r"checkpoints/3 does not fit the run's settings: ") as caught:
        opened.latest(params, state)
    assert differs in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "damaged" not in caplog.text
    assert contents(folder) == before


@pytest.mark.parametrize("with_state", [True, False])
def test_what_the_system_cannot_read_is_no_damage(folder: Path, with_state: bool) -> None:
    """A symbolic link to itself stands in for an I/O error; reading a pipe would block."""
    path = data_files(folder / "3")[0]
    path.unlink()
    path.symlink_to(path)
    for said in ("symbolic links", "not a regular file"):
        with pytest.raises(InputError, match="need not be damage") as caught:
            step_read(folder, with_state)
        assert f"3 cannot be read ({said}" in str(caught.value).lower().replace("too many levels of ", "")
        path.unlink()
        os.mkfifo(path)
    path.unlink()
    assert step_read(folder) == 2, "a file that is missing is damage"


def test_damaged_ones_are_set_aside_by_renaming(opened: Checkpoints, folder: Path) -> None:
    before = contents(folder)
    moved = opened.set_aside_after(1)
    assert opened.steps() == [1]
    assert sorted(path.name for path in moved) == ["2", "3"]
    aside = folder.with_name("checkpoints-set-aside")
    assert contents(folder) | contents(aside) == before
    opened.save(2, params_of(20), state_of(20), META)
    opened.wait()
    restored = opened.latest(params_of(0), state_of(0))
    assert restored is not None
    assert_equal_trees(restored.params, params_of(20))
    assert restored.step == 2
    assert [path.name for path in opened.set_aside_after(1)] == ["2.1"], "what is there stays"


def test_a_step_that_is_there_or_past_is_not_passed_over_in_silence(opened: Checkpoints) -> None:
    for step in (3, 2):
        with pytest.raises(InputError, match=rf"checkpoint {step} could not be written .*free space|later"):
            opened.save(step, params_of(9), state_of(9), META)


def test_reading_changes_nothing(folder: Path) -> None:
    """A run may be read while it trains: its half-written checkpoint must be kept."""
    (folder / "4.orbax-checkpoint-tmp").mkdir()
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert step_read(folder, with_state=False) == 3
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


@pytest.mark.parametrize("call", ["save", "wait_until_finished"])
@pytest.mark.parametrize(
    ("error", "raised", "said"),
    [
        (jax.errors.JaxRuntimeError("INTERNAL: Gloo AllGather failed"), jax.errors.JaxRuntimeError, "Gloo AllGather"),
        (ValueError("RESOURCE_EXHAUSTED: disk quota"), InputError, "could not be written to .*disk quota.*free space"),
    ],
)
def test_only_an_error_of_the_disk_gives_advice_about_it(
    opened: Checkpoints,
    call: str,
    error: Exception,
    raised: type[Exception],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Saving exchanges values between processes, one of which may have died."""

    def fail(*_: Any, **__: Any) -> bool:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(opened._manager, call, fail)
        with pytest.raises(raised, match=said):
            opened.save(4, params_of(4), state_of(4), META)
