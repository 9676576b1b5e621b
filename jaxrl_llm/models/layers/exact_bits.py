"""Attention on CPUs with sums in a fixed order, so that a token's state has the same bits in any layout of a batch.

Packing, padding and sharing prompts put other tokens, which are masked, beside a token's own. In exact arithmetic they
change nothing; in float32 they do where XLA's CPU compiler picks the order of a sum by its length. What is rounded
differently in one layer grows in those after it, to 1e-5 of SmolLM2's gradients. Here the order depends on the token's
own terms alone, for heads of a multiple of 64 numbers.

It was measured with JAX 0.10.2 on x86-64 processors with AVX-512, Intel's and AMD's, whose vectors hold 16 float32
numbers. On others the results are as accurate, but bits may differ between layouts; tests of bits are skipped there. On
GPUs and TPUs `layers` does not call these functions.
"""

from collections.abc import Callable

import jax.numpy as jnp

from jaxrl_llm.core.trajectory import Array

VECTOR = 16  # float32 numbers in a vector of 512 bits


def exact_scores(products: Callable[[Array, Array], Array], q: Array, k: Array) -> Array:
    """`products` of queries [..., Q, h] with keys [..., S, h], [..., Q, S]; a score does not depend on how many keys.

    XLA picks the order of a score's h terms by how often 2 divides the number of vectors that the keys fill: keys are
    padded to an odd number of vectors.
    """
    S = k.shape[-2]
    padding = (VECTOR - S) % (2 * VECTOR)
    return products(q, jnp.pad(k, [(0, 0)] * (k.ndim - 2) + [(0, padding), (0, 0)]))[..., :S]


def sum_in_order(x: Array) -> Array:
    """The sum of [..., S] over the last axis, [..., 1], unchanged by zeros between the terms.

    It is a product with 64 columns of ones, whose terms XLA adds one after another (up to some 400 of them). A plain
    sum adds the terms of several places at once, so that it matters where they stand.
    """
    return (x @ jnp.ones((x.shape[-1], 64), x.dtype))[..., :1]
