"""Methods that steer the sampler or take labels from the data, trained by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_runs import Taken, lines_of, small_config, train, watched

from jaxrl_llm.algorithms.credit.hapo_heterogeneous import ENTRIES
from jaxrl_llm.utils.errors import InputError


def trained(folder: Path, name: str, **changes: Any) -> list[Taken]:
    """What the source of a run of two steps gave."""
    taken: list[Taken] = []
    with watched(taken):
        train(small_config(folder, algorithm=name, **{"steps": 2, **changes}))
    assert len(lines_of(folder / "run" / "metrics.jsonl")) == len(taken)
    return taken


@pytest.mark.heavy
def test_arbitrary_entropy_samples_again_at_the_temperature_that_it_chose(tmp_path: Path) -> None:
    given = {"tempered_share": 1.0, "target_entropy": 0.0, "hot": 1.5, "cold": 0.5}
    first, second = trained(tmp_path, "aepo_arbitrary_entropy", hyperparameters=given)
    for taken in (first, second):
        tempered = np.asarray(taken.scored.batch.info["tempered"])
        assert tempered.tolist() == ([0.0] * 4 + [1.0] * 4) * 4
    # Before the first update the temperature is hot; then the entropy is above the target of 0.
    assert dict(first.before.controls) == {}
    assert second.before.controls["temperature"] == pytest.approx(1.5)
    assert second.after.controls == second.before.controls  # until the update tells it


@pytest.mark.heavy
def test_one_token_rollout_learns_the_texts_of_a_column(tmp_path: Path) -> None:
    taken = trained(tmp_path, "otr", group_size=1, steps=4, hyperparameters={"penalty": 0.0})
    for one in taken:
        batch = one.scored.batch
        assert np.asarray(batch.info["demonstrated"]).tolist() == [1.0] * 4
        assert one.scored.texts == [row for row in one.scored.texts if row in ("0", "1")]
    probability = [line["label/probability"] for line in lines_of(tmp_path / "run" / "metrics.jsonl")]
    assert probability[-1] > probability[0]


@pytest.mark.heavy
def test_policy_agnostic_rl_trains_by_name(tmp_path: Path) -> None:
    assert len(trained(tmp_path, "pa_rl", hyperparameters={"keep": 2})) == 2


@pytest.mark.heavy
def test_texts_beside_samples_train_by_name(tmp_path: Path) -> None:
    taken = trained(tmp_path, "ppo_max", hyperparameters={"pretraining_coefficient": 0.5})
    for one in taken:
        assert np.asarray(one.scored.batch.info["demonstrated"]).tolist() == ([0.0] * 4 + [1.0]) * 4
    assert all(line["pretraining"] > 0 for line in lines_of(tmp_path / "run" / "metrics.jsonl"))


def test_a_column_that_no_prompt_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"reads the column 'solution', which no prompt has"):
        train(small_config(tmp_path, algorithm="otr", group_size=1, hyperparameters={"column": "solution"}))


@pytest.mark.heavy
def test_heterogeneous_hapo_draws_at_the_levels_of_the_last_batch(tmp_path: Path) -> None:
    given = {"tau": 0.5, "dynamic_sampling": False}
    first, second = trained(tmp_path, "hapo_heterogeneous", hyperparameters=given, minibatches=1)
    of = [{name: np.asarray(one.scored.batch.info[name]) for name in ENTRIES} for one in (first, second)]
    assert not of[0]["level_tau"].any()
    np.testing.assert_array_equal(of[1]["level_tau"], 0.5)
    for name in ENTRIES:  # of the entropies of the first batch
        assert second.before.controls[name] == pytest.approx(float(of[1][name][0]))
    batch = first.scored.batch
    x = np.log(np.maximum(np.asarray(batch.entropy)[np.asarray(batch.action_mask)], 1e-8))
    assert of[1]["level_pivot"][0] == pytest.approx(sorted(x)[round(0.8 * (len(x) - 1))], abs=1e-5)
    for line in lines_of(tmp_path / "run" / "metrics.jsonl"):
        assert line["mismatch"] < 1e-4  # the trainer computes what was drawn from


def test_temperatures_by_entropy_refuse_partial_rollouts(tmp_path: Path) -> None:
    given = {"dynamic_sampling": False}
    config = small_config(tmp_path, algorithm="hapo_heterogeneous", hyperparameters=given, segment_tokens=3)
    with pytest.raises(InputError, match="all tokens of an episode through the hook of one step"):
        train(config)
