"""Runs that draw through hooks of the sampler: NLPO by name, with its second policy in checkpoints, and top-n-sigma."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tiny_runs import MODEL, Taken, assert_equal_trees, lines_of, reproducible, small_config, train, watched

from jaxrl_llm.algorithms import get
from jaxrl_llm.distributed import mesh_of
from jaxrl_llm.distributed.chips import topology_of
from jaxrl_llm.models import load_policy
from jaxrl_llm.plan.estimate import held_bytes
from jaxrl_llm.plan.models import config_of as config_of_model
from jaxrl_llm.plan.sampling import abstract_mesh
from jaxrl_llm.plan.shapes import plan_inputs as checked_plan
from jaxrl_llm.plan.shapes import state_shapes
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.method import check_method
from jaxrl_llm.training.rollout import check_hook, rollout_of
from jaxrl_llm.utils.errors import InputError

NLPO = {"mask_min_keep": 2, "mask_top_p": 0.7, "mask_every": 2}


def config_of(folder: Path, **changes: Any) -> TrainConfig:
    given = {"algorithm": "nlpo", "hyperparameters": NLPO, "top_p": 1.0, "minibatches": 1, "eval_size": 0}
    return small_config(folder, **{**given, **changes})


@pytest.mark.heavy
def test_nlpo_by_name(tmp_path: Path) -> None:
    """The mask is that of a copy which is replaced after every second update, and the update knows it."""
    taken: list[Taken] = []
    with watched(taken):
        train(config_of(tmp_path, steps=4, epochs=2))
    lines = lines_of(tmp_path / "run" / "metrics.jsonl")
    assert all(np.isfinite(x) for line in lines for x in line.values() if isinstance(x, float))
    for line in lines:
        assert line["mismatch"] < 1e-5, "the update computes what was drawn from"
    own = [{name: x for name, x in one.params.items() if name not in ("other", "critic")} for one in taken]
    for step, of in enumerate((0, 0, 2, 2)):
        assert_equal_trees(taken[step].params["other"], own[of])
    batch = taken[3].scored.batch
    action = np.asarray(batch.action_mask)
    assert np.isfinite(np.asarray(batch.support_floor)[action]).all()
    assert (np.asarray(batch.behaviour_logp) > np.asarray(batch.untruncated_logp))[action].mean() > 0.9
    assert all(line["rollout/compiles"] == 0 for line in lines[1:]), "one compile"


@pytest.mark.heavy
@pytest.mark.parametrize("changes", [{}, {"lora_rank": 2, "speculative_tokens": 2}], ids=["plain", "adapters"])
def test_a_run_that_is_resumed_goes_on_with_its_second_policy(tmp_path: Path, changes: dict[str, Any]) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    given = {"hyperparameters": {**NLPO, "mask_every": 3}, "checkpoint_every": 1, **changes}
    train(config_of(tmp_path / "a", **given))
    train(config_of(tmp_path / "b", **given, steps=2))
    train(config_of(tmp_path / "b", **given), resume=True, accept_changed_inputs=True)
    sums = [lines_of(tmp_path / name / "run/checkpoints/4/meta/metadata")[0]["checksums"] for name in ("a", "b")]
    for one in sums:
        del one["meta"]  # it holds seconds
    assert sums[0] == sums[1]
    assert any("['other']" in name for name in sums[0]), "the second policy is in the checkpoint"
    lines = [reproducible(tmp_path / name / "run" / "metrics.jsonl") for name in ("a", "b")]
    assert lines[0] == lines[1]


@pytest.mark.heavy
def test_any_method_can_draw_through_a_hook(tmp_path: Path) -> None:
    """GRPO with top-n-sigma: what is sampled and what is trained on agree; n large enough is no hook."""
    found = {}
    for name, rollout in (("group", "group"), ("wide", "top_nsigma(100)"), ("narrow", "top_nsigma(1)")):
        (tmp_path / name).mkdir()
        given = {"hyperparameters": {}, "algorithm": "grpo", "rollout": rollout}
        train(config_of(tmp_path / name, steps=2, **given))
        found[name] = lines_of(tmp_path / name / "run" / "metrics.jsonl")
        assert all(line["mismatch"] < 1e-5 for line in found[name])
    for one, other in zip(found["group"], found["wide"], strict=True):
        for name in ("loss", "entropy", "grad_norm"):
            assert one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5)
    assert found["narrow"][0]["entropy"] < found["group"][0]["entropy"] - 0.1


def checked(**settings: Any) -> None:
    check_method(TrainConfig(**{"algorithm": "nlpo", **settings}), mesh_of(""))


def test_what_a_run_cannot_do_is_refused_before_a_model_is_loaded() -> None:
    checked()
    with pytest.raises(
        InputError,
        match=r"nlpo has a rollout of its own, .*lagged_nucleus.*, but rollout is down_sampled\(2\)",
    ):
        check_method(TrainConfig(rollout="down_sampled(2)", algorithm="nlpo"), mesh_of(""))
    with pytest.raises(InputError, match="forbids tokens itself, which top_k, top_p and min_p do not support"):
        checked(top_p=0.9)
    with pytest.raises(InputError, match="all tokens of an episode through the hook of one step"):
        checked(segment_tokens=8)
    check_method(TrainConfig(algorithm="grpo", rollout="top_nsigma(1)", segment_tokens=8), mesh_of(""))
    replayed = dataclasses.replace(get("nlpo"), replay=get("arpo_replay").replay)
    with pytest.raises(InputError, match="nlpo replays completions of other steps or policies"):
        check_hook(TrainConfig(algorithm="nlpo"), replayed, rollout_of(TrainConfig(), replayed))
    assert get("nlpo").rollout is not None


def test_the_plan_refuses_a_second_policy_and_the_default_mesh_counts_it() -> None:
    algorithm = get("nlpo")
    config = TrainConfig(algorithm="nlpo", model=str(MODEL))
    with pytest.raises(InputError, match="nlpo runs a second one beside it"):
        checked_plan(config, topology_of("cpu:1"))
    model, mesh = config_of_model(config.model), abstract_mesh({"data": 1})
    found = held_bytes(state_shapes(config, model, algorithm), mesh)
    alone = held_bytes(state_shapes(config, model, dataclasses.replace(algorithm, rollout=None)), mesh)
    weights = sum(x.nbytes for x in jax.tree.leaves(load_policy(MODEL)[1]))
    assert found.reference - alone.reference == weights
