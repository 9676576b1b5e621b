"""`fused_sample` against float64 formulas, its plain reference and the law it must follow, and what it may allocate."""

from __future__ import annotations

import doctest
import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jaxrl_kernels.sample
import numpy as np
import pytest
from compiling import optimised
from heavy import few
from jaxpr_sizes import sizes
from jaxrl_kernels import IMPLEMENTATIONS, fused_sample
from jaxrl_kernels.sample.noise import BLOCK, OF_BLOCKS, OF_TOKENS, bits_at, gumbel, row_keys, threefry2x32
from other_process import on_devices, result_of
from scipy import stats
from tpu_environment import tpu_environment

N, D, V = 21, 48, 700
STATIC = ("softcap", "implementation", "block_size", "row_block")
# V is no multiple of a block of 128. Tiles of one block and of several, and of more than V; None is the logits at once
# in the blocked path. Row blocks that are and are not divisors of N.
WAYS = [
    *({"implementation": "xla", "block_size": size} for size in (128, 256, 512, 640, 1024, None)),
    *(
        {"implementation": "pallas", "block_size": size, "row_block": rows}
        for size, rows in ((128, 8), (256, 7), (512, 32), (1024, 21), (None, None))
    ),
]
sample = jax.jit(fused_sample, static_argnames=STATIC)


