"""Sums over one tile of the vocabulary, over all tiles in plain JAX, and the final draw of the token.

The draw has two levels. Blocks b are BLOCK consecutive tokens, s_b = logsumexp_{v in b} z_v their total logit:

    b* = argmax_b s_b + g1_b,    token = argmax_{v in b*} z_v + g2_v    with independent Gumbel noise g1, g2.

By the Gumbel-max theorem P(b*) = exp(s_b*) / sum_b exp(s_b) and P(token | b*) = exp(z_token - s_b*), and the sum over
blocks of exp(s_b) is that over tokens of exp(z_v): so P(token) = exp(z_token) / sum_v exp(z_v) = softmax(z)_token.

As in `fused_logprob`, the largest logit m and l = sum_v exp(z_v - m) are kept separately instead of as a logsumexp,
because z - m - log l is exact for the most probable token however large the logits are. A block's exponentials are
relative to its own maximum m_b and rescaled for the row: this takes one exponential per logit, and a block's sum does
not depend on the tile.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_kernels.half_products import products
from jaxrl_kernels.logprob.tile import EXCLUDED, rescaled
from jaxrl_kernels.partition import zeros
from jaxrl_kernels.sample.noise import BLOCK, OF_BLOCKS, OF_TOKENS, bits_at, gumbel

Array = jax.Array


class Inputs(NamedTuple):
    """What tokens are drawn from: N rows, and a slice of V tokens of the vocabulary."""

    hidden: Array  # f32 or bf16 [N, D]
    unembedding: Array  # f32 or bf16 [V, D]
    keys: Array  # uint32[N, 2]
    temperature: Array  # f32[N]
    allowed: Array | None  # bool or int8 [N, V]


class DrawSums(NamedTuple):
    """Running sums of each row over the tokens processed so far. z are logits after temperature."""

    score: Array  # f32[N, 1]: max_b s_b + g1_b; in a greedy row max_b m_b
    first: Array  # int32[N, 1]: first token of the block with this score; the lowest in a tie
    logits: Array  # f32[N, BLOCK]: z of that block, EXCLUDED past the end of the vocabulary
    m: Array  # f32[N, 1]: max_v z_v
    l: Array  # f32[N, 1]: sum_v exp(z_v - m)
    acc: Array  # f32[N, 1]: sum_v exp(z_v - m) (z_v - m)


class SliceDraw(NamedTuple):
    """`DrawSums` after the token is drawn in the best block."""

    score: Array
    token: Array  # int32[N, 1]
    logit: Array  # f32[N, 1]: z at that token
    m: Array
    l: Array
    acc: Array


def adjusted(logits: Array, temperature: Array, permitted: Array | None, softcap: float) -> Array:
    """z: logits f32[N, T] capped, divided by temperature f32[N, 1] where it is not 0, EXCLUDED or above.

    permitted: bool, broadcasts against [N, T]. All may be transposed.
    """
    z = softcap * jnp.tanh(logits / softcap) if softcap else logits
    z = z / jnp.where(temperature == 0, 1.0, temperature)
    return jnp.maximum(z if permitted is None else jnp.where(permitted, z, EXCLUDED), EXCLUDED)


def block_scores(block_m: Array, block_l: Array, keys: Array, temperature: Array, first: Any) -> Array:
    """f32[N, B]: s_b + g1_b for consecutive blocks that start at token `first`, a multiple of BLOCK.

    block_m: f32[N, B], m_b; block_l: f32[N, B], sum_v exp(z_v - m_b); keys: uint32[N, 2]; temperature: f32[N, 1].
    Greedy rows get m_b: the most probable token is in the block with the largest maximum, not the largest sum.
    """
    block = jax.lax.div(jnp.int32(first), jnp.int32(BLOCK))
    number = block + jax.lax.broadcasted_iota(jnp.int32, (1, block_m.shape[1]), 1)
    # Noise cannot select an excluded block: EXCLUDED + log(BLOCK) + noise is EXCLUDED in float32.
    noisy = block_m + jnp.log(block_l) + gumbel(bits_at(keys, OF_BLOCKS, number))
    return jnp.where(temperature == 0, block_m, noisy)


def of_blocks(block_m: Array, block_l: Array, acc: Array) -> tuple[Array, Array, Array]:
    """`m`, `l` and `acc` of rows, f32[N, 1], from those of their blocks, f32[N, B]."""
    m = jnp.max(block_m, axis=1, keepdims=True)
    shift = block_m - m
    scale = jnp.exp(shift)
    l = jnp.sum(scale * block_l, axis=1, keepdims=True)
    return m, l, jnp.sum(scale * (acc + shift * block_l), axis=1, keepdims=True)


def of_tile(z: Array, keys: Array, temperature: Array, first: Any, axis: int = 1) -> DrawSums:
    """Sums of one tile of T tokens, first, first + 1, ...; in plain JAX.

    z: f32[N, T], or f32[T, N] with axis 0 (static); the rest as of `block_scores`.
    """
    if missing := -z.shape[axis] % BLOCK:
        padding = [(0, 0), (0, 0)]
        padding[axis] = (0, missing)
        z = jnp.pad(z, padding, constant_values=EXCLUDED)
    blocks = z.reshape(*z.shape[:axis], z.shape[axis] // BLOCK, BLOCK, *z.shape[axis + 1 :])
    block_m = jnp.max(blocks, axis=axis + 1, keepdims=True)
    shifted = blocks - block_m
    exponential = jnp.exp(shifted)
    block_l, acc = jnp.sum(exponential, axis=axis + 1), jnp.sum(exponential * shifted, axis=axis + 1)
    block_m = jnp.squeeze(block_m, axis + 1)
    if axis == 0:
        block_m, block_l, acc = block_m.T, block_l.T, acc.T
    # The barrier prevents recomputation, with which the maximum and its index could be rounded differently.
    score = jax.lax.optimization_barrier(block_scores(block_m, block_l, keys, temperature, first))
    best = jnp.argmax(score, axis=1).astype(jnp.int32)
    index = best[:, None, None] if axis == 1 else best[None, None, :]
    logits = jnp.squeeze(jnp.take_along_axis(blocks, index, axis=axis), axis)
    highest = jnp.take_along_axis(score, best[:, None], axis=1)
    first_of_best = first + best[:, None] * BLOCK
    return DrawSums(highest, first_of_best, logits if axis == 1 else logits.T, *of_blocks(block_m, block_l, acc))


def nothing(like: Array) -> DrawSums:
    """The sums of no token, for as many rows as `like` has; merged with others, they leave these as they are."""
    one = zeros((like.shape[0], 1), jnp.float32, like)
    logits = zeros((like.shape[0], BLOCK), jnp.float32, like) + EXCLUDED
    return DrawSums(one - jnp.inf, one.astype(jnp.int32), logits, one + EXCLUDED, one, one)


def merge(a: DrawSums, b: DrawSums) -> DrawSums:
    """Sums over the tokens of both, in any order."""
    take_b = (b.score > a.score) | ((b.score == a.score) & (b.first < a.first))
    score, first, logits = (jnp.where(take_b, new, old) for new, old in zip(b[:3], a[:3], strict=True))
    m = jnp.maximum(a.m, b.m)
    (l_a, acc_a), (l_b, acc_b) = rescaled(a, m), rescaled(b, m)
    return DrawSums(score, first, logits, m, l_a + l_b, acc_a + acc_b)


def draw(sums: DrawSums, keys: Array, temperature: Array) -> SliceDraw:
    """The token of each row's best block, the lowest in a tie; keys: uint32[N, 2]; temperature: f32[N]."""
    temperature = temperature[:, None]
    tokens = sums.first + jax.lax.broadcasted_iota(jnp.int32, (1, BLOCK), 1)
    # Relative to the block's maximum, so that the noise is not lost to rounding with large logits.
    shifted = sums.logits - jnp.max(sums.logits, axis=1, keepdims=True)
    noise = gumbel(bits_at(keys, OF_TOKENS, tokens))
    best = jnp.argmax(jnp.where(temperature == 0, shifted, shifted + noise), axis=1, keepdims=True)
    token, logit = sums.first + best.astype(jnp.int32), jnp.take_along_axis(sums.logits, best, axis=1)
    return SliceDraw(sums.score, token, logit, sums.m, sums.l, sums.acc)


