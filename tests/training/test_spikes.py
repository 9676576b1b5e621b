"""Loss spikes are found by a robust bound, and undone by going back to a checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_runs as runs

from jaxrl_llm.learner.optimizer import OptimizerConfig
from jaxrl_llm.rollouts.runtime.sources import shuffled_epochs
from jaxrl_llm.training import loop
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.folder.checkpoints import Checkpoints
from jaxrl_llm.training.health.goodput import Clock
from jaxrl_llm.training.health.loss_spikes import History, SpikeRule, as_history, bound, judge
from jaxrl_llm.training.state import LoopState
from jaxrl_llm.training.step import undo_spike
from jaxrl_llm.utils.errors import InputError

RULE = SpikeRule(("loss",), factor=4.0, window=5, rollbacks=2)
FLAT = History({"loss": (1.0, 3.0, 2.0, 5.0, 2.0)})  # median 2, distances 1 1 0 3 0, MAD 1: the bound is 6


def of(history: History, step: int, loss: float, undoable: bool = True) -> Any:
    return judge(history, step, {"loss": loss, "kl": 0.0}, RULE, undoable)


def test_the_bound_is_the_median_and_some_deviations() -> None:
    assert bound(FLAT.values["loss"], 4.0) == 6
    assert bound((-2.0, -1.0, -1.5, -1.0), 2.0) == -1.25 + 2 * 0.25  # distances .75 .25 .25 .25
    assert bound((2.0,) * 5, 4.0) == pytest.approx(2 + 4 * 0.1), "at least 5 % of the median"
    assert bound((0.0,) * 4 + (1.0,), 4.0) == np.inf


def test_what_is_above_the_bound_is_undone_and_forgotten() -> None:
    assert of(FLAT, 9, 6.0) == (History({"loss": (3.0, 2.0, 5.0, 2.0, 6.0)}), "", False)
    history, spike, undo = of(FLAT, 9, 6.5)
    assert (spike, undo) == ("loss is 6.5, above 6", True)
    assert history == History(FLAT.values, (9,))


def test_there_is_no_spike_before_the_window_is_full() -> None:
    history = History({"loss": (1.0, 1.0, 1.0, 1.0)})
    assert of(history, 4, 1e9) == (History({"loss": (1.0, 1.0, 1.0, 1.0, 1e9)}), "", False)


def test_rollbacks_are_limited_and_a_new_level_is_learned() -> None:
    history, undone = FLAT, []
    for step in range(10, 20):
        history, spike, undo = of(history, step, 50.0)
        undone += [step] * undo
        assert bool(spike) == (step < 15)
    assert undone == [10, 11], "two within the window; then three are taken in, and 50 is the median"
    assert of(History(FLAT.values, (10, 11)), 15, 50.0).undo, "five steps later"
    assert not of(History(FLAT.values, (10, 11)), 14, 50.0).undo


def test_what_cannot_be_undone_is_a_spike_all_the_same() -> None:
    history, spike, undo = of(FLAT, 9, 7.0, undoable=False)
    assert (spike, undo) == ("loss is 7, above 6", False)
    assert history == History({"loss": (3.0, 2.0, 5.0, 2.0, 7.0)})


def test_values_that_are_not_finite_are_left_out() -> None:
    assert of(FLAT, 9, np.nan).history == FLAT


def test_a_metric_that_there_is_not() -> None:
    with pytest.raises(InputError, match="unknown metric in spike_metrics 'lossy': did you mean 'loss'"):
        judge(FLAT, 9, {"loss": 1.0}, RULE._replace(metrics=("lossy",)), True)


def test_there_and_back_through_json() -> None:
    history = History({"loss": (0.1, 1 / 3), "grad_norm": (1e-30,)}, (3, 7))
    assert as_history(json.loads(json.dumps(history._asdict()))) == history


def test_it_needs_checkpoints() -> None:
    with pytest.raises(InputError, match="checkpoint_every is 0: there would be nothing to go back to"):
        TrainConfig(spike_factor=10.0, checkpoint_every=0)


def test_before_the_first_checkpoint_it_is_only_said(tmp_path: Path) -> None:
    config = TrainConfig(spike_factor=4.0, spike_window=5, spike_metrics=("loss",))
    given: Any = LoopState(step=9, feedback={"loss": 7.0}, spikes=FLAT)
    state, metrics, notes = undo_spike(config, "kept", given, Checkpoints(tmp_path / "c"), Clock())  # type: ignore[arg-type]
    assert (state, metrics) == ("kept", {"rollback": 0.0})
    assert notes == ["step 10: loss is 7, above 6; not rolled back: there is no checkpoint to go back to"]


# A run whose eighth step has a prompt with rewards of up to 1000; those of the others are up to 1.

SPIKE, EVERY, STEPS = 7, 4, 10
SPIKY = """
def spiky(completions, completion_ids, answer):
    shares = [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]
    return [share * float(scale) for share, scale in zip(shares, answer)]
