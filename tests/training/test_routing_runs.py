"""Runs of mixtures of experts that replay the routing, by the method's name and by option."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_runs as runs
from test_resume import STEPS, assert_same_run

from jaxrl_llm.algorithms import get
from jaxrl_llm.plan.full_batch import full_batch
from jaxrl_llm.plan.models import config_of
from jaxrl_llm.plan.shapes import records
from jaxrl_llm.training import loop
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.method import make_algorithm, with_routing
from jaxrl_llm.utils.errors import InputError

VECTORS = runs.MODEL.parent
SHORT: dict[str, Any] = {"steps": 2, "eval_size": 0, "top_p": 1.0}


@pytest.fixture
def mixture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "MODEL", VECTORS / "mixtral")
    monkeypatch.setattr(loop, "write_report", lambda folder: folder)


def trained(config: TrainConfig, folder: Path) -> tuple[list[dict[str, Any]], list[runs.Taken]]:
    taken: list[runs.Taken] = []
    with runs.watched(taken):
        loop.train(config)
    lines = runs.finite_lines_of(folder)
    assert len(lines) == 2
    return lines, taken


@pytest.mark.heavy
@pytest.mark.usefixtures("mixture")
def test_minirl_trains_a_mixture_by_name(tmp_path: Path) -> None:
    """Its rollouts record the experts of all tokens that the update sees; int8 weights choose some others."""
    config = runs.small_config(tmp_path, algorithm="minirl", weight_dtype="int8", **SHORT)
    _, taken = trained(config, tmp_path)
    for step in taken:
        batch = step.scored.batch
        real = np.asarray(batch.token_mask)
        seen = real & (np.cumsum(real, axis=1) < real.sum(axis=1, keepdims=True))
        assert (np.asarray(batch.experts)[seen] >= 0).all()
        assert batch.experts.shape == (*batch.tokens.shape, 2, 2)


@pytest.mark.heavy
@pytest.mark.usefixtures("mixture")
@pytest.mark.parametrize("how", ["recompute", "rollout", "none"])
def test_any_method_with_the_option(how: str, tmp_path: Path) -> None:
    name = "minirl" if how == "none" else "dr_grpo"
    lines, taken = trained(runs.small_config(tmp_path, algorithm=name, routing_replay=how, **SHORT), tmp_path)
    assert (taken[0].scored.batch.experts is not None) == (how == "rollout")
    assert lines[0]["mismatch"] < 1e-4


@pytest.mark.heavy
@pytest.mark.usefixtures("mixture")
def test_completions_in_flight_keep_their_experts(tmp_path: Path) -> None:
    """They go on over several steps, of whose weights each token has the experts; a resumed run ends the same."""
    more: Any = {"segment_tokens": 3, "oversample": 1.5, "steps": STEPS, "checkpoint_every": 1, "keep_checkpoints": 9}
    taken: list[runs.Taken] = []
    with runs.watched(taken):
        loop.train(runs.small_config(tmp_path, algorithm="minirl", **{**SHORT, **more}))
    waiting = [answer for step in taken for answer in step.waiting if answer.tokens.size]
    assert waiting
    assert all(answer.before is not None and (answer.tokens.experts >= 0).all() for answer in waiting)  # type: ignore[operator]
    copy = runs.resumed_copy(tmp_path, range(3, STEPS + 1))
    assert_same_run(copy, tmp_path / "run")


@pytest.mark.heavy
@pytest.mark.usefixtures("mixture")
def test_a_run_with_balanced_experts(tmp_path: Path) -> None:
    config = runs.small_config(tmp_path, algorithm="minirl", router_aux_coefficient=0.01, micro_batches=2, **SHORT)
    lines, _ = trained(config, tmp_path)
    for line in lines:
        assert 1.5 < line["router/aux_loss"] <= 4
        assert 0.25 <= line["router/largest_share"] <= 0.5


@pytest.mark.parametrize("name", ["router_aux_coefficient", "router_bias_speed"])
def test_a_dense_model_has_no_experts_to_balance(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"{name} is 0.1, but the model is no mixture of experts: leave it out"):
        loop.train(runs.small_config(tmp_path, **{name: 0.1}))


def test_a_dense_model_has_no_routing(tmp_path: Path) -> None:
    config = runs.small_config(tmp_path, routing_replay="rollout")
    with pytest.raises(InputError, match=r"routing_replay is rollout, but .*llama_tied is no mixture of experts"):
        loop.train(config)


def test_who_says_what_is_replayed() -> None:
    """The option overrides the method; of a dense model nothing is replayed, and a plan counts what is recorded."""
    dense, experts = (config_of(str(VECTORS / name)) for name in ("llama_tied", "qwen3_moe"))

    def routing(model: Any, **changes: Any) -> str:
        config = TrainConfig(**changes)
        return with_routing(config, make_algorithm(config), model).routing

    assert routing(experts) == routing(dense) == routing(dense, algorithm="minirl") == "none"
    assert routing(experts, algorithm="minirl") == "rollout"
    assert routing(experts, algorithm="minirl", hyperparameters={"routing": "recompute"}) == "recompute"
    assert routing(experts, algorithm="minirl", hyperparameters={"routing": "none"}) == "none"
    assert routing(experts, algorithm="minirl", routing_replay="none") == "none"
    assert routing(experts, routing_replay="recompute") == "recompute"
    assert routing(dense, algorithm="minirl", routing_replay="none") == "none"
    config = TrainConfig(max_prompt_tokens=8, max_new_tokens=8, prompts_per_step=2, group_size=2)
    assert records(get("minirl"), experts)
    batch = full_batch(config, get("minirl"), 64, experts)
    assert batch.experts is not None
    assert (batch.experts.shape, batch.experts.dtype) == ((*batch.tokens.shape, 2, 2), np.int8)
    assert full_batch(config, get("minirl"), 64, dense).experts is None
    with pytest.raises(InputError, match="unknown routing of minirl 'replay'"):
        get("minirl", routing="replay")
