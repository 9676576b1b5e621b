"""Transforms and objectives cost almost nothing compared with the policy's update, by XLA's cost analysis.

A token's update of SmolLM2-135M takes at least 6 x 135M operations, and moves at least its hidden state (576 numbers)
in and out of 30 layers, forward and backward. Five per cent of that is allowed; less is used.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import optimised

from jaxrl_llm import algorithms
from jaxrl_llm.core.needs import fill_in
from jaxrl_llm.core.trajectory import PolicyOutputs, Trajectories

N, L = 512, 1024
OPERATIONS, BYTES = 0.05 * 6 * 135e6, 0.05 * 4 * 30 * 576 * 4  # a token: 4e7 and 1.4e4


def wide_batch() -> Trajectories:
    ones, row = jnp.ones((N, L), bool), jnp.arange(N, dtype=jnp.int32) // 8
    zeros, reward = jnp.zeros((N, L)), (jnp.arange(N) % 3 == 0).astype(jnp.float32)
    whole = zeros.astype(jnp.int32)
    return Trajectories(
        tokens=whole, token_mask=ones, action_mask=ones, behaviour_logp=zeros - 1, policy_step=whole, turn=whole,
        group=row, prompt_id=row, truncated=row < 0, reward=reward, rewards={"right": reward}, entropy=zeros + 1,
    )  # fmt: skip


# It reads a hundred probable tokens at each place, which are some kilobytes; its stand-ins have a few.
OF_MANY_TOKENS = {"srpo_sample_routing"}


@optimised
@pytest.mark.parametrize("name", [name for name in algorithms.names() if name not in OF_MANY_TOKENS])
def test_it_is_cheap_beside_the_update(name: str) -> None:
    algorithm = algorithms.get(name)
    batch, extras, _ = fill_in(wide_batch(), algorithm.needs)
    outputs = PolicyOutputs(batch.behaviour_logp, batch.need("entropy"), extras or None)

    def whole(memory: object, batch: Trajectories, outputs: PolicyOutputs) -> object:
        memory, ready = algorithm.transform.apply(memory, batch)
        return memory, jax.value_and_grad(lambda outputs: algorithm.objective(outputs, ready)[0])(outputs)

    cost = jax.jit(whole).lower(algorithm.transform.init(), batch, outputs).compile().cost_analysis()
    assert cost["flops"] / (N * L) < min(500, OPERATIONS)
    assert cost["bytes accessed"] / (N * L) < min(1000, BYTES)
    assert np.isfinite(cost["flops"])
