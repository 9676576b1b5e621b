"""Which blocks of queries and keys a kernel visits, as scalars that it reads before it starts.

A token has a number `enter`, and an interval [enter, leave) of the numbers of the tokens that continue it. A query
attends to a key if the query's number lies in the key's interval and, with a window, fewer than `window` tokens lie
between them on their path. Blocks are compared by the bounds of their tokens' numbers, so a pair of blocks of which no
token attends to another is almost always left out.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array

LANES = 128
MAX_PAIRS = 98_304  # pairs of blocks that a kernel may be given: they are in scalar memory
SIZES = ((128, 512), (256, 1024), (512, 1024), (512, 2048))  # of blocks of queries and of keys, the finest first
OUTSIDE = 2**30  # above any number or position of a token
SHIFT = 16  # a pair of blocks is one number: block of queries << SHIFT | block of keys


class PackedTokens(NamedTuple):
    """Tokens that attend to one another, int32[N, L] each. Where there is no token, enter and leave are 0."""

    enter: Array  # number of the token, at least 1 and unique in its row
    leave: Array  # one more than the last number that continues it
    position: Array  # tokens before it on its path


class Visits(NamedTuple):
    """Which blocks of 128 tokens each block of 128 visits, in the kernels for GPUs; arrays start with N."""

    keys: Array  # int32[N, L / 128, S / 128]: for a block of queries, first the blocks of keys that it visits
    key_counts: Array  # int32[N, L / 128]: how many it visits
    queries: Array  # int32[N, S / 128, L / 128]: the same for a block of keys
    query_counts: Array  # int32[N, S / 128]


class BlockPairs(NamedTuple):
    """The pairs of blocks that a kernel visits, and the bounds of their tokens; arrays start with N."""

    by_query: Array  # int32[N, P], sorted by block of queries; each block of queries has one at least
    by_key: Array  # int32[N, P], sorted by block of keys; each block of keys has one at least
    counts: Array  # int32[N, 2]: how many of each are valid; the others repeat the last
    of_queries: Array  # int32[N, 3, blocks of queries]: least and greatest number, and least position
    of_keys: Array  # int32[N, 3, keys / 128]: least number, greatest end of an interval, and greatest position
    visits: Visits  # for GPUs; compilers drop from a program what its kernels do not read


def block_sizes(queries: int, keys: int) -> tuple[int, int]:
    """Queries and keys of a block, for lengths that are multiples of 128. ValueError: there are too many tokens."""
    for size, width in SIZES:
        width = max(most for most in range(LANES, width + 1, LANES) if keys % most == 0)
        if -(-queries // size) * (keys // width) <= MAX_PAIRS and (queries % size == 0 or size == SIZES[0][0]):
            return size, width
    raise ValueError(f"{queries} queries and {keys} keys are too many for one kernel: use a longer sequence axis")


def _bounds(tokens: PackedTokens, size: int, of_keys: bool = False) -> Array:
    """`BlockPairs.of_queries`, or `of_keys`, of blocks of a size."""
    real = tokens.enter > 0

    def least(x: Array) -> Array:
        return jnp.where(real, x, OUTSIDE).reshape(x.shape[0], -1, size).min(2)

    def greatest(x: Array) -> Array:
        return jnp.where(real, x, -1).reshape(x.shape[0], -1, size).max(2)

    end, place = (tokens.leave, greatest) if of_keys else (tokens.enter, least)
    return jnp.stack([least(tokens.enter), greatest(end), place(tokens.position)], axis=1)


def attends(of_queries: tuple, of_keys: tuple, window: Array | int) -> Array:
    """Whether any token of a block of queries may attend to one of a block of keys, from the bounds of both."""
    least, greatest, earliest = of_queries
    first, end, latest = of_keys
    near = (earliest - latest < window) | (jnp.asarray(window) == 0)
    return (first <= greatest) & (least < end) & near


def _sorted(chosen: Array) -> tuple[Array, Array]:
    """The indices of the true entries bool[N, A, B] in their order, then the last of them repeated; and their number.

    Places are counted by rows and then within them: one long cumulative sum takes TPUs' compiler minutes.
    """
    N, A, B = chosen.shape
    ends = jnp.cumsum(jnp.sum(chosen, axis=2, dtype=jnp.int32), axis=1)
    within = jnp.cumsum(chosen, axis=2, dtype=jnp.int32)
    place = jnp.where(chosen, (ends - within[:, :, -1])[:, :, None] + within - 1, A * B).reshape(N, -1)
    index = jnp.broadcast_to(jnp.arange(A * B, dtype=jnp.int32), (N, A * B))
    out = jnp.zeros((N, A * B), jnp.int32).at[jnp.arange(N)[:, None], place].set(index, mode="drop")
    count = ends[:, -1]
    last = jnp.take_along_axis(out, jnp.maximum(count - 1, 0)[:, None], axis=1)
    return jnp.where(jnp.arange(A * B) < count[:, None], out, last), count


def _attending(of_queries: Array, of_keys: Array, window: Array | int) -> Array:
    """bool[N, blocks of queries, blocks of keys]: see `attends`. of_queries, of_keys: as in BlockPairs."""
    rows, columns = jnp.moveaxis(of_queries, 1, 0)[..., None], jnp.moveaxis(of_keys, 1, 0)[:, :, None]
    return attends(tuple(rows), tuple(columns), window)


def _listed(chosen: Array) -> tuple[Array, Array]:
    """For each row of bool[..., B], the places of its true entries in order and then any; and their number."""
    first = jnp.sort(jnp.where(chosen, jnp.arange(chosen.shape[-1], dtype=jnp.int32), OUTSIDE), axis=-1)
    return jnp.minimum(first, chosen.shape[-1] - 1), jnp.sum(chosen, axis=-1, dtype=jnp.int32)


@jax.named_scope("block_pairs")
def block_pairs(queries: PackedTokens, keys: PackedTokens, window: Array | int = 0) -> BlockPairs:
    """The pairs of blocks to visit; lengths are multiples of 128. window: see `packed_attention`."""
    size, width = block_sizes(queries.enter.shape[1], keys.enter.shape[1])
    of_queries, of_keys = _bounds(queries, size), _bounds(keys, LANES, of_keys=True)
    visited = _attending(of_queries, of_keys, window)
    visited = visited.reshape(*visited.shape[:2], -1, width // LANES).any(3)
    # A block that attends to nothing, or that nothing attends to, is visited once, because its results must be written.
    lonely_query = ~visited.any(2, keepdims=True) & (jnp.arange(visited.shape[2]) == 0)
    lonely_key = ~visited.any(1, keepdims=True) & (jnp.arange(visited.shape[1]) == 0)[:, None]
    _, nq, nk = visited.shape
    of_query, query_count = _sorted(visited | lonely_query)
    of_key, key_count = _sorted((visited | lonely_key).swapaxes(1, 2))
    by_query = (of_query // nk) << SHIFT | of_query % nk
    by_key = (of_key % nq) << SHIFT | of_key // nq
    counts = jnp.stack([query_count, key_count], axis=1)
    visited = _attending(_bounds(queries, LANES), of_keys, window)
    visits = Visits(*_listed(visited), *_listed(visited.swapaxes(1, 2)))
    return BlockPairs(by_query, by_key, counts, of_queries, of_keys, visits)
