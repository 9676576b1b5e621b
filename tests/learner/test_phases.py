"""Updates turn by turn: the factor of later turns by hand, and a whole batch against a loop over turns."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_steps import uneven

from jaxrl_llm import algorithms
from jaxrl_llm.core.algorithm import Algorithm, TurnPhases, turn_in_episode
from jaxrl_llm.core.trajectory import Trajectories, map_rows
from jaxrl_llm.distributed import data_mesh
from jaxrl_llm.learner.setup import start
from jaxrl_llm.learner.step import Learner, learn_batch
from jaxrl_llm.learner.turnwise_updates import after_turn, at_turn, joined, phase_count, without_factor
from jaxrl_llm.models.outputs import policy_outputs
from jaxrl_llm.utils.errors import InputError


def rows(turn: Any, **info: Any) -> Trajectories:
    """Rows of six tokens with these turns; -1 where the environment speaks."""
    turn = jnp.asarray(turn, jnp.int32)
    N, L = turn.shape
    number = jnp.arange(N) // 2
    zero = jnp.zeros((N, L))
    return Trajectories(
        jnp.ones((N, L), jnp.int32), jnp.ones((N, L), bool), turn >= 0, zero, zero.astype(jnp.int32), turn, number,
        number, jnp.zeros(N, bool), old_logp=zero, reward=jnp.zeros(N),
        info={name: jnp.asarray(x, jnp.float32) for name, x in info.items()} or None,
    )  # fmt: skip


def test_worked_example() -> None:
    """The card's: M = [1.040811, 1.2] after the last turn, [1.094174, 1.2] after the one before it."""
    batch = without_factor(rows([[0, 0, -1, 1, 1, -1], [0, -1, 1, 1, 1, -1]]))
    assert phase_count(batch) == 2
    change = np.array([[0.05, 0.05, 9, 0.10, -0.02, 9], [0.1, 9, 0.3, 0.3, 0.3, 9]])
    later = after_turn(batch.replace(old_logp=jnp.asarray(change)), jnp.zeros((2, 6)), jnp.int32(1), 0.2)
    np.testing.assert_allclose(later.need("turn_factor"), [1.040811, 1.2], atol=1e-6)
    found = after_turn(later, jnp.zeros((2, 6)), jnp.int32(0), 0.2)
    np.testing.assert_allclose(found.need("turn_factor"), [1.094174, 1.2], atol=1e-6)


def test_rows_of_one_episode_share_its_factor() -> None:
    """Rows 0 and 1 are turns 0 and 1 to 2 of episode 0, row 2 is an episode of one turn, row 3 one of two."""
    batch = rows([[0, 0], [0, 1], [0, -1], [0, 1]], episode=[0, 0, 1, 0], first_turn=[0, 1, 0, 0])
    assert turn_in_episode(batch).tolist() == [[0, 0], [1, 2], [0, -1], [0, 1]]
    assert phase_count(batch) == 3
    moved = without_factor(batch).replace(old_logp=jnp.full((4, 2), 0.1))
    found = after_turn(moved, jnp.zeros((4, 2)), jnp.int32(2), 0.2).need("turn_factor")
    np.testing.assert_allclose(found, [np.exp(0.1), np.exp(0.1), 1, 1], atol=1e-6)
    whole = at_turn(batch, jnp.int32(1)).replace(advantages=jnp.full((4, 2), 1.0))
    assert np.asarray(whole.weights).tolist() == [[0, 0], [1, 0], [0, 0], [0, 1]]
    both = joined(whole, at_turn(batch, jnp.int32(0)).replace(advantages=jnp.full((4, 2), 2.0)), jnp.int32(0))
    assert np.asarray(both.weights).tolist() == [[1, 1], [1, 0], [1, 0], [1, 1]]
    assert np.asarray(both.advantages).tolist() == [[2, 2], [1, 1], [2, 2], [2, 1]]


def test_what_does_not_fit() -> None:
    grpo = algorithms.get("grpo")
    with pytest.raises(InputError, match="phases need a ratio to the old policy"):
        Algorithm(grpo.transform, grpo.objective, phases=TurnPhases())
    with pytest.raises(InputError, match="clip"):
        TurnPhases(-0.1)


@pytest.mark.heavy
def test_a_batch_against_a_loop_over_its_turns(vectors: Any) -> None:
    """Plain gradient steps of 0.5; the later turns change the factor of the earlier ones."""
    model, mesh, rate = vectors("llama_tied"), data_mesh(), 0.5
    batch = uneven(groups=3, group_size=2, longest=9)
    reward = np.array([1.0, 0, 0, 2, 1, 1])
    turn = np.where(batch.action_mask, np.minimum(np.asarray(batch.action_index), 2), -1)
    assert turn.max() == 2
    batch = batch.replace(
        reward=jnp.asarray(reward, jnp.float32), turn=jnp.asarray(turn, jnp.int32), advantages=None, weights=None
    )
    method = algorithms.get("seeupo", kl_coefficient=0.0)
    learner = Learner(model.policy, method, optax.sgd(rate), mesh)
    params = jax.tree.map(jnp.copy, model.params)
    state, memory = start(model.policy, method, learner.optimizer, params, None, mesh)
    found = learn_batch(learner, state, memory, map_rows(np.asarray, batch))

    scored = np.asarray(batch.action_mask).any(axis=1)
    A = np.zeros(6)
    for g in range(3):
        own = [i for i in range(2 * g, 2 * g + 2) if scored[i]]
        for i in own:
            A[i] = reward[i] - np.mean(reward[own])
    A = np.where(scored, (A - A[scored].mean()) / A[scored].std(ddof=1), 0.0).clip(-3, 3)
    M, weights = np.ones(6), model.params
    logp_of = jax.jit(lambda params: policy_outputs(model.policy, params, batch).logp)
    credit = np.zeros(turn.shape)
    for t in (2, 1, 0):
        mask = jnp.asarray(turn == t)
        length, own = mask.sum(axis=1), jnp.asarray(A * M)

        def loss(params: Any, mask: Any = mask, length: Any = length, own: Any = own) -> Any:
            logp = policy_outputs(model.policy, params, batch).logp
            return -jnp.sum(own * jnp.sum(jnp.where(mask, logp, 0), axis=1) / jnp.maximum(length, 1)) / jnp.sum(
                length > 0
            )

        before, gradient = logp_of(weights), jax.jit(jax.grad(loss))(weights)
        credit = np.where(np.asarray(mask), (A * M)[:, None], credit)
        weights = jax.tree.map(lambda w, g: w - rate * g, weights, gradient)
        after = logp_of(weights)
        for i in range(6):
            if (at := turn[i] == t).any():
                q = np.exp(np.mean(np.asarray(after)[i, at] - np.asarray(before)[i, at]))
                M[i] = np.clip(M[i] * np.clip(q, 0.8, 1.2), 0.8, 1.2)
    assert len(set(M.tolist())) > 3
    np.testing.assert_allclose(found.batch.advantages, credit, atol=2e-5)
    for x, y in zip(jax.tree.leaves(found.state.params), jax.tree.leaves(weights), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)
    assert int(found.state.step) == 3
