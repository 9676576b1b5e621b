"""Weights of decoder layers rounded to eight bits, with a scale for each output (products: `layers.products`).

A matrix W [K, N] is stored as values of int8 or float8 (E4M3) and scales f32[1, N], W ~ values * scale, with
scale = max |W| / 127 over the inputs of an output (448 for float8), and 1 where all are zero; as in Jet-RL
(2601.14243), but by output instead of by block of 128 x 128, so that the scale is applied after the product:
x W ~ (x values) * scale. A product reads the values themselves: no wide copy of the weights is in memory. Activations
are not rounded. The sampler keeps `Quantised` weights; the update, where it shall compute the same numbers, rounds its
own at each use (`StraightThrough`), with gradients as if W had not been rounded but was that matrix.

Frozen weights, to which adapters are trained (QLoRA), may be kept as `Quantised`, or in four bits (`normal_float`), in
the update too (`FROZEN`): gradients go through the matrices that they stand for, and nothing wide is kept for the
backward pass.

A kind of BLOCKS rounds both factors of each product, in the backward pass too: see `blocks`.

Embeddings, unembedding, norms, biases, routers of experts and adapters stay as they are.
"""

from jaxrl_llm.models.quantised.layers import (
    FROZEN,
    NAMES,
    cast,
    frozen_weight,
    inputs_of,
    quantised_layer,
    quantised_specs,
    rounded_specs,
    straight_through_layer,
)
from jaxrl_llm.models.quantised.weights import (
    Quantised,
    StraightThrough,
    Weight,
    dense,
    dequantised,
    is_rounded,
    kind_of,
    quantise,
    rounded,
    straight_through,
)

__all__ = [
    "FROZEN",
    "NAMES",
    "Quantised",
    "StraightThrough",
    "Weight",
    "cast",
    "dense",
    "dequantised",
    "frozen_weight",
    "inputs_of",
    "is_rounded",
    "kind_of",
    "quantise",
    "quantised_layer",
    "quantised_specs",
    "rounded",
    "rounded_specs",
    "straight_through",
    "straight_through_layer",
]
