"""Rewards of single actions divided by their standard deviation."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.advantages.returns import terminal_rewards
from jaxrl_llm.algorithms.guidance.drpo_dataset_reset import whiten_rewards
from jaxrl_llm.core.trajectory import Trajectories


def test_it_is_the_loop_and_keeps_the_mean() -> None:
    mask = np.array([[0, 1, 1], [1, 1, 0], [1, 1, 1]], bool)
    given, score = np.array([[9, 0.5, -0.2], [0.1, 0.3, 9], [1.0, 1, 1]]), np.array([1.0, -2.0, np.nan])
    zeros = jnp.zeros((3, 3))
    batch = Trajectories(
        tokens=zeros.astype(int), token_mask=jnp.asarray(mask), action_mask=jnp.asarray(mask), behaviour_logp=zeros,
        policy_step=zeros.astype(int), turn=jnp.where(mask, 0, -1), group=jnp.arange(3), prompt_id=jnp.arange(3),
        truncated=jnp.zeros(3, bool), reward=jnp.asarray(score), token_rewards=jnp.asarray(given),
    )  # fmt: skip
    whitened = whiten_rewards().apply((), batch)[1]
    values = np.array([0.5, -0.2 + 1.0, 0.1, 0.3 - 2.0])  # the third row has no score
    expected = (values - values.mean()) / values.std(ddof=1) + values.mean()
    found = np.asarray(terminal_rewards(whitened))
    np.testing.assert_allclose(found[[0, 0, 1, 1], [1, 2, 0, 1]], expected, rtol=1e-5)
    assert not found[2].any()
    np.testing.assert_array_equal(whitened.reward, batch.reward)
