"""Gumbel noise for token v of a row as a pure function of (seed, prompt id, sample number, position, v).

The bits come from Threefry-2x32 with 20 rounds: additions, exclusive ors and rotations of 32-bit words, the same on
every platform, in any order and from any tile. Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy
as 1, 2, 3", SC 2011, section 4.2 and table 2 (rotations); the parity constant is that of Threefish (Skein 1.3).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array

PARITY = 0x1BD11BDA
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
LANES = 128
PERIOD = 2 * LANES  # a call gives two words: tokens v and v + LANES of each period share one


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


def bits_at(keys: Array, tokens: Array) -> Array:
    """uint32[N, T]: the random word of each row (keys uint32[N, 2]) and token (int32, broadcast against [N, T])."""
    tokens = tokens.astype(jnp.uint32)
    counter = (tokens >> jnp.uint32(8)) * jnp.uint32(LANES) + (tokens & jnp.uint32(LANES - 1))
    first, second = threefry2x32((keys[:, :1], keys[:, 1:]), (counter, jnp.zeros_like(counter)))
    return jnp.where((tokens & jnp.uint32(LANES)) == 0, first, second)


def bits_of_tile(keys: Array, start: Any, width: int, aligned: bool) -> Array:
    """uint32[N, width]: the words of tokens start, start + 1, ..., as `bits_at` gives them.

    With `aligned` (static: start is a multiple of PERIOD) both words of each call are used, which halves the work of a
    tile that is wider than LANES.
    """
    if not aligned or width <= LANES:
        return bits_at(keys, start + jax.lax.broadcasted_iota(jnp.int32, (1, width), 1))
    periods = -(-width // PERIOD)
    shape = (keys.shape[0], periods * LANES)
    counter = ((start >> 1) + jax.lax.broadcasted_iota(jnp.int32, shape, 1)).astype(jnp.uint32)
    words = threefry2x32((keys[:, :1], keys[:, 1:]), (counter, jnp.zeros_like(counter)))
    pieces = [word[:, i * LANES : (i + 1) * LANES] for i in range(periods) for word in words]
    return jnp.concatenate(pieces, axis=1)[:, :width]


def gumbel(bits: Array) -> Array:
    """f32 standard Gumbel noise from uint32 words, one each; always finite.

    -log(-log1p(-w)) with w = (k + 1/2) / 2^31 in (0, 1) from the upper 31 bits k, rounded to float32 and held below 1.
    Large noise, which decides who is drawn, comes from small w, where float32 is finest: the step of w is 2^-31 there.
    (With u = 1 - w near 1 instead, the step would be 2^-24 and the draws of a large flat vocabulary would tie.)
    The noise lies in [-2.82, 22.19]: a token whose probability is below about 2^-31 of the greatest may never be drawn,
    and a probability p carries a relative error of about 2^-32 / p.
    """
    w = (bits >> jnp.uint32(1)).astype(jnp.int32).astype(jnp.float32) * 2.0**-31 + 2.0**-32
    return -jnp.log(-jnp.log1p(-jnp.minimum(w, 1.0 - 2.0**-24)))
