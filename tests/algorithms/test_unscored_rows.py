"""Rows that nothing scored weigh nothing and change no other row, whatever the method."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import LOGP, MASK, OLD, REWARD, batch_of, loss_of
from every_method import every_method
from experience import Case, L, N, Steps, case, steps_of

from jaxrl_llm import algorithms
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.trajectory import WITHOUT_SCORE, Trajectories, counted_rows, map_rows

ADDED = np.array([0, 4, N - 1])  # copies of rows of two known groups, and of one for a group of its own


def two_batches(algorithm: Algorithm) -> list[Case]:
    return [case(seed, algorithm, weights=np.ones((N, L))) for seed in (11, 12)]


def with_unscored(one: Case) -> Case:
    """Three more rows, whose reward and components are NaN; one is a group of its own."""
    index = np.concatenate([np.arange(N), ADDED])
    new = np.arange(len(index)) >= N
    batch, outputs = (map_rows(lambda x: x[index], one.batch), jax.tree.map(lambda x: x[index], one.outputs))
    rewards = {name: jnp.where(new, jnp.nan, value) for name, value in (batch.rewards or {}).items()}
    info = {name: jnp.where(new, 0.0, value) if name in WITHOUT_SCORE else value for name, value in batch.info.items()}
    batch = batch.replace(
        info=info,
        reward=jnp.where(new, jnp.nan, batch.reward),
        rewards=rewards,
        group=jnp.where(np.arange(len(index)) == N + 2, 99, batch.group).astype(jnp.int32),
    )
    return Case(batch, outputs)


def learned(algorithm: Algorithm, cases: list[Case]) -> tuple[Trajectories, Any]:
    """The last prepared batch and gradient; after each batch the method's memory goes on."""
    steps, memory, feedback = Steps(*map(jax.jit, steps_of(algorithm))), algorithm.transform.init(), None
    for batch, outputs in cases:
        memory, ready = steps.prepare(memory, batch.replace(feedback=feedback))
        _, gradient = steps.gradient(outputs, ready)
    return ready, gradient


@every_method
def test_unscored_rows_change_no_other(name: str) -> None:
    algorithm = algorithms.get(name)
    cases = two_batches(algorithm)
    ready, gradient = learned(algorithm, cases)
    more, changed = learned(algorithm, [with_unscored(one) for one in cases])
    if ready.advantages is not None:
        np.testing.assert_allclose(more.advantages[:N], ready.advantages, rtol=1e-6, atol=1e-6)
    for one, two in zip(jax.tree.leaves(gradient), jax.tree.leaves(changed), strict=True):
        size = float(jnp.linalg.norm(one))
        np.testing.assert_allclose(two[:N], one, rtol=0, atol=1e-6 * max(size, 1e-3))
        assert not np.any(two[N:]), "an unscored row has a gradient"


def test_an_unscored_sample_is_in_no_divisor() -> None:
    """The loss of three scored samples, of which a fourth is a copy without a score."""
    three = batch_of(MASK[:3], REWARD[:3], OLD[:3], reference_logp=OLD[:3])
    four = batch_of(MASK[[0, 1, 2, 0]], [*REWARD[:3], np.nan], OLD[[0, 1, 2, 0]], reference_logp=OLD[[0, 1, 2, 0]])
    for average in ("token", "sequence", "sum", "prompt"):
        method = algorithms.get("grpo", average=average)
        assert loss_of(method, four, LOGP[[0, 1, 2, 0]]) == pytest.approx(loss_of(method, three, LOGP[:3]), rel=1e-6)


def test_rows_that_need_no_score_count() -> None:
    """Texts of the data set to a method that imitates them, and completions that go on in the next step."""
    batch = batch_of(reward=[1.0, np.nan, np.nan, 0.0], info={"demonstrated": np.array([0.0, 1, 0, 0])})
    assert counted_rows(batch).tolist() == [True, False, False, True]
    assert counted_rows(batch, ["demonstrated"]).tolist() == [True, True, False, True]
    assert counted_rows(batch.with_info(unfinished=np.array([0, 0, 1, 0]))).tolist() == [True, False, True, True]
    assert counted_rows(batch.replace(reward=None)).all()
