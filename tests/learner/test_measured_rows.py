"""Rows that are only measured: the learner's forward pass reads them, and no gradient step does."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_steps import uneven

from jaxrl_llm import algorithms
from jaxrl_llm.core.trajectory import Trajectories, map_rows
from jaxrl_llm.distributed import data_mesh
from jaxrl_llm.learner.microbatches import plan_steps
from jaxrl_llm.learner.outputs import outputs_of
from jaxrl_llm.learner.setup import compile_learning, start
from jaxrl_llm.learner.step import Learner, learn_batch
from jaxrl_llm.plan.full_batch import full_batch
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.full_size import at_full_size, fill_up
from jaxrl_llm.training.metrics import signal


def test_steps_over_some_rows_take_each_of_them_once() -> None:
    batch, rows = uneven(groups=6, group_size=2), np.array([1, 2, 3, 5, 8, 9, 10, 11])
    steps = plan_steps(batch, epochs=2, minibatches=2, micro_batches=2, rows=rows)
    assert steps.rows.shape == (2, 2, 2, 2)
    for epoch in np.asarray(steps.rows):
        assert sorted(epoch.reshape(-1).tolist()) == rows.tolist()
    whole = plan_steps(batch, minibatches=2)
    assert np.array_equal(plan_steps(batch, minibatches=2, rows=np.arange(12)).rows, whole.rows)


def scored(rows: int) -> Trajectories:
    batch = uneven(groups=rows, group_size=1, longest=8)
    reward = jnp.asarray(np.arange(rows) % 2, jnp.float32)
    return batch.replace(reward=reward, rewards={"a": reward}, advantages=None, weights=None)


def with_marks(batch: Trajectories, trained: int) -> Trajectories:
    """The rows after the first ones are earlier responses to the first prompts."""
    marks = (np.arange(batch.tokens.shape[0]) >= trained).astype(np.float32)
    prompt = np.concatenate([np.arange(trained), np.arange(len(marks) - trained)]).astype(np.int32)
    return batch.replace(prompt_id=jnp.asarray(prompt)).with_info(measured=jnp.asarray(marks))


@pytest.mark.heavy
def test_the_update_is_that_of_the_other_rows_and_the_drift_is_the_loop(vectors: Any) -> None:
    model, mesh = vectors("llama_tied"), data_mesh()
    method, optimizer = algorithms.get("spo_single_stream", prompts=8), optax.sgd(0.1)
    learner = Learner(model.policy, method, optimizer, mesh, minibatches=2)
    with_others = with_marks(scored(6), 4)
    alone = map_rows(lambda x: x[:4], with_others)
    found = []
    for batch in (alone, with_others):
        params = jax.tree.map(jnp.copy, model.params)
        state, memory = start(model.policy, method, optimizer, params, None, mesh)
        found.append(learn_batch(learner, state, memory, map_rows(np.asarray, batch), 3))
    one, other = found
    for x, y in zip(jax.tree.leaves(one.state.params), jax.tree.leaves(other.state.params), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)
    assert float(one.metrics["grad_norm"]) > 1e-4
    assert np.isnan(one.batch.info["drift"]).all()
    logp = np.asarray(outputs_of(model.policy, model.params, with_others).logp)
    mask, then = np.asarray(with_others.action_mask), np.asarray(with_others.behaviour_logp)
    expected = [np.mean([abs(logp[i, t] - then[i, t]) for t in range(mask.shape[1]) if mask[i, t]]) for i in (4, 5)]
    np.testing.assert_allclose(other.batch.info["drift"], [*expected, np.nan, np.nan, *expected], rtol=1e-4)
    assert not np.asarray(other.batch.weights)[4:].any()
    assert signal(one.batch) == signal(other.batch) == 1
    assert np.asarray(other.memory.seen).tolist() == [True] * 4 + [False] * 4


@pytest.mark.heavy
def test_a_plan_has_the_programs_of_a_run(vectors: Any) -> None:
    """Ahead of time, on shapes: the forward pass has all rows, the update only those that it trains on."""
    model, method = vectors("llama_tied"), algorithms.get("spo_single_stream", prompts=8)
    config = TrainConfig(prompts_per_step=4, group_size=1, max_prompt_tokens=8, max_new_tokens=8)
    batch = full_batch(config, method, model.policy.config.vocab_size)
    assert np.asarray(batch.need("measured")).tolist() == [0.0] * 4 + [1.0] * 4
    learner = Learner(model.policy, method, optax.sgd(0.1), data_mesh(), minibatches=2)
    programs = compile_learning(learner, model.params, batch)
    assert [one.name for one in programs] == ["outputs_of", "_computed", "prepare", "update"]


def test_both_kinds_of_rows_are_filled_up() -> None:
    """To a multiple of the usual number each: 3 + 2 rows to 4 + 4, and 4 without others to 4 + 4 as well."""
    filled = at_full_size(with_marks(scored(5), 3), 4, 1)
    marks = np.asarray(filled.info["measured"])  # type: ignore[index]
    assert marks.tolist() == [0, 0, 0, 1, 1, 0, 1, 1]
    assert not np.asarray(filled.action_mask)[5:].any()
    assert at_full_size(with_marks(scored(4), 4), 4, 1).info["measured"].tolist() == [0] * 4 + [1] * 4  # type: ignore[index]
    plain = dataclasses.replace(scored(3), info=None)
    assert at_full_size(plain, 4, 1).tokens.shape[0] == 4
    assert np.array_equal(at_full_size(plain, 4, 1).tokens, fill_up(plain, 4, 1).tokens)