def drawn(seed: int, dtype: Any = jnp.float32) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Random hidden [N, D], unembedding [V, D] and counters [N, 4].

    The numbers are multiples of 1/16, so their products sum without rounding in any order: tokens must be bit-equal.
    """
    random = np.random.default_rng(seed)
    hidden, unembedding = (np.round(16 * random.normal(size=(n, D)) * s) / 16 for n, s in ((N, 1.0), (V, 0.3)))
    counters = random.integers(0, 2**32, size=(N, 4), dtype=np.uint32)
    return jnp.asarray(hidden, dtype), jnp.asarray(unembedding, dtype), jnp.asarray(counters)


def logits(hidden: Any, unembedding: Any, temperature: Any, softcap: float, allowed: Any = None) -> np.ndarray:
    """float64[N, V]; -inf where not allowed."""
    z = np.asarray(hidden, np.float64) @ np.asarray(unembedding, np.float64).T
    z = softcap * np.tanh(z / softcap) if softcap else z
    temperature = np.broadcast_to(np.asarray(temperature, np.float64), z.shape[:1])[:, None]
    z = z / np.where(temperature == 0, 1, temperature)
    return z if allowed is None else np.where(np.asarray(allowed), z, -np.inf)


def log_softmax(z: np.ndarray) -> np.ndarray:
    z = z - z.max(axis=1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=1, keepdims=True))


def assert_of_distribution(found: Any, z: np.ndarray, tolerance: float = 1e-5) -> None:
    """The log-probabilities are those of the tokens, and the entropies those of softmax(z)."""
    token, logp, entropy = map(np.asarray, found)
    assert (token.dtype, logp.dtype, entropy.dtype) == (np.int32, np.float32, np.float32)
    exact = log_softmax(z)
    np.testing.assert_allclose(logp, exact[np.arange(len(token)), token], rtol=tolerance, atol=tolerance)
    terms = np.where(np.isfinite(exact), np.exp(exact) * np.where(np.isfinite(exact), exact, 0), 0)
    np.testing.assert_allclose(entropy, -terms.sum(axis=1), rtol=tolerance, atol=tolerance)


def mask(seed: int, share: float = 0.3) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).random((N, V)) < share)


CASES = [
    {"temperature": temperature, "softcap": softcap, "allowed": allowed}
    for temperature, softcap, allowed in (
        (1.0, 0.0, None),
        (0.7, 2.0, mask(1)),
        (np.linspace(0.5, 2, N, dtype=np.float32), 0.0, mask(2).astype(jnp.int8)),
        (np.where(np.arange(N) % 3 == 0, 0, 1.3).astype(np.float32), 2.0, None),
    )
]


def words(*values: int) -> tuple[jax.Array, ...]:
    return tuple(jnp.uint32(value) for value in values)


@pytest.mark.parametrize(
    "counter, key, wanted",
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 2, (0x1CB996FC, 0xBB002BE7)),
        ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_known_answers_of_threefry(counter: Any, key: Any, wanted: Any) -> None:
    # The known-answer file of Random123, threefry2x32 with 20 rounds.
    assert tuple(map(int, threefry2x32(words(*key), words(*counter)))) == wanted


def test_each_counter_and_level_names_other_noise() -> None:
    counters = np.array([*itertools.product((0, 1, 2**31), repeat=4)], np.uint32)
    keys = np.asarray(row_keys(jnp.asarray(counters)))
    assert len(np.unique(keys, axis=0)) == len(counters)
    bits = [np.asarray(bits_at(jnp.asarray(keys), level, jnp.arange(64)[None])) for level in (OF_BLOCKS, OF_TOKENS)]
    assert len(np.unique(bits)) == bits[0].size + bits[1].size


def test_bits_are_uniform_and_independent() -> None:
    # Neighbouring counters, neighbouring indices and the two levels: 2^20 words each.
    counters = np.stack([np.full(1024, 5), np.full(1024, 9), np.arange(1024) // 32, np.arange(1024) % 32], axis=1)
    keys, index = row_keys(jnp.asarray(counters, jnp.uint32)), jnp.arange(1024)[None]
    levels = [np.asarray(bits_at(keys, level, index)) for level in (OF_BLOCKS, OF_TOKENS)]
    for bits in levels:
        ones = np.array([((bits >> i) & 1).mean() for i in range(32)])
        assert np.abs(ones - 0.5).max() < 5 * 0.5 / 1024
        for shift in (0, 12, 24):
            counts = np.bincount(((bits >> shift) & 255).ravel(), minlength=256)
            assert stats.chisquare(counts).pvalue > 1e-4
        for a, b in ((bits[:, :-1], bits[:, 1:]), (bits[:-1], bits[1:]), (bits[:, :128], bits[:, 128:256]), levels):
            counts = np.bincount(((a >> 28) * 16 + (b >> 28)).ravel(), minlength=256)
            assert stats.chisquare(counts).pvalue > 1e-4
        assert stats.kstest(np.asarray(gumbel(jnp.asarray(bits.ravel()))), "gumbel_r").pvalue > 1e-4


def test_gumbel_is_the_formula_and_finite_at_both_ends() -> None:
    random = (
        np.random.default_rng(3).integers(0, 2**32, 10000, dtype=np.uint32) >> np.arange(10000, dtype=np.uint32) % 32
    )
    bits = np.concatenate([random, np.array([0, 1, 2, 3, 2**31, 2**32 - 1], np.uint32)])
    found = np.asarray(gumbel(jnp.asarray(bits)), np.float64)
    w = np.minimum(((bits >> 1) + 0.5) / 2**31, 1 - 2.0**-24)
    np.testing.assert_allclose(found, -np.log(-np.log1p(-w)), rtol=1e-5, atol=1e-5)
    assert -2.82 < found.min() < -2.81
    assert 22.18 < found.max() < 22.19


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_the_reference_is_the_float64_formula(case: dict[str, Any]) -> None:
    arrays = drawn(4)
    z = logits(*arrays[:2], **case)
    found = sample(*arrays, **case, implementation="reference")
    assert_of_distribution(found, z)
    np.testing.assert_array_equal(found[0], two_level_argmax(z, case["temperature"], arrays[2]))


def two_level_argmax(z: np.ndarray, temperature: Any, counters: jax.Array) -> list[int]:
    """The definition of the draw, row by row in float64; greedy rows are the argmax of z."""
    keys = row_keys(counters)
    of_blocks, of_tokens = (
        np.asarray(gumbel(bits_at(keys, level, jnp.arange(z.shape[1])[None])), np.float64)
        for level in (OF_BLOCKS, OF_TOKENS)
    )
    tokens = []
    for n, heat in enumerate(np.broadcast_to(np.asarray(temperature), len(z))):
        if heat == 0:
            tokens.append(int(np.argmax(z[n])))
            continue
        starts = range(0, z.shape[1], BLOCK)
        sums = [np.logaddexp.reduce(z[n, start : start + BLOCK]) for start in starts]
        start = BLOCK * int(np.argmax(sums + of_blocks[n, : len(sums)]))
        tokens.append(start + int(np.argmax((z + of_tokens)[n, start : start + BLOCK])))
    return tokens


def assert_as_the_reference(case: dict[str, Any], way: dict[str, Any]) -> None:
    arrays = drawn(4)
    found = sample(*arrays, **case, **way)
    np.testing.assert_array_equal(found[0], sample(*arrays, **case, implementation="reference")[0])
    assert_of_distribution(found, logits(*arrays[:2], **case))


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
@pytest.mark.parametrize("implementation", few(["pallas", "xla"], ["pallas"]))
def test_every_case_draws_the_tokens_of_the_reference(case: dict[str, Any], implementation: str) -> None:
    assert_as_the_reference(case, {"implementation": implementation, "block_size": 256})


@pytest.mark.parametrize("way", few(WAYS, [WAYS[0], WAYS[-1]]), ids=str)
def test_every_way_draws_the_tokens_of_the_reference(way: dict[str, Any]) -> None:
    assert_as_the_reference(CASES[1], way)


@pytest.mark.parametrize("implementation", few(IMPLEMENTATIONS, ["pallas"]))
def test_a_token_depends_on_neither_order_nor_company(implementation: str) -> None:
    arrays = drawn(5)
    call = partial(sample, temperature=0.9, implementation=implementation)
    wanted = call(*arrays)
    order = np.random.default_rng(6).permutation(N)
    for rows in (order, np.arange(8), np.arange(8, N), np.array([3])):
        found = call(arrays[0][rows], arrays[1], arrays[2][rows])
        np.testing.assert_array_equal(found[0], np.asarray(wanted[0])[rows])
        np.testing.assert_allclose(found[1:], np.stack(wanted[1:])[:, rows], rtol=1e-5)
    assert len(np.unique(np.asarray(wanted[0]))) > N // 2
    moved = call(arrays[0], arrays[1], arrays[2].at[:, 3].add(1))
    assert (np.asarray(moved[0]) != np.asarray(wanted[0])).sum() > N // 2


@optimised  # or it takes twice as long
def test_a_million_draws_follow_softmax() -> None:
    # Three blocks, the last one of 44 tokens. Blocks and the tokens in them differ in probability by factors of e^8,
    # and the last token would take half of the draws if it were not forbidden.
    M, width = 1000, 300
    random = np.random.default_rng(11)
    z = (random.normal(size=width) * 1.5 + np.repeat([0.0, -2.0, 1.0], BLOCK)[:width]).astype(np.float32)
    z[5], z[130], z[-1] = 5.0, 4.0, 9.0
    sample_number, position = np.divmod(np.arange(M * M), M)
    counters = np.stack([np.full(M * M, 1), np.full(M * M, 2), sample_number, position], axis=1)
    draw = jax.jit(partial(fused_sample, temperature=1.5, implementation="xla", block_size=256))
    parts = [
        draw(
            jnp.ones((len(part), 1)),
            jnp.asarray(z)[:, None],
            part,
            allowed=jnp.ones((len(part), width), bool).at[:, -1].set(False),
        )
        for part in np.split(jnp.asarray(counters, jnp.uint32), 20)
    ]
    token, logp = (np.concatenate([np.asarray(part[i]) for part in parts]) for i in range(2))
    exact = log_softmax(z[None, :-1].astype(np.float64) / 1.5)[0]
    np.testing.assert_allclose(logp, exact[token], rtol=1e-5)
    p = np.exp(exact)
    assert stats.chisquare(np.bincount(token, minlength=width - 1), p * M * M).pvalue > 1e-4
    # Neighbouring positions, and neighbouring samples, are independent: in their blocks, and in the tokens of a block.
    grid = token.reshape(M, M)
    for group in (np.arange(width - 1) // BLOCK, np.arange(width - 1) % 7, np.argsort(np.argsort(-p)).clip(max=8)):
        mass = np.bincount(group, p)
        pair = np.outer(mass, mass).ravel()
        for a, b in ((grid[:, ::2], grid[:, 1::2]), (grid[::2], grid[1::2])):
            counts = np.bincount((group[a] * len(mass) + group[b]).ravel(), minlength=pair.size)
            assert stats.chisquare(counts, pair * a.size).pvalue > 1e-4


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_greedy_is_the_lowest_argmax(implementation: str) -> None:
    unembedding = jnp.array([[1.0], [3.0], [3.0], [-9.0], [5.0]])
    allowed = jnp.array([[True] * 5, [True, True, True, True, False], [False, False, False, True, False]])
    counters = jnp.zeros((3, 4), jnp.uint32)
    settings = {"implementation": implementation, "allowed": allowed}
    found = sample(jnp.ones((3, 1)), unembedding, counters, temperature=0.0, **settings)
    np.testing.assert_array_equal(found[0], [4, 1, 3])
    # At temperature 0 the distribution is that of temperature 1, over the allowed tokens.
    assert_of_distribution(found, logits(np.ones((3, 1)), unembedding, 1.0, 0.0, allowed))
    arrays = drawn(7)
    token = sample(*arrays, temperature=0.0, implementation=implementation)[0]
    np.testing.assert_array_equal(token, logits(*arrays[:2], 0.0, 0.0).argmax(axis=1))


@pytest.mark.parametrize("way", few([*WAYS, {"implementation": "reference"}], [WAYS[0], WAYS[-1]]), ids=str)
def test_greedy_ties_within_and_across_blocks(way: dict[str, Any]) -> None:
    # The first block has by far the greatest sum; the greatest logit is not in it, but at two tokens of block 2, at one
    # of block 3, and at the last token.
    unembedding = jnp.zeros((V, 1)).at[:BLOCK].set(1.99).at[jnp.array([300, 301, 400, V - 1])].set(2.0)
    allowed = jnp.ones((3, V), bool).at[1, :301].set(False).at[2, :401].set(False)
    counters = jnp.arange(12, dtype=jnp.uint32).reshape(3, 4)
    found = sample(jnp.ones((3, 1)), unembedding, counters, temperature=0.0, allowed=allowed, **way)
    np.testing.assert_array_equal(found[0], [300, 301, V - 1])
    assert_of_distribution(found, logits(np.ones((3, 1)), unembedding, 1.0, 0.0, allowed))


@pytest.mark.heavy
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_extreme_logits(implementation: str) -> None:
    counters = jnp.arange(8, dtype=jnp.uint32).reshape(2, 4)
    call = partial(sample, jnp.ones((2, 1)), counters=counters, implementation=implementation)
    unembedding = jnp.array([[-1e4], [1e4], [0.0], [-jnp.inf], [-1e4]])
    token, logp, entropy = call(unembedding)
    np.testing.assert_array_equal([token, logp, entropy], [[1, 1], [0, 0], [0, 0]])
    # Only the least tokens are left, though others are e^20000 times as likely.
    allowed = jnp.array([[True, False, False, True, True]] * 2)
    token, logp, entropy = call(unembedding, allowed=allowed)
    assert set(np.asarray(token).tolist()) <= {0, 4}
    np.testing.assert_allclose([logp, entropy], [[-np.log(2)] * 2, [np.log(2)] * 2], rtol=1e-6)
    for level in (0.0, -3.0, 1e4):
        token, logp, entropy = call(jnp.full((7, 1), level))
        assert ((np.asarray(token) >= 0) & (np.asarray(token) < 7)).all()
        np.testing.assert_allclose([logp, entropy], [[-np.log(7)] * 2, [np.log(7)] * 2], rtol=1e-6)


@pytest.mark.heavy
@pytest.mark.parametrize("block_size", few([128, 512, None], [128]))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_extreme_blocks(implementation: str, block_size: int | None) -> None:
    rows = 64
    counters = jnp.asarray(np.random.default_rng(12).integers(0, 2**32, (rows, 4), np.uint32))
    call = partial(sample, jnp.ones((rows, 1)), counters=counters, implementation=implementation, block_size=block_size)

    def check(unembedding: np.ndarray, allowed: Any = None) -> np.ndarray:
        unembedding = np.asarray(unembedding, np.float32)[:, None]
        found = call(jnp.asarray(unembedding), allowed=allowed)
        assert_of_distribution(found, logits(np.ones((rows, 1)), unembedding, 1.0, 0.0, allowed))
        return np.asarray(found[0])

    # All the mass in one block, the others 2e4 below it; and the same where the block is the last one, of 60 tokens.
    for start, stop in ((256, 384), (640, V)):
        token = check(np.where((np.arange(V) >= start) & (np.arange(V) < stop), 1e4, -1e4))
        assert set(token) <= {*range(start, stop)}
        assert len(set(token)) > 20
    # A range of 1e4 within a block and across blocks: two tokens of different blocks share the mass.
    z = np.linspace(-1e4, -50, V)
    z[[3, 200]] = 1.0, 2.0
    assert set(check(z)) == {3, 200}
    # All equal: every block is drawn, the last one too.
    assert set(check(np.full(V, 3.0)) // BLOCK) == {*range(6)}
    # One token allowed, far below the rest, with all others of its block excluded; then by a logit of -inf.
    np.testing.assert_array_equal(check(z, jnp.zeros((rows, V), bool).at[:, 333].set(True)), 333)
    np.testing.assert_array_equal(check(np.where(np.arange(V) == 444, -50, -np.inf)), 444)
    # Blocks that are excluded as a whole, at both ends.
    allowed = jnp.zeros((rows, V), bool).at[:, 200:220].set(True).at[:, 500].set(True)
    assert set(check(np.zeros(V), allowed)) <= {*range(200, 220), 500}
    found = call(jnp.zeros((V, 1)), allowed=jnp.zeros((rows, V), bool).at[0, 5].set(True))
    np.testing.assert_array_equal(found, [[5] + [-1] * 63, [0] + [-np.inf] * 63, [0] * 64])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_with_nothing_to_draw(implementation: str) -> None:
    hidden = jnp.array([[1.0], [1.0], [jnp.nan], [1.0]])
    allowed = jnp.ones((4, 5), bool).at[0].set(False).at[3].set(False)
    for temperature in (0.0, 1.0):
        found = sample(
            hidden,
            jnp.zeros((5, 1)),
            jnp.zeros((4, 4), jnp.uint32),
            temperature=temperature,
            allowed=allowed,
            implementation=implementation,
        )
        token, logp, entropy = map(np.asarray, found)
        np.testing.assert_array_equal(token[[0, 2, 3]], [-1, -1, -1])
        assert 0 <= token[1] < 5
        np.testing.assert_allclose(logp, [-np.inf, -np.log(5), np.nan, -np.inf], rtol=1e-6)
        np.testing.assert_allclose(entropy, [0, np.log(5), np.nan, 0], rtol=1e-6)


@pytest.mark.heavy
@pytest.mark.parametrize("implementation", few(IMPLEMENTATIONS, ["xla"]))
def test_smallest_sizes(implementation: str) -> None:
    call = partial(fused_sample, implementation=implementation)
    found = call(jnp.ones((1, 2)), jnp.ones((1, 2)), jnp.zeros((1, 4), jnp.uint32))
    np.testing.assert_array_equal(found, [[0], [0], [0]])
    found = call(jnp.ones((0, 2)), jnp.ones((3, 2)), jnp.zeros((0, 4), jnp.uint32))
    assert [x.shape for x in found] == [(0,)] * 3
    for vocabulary in (127, 128, 129):
        unembedding = jnp.linspace(0, 3, vocabulary)[:, None]
        counters = jnp.array([[1, 2, 3, vocabulary]], jnp.uint32)
        found = call(jnp.ones((1, 1)), unembedding, counters)
        z = logits(np.ones((1, 1)), unembedding, 1.0, 0.0)
        assert_of_distribution(found, z)
        np.testing.assert_array_equal(found[0], two_level_argmax(z, 1.0, counters))


@pytest.mark.heavy
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bfloat16_inputs_sum_in_float32(implementation: str) -> None:
    low = drawn(8, jnp.bfloat16)
    exact = [np.asarray(array, np.float32) for array in low[:2]]
    found = sample(*low, implementation=implementation)
    assert_of_distribution(found, logits(*exact, 1.0, 0.0))
    np.testing.assert_array_equal(found[0], sample(*exact, low[2])[0])
    mixed = sample(low[0], exact[1], low[2], implementation=implementation)
    np.testing.assert_array_equal(found[0], mixed[0])


@pytest.mark.heavy
def test_under_vmap_and_without_gradient() -> None:
    hidden, unembedding, counters = drawn(9)
    wanted = sample(hidden, unembedding, counters)
    parts = hidden.reshape(3, -1, D), unembedding, counters.reshape(3, -1, 4)
    found = jax.jit(jax.vmap(fused_sample, in_axes=(0, None, 0)))(*parts)
    np.testing.assert_array_equal(np.ravel(found[0]), wanted[0])

    def total(hidden: jax.Array, unembedding: jax.Array, implementation: Any) -> Any:
        return sum(map(jnp.sum, fused_sample(hidden, unembedding, counters, implementation=implementation)[1:]))

    for implementation in IMPLEMENTATIONS:
        for slope in jax.grad(total, argnums=(0, 1))(hidden, unembedding, implementation):
            np.testing.assert_array_equal(slope, 0)


ON_FOUR_DEVICES = """
import json
import jax, jax.numpy as jnp, numpy as np
from jax import P
from jax.sharding import NamedSharding
from jaxrl_kernels import fused_sample

