"""How many directions the hidden states of a response span, and how that number grows along the response."""

import jax
import jax.numpy as jnp


def effective_rank(hidden: jax.Array, mask: jax.Array) -> jax.Array:
    """exp of the entropy of the normalised singular values of the centred masked rows of f32[T, D], f32[] (2509.23808).

    1 where the rows are all the same, 0 where there are fewer than two.
    """
    count = jnp.sum(mask)
    # Less its first row, a matrix of equal rows is exactly 0.
    shifted = jnp.where(mask[:, None], hidden - hidden[jnp.argmax(mask)], 0.0)
    centred = jnp.where(mask[:, None], shifted - jnp.sum(shifted, axis=0) / jnp.maximum(count, 1), 0.0)
    values = jnp.linalg.svd(centred, compute_uv=False)
    total = jnp.sum(values)
    p = values / jnp.where(total > 0, total, 1.0)
    rank = jnp.exp(-jnp.sum(jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p, 1.0)), 0.0)))
    return jnp.where(count < 2, 0.0, rank)


def prefix_ranks(hidden: jax.Array, count: jax.Array, stride: int) -> tuple[jax.Array, jax.Array]:
    """Effective rank f32[J] of rows 0 .. j stride, for j = 1 .. J, and which of these are among the first `count`."""
    ends = jnp.arange(stride, hidden.shape[0], stride)
    place = jnp.arange(hidden.shape[0])
    ranks = jax.lax.map(lambda end: effective_rank(hidden, place <= jnp.minimum(end, count - 1)), ends)
    return ranks, ends < count


def growth(series: jax.Array, known: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Means of d_j = m_j - mean(m_1 .. m_j-1), j >= 2, and of d_j - d_j-1, j >= 3, over the known leading m f32[J]."""
    number = jnp.sum(known)
    before = jnp.cumsum(series) - series
    change = (series - before / jnp.maximum(jnp.arange(series.size), 1))[1:]
    there = known[1:]
    velocity = jnp.sum(jnp.where(there, change, 0.0)) / jnp.maximum(number - 1, 1)
    turn = jnp.where(there[1:], change[1:] - change[:-1], 0.0)
    return velocity, jnp.sum(turn) / jnp.maximum(number - 2, 1)


def rank_measures(hidden: jax.Array, mask: jax.Array, stride: int = 40, max_length: int = 512) -> jax.Array:
    """f32[3]: effective rank of the masked rows of hidden f32[T, D], its mean growth, and the growth's (2509.23808).

    Growth is along prefixes that get longer by `stride` rows, within the last `max_length` masked rows; 0 where there
    are too few. All rows count in the rank itself.
    """
    T, D = hidden.shape
    order = jnp.argsort(~mask, stable=True)  # masked rows first, whatever stands between them
    count = jnp.sum(mask)
    rows = jnp.where((jnp.arange(T) < count)[:, None], hidden[order], 0.0).astype(jnp.float32)
    if D > T:  # the same singular values, also of any subset of rows, with fewer columns
        rows = jnp.linalg.qr(rows.T, mode="r").T
    whole = effective_rank(rows, jnp.arange(T) < count)
    width = min(max_length, T)
    if width <= stride:
        return jnp.stack([whole, jnp.float32(0), jnp.float32(0)])
    window = jax.lax.dynamic_slice_in_dim(rows, jnp.clip(count - width, 0, T - width), width)
    return jnp.stack([whole, *growth(*prefix_ranks(window, jnp.minimum(count, width), stride))])
