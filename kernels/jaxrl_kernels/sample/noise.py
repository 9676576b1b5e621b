"""Gumbel noise for one of N rows as a pure function of (seed, prompt id, sample number, position) and an index.

A draw has two levels, blocks of BLOCK consecutive tokens and the tokens of one block, each with its own noise. The bits
come from Threefry-2x32 with 20 rounds, which uses additions, exclusive ors and rotations of 32-bit words and so gives
the same bits on every platform, in any order and for any tiling. Source: Salmon, Moraes, Dror and Shaw, "Parallel
random numbers: as easy as 1, 2, 3", SC 2011, section 4.2 and table 2 (rotations); the parity constant is that of
Threefish (Skein 1.3).
"""

import jax
import jax.numpy as jnp

Array = jax.Array

PARITY = 0x1BD11BDA
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
BLOCK = 128  # tokens; part of the definition of the noise, not a setting
OF_BLOCKS, OF_TOKENS = 0, 1  # the first word of the counter; the second is the index of the block or of the token


def threefry2x32(key: tuple[Array, Array], counter: tuple[Array, Array]) -> tuple[Array, Array]:
    """Two random words from a key of two words and a counter of two, uint32 arrays that broadcast together."""
    keys = (key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(PARITY))
    a, b = counter[0] + keys[0], counter[1] + keys[1]
    for group in range(5):
        for rotation in ROTATIONS[group % 2]:
            a = a + b
            b = ((b << jnp.uint32(rotation)) | (b >> jnp.uint32(32 - rotation))) ^ a
        a = a + keys[(group + 1) % 3]
        b = b + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return a, b


def row_keys(counters: Array) -> Array:
    """uint32[N, 2]: a key for each row from its (seed, prompt id, sample number, position), uint32[N, 4]."""
    seed, prompt, sample, position = (counters[:, i] for i in range(4))
    return jnp.stack(threefry2x32((seed, prompt), (sample, position)), axis=1)


def bits_at(keys: Array, level: int, index: Array) -> Array:
    """uint32[N, T]: the random word of each row (keys uint32[N, 2]) and index (int32, [N, T] or [1, T]).

    level: OF_BLOCKS or OF_TOKENS.
    """
    index = index.astype(jnp.uint32)
    return threefry2x32((keys[:, :1], keys[:, 1:]), (jnp.full_like(index, level), index))[0]


def gumbel(bits: Array) -> Array:
    """f32 standard Gumbel noise from uint32 words, one each; always finite.

    -log(-log1p(-w)) with w = (k + 1/2) / 2^31 in (0, 1) from the upper 31 bits k, rounded to float32 and clipped below
    1. Large noise, which decides the draw, comes from small w, where float32 is most precise: the spacing of w is 2^-31
    there. (With u = 1 - w near 1 instead, the spacing would be 2^-24, and draws of a large flat vocabulary would tie.)
    The noise is in [-2.82, 22.19]: a block, or a token within its block, whose probability is below about 2^-31 of the
    largest is never drawn, and a probability p has a relative error of about 2^-32 / p.
    """
    w = (bits >> jnp.uint32(1)).astype(jnp.int32).astype(jnp.float32) * 2.0**-31 + 2.0**-32
    return -jnp.log(-jnp.log1p(-jnp.minimum(w, 1.0 - 2.0**-24)))
