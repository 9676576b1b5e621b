"""The arithmetic of an update that computes prompts once, as XLA counts it."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.models import ModelConfig, Policy, init_params
from jaxrl_llm.models.config.rope import Rope
from jaxrl_llm.models.packed_states import packed_states
from jaxrl_llm.models.packing import Packing, shared_prompts, whole_rows
from jaxrl_llm.models.stacks import unstack

PROMPT, COMPLETION, GROUP = 512, 256, 16
# SmolLM2-135M but for its number of layers: XLA counts a loop once, so they are unrolled, and there are few.
SMOLLM2 = ModelConfig(
    family="llama", vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=1, num_heads=9,
    num_kv_heads=3, head_dim=64, norm_epsilon=1e-5, tie_embeddings=True, ropes=(Rope(100000.0),), rope_of_layer=(0,),
    window_of_layer=(0,), query_scale=0.125, max_positions=8192,
)  # fmt: skip


def flops(f: Any, *shapes: Any) -> float:
    return jax.jit(f).lower(*shapes).compile().cost_analysis()["flops"]


def of_body(layers: int, pack: Any, batch: Trajectories) -> float:
    """Operations of the layers' forward and backward pass, with recomputation."""
    config = dataclasses.replace(SMOLLM2, num_layers=layers, rope_of_layer=(0,) * layers, window_of_layer=(0,) * layers)
    policy = Policy(config)

    def loss(params: Any, batch: Trajectories) -> jax.Array:
        packing: Packing = pack(batch)
        return jnp.sum(packed_states(policy, params, batch.tokens, packing)[0] ** 2)

    params = jax.eval_shape(lambda: unstack(init_params(jax.random.key(0), config), config))
    return flops(jax.grad(loss), params, batch)


@pytest.mark.heavy
def test_prompts_once_take_less_than_half_of_the_work() -> None:
    """16 completions of 256 tokens over a prompt of 512: at most 45 % of a row for each sequence, all layers of
    SmolLM2 and the vocabulary included, which both look at for the completions' tokens only.
    """
    N, L = GROUP, PROMPT + COMPLETION
    whole, row = partial(jax.ShapeDtypeStruct, (N, L)), jax.ShapeDtypeStruct((N,), jnp.int32)
    batch = Trajectories(
        tokens=whole(jnp.int32), token_mask=whole(bool), action_mask=whole(bool), behaviour_logp=whole(jnp.float32),
        policy_step=whole(jnp.int32), turn=whole(jnp.int32), group=row, prompt_id=row,
        truncated=jax.ShapeDtypeStruct((N,), bool),
    )  # fmt: skip
    share = partial(shared_prompts, group_size=GROUP, prompt_length=PROMPT, completion_length=COMPLETION)
    totals = {}
    for name, pack in (("shared", share), ("plain", whole_rows)):
        one, two = (of_body(layers, pack, batch) for layers in (1, 2))
        totals[name] = one + 29 * (two - one)
    M, D, V = N * COMPLETION, SMOLLM2.hidden_size, SMOLLM2.vocab_size
    # The product, again in the backward pass, and two more of it (tests/kernels hold fused_logprob to that).
    of_vocabulary = 8 * M * D * V
    # Forward, again in the backward pass, and two products of it: 8 operations a weight and token, and attention.
    weights = D * (2 * 9 * 64 + 2 * 3 * 64 + 3 * SMOLLM2.intermediate_size)
    assert totals["plain"] == pytest.approx(30 * (8 * N * L * weights + 16 * N * L**2 * D), rel=0.1)
    ratio = (totals["shared"] + of_vocabulary) / (totals["plain"] + of_vocabulary)
    print(f"work of shared prompts: {ratio:.3f} of a row for each sequence")
    assert 0.375 < ratio <= 0.45
