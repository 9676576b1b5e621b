"""The gated delta rule in JAX: one chunk, and a loop over the chunks of all rows, forward and backward.

With G_t the sum of g up to token t, S the state before, and everything of one head,

    (I + A) D = b (v - exp(G) k S),  A_ts = b_t exp(G_t - G_s) k_t . k_s for s < t,
    o_t = exp(G_t) q_t S + sum_{s <= t} exp(G_t - G_s) (q_t . k_s) D_s,
    S'  = exp(G_C) S + sum_s exp(G_C - G_s) k_s D_s^T

(section 3.3 and appendix A of arXiv 2412.06464). Written in products of matrices alone, which both XLA and a Pallas
kernel compute.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_kernels.partition import zeros

Array = jax.Array
EXACT = jax.lax.Precision.HIGHEST  # of products with inverses, whose factors TPUs would round to bfloat16


class Chunk(NamedTuple):
    """What C tokens of a chunk bring, heads first: H of values, which share K of keys and queries in equal numbers.

    A token that changes nothing has g = 0 and beta = 0. q, k and v in any dtype, g and beta in that of states.
    """

    q: Array  # [..., K, C, k], scaled
    k: Array  # [..., K, C, k], of length at most 1
    v: Array  # [..., H, C, v]
    g: Array  # [..., H, 1, C], at most 0
    beta: Array  # [..., H, 1, C]


class Shares(NamedTuple):
    """Which tokens of a chunk are of one path, in numbers 1 for true and 0 for false: `path` is the path's number."""

    path: Array  # [..., 1, 1, C]
    from_entry: Array  # [..., 1, 1, C], whether what the chunk begins with is of the token's path
    to_end: Array  # [..., 1, 1, C], whether the token's path goes on after the chunk
    through: Array  # [..., 1, 1, 1], whether the path that the chunk begins with does


@jax.custom_vjp
def solved(a: Array, right: Array) -> Array:
    """X [..., C, m] with (1 + A) X = right, for matrices A [..., C, C] that are 0 on and above the diagonal.

    In products of matrices alone, by the inverse.
    """
    return _product(inverse_of_one_plus(a), right, EXACT)


def step(
    x: Chunk, state: Array, shares: Shares | None = None, solve: Callable[[Array, Array], Array] = solved
) -> tuple[Array, Array]:
    """Outputs [..., H, C, v] of a chunk's tokens, and the states [..., H, k, v] after them.

    state: [..., H, k, v], before. shares: None where all tokens are of one path, that of the state. solve: see
    `solved`.
    """
    g, beta = x.g, x.beta
    q, k, v = (each.astype(state.dtype) for each in (x.q, x.k, x.v))
    C, of_each = q.shape[-2], v.shape[-3] // q.shape[-3]
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (C, C), axis) for axis in (0, 1))
    eye, earlier, pairs = row == column, column < row, column <= row
    # Sums of g up to each token, both ways: down a column and along a row.
    down = jnp.sum(jnp.where(pairs, g, 0), axis=-1, keepdims=True)  # [..., H, C, 1]
    along = jnp.sum(jnp.where(eye, down, 0), axis=-2, keepdims=True)  # [..., H, 1, C]
    whole = jnp.sum(g, axis=-1, keepdims=True)  # [..., H, 1, 1]
    grown, left, decay = jnp.exp(down), jnp.exp(whole - down), jnp.exp(whole)
    between = jnp.exp(jnp.where(pairs, down - along, 0))
    of_one = pairs
    if shares is not None:
        of_one = pairs & (_upright(shares.path, eye) == shares.path)
        grown = grown * _upright(shares.from_entry, eye)
        left, decay = left * _upright(shares.to_end, eye), decay * shares.through
    between = jnp.where(of_one, between, 0)
    rate = _upright(beta, eye)  # [..., H, C, 1]
    of_keys, of_queries = (_for_values(_product(each, k, axes=(1, 1)), of_each) for each in (k, q))
    q, k = _for_values(q, of_each), _for_values(k, of_each)
    system = jnp.where(earlier, rate * of_keys * between, 0)
    change = solve(system, rate * (v - grown * _product(k, state)))
    out = grown * _product(q, state) + _product(of_queries * between, change)
    return out.astype(x.v.dtype), decay * state + _product(k, left * change, axes=(0, 0))


def _for_values(x: Array, count: int) -> Array:
    """What heads of keys have [..., K, C, m], for each of the heads of values that share them [..., H, C, m]."""
    if count == 1:
        return x
    *lead, K, C, m = x.shape
    return jnp.broadcast_to(x[..., None, :, :], (*lead, K, count, C, m)).reshape(*lead, K * count, C, m)


def _upright(x: Array, eye: Array) -> Array:
    """A row [..., 1, C] as a column [..., C, 1]; a transposition that every compiler can do."""
    return jnp.sum(jnp.where(eye, x, 0), axis=-1, keepdims=True)


def _product(a: Array, b: Array, precision: jax.lax.Precision | None = None, axes: tuple[int, int] = (1, 0)) -> Array:
    """The product of matrices over an axis of each: a b; of axes (1, 1) a b^T, of (0, 0) a^T b."""
    batch = tuple(range(a.ndim - 2))
    left, right = ((a.ndim - 2 + axis,) for axis in axes)
    dimensions = (left, right), (batch, batch)
    return jax.lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=a.dtype)


