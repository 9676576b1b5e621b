"""Stores on disk: the batches of the stores in memory, few bytes of state, and files that outlive what needs them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stored_rows import REPLAYS, all_facts, run, scored_of, some_steps

from jaxrl_llm.algorithms.replay.vspo_prs import with_staged_reward
from jaxrl_llm.core.source import Replay
from jaxrl_llm.replay import base
from jaxrl_llm.replay.disk import is_available, on_disk
from jaxrl_llm.rewards.scoring import Scored
from jaxrl_llm.rollouts.runtime.source_setup import ExperienceState, loaded, saved
from jaxrl_llm.sampling.speculative.drafts import Drafts
from jaxrl_llm.utils.errors import InputError

pytest.importorskip("array_record")
STAGED = with_staged_reward(base.whole_groups(groups=4), {"form": 0.1, "right": 1.0})
EVERY = {**REPLAYS, "staged": STAGED}
every = pytest.mark.parametrize("replay", EVERY.values(), ids=EVERY)


def assert_equal(one: Scored, two: Scored) -> None:
    """Every field of the batch, widths and dtypes too."""
    assert one.texts == two.texts
    assert one.failures == two.failures
    for name in one.batch.__dataclass_fields__:
        a, b = getattr(one.batch, name), getattr(two.batch, name)
        if isinstance(a, dict):
            assert set(a) == set(b), name
        pairs = [(a[key], b[key]) for key in a] if isinstance(a, dict) else [(a, b)]
        for x, y in pairs:
            assert (x is None) == (y is None), name
            if x is not None:
                np.testing.assert_array_equal(x, y, name)
                assert np.asarray(x).dtype == np.asarray(y).dtype, name


@every
@pytest.mark.parametrize("above", [0, 300])
@pytest.mark.parametrize("seed", [3, 8])
def test_batches_are_those_of_the_store_in_memory(replay: Replay, above: int, seed: int, tmp_path: Path) -> None:
    """Whether the tokens move at once or after some steps; 300 bytes are reached on the way."""
    steps = some_steps(9, seed)
    expected, state = run(replay, steps)
    found, other = run(on_disk(replay, tmp_path, above), steps)
    for one, two in zip(expected, found, strict=True):
        assert_equal(one, two)
    assert "disk:next" in other
    rows = {name: x for name, x in replay.metrics(state).items() if name.endswith("/rows")}
    got = on_disk(replay, tmp_path, above).metrics(other)
    assert {name: got[name] for name in rows} == rows
    assert got["replay/disk_megabytes"] == sum(other["disk:bytes"]) / 1e6


@every
def test_it_goes_on_after_a_kill_at_any_point(replay: Replay, tmp_path: Path) -> None:
    """From the checkpoint of step 3, whether or not steps after it had written files, and cleaned up before it."""
    steps, stored = some_steps(8), on_disk(replay, tmp_path, 0)
    expected, _ = run(replay, steps)
    state: Any = stored.init()
    for step, scored in enumerate(steps[:6]):
        if step in (1, 2, 3):  # checkpoints; what follows the last one is lost, but has left its files
            stored.on_checkpoint(state, step)
            kept = saved(ExperienceState(0, state, (), Drafts()))
        _, state = stored.mix(state, scored, step, 100 + step)
    (tmp_path / "000000000099.new").write_text("half a file")
    again = loaded(*kept).replay
    rest, last = run(stored, steps[3:], again, 3)
    for one, two in zip(expected[3:], rest, strict=True):
        assert_equal(one, two)
    stored.on_checkpoint(last, 8)
    assert not list(tmp_path.glob("*.new"))
    assert {int(path.stem) for path in tmp_path.glob("*.array_record")} >= set(last["disk:files"].tolist())


def test_files_go_when_no_checkpoint_needs_them(tmp_path: Path) -> None:
    """Two checkpoints are kept, and a third may not be complete; a store of 2 groups needs the files of few steps."""
    replay = on_disk(base.whole_groups(groups=2), tmp_path, 0)
    state: Any = replay.init()
    files: list[set[int]] = []
    for step in range(20):
        _, state = replay.mix(state, scored_of([[1, 0], [0, 1, 1]], [0, 1], step), step, step)
        replay.on_checkpoint(state, step + 1)
        files.append(set(state["disk:files"].tolist()))
        there = {int(path.stem) for path in tmp_path.glob("*.array_record")}
        assert there == set().union(*files[-3:])
    assert len(there) <= 4


def test_the_state_has_few_bytes_however_long_rows_are(tmp_path: Path) -> None:
    """Rows of 4,000 tokens in a store of 64: 30 times their own bytes in memory, and less than 300 each on disk."""

    def long(step: int) -> Scored:
        scored = scored_of([[1, 0], [0, 1]], [0, 1], step)
        wide: Any = {name: np.resize(x, (4, 4000)) for name, x in vars(scored.batch).items()
                     if isinstance(x, np.ndarray) and x.ndim == 2}  # fmt: skip
        wide["token_mask"] = np.ones((4, 4000), bool)
        return scored._replace(batch=scored.batch.replace(**wide, info=None))

    replay, sizes = base.whole_groups(groups=32), []
    for one in (replay, on_disk(replay, tmp_path, 0)):
        state: Any = one.init()
        for step in range(20):
            _, state = one.mix(state, long(step), step, step)
        sizes.append(sum(x.nbytes for x in state.values()))
        assert one.metrics(state)["replay/rows"] == 64
    assert sizes[0] > 64 * 4000 * 17
    assert sizes[1] < 64 * 300


def test_what_reads_tokens_stays_in_memory(tmp_path: Path) -> None:
    mine = Replay(dict, lambda state, scored, step, seed: (scored, {"length": np.ones(9, np.int32)}))
    assert on_disk(mine, tmp_path, 0) is mine
    steps = some_steps(3)
    found, state = run(on_disk(EVERY["whole_groups"], tmp_path, 10**6), steps)
    assert not list(tmp_path.iterdir())
    assert "disk:next" not in state
    assert [all_facts(x) for x in found] == [all_facts(x) for x in run(EVERY["whole_groups"], steps)[0]]


def test_a_missing_or_damaged_file_is_told(tmp_path: Path) -> None:
    replay, steps = on_disk(base.whole_groups(times=4), tmp_path, 0), some_steps(5)
    _, state = run(replay, steps[:4])
    path = next(iter(sorted(tmp_path.glob("*.array_record"))))
    path.write_bytes(b"nothing")
    with pytest.raises(InputError, match=r"array_record is damaged .*: put a good copy back"):
        replay.mix(state, steps[4], 4, 0)
    path.unlink()
    with pytest.raises(InputError, match=r"replayed rows are missing, .*: put the file back"):
        replay.mix(state, steps[4], 4, 0)
    (tmp_path / "kept.json").write_text("[1]")
    with pytest.raises(InputError, match="is damaged: remove it"):
        replay.on_checkpoint(state, 5)


def test_without_array_record_stores_stay_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_available()
    monkeypatch.setitem(sys.modules, "array_record", None)
    assert not is_available()