random, out = np.random.default_rng(0), []
devices = np.array(jax.devices())
meshes = jax.sharding.Mesh(devices, ("vocab",)), jax.sharding.Mesh(devices.reshape(2, 2), ("data", "vocab"))
N, D = 8, 16
counters = jnp.asarray(random.integers(0, 2**32, (N, 4)), jnp.uint32)
hidden = jnp.asarray(random.normal(size=(N, D)), jnp.float32)
temperature = jnp.where(jnp.arange(N) == 5, 0.0, 0.8)

def compare(V, mesh, rows, masked, implementation, real):
    unembedding = jnp.asarray(random.normal(size=(V, D)) * 0.3, jnp.float32)
    if masked:  # the greedy row ties over the last two slices and, where they win, over the devices
        unembedding = unembedding.at[V // 2 :].set(10 * hidden[5])
    allowed = jnp.asarray(random.random((N, V)) < 0.3).at[3].set(False) if masked else jnp.ones((N, V), bool)
    def program(hidden, unembedding, counters, temperature, allowed):
        return fused_sample(
            hidden, unembedding, counters, vocab_axis="vocab", temperature=temperature, softcap=2.0,
            allowed=allowed if masked else None, vocab_size=real, implementation=implementation, block_size=256,
        )
    specs = (P(rows), P("vocab"), P(rows), P(rows), P(rows, "vocab"))
    arrays = hidden, unembedding, counters, temperature, allowed
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs)]
    lowered = jax.jit(program).lower(*placed)
    cut = V % 512 == 0 or mesh.shape["vocab"] == 2
    assert ("all_reduce" in lowered.as_text()) == cut  # of what the slices give
    found = lowered.compile()(*placed)
    wanted = fused_sample(
        hidden, unembedding, counters, temperature=temperature, softcap=2.0,
        allowed=allowed & (jnp.arange(V) < (real or V)),
    )
    far = max(float(np.max(np.abs(np.where(np.isfinite(b), a - b, 0)))) for a, b in zip(found, wanted))
    same = bool(jnp.all(found[0] == wanted[0])) and bool(jnp.all(jnp.isinf(found[1]) == jnp.isinf(wanted[1])))
    out.append([same, far, [V, rows, masked, implementation, real]])

