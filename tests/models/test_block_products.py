"""Products whose factors are rounded in blocks: by loops over blocks, gradients by their definition, and refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_quantised import nearest

from jaxrl_llm.models.layers.products import matrix_product
from jaxrl_llm.models.quantised import KINDS, BlockRounding, StraightThroughBlocks, dense, in_blocks, quantise_blocks
from jaxrl_llm.models.quantised.layers import quantised_layer, straight_through_layer
from jaxrl_llm.utils.errors import InputError

ROUND: dict[str, Callable[[float], float]] = {"int8": lambda x: float(np.round(x)), "float8": nearest}


def of_block(block: np.ndarray, kind: str) -> np.ndarray:
    """The numbers that a block stands for once it is rounded, each by itself."""
    largest = float(np.abs(block).max(initial=0.0))
    scale = np.float32(largest) / np.float32(KINDS[kind][1]) if largest else np.float32(1)
    found = [ROUND[kind](float(np.float32(x) / scale)) * float(scale) for x in block.ravel()]
    return np.asarray(found).reshape(block.shape)


def by_blocks(a: np.ndarray, rows: int, columns: int, kind: str) -> np.ndarray:
    out = np.zeros(a.shape)
    for i in range(0, a.shape[0], rows):
        for j in range(0, a.shape[1], columns):
            out[i : i + rows, j : j + columns] = of_block(a[i : i + rows, j : j + columns], kind)
    return out


def test_worked_example_of_jet_rl() -> None:
    """3.5 / 448 = 0.0078125, and 1.28 is 1.25 in E4M3; a block of zeros has the scale 1."""
    values, scale = in_blocks(jnp.asarray([[0.5, -2.0, 3.5, 0.01], [0.0] * 4]), (1, 4), "float8")
    np.testing.assert_array_equal(scale, [[0.0078125], [1.0]])
    np.testing.assert_array_equal(values.astype(jnp.float32), [[64, -256, 448, 1.25], [0] * 4])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("M, K, outputs", [(5, 10, (2, 3)), (9, 4, (8,)), (1, 3, (2,))])
def test_the_three_products_by_loops(kind: str, M: int, K: int, outputs: tuple[int, ...]) -> None:
    """Sizes that blocks of 4 divide, exceed and do not divide; the weight's outputs have one or two axes."""
    random, N = np.random.default_rng(M), math.prod(outputs)
    x, w, dy = (
        (random.normal(size=shape) * np.exp(random.normal(size=shape[1]))).astype(np.float32)
        for shape in ((M, K), (K, N), (M, N))
    )
    how, shaped = BlockRounding(kind, 4), jnp.asarray(w).reshape(K, *outputs)
    y, back = jax.vjp(lambda x, w: matrix_product(x, StraightThroughBlocks(w, how)), jnp.asarray(x), shaped)
    dx, dw = back(jnp.asarray(dy))
    rounded = by_blocks(w, 4, 4, kind)
    expected = {
        "y": (y, by_blocks(x, 1, 4, kind) @ rounded),
        "dx": (dx, by_blocks(dy, 1, 4, kind) @ rounded.T),
        "dw": (dw.reshape(K, N), by_blocks(x, 4, 1, kind).T @ by_blocks(dy, 4, 1, kind)),
    }
    exact = {"y": x @ w, "dx": dy @ w.T, "dw": x.T @ dy}
    for name, (found, loop) in expected.items():
        size = np.abs(loop).max()
        np.testing.assert_allclose(found, loop, rtol=0, atol=2e-6 * size, err_msg=name)
        if M > 1:  # else what is rounded is the largest of its group, and exact
            assert np.abs(found - exact[name]).max() > 1e-4 * size, name
    np.testing.assert_array_equal(y, matrix_product(jnp.asarray(x), quantise_blocks(shaped, how, (-1 - len(outputs),))))


def test_sums_of_int8_are_those_of_whole_numbers() -> None:
    """A group of 128 sums below 2^24: in any order of the inputs inside of groups the product is the same bits."""
    keys = jax.random.split(jax.random.key(0))
    x, w = jax.random.normal(keys[0], (3, 256)), jax.random.normal(keys[1], (256, 5))
    order = np.concatenate([np.random.default_rng(0).permutation(128) + first for first in (0, 128)])
    how = BlockRounding("int8")
    one, other = (matrix_product(a, quantise_blocks(b, how)) for a, b in ((x, w), (x[:, order], w[order])))
    np.testing.assert_array_equal(one, other)


def test_layers_stacked_or_not_and_several_inputs() -> None:
    w = jax.random.normal(jax.random.key(0), (6, 30, 7))
    layer = {"query": w, "out": w, "attention_norm": w[0, 0]}
    found = quantised_layer(layer, "float8_blocks")
    assert found["attention_norm"] is layer["attention_norm"]
    assert [found[name].scale.shape for name in ("query", "out")] == [(1, 2), (2, 1)]  # of [6, 210] and [180, 7]
    stacked = quantised_layer(jax.tree.map(lambda x: jnp.stack([x, 2 * x]), layer), "float8_blocks")
    for name in ("query", "out"):
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[0], b), stacked[name], found[name])


@pytest.mark.parametrize("made", [quantised_layer, straight_through_layer])
@pytest.mark.parametrize("name, what", [("router", "experts"), ("key_out", "latent attention")])
def test_layers_with_other_products_are_refused(made: Any, name: str, what: str) -> None:
    layer = {"query": jnp.ones((4, 2, 2)), name: jnp.ones((4, 2, 2))}
    with pytest.raises(InputError, match=rf"float8_blocks rounds .* has {what}: give weight_dtype float8, or another"):
        made(layer, "float8_blocks")


@pytest.mark.parametrize("made", [quantised_layer, straight_through_layer])
def test_there_is_no_matrix_of_rounded_products(made: Any) -> None:
    weight = made({"query": jnp.ones((4, 2, 2))}, "int8_blocks")["query"]
    with pytest.raises(InputError, match="int8_blocks rounds both factors of products: take weight_dtype int8 here"):
        dense(weight)