def finish(drawn: SliceDraw) -> tuple[Array, Array, Array]:
    """(token int32[N], logp f32[N], entropy f32[N]) from the draw over the whole vocabulary."""
    _, token, logit, m, l, acc = (x[:, 0] for x in drawn)
    log_l = jnp.log(l)
    nothing = m <= EXCLUDED
    logp = jnp.where(nothing, -jnp.inf, logit - m - log_l)
    entropy = jnp.where(nothing, 0.0, log_l - acc / l)
    return jnp.where(nothing | jnp.isnan(logp), -1, token), logp, entropy


def blocked_sums(
    inputs: Inputs, softcap: float, block_size: int, at_once: bool = False, offset: Any = 0, limit: Any = None
) -> DrawSums:
    """Sums over the first `limit` rows of `unembedding` [V, D], which are the tokens offset, offset + 1, ...

    block_size: tokens per tile, a multiple of BLOCK; offset: int32[], a multiple of BLOCK; limit: int32[], or None for
    all. at_once (static): compute all logits f32[V, N] in one product and slice tiles from them, instead of one product
    per tile.
    """
    hidden, unembedding, keys, temperature, allowed = inputs
    vocabulary = unembedding.shape[0]
    block_size = min(block_size, vocabulary)
    full, short = divmod(vocabulary, block_size)
    # Tokens first: on CPU this makes the product 25 % faster, and sums over a block's tokens are vectorised. A single
    # product saves the copy of each tile of the unembedding that XLA makes for the product of a slice.
    logits = products(unembedding, hidden) if at_once else None

    def sums(start: Any, width: int) -> DrawSums:
        if logits is not None:
            tile = jax.lax.dynamic_slice_in_dim(logits, start, width)
        else:
            tile = products(jax.lax.dynamic_slice_in_dim(unembedding, start, width), hidden)
        permitted = None if limit is None else (start + jnp.arange(width, dtype=jnp.int32) < limit)[:, None]
        if allowed is not None:
            of_mask = jax.lax.dynamic_slice_in_dim(allowed, start, width, axis=1).T != 0
            permitted = of_mask if permitted is None else of_mask & permitted
        z = adjusted(tile, temperature[None], permitted, softcap)
        return of_tile(z, keys, temperature[:, None], offset + start, axis=0)

    # A partial tile goes first. Without one the scan begins with nothing, so that a tile is compiled once.
    if full == 1 and not short:
        return sums(0, block_size)
    carry = sums(full * block_size, short) if short else nothing(hidden)
    starts = jnp.arange(full, dtype=jnp.int32) * block_size
    return jax.lax.scan(lambda before, start: (merge(before, sums(start, block_size)), None), carry, starts)[0]