# Slices of one block and of several; some without tokens, and a vocabulary that ends within a block.
compare(2048, meshes[0], None, True, None, None)
compare(768, meshes[1], "data", True, None, None)
compare(512, meshes[0], None, False, None, 300)
compare(2048, meshes[1], "data", False, "pallas", 1000)
compare(512, meshes[0], None, True, "pallas", 300)
# No block of 128 tokens is cut: every device draws from all.
compare(800, meshes[0], None, False, None, 300)
print("RESULT" + json.dumps(out))
"""


@pytest.mark.heavy
def test_a_cut_vocabulary_gives_the_same() -> None:
    found = result_of(ON_FOUR_DEVICES, environment=on_devices(4))
    assert len(found) == 6
    for same, far, case in found:
        assert same, case
        assert far < 1e-5, case


def shaped(rows: int, width: int, vocabulary: int, dtype: Any = jnp.float32) -> tuple[jax.ShapeDtypeStruct, ...]:
    counters = jax.ShapeDtypeStruct((rows, 4), jnp.uint32)
    return jax.ShapeDtypeStruct((rows, width), dtype), jax.ShapeDtypeStruct((vocabulary, width), dtype), counters


def test_no_array_is_as_large_as_the_logits() -> None:
    def largest(**settings: Any) -> int:
        return max(sizes(jax.make_jaxpr(partial(fused_sample, **settings))(*shaped(64, 2, 10000)).jaxpr))

    assert largest() == 64 * 10000  # few enough to be made at once
    assert largest(implementation="reference") == 64 * -(-10000 // BLOCK) * BLOCK
    assert largest(implementation="xla", block_size=512) == 64 * 512
    assert largest(implementation="pallas", block_size=512) == 64 * 512


def test_logits_beyond_the_limit_are_tiled_by_default() -> None:
    traced = jax.make_jaxpr(partial(fused_sample, implementation="xla"))(*shaped(256, 2, 151936)).jaxpr
    assert max(sizes(traced)) == 256 * 4096


@optimised
def test_compiled_memory() -> None:
    call = jax.jit(partial(fused_sample, implementation="xla", block_size=1024))
    memory = call.lower(*shaped(256, 64, 32768)).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 10 * 4 * 256 * 1024 < 4 * 256 * 32768 / 3


def test_lowers_for_cuda() -> None:
    call = jax.jit(fused_sample)
    text = call.trace(*shaped(64, 32, 151936, jnp.bfloat16)).lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.while" in text
    assert "64x151936" not in text


TPU_PROGRAM = """
import json
from functools import partial
import jax, jax.numpy as jnp, numpy as np
from jax import P
from jax.experimental import topologies
from jaxrl_kernels import fused_sample

devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
N, D, V = 256, 2048, 151936
mesh = jax.sharding.Mesh(np.array(devices), ("vocab",))

def report(program, *shapes):
    compiled = jax.jit(program).lower(*shapes).compile()
    return [compiled.memory_analysis().temp_size_in_bytes, compiled.as_text().count('"tpu_custom_call"')]

def arrays(rows, place, cut, vocabulary=V):
    kinds = ((rows, D), jnp.bfloat16, place), ((vocabulary, D), jnp.bfloat16, cut), ((rows, 4), jnp.uint32, place)
    return [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype, sharding in kinds]

one = jax.sharding.SingleDeviceSharding(devices[0])
whole, cut = jax.sharding.NamedSharding(mesh, P()), jax.sharding.NamedSharding(mesh, P("vocab"))
spread = partial(fused_sample, vocab_axis="vocab", vocab_size=V)
allowed = jax.ShapeDtypeStruct((300, V), jnp.int8, sharding=one)
print("RESULT" + json.dumps({
    "plain": report(fused_sample, *arrays(N, one, one)),
    "masked": report(
        lambda h, u, c, a: fused_sample(h, u, c, allowed=a, temperature=0.7, softcap=30.0),
        *arrays(300, one, one), allowed,
    ),
    "one row": report(fused_sample, *arrays(1, one, one)),
    "sharded": report(spread, *arrays(N, whole, cut, 4 * 297 * 128)),
}))
"""


@pytest.mark.heavy
def test_compiles_for_tpu_as_a_mosaic_kernel() -> None:
    for name, (temporaries, kernels) in result_of(TPU_PROGRAM, environment=tpu_environment()).items():
        assert temporaries < 2**20 < 256 * 151936 * 4 / 100, name
        assert kernels == 1, name


GOOD = {"hidden": jnp.ones((3, 2)), "unembedding": jnp.ones((5, 2)), "counters": jnp.zeros((3, 4), jnp.uint32)}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"hidden": jnp.ones(3)}, r"hidden must be .* matrix, found float32\[3\]"),
        ({"unembedding": jnp.ones((5, 2), jnp.int32)}, "unembedding must be a float32 or bfloat16"),
        ({"unembedding": jnp.ones((2, 5))}, r"same D, found \[3, 2\] and \[2, 5\]"),
        ({"unembedding": jnp.ones((0, 2))}, "the vocabulary is empty"),
        ({"counters": jnp.zeros((3, 2), jnp.uint32)}, r"counters must be uint32\[3, 4\] .* found uint32\[3, 2\]"),
        ({"counters": jnp.zeros((3, 4))}, r"counters must be uint32\[3, 4\] .* found float32\[3, 4\]"),
        ({"temperature": jnp.ones(2)}, r"temperature must be a scalar or f32\[3\]"),
        ({"temperature": -1.0}, r"temperature must be 0 \(greedy\) or above, found -1.0"),
        ({"softcap": -1.0}, "softcap must be 0 .* found -1.0"),
        ({"allowed": jnp.ones((3, 4), bool)}, r"allowed must be bool or int8\[3, 5\], found bool\[3, 4\]"),
        ({"allowed": jnp.ones((3, 5))}, r"allowed must be bool or int8\[3, 5\], found float32\[3, 5\]"),
        ({"block_size": 0}, "block_size must be at least 1, found 0"),
        ({"block_size": 200}, "block_size must be a multiple of 128, found 200"),
        ({"row_block": 0}, "row_block must be at least 1, found 0"),
        ({"vocab_size": 0}, "vocab_size must be at least 1, found 0"),
        ({"vocab_size": 6}, "vocab_size is 6, but the unembedding has 5 rows"),
        ({"row_axis": "x", "vocab_axis": ("y", "x")}, "mesh axis 'x' cannot shard both rows and another dimension"),
        (
            {"implementation": "triton"},
            "unknown implementation 'triton': use None or one of pallas, xla, reference",
        ),
    ],
)
def test_errors_say_what_was_found(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fused_sample(**{**GOOD, **change})


@pytest.mark.heavy
def test_docstring_examples() -> None:
    assert doctest.testmod(jaxrl_kernels.sample) == (0, 7)
