"""Runs that think softly: ratios of 1, evaluations, unfinished completions, a resumed run, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_agent_runs import config_of as agents
from tiny_runs import MODEL, Taken, lines_of, reproducible, small_config, train, watched

from jaxrl_llm.core.soft_thinking import SoftThinking
from jaxrl_llm.distributed import data_mesh
from jaxrl_llm.distributed.chips import topology_of
from jaxrl_llm.models import load_policy
from jaxrl_llm.models.outputs import policy_outputs
from jaxrl_llm.models.parameters import combine
from jaxrl_llm.plan.full_batch import full_batch
from jaxrl_llm.plan.shapes import plan_inputs as checked_plan
from jaxrl_llm.plan.shapes import shapes_of
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.evaluation.evaluate import evaluate_policy, evaluate_run
from jaxrl_llm.training.method import check_method
from jaxrl_llm.training.setup import set_up
from jaxrl_llm.utils.errors import InputError

END = "e"
THINKING = SoftThinking(end=END)
HOW: dict[str, Any] = {
    "algorithm": "soft_grpo", "hyperparameters": {"end": END}, "top_p": 1.0, "minibatches": 1, "max_new_tokens": 8,
}  # fmt: skip


def config_of(folder: Path, **changes: Any) -> TrainConfig:
    return small_config(folder, **{**HOW, **changes})


def test_a_run_by_name_has_ratios_of_one_and_a_signal(tmp_path: Path) -> None:
    taken: list[Taken] = []
    with watched(taken):
        train(config_of(tmp_path, steps=2))
    lines = [line for line in lines_of(tmp_path / "run" / "metrics.jsonl") if "grad_norm" in line]
    assert len(lines) == 2
    assert all(line["grad_norm"] > 1e-3 and line["mismatch"] < 1e-4 for line in lines)
    policy = dataclasses.replace(load_policy(MODEL)[0], thinking=THINKING)
    for one in taken:
        batch = one.scored.batch
        assert np.asarray(batch.thoughts).shape == (16, batch.tokens.shape[1], 3, 5)
        action = np.asarray(batch.action_mask)
        assert (np.asarray(batch.thoughts)[:, :, 0, 0] >= 0)[action].mean() > 0.5
        found = policy_outputs(policy, one.params, jax.tree.map(jnp.asarray, batch))
        np.testing.assert_allclose(np.asarray(found.logp)[action], np.asarray(batch.behaviour_logp)[action], atol=5e-5)
    assert not np.array_equal(taken[0].params["embed"], taken[1].params["embed"])


def test_a_resumed_run_repeats_also_with_unfinished_completions(tmp_path: Path) -> None:
    """Completions of several steps are continued from their mixtures, which a checkpoint holds."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    given: dict[str, Any] = {"checkpoint_every": 1, "segment_tokens": 3, "oversample": 2.0, "eval_size": 0, "steps": 4}
    taken: list[Taken] = []
    with watched(taken):
        train(config_of(tmp_path / "a", **given))
    train(config_of(tmp_path / "b", **{**given, "steps": 2}))
    train(config_of(tmp_path / "b", **given), resume=True, accept_changed_inputs=True)
    sums = [lines_of(tmp_path / name / "run/checkpoints/4/meta/metadata")[0]["checksums"] for name in ("a", "b")]
    for one in sums:
        del one["meta"]  # it holds seconds
    assert sums[0] == sums[1]
    lines = [reproducible(tmp_path / name / "run" / "metrics.jsonl") for name in ("a", "b")]
    assert lines[0] == lines[1]
    steps = np.asarray(taken[-1].scored.batch.policy_step)[np.asarray(taken[-1].scored.batch.action_mask)]
    assert len({*steps.tolist()}) > 1


def test_an_evaluation_thinks_softly_without_noise(tmp_path: Path) -> None:
    config = config_of(tmp_path, eval_size=8)
    parts, state, _ = set_up(config)
    params = combine(parts.frozen, state.params)
    found = evaluate_run(config, parts, params)
    assert parts.held_out is not None
    soft = dataclasses.replace(parts.policy, thinking=THINKING)
    texts = [
        evaluate_policy(policy, params, parts.held_out, parts.rewards, max_new_tokens=8).scored.texts
        for policy in (soft, parts.policy)
    ]
    assert found.scored.texts == texts[0]
    assert texts[0] != texts[1]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"speculative_tokens": 2}, "soft_grpo thinks softly, which speculation cannot draft"),
        ({"hyperparameters": {"top_k": 0}}, "top_k"),
        ({"critic": "shared"}, "soft_grpo has no critic"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as error:
        check_method(TrainConfig(algorithm="soft_grpo", **changes), data_mesh())
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_conversations_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="goes on after observations"):
        check_method(agents(tmp_path, algorithm="soft_grpo"), data_mesh())


def test_the_plan_has_soft_tokens() -> None:
    config = TrainConfig(algorithm="soft_grpo", model=str(MODEL))
    *_, algorithm, model = checked_plan(config, topology_of("cpu:1"))
    batch = full_batch(config, algorithm, model.vocab_size)
    assert batch.thoughts is not None
    assert batch.thoughts.shape == (*batch.tokens.shape, 3, 5)
    assert shapes_of(config, topology_of("cpu:1")).policy.thinking == dataclasses.replace(SoftThinking(), end=0)
