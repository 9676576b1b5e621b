"""The pass over prompts: the attention kernel and dense masks give the same hidden states, keys and values."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import quick_compiles
from heavy import few
from jax.sharding import AbstractMesh

from jaxrl_llm.models.placement import ANYWHERE, between_layers
from jaxrl_llm.models.stacks import unstack
from jaxrl_llm.sampling.prefill import causal_pass, of_layer


@pytest.mark.parametrize("family", few(["gemma2", "qwen3_moe", "llama"], ["gemma2"]))
@pytest.mark.parametrize("stacked", few([True, False], [True]))
def test_by_the_kernel_or_by_masks(family: str, stacked: bool, vectors: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows longer than a sliding window, one of them with padding."""
    model = vectors(family)
    params = model.params if stacked else unstack(model.params, model.policy.config)
    tokens = jnp.asarray(np.random.default_rng(0).integers(1, 256, (2, 128)), jnp.int32)
    length, real = jnp.asarray([128, 50], jnp.int32), np.arange(128) < np.array([128, 50])[:, None]
    found = []
    for kernels in (False, True):
        monkeypatch.setattr("jaxrl_llm.sampling.prefill.takes_kernels", lambda mesh, kernels=kernels: kernels)
        with quick_compiles():
            found.append(jax.jit(lambda *given: causal_pass(model.policy, *given))(params, tokens, length))
    (hidden, kvs, _), (by_kernel, others, _) = found
    np.testing.assert_allclose(np.asarray(by_kernel)[real], np.asarray(hidden)[real], rtol=1e-4, atol=1e-5)
    for number in range(model.policy.config.num_layers):
        for a, b in zip(of_layer(others, number), of_layer(kvs, number), strict=True):
            np.testing.assert_allclose(np.asarray(a)[real], np.asarray(b)[real], rtol=1e-4, atol=1e-5)


def test_tokens_are_split_between_layers_and_whole_in_them() -> None:
    mesh = AbstractMesh((2, 4), ("data", "tensor"))
    for rows, over in ((4, "data"), (3, None)):
        states = between_layers(ANYWHERE, mesh, rows, 128).states
        x = jax.ShapeDtypeStruct((rows, 128, 8), jnp.bfloat16)
        for whole, tokens in ((False, "tensor"), (True, None)):
            (line,) = jax.make_jaxpr(lambda x, states=states, whole=whole: states(x, whole))(x).eqns
            assert line.params["sharding"].spec == jax.P(over, tokens)
    for other, tokens in ((mesh, 130), (AbstractMesh((8,), ("data",)), 128), (None, 128)):
        assert between_layers(ANYWHERE, other, 4, tokens) is ANYWHERE