def _solved_forward(a: Array, right: Array) -> tuple[Array, tuple[Array, Array]]:
    inverse = inverse_of_one_plus(a)
    x = _product(inverse, right, EXACT)
    return x, (inverse, x)


def _solved_backward(residuals: tuple[Array, Array], d_x: Array) -> tuple[Array, Array]:
    inverse, x = residuals
    d_right = _product(inverse, d_x, EXACT, axes=(0, 0))
    return -_product(d_right, x, axes=(1, 1)), d_right


solved.defvjp(_solved_forward, _solved_backward)


def inverse_of_one_plus(a: Array) -> Array:
    """The inverse of 1 + A for matrices A [..., C, C] that are 0 on and above the diagonal.

    Blocks along the diagonal are inverted, of 1, 2, 4 ... rows: that of [[P, 0], [Q, R]] is
    [[P', 0], [-R' Q P', R']] with those of P and R. As stable as forward substitution, in products alone.
    """
    C = a.shape[-1]
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (C, C), axis) for axis in (0, 1))
    found = jnp.broadcast_to((row == column).astype(a.dtype), a.shape)
    for doubling in range((C - 1).bit_length()):
        block, other = row >> doubling, column >> doubling
        below = (block & 1 == 1) & (other == block - 1)
        found = found - _product(found, _product(jnp.where(below, a, 0), found, EXACT), EXACT)
    return found


def solved_by_substitution(a: Array, right: Array) -> Array:
    """`solved` by XLA's own triangular solver, of which there is one operation to compile."""
    return jax.lax.linalg.triangular_solve(a, right, left_side=True, lower=True, unit_diagonal=True)


class DeltaInputs(NamedTuple):
    """What tokens [...] bring to the rule, of H heads of values and K of keys, of which H is a multiple.

    q, k and v in any dtype, g and beta in that of states; a token that changes nothing has g = 0 and beta = 0.
    """

    q: Array  # [..., K, k], scaled
    k: Array  # [..., K, k], of length at most 1
    v: Array  # [..., H, v]
    g: Array  # [..., H], at most 0
    beta: Array  # [..., H]


Given = tuple[DeltaInputs, Shares | None]


def forward(given: Given, places: Array, starts: Array) -> tuple[Array, Array, Array]:
    """Outputs [R, n, C, H, v], the states [R, H, k, v] after the last chunk, and those after each, [R, n, H, k, v].

    places: int32[R, n], where among the states after chunks and `starts` [R, s, H, k, v] each chunk finds its own.
    """
    n, v = places.shape[1], given[0].v
    known = jnp.concatenate([zeros((len(places), n, *starts.shape[2:]), starts.dtype, starts), starts], axis=1)

    def one(number: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        out, known = carry
        x, shares = _of_chunk(given, number)
        found, after = _step(x, shares, _take(known, places[:, number]))
        return out.at[:, number].set(found), known.at[:, number].set(after)

    out, known = jax.lax.fori_loop(0, n, one, (_like(v), known))
    return out, known[:, n - 1], known[:, :n]


def backward(
    given: Given, places: Array, starts: Array, after: Array, d_out: Array, d_last: Array
) -> tuple[DeltaInputs, Array]:
    """The cotangents of the inputs and of `starts`."""
    n, rows = places.shape[1], jnp.arange(len(places))
    known = jnp.concatenate([after, starts], axis=1)
    d_known = jnp.concatenate([_like(after), _like(starts)], axis=1).at[:, n - 1].set(d_last)

    def one(back: Array, carry: tuple[DeltaInputs, Array]) -> tuple[DeltaInputs, Array]:
        d_x, d_known = carry
        number = n - 1 - back
        (x, shares), place = _of_chunk(given, number), places[:, number]
        pull = jax.vjp(lambda x, state: _step(x, shares, state), x, _take(known, place))[1]
        d_own, d_state = pull((d_out[:, number], d_known[:, number]))
        d_x = jax.tree.map(lambda all_, own: all_.at[:, number].set(own), d_x, d_own)
        return d_x, d_known.at[rows, place].add(d_state)

    d_x, d_known = jax.lax.fori_loop(0, n, one, (jax.tree.map(_like, given[0]), d_known))
    return d_x, d_known[:, n:]


def heads_first(x: DeltaInputs) -> Chunk:
    """Chunks [..., C, heads, m] as `chunk.step` takes them."""
    tokens = (jnp.swapaxes(each, -2, -3) for each in (x.q, x.k, x.v))
    return Chunk(*tokens, *(jnp.swapaxes(each, -1, -2)[..., None, :] for each in (x.g, x.beta)))


def _step(x: DeltaInputs, shares: Shares | None, state: Array) -> tuple[Array, Array]:
    out, after = step(heads_first(x), state, shares, solved_by_substitution)
    return jnp.swapaxes(out, -2, -3), after


def _like(x: Array) -> Array:
    return zeros(x.shape, x.dtype, x)


def _of_chunk(given: Any, number: Array) -> Any:
    return jax.tree.map(lambda each: each[:, number], given)


def _take(states: Array, place: Array) -> Array:
    return jnp.take_along_axis(states, place[:, None, None, None, None], axis=1)[:, 0]
