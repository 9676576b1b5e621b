"""Layers of several kinds: the blocks in which they are scanned, and how they lie in the parameters."""

from __future__ import annotations

import dataclasses
from typing import Any

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from conftest import KINDS, quick_compiles
from heavy import few
from hypothesis import given, settings

from jaxrl_llm.models import ModelConfig, init_params
from jaxrl_llm.models.config import LayerKind
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.models.stacks import blocks, first_layers, stacked_layers, unstack


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=14))
def test_blocks_are_all_layers_in_order(kinds: list[int]) -> None:
    found = blocks(tuple(kinds))
    assert [kind for block in found for kind in block.pattern * block.repeats] == kinds
    assert [block.start for block in found] == np.cumsum([0, *(len(block.layers) for block in found)])[:-1].tolist()


@pytest.mark.parametrize(
    ("kinds", "compiled"),
    [("llla" * 8, 4), ("d" + "e" * 60, 2), ("s" * 5 + "f", 2), ("ccaccaccacacac", 6), ("a" * 28, 1)],
)
def test_few_layers_are_compiled(kinds: str, compiled: int) -> None:
    """However deep: a period, a first layer of its own, an irregular order."""
    assert sum(len(block.pattern) for block in blocks(tuple(map(ord, kinds)))) == compiled


@pytest.mark.parametrize("family", few(KINDS, ("qwen3_5", "gemma4_e2b")))
def test_layers_stacked_and_apart(family: str, vectors: Any) -> None:
    model = vectors(family)
    config, params = model.policy.config, model.params
    apart = unstack(params, config)
    jax.tree.map(np.testing.assert_array_equal, stacked_layers(apart, config), params)
    first = first_layers(params, config, 2)
    jax.tree.map(np.testing.assert_array_equal, unstack(first, config.first(2))["layers"], apart["layers"][:2])


@pytest.mark.heavy
@pytest.mark.parametrize("order", few(["abab", "abba", "babbb", "aabaabab"], ["abba", "aabaabab"]))
def test_scanned_layers_are_the_unrolled(order: str) -> None:
    """Whatever the order of two kinds with other sizes, windows and rotations."""
    kinds = (LayerKind("a"), LayerKind("b", (("head_dim", 12), ("intermediate_size", 20), ("num_kv_heads", 1))))
    config = ModelConfig(
        "llama", 17, 16, 24, len(order), 4, 2, 8, 1e-6, True, query_scale=0.3, kinds=kinds,
        kind_of_layer=tuple("ab".index(kind) for kind in order), rope_of_layer=(0,) * len(order),
        window_of_layer=tuple(3 * (kind == "b") for kind in order),
    )  # fmt: skip
    params, tokens = init_params(jax.random.key(0), config, scale=0.3), np.arange(10, dtype=np.int32)[None]
    with quick_compiles():
        scanned, unrolled = (Policy(config).logits(tree, tokens) for tree in (params, unstack(params, config)))
    np.testing.assert_allclose(scanned, unrolled, atol=1e-5)
    alone = dataclasses.replace(config, kind_of_layer=(0,) * len(order))
    assert alone.first(1).of_layer(0).head_dim == 8
    assert config.of_layer(order.index("b")).head_dim == 12
