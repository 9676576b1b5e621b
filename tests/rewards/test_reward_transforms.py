"""Rewards rewritten: graded, ranked, stretched, held to a budget, taken out."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.rewards.dgrpo_vital import useful_range
from jaxrl_llm.algorithms.rewards.fapo import flawed_rows, graded
from jaxrl_llm.algorithms.rewards.hbpo import budget_reward
from jaxrl_llm.algorithms.rewards.unlikeliness_reward import likelihood_rank, rank_penalty
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.rewards.transforms import leave_out, rescore


def batch_of(reward: list[float]) -> Trajectories:
    N, L = len(reward), 2
    mask, zeros = jnp.ones((N, L), bool), jnp.zeros((N, L), jnp.int32)
    group = jnp.zeros(N, jnp.int32)
    return Trajectories(
        tokens=zeros,
        token_mask=mask,
        action_mask=mask,
        behaviour_logp=-1.0 * mask,
        policy_step=zeros,
        turn=zeros,
        group=group,
        prompt_id=group,
        truncated=jnp.zeros(N, bool),
        reward=jnp.asarray(reward),
    )


def test_rescoring_leaves_what_is_not_scored() -> None:
    _, found = rescore(lambda b: jnp.zeros(3)).apply((), batch_of([1.0, float("nan"), 2.0]))
    np.testing.assert_array_equal(found.reward, [0, np.nan, 0])


def test_what_is_left_out_has_neither_score_nor_weight() -> None:
    batch = batch_of([1.0, 0.0, 2.0]).replace(weights=jnp.full((3, 2), 0.5))
    _, found = leave_out(lambda b: b.reward > 1).apply((), batch)
    np.testing.assert_array_equal(found.reward, [1, 0, np.nan])
    np.testing.assert_array_equal(found.weights, [[0.5, 0.5], [0.5, 0.5], [0, 0]])


def test_grades() -> None:
    assert graded(jnp.array([True, True, False]), jnp.array([False, True, True]), 0.75).tolist() == [1, 0.25, -1]
    assert useful_range(jnp.array([0.2, 0.45, 0.7]), 0.1, 0.6).round(4).tolist() == pytest.approx([0.2, 0.7, 1.0])
    batch = batch_of([1.0, 0.0, 1.0])
    assert flawed_rows(batch).tolist() == [False] * 3
    judged = batch.replace(rewards={"sound": jnp.array([1.0, 0.0, jnp.nan])})
    assert flawed_rows(judged).tolist() == [False, True, False]
    assert flawed_rows(judged.with_info(flawed=jnp.array([1, 0, 0]))).tolist() == [True, False, False]


def test_ranks_are_within_the_group_and_shared_by_equals() -> None:
    likelihood = jnp.array([-1.0, -2.0, -2.0, -0.5, jnp.nan, -3.0])
    rank, size = likelihood_rank(likelihood, jnp.array([0, 0, 0, 0, 0, 7]))
    assert rank[jnp.array([0, 1, 2, 3, 5])].tolist() == [1, 2.5, 2.5, 0, 0]
    assert size.tolist() == [4, 4, 4, 4, 4, 1]
    assert jnp.isnan(rank_penalty(jnp.array([jnp.nan, 1.0]), jnp.zeros(2), jnp.zeros(2, jnp.int32)))[0]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (300, [3.923141, 3.695518, 2.828427, 2.222281]),
        (800, [3.742912, 3.695518, 2.828427, 2.222281]),
        (3000, [1.024755, 1.149755, 1.399755, 1.524755]),
        (4097, [0, 0, 0, 0]),
    ],
)
def test_budget_reward(tokens: float, expected: list[float]) -> None:
    budgets = jnp.array([512.0, 1024, 2048, 2560])
    lengths = jnp.full(4, float(tokens))
    found = budget_reward(lengths, budgets, 4096, slope=1 / 4096)
    np.testing.assert_allclose(found, expected, atol=1.5e-6)
    bent = budget_reward(lengths, budgets, 4096, slope=1 / 4096, flat=False)
    assert (bent <= found + 1e-6).all()
