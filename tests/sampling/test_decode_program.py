"""What the compiled decoding loop is made of, by its text: nothing is done once more for every layer."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from compiling import optimised

from jaxrl_llm.models import ModelConfig, Policy, init_params
from jaxrl_llm.models.config.rope import Rope
from jaxrl_llm.sampling.decode import decode, empty_ring_cache
from jaxrl_llm.sampling.draw import DrawSettings
from jaxrl_llm.sampling.prefill import empty_prefix_cache
from jaxrl_llm.sampling.rows import no_rows
from jaxrl_llm.sampling.weights.layouts import abstract_weights


def lowered(layers: int) -> jax.stages.Lowered:
    """The loop for 4 rows in 2 groups."""
    config = ModelConfig(
        family="llama", vocab_size=64, hidden_size=16, intermediate_size=32, num_layers=layers, num_heads=4,
        num_kv_heads=2, head_dim=4, norm_epsilon=1e-5, tie_embeddings=True, ropes=(Rope(10000.0),),
        rope_of_layer=(0,) * layers, window_of_layer=(0,) * layers, query_scale=0.5, max_positions=64,
    )  # fmt: skip
    policy = Policy(config, jnp.dtype(jnp.float32))
    weights = abstract_weights(policy, jax.eval_shape(partial(init_params, config=config), jax.random.key(0)), None)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    settings = DrawSettings(
        jax.ShapeDtypeStruct((), jnp.uint32), jax.ShapeDtypeStruct((), jnp.float32), None, None,
        jax.ShapeDtypeStruct((1,), jnp.int32),
    )  # fmt: skip
    prefix_cache = jax.eval_shape(lambda: empty_prefix_cache(policy, 2, 8, jnp.float32))
    ring = jax.eval_shape(lambda: empty_ring_cache(policy, 4, 8, jnp.float32))
    rows = jax.eval_shape(lambda: no_rows(4))
    return decode.lower(policy, weights, prefix_cache, None, ring, rows, settings, number, number)


@optimised
def test_rotations_are_worked_out_once_a_step() -> None:
    # Once before the loop and once in it; XLA would fuse them into the heads of every layer.
    for layers in (2, 4):
        text = lowered(layers).compile().as_text()
        assert 1 <= text.count(" cosine(") <= 2
        assert 1 <= text.count(" sine(") <= 2


def test_layers_that_are_alike_are_traced_once() -> None:
    def products(layers: int) -> int:
        return lowered(layers).as_text().count("stablehlo.dot_general")

    assert products(4) == products(2)