"""


@pytest.fixture(scope="module")
def spiked(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """The configuration of the finished run."""
    folder = tmp_path_factory.mktemp("spiked")
    rows = [{"prompt": f"number {i:02d}:", "answer": "1"} for i in range(4 * (STEPS + 1))]
    curriculum = shuffled_epochs(rows, seed=0)
    at = curriculum.init()
    for _ in range(SPIKE + 1):
        ids, at = curriculum.select(at, 4)
    rows[int(ids[0])]["answer"] = "1000"
    (folder / "numbers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "spiky.py").write_text(SPIKY)
    config = runs.small_config(
        folder, prompts=str(folder / "numbers.jsonl"), rewards=(f"{folder / 'spiky.py'}:spiky",), algorithm="rloo",
        steps=STEPS, checkpoint_every=EVERY, keep_checkpoints=4, eval_size=0, spike_factor=100.0, spike_window=4,
        spike_metrics=("grad_norm",), optimizer=OptimizerConfig(learning_rate=1e-5),
    )  # fmt: skip
    runs.train(config)
    return config


def saved(run: Path, step: int) -> dict[str, int]:
    """Checksums of the arrays in a checkpoint."""
    found = runs.lines_of(run / f"checkpoints/{step}/meta/metadata")[0]["checksums"]
    return {name: value for name, value in found.items() if name != "meta"}


@pytest.mark.heavy
def test_the_run_goes_on_from_the_checkpoint_and_with_other_prompts(spiked: TrainConfig) -> None:
    run = Path(spiked.output)
    lines = runs.lines_of(run / "metrics.jsonl")
    assert [line["step"] for line in lines if line["rollback"]] == [SPIKE + 1]
    norms = [line["grad_norm"] for line in lines]
    assert norms[SPIKE] > bound(tuple(norms[SPIKE - 4 : SPIKE]), 100.0)
    assert saved(run, SPIKE + 1) == saved(run, EVERY), "parameters, moments, counter and memory as they were"
    assert saved(run, STEPS) != saved(run, EVERY)
    taken = [row["prompt_id"] for row in runs.lines_of(run / "completions.jsonl")]
    assert len(set(taken)) == 4 * STEPS, "no prompt comes twice"
    undone = cumulative = 0.0
    for line in lines[: SPIKE + 1]:
        spent = sum(line[f"seconds/{name}"] for name in ("sample", "score", "update"))
        cumulative += spent
        undone += spent * (line["step"] > EVERY)
    total = sum(v for line in lines[: SPIKE + 1] for k, v in line.items() if k.startswith("seconds/"))
    assert lines[SPIKE]["goodput"] == pytest.approx((cumulative - undone) / total, rel=0.05)


@pytest.mark.heavy
@pytest.mark.parametrize("step", [EVERY, SPIKE + 1])
def test_it_resumes_bit_by_bit(spiked: TrainConfig, tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before the rollback, and after it."""
    monkeypatch.setattr(loop, "write_report", lambda folder: folder)
    run, whole = tmp_path / "run", Path(spiked.output)
    shutil.copytree(whole, run)
    for later in [one for one in (EVERY, SPIKE + 1, STEPS) if one > step]:
        shutil.rmtree(run / "checkpoints" / str(later))
    loop.resume(str(run))
    runs.assert_equal_trees(runs.final_params(run), runs.final_params(whole))
    assert saved(run, STEPS) == saved(whole, STEPS)
    assert runs.reproducible(run / "metrics.jsonl") == runs.reproducible(whole / "metrics.jsonl")
    assert (run / "completions.jsonl").read_bytes() == (whole / "completions.jsonl").read_bytes()
