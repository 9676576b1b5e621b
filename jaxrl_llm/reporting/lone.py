"""Whether a method compares the samples of a prompt, found by trying it."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.reporting.credit import compare


def compares_samples(algorithm: Algorithm) -> bool:
    """Whether a method learns nothing from one sample of a prompt: on four groups of one sample with different rewards,
    such a method has zero gradients. A critic with a target says of a single sample too which actions are good."""
    if algorithm.target is not None:
        return False
    action, rows = jnp.ones((4, 3), bool), jnp.arange(4, dtype=jnp.int32)
    logp, zeros = -0.1 * (1 + jnp.arange(12.0).reshape(4, 3)), jnp.zeros((4, 3), jnp.int32)
    reward = jnp.asarray([0.0, 1.0, 0.5, 1.0])
    lone = Trajectories(
        tokens=zeros, token_mask=action, action_mask=action, behaviour_logp=logp, policy_step=zeros, turn=zeros,
        group=rows, prompt_id=rows, truncated=rows < 0, rewards={"probe": reward}, reward=reward,
        info={"greedy_reward": jnp.full(4, 0.25), "demonstrated": jnp.ones(4)},
    )  # fmt: skip
    return not np.any(compare(algorithm, lone).gradients["algorithm 1"])