def reference_sample(inputs: Inputs, softcap: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The formula of `fused_sample`, with all [N, V] logits and noise: token int32[N], logp f32[N], entropy f32[N]."""
    hidden, unembedding, keys, temperature, allowed = inputs
    vocabulary = unembedding.shape[0]
    z = jnp.einsum("nd,vd->nv", hidden, unembedding, preferred_element_type=jnp.float32)
    z = softcap * jnp.tanh(z / softcap) if softcap else z
    greedy = (temperature == 0)[:, None]
    z = z / jnp.where(greedy, 1.0, temperature[:, None])
    z = jnp.maximum(z if allowed is None else jnp.where(allowed, z, EXCLUDED), EXCLUDED)

    number = -(-vocabulary // BLOCK)
    padding = ((0, 0), (0, number * BLOCK - vocabulary))
    blocks = jnp.pad(z, padding, constant_values=EXCLUDED).reshape(len(z), number, BLOCK)
    sums = jax.nn.logsumexp(blocks, axis=2) + gumbel(bits_at(keys, OF_BLOCKS, jnp.arange(number)[None]))
    block = jnp.argmax(jnp.where(greedy, jnp.max(blocks, axis=2), sums), axis=1)
    in_block = jnp.arange(vocabulary) // BLOCK == block[:, None]
    within = z - jnp.max(z, axis=1, where=in_block, initial=EXCLUDED, keepdims=True)
    noisy = within + gumbel(bits_at(keys, OF_TOKENS, jnp.arange(vocabulary)[None]))
    token = jnp.argmax(jnp.where(in_block, jnp.where(greedy, within, noisy), -jnp.inf), axis=1).astype(jnp.int32)

    logp = jax.nn.log_softmax(z)
    entropy = -jnp.sum(jnp.exp(logp) * logp, axis=1)
    chosen = jnp.take_along_axis(logp, token[:, None], axis=1)[:, 0]
    nothing = jnp.max(z, axis=1) <= EXCLUDED
    token = jnp.where(nothing | jnp.isnan(chosen), -1, token)
    return token, jnp.where(nothing, -jnp.inf, chosen), jnp.where(nothing, 0.0, entropy)
