"""Methods that steer the sampler or take labels from the data, trained by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_prefixed_runs import with_long_context
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
def test_hila_learns_which_listed_action_is_worth_most(tmp_path: Path) -> None:
    """Of four: a peer is right, another and the policy are wrong, and the expert costs more than the right peer."""
    rows = [{"prompt": f"{i}:", "answer": str(i), "peers": [str(i), "x"], "expert": f"it is {i}"} for i in range(4, 8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    taken = trained(
        tmp_path, "hila", model=str(with_long_context(tmp_path)), prompts=str(tmp_path / "rows.jsonl"), steps=3,
        rewards=("number_match",), eval_size=0, minibatches=1, temperature=1.0, top_p=1.0,
    )  # fmt: skip
    batch = taken[0].scored.batch
    assert np.asarray(batch.info["demonstrated"]).tolist() == [0.0, 0.0, 0.0, 0.0, 1.0] * 4
    np.testing.assert_allclose(np.asarray(batch.reward).reshape(4, 5)[:, [0, 1, 3]], [[1, 0, 0.7]] * 4, atol=1e-6)
    assert np.asarray(batch.group).tolist() == [g for i in range(4) for g in [2 * i] * 4 + [2 * i + 1]]
    lines = lines_of(tmp_path / "run" / "metrics.jsonl")
    assert lines[-1]["choice/reward"] > lines[0]["choice/reward"] + 0.05
    assert lines[-1]["expert/loss"] < lines[0]["expert/loss"]
    assert lines[0]["kl"] < 1e-6 < lines[-1]["kl"]


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
