"""`fused_logprob` against float64 loops, finite differences and its own plain reference, and what it may allocate."""

from __future__ import annotations

import doctest
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jaxrl_kernels.logprob
import numpy as np
import pytest
from compiling import optimised
from heavy import few
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxpr_sizes import sizes
from jaxrl_kernels import IMPLEMENTATIONS, fused_logprob

M, D, V = 6, 5, 23
BLOCKS = (1, 4, 7, V - 1, V, V + 9)
CASES = [
    {"softcap": softcap, "temperature": temperature, "floor": floor}
    for softcap in (0.0, 2.0)
    for temperature, floor in ((0.6, None), ("rows", "everything"), ("rows", "top_p"), ("rows", "without_target"))
]


def drawn(seed: int, scale: float = 1.5) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random hidden [M, D], unembedding [V, D] and targets [M]."""
    random = np.random.default_rng(seed)
    hidden, unembedding = random.normal(size=(M, D)) * scale, random.normal(size=(V, D))
    return hidden.astype(np.float32), unembedding.astype(np.float32), random.integers(0, V, M).astype(np.int32)


def logits(hidden: np.ndarray, unembedding: np.ndarray, temperature: Any, softcap: float) -> np.ndarray:
    z = hidden.astype(np.float64) @ unembedding.astype(np.float64).T
    z = softcap * np.tanh(z / softcap) if softcap else z
    return z / np.broadcast_to(np.asarray(temperature, np.float64), hidden.shape[:1])[:, None]


def log_softmax(z: np.ndarray) -> np.ndarray:
    z = z - z.max()
    return z - np.log(sum(np.exp(value) for value in z))


def supports(z: np.ndarray, targets: np.ndarray, floor: Any) -> list[list[int]]:
    """For each row, the tokens at or above the floor, and the target."""
    kept = []
    for row, target, least in zip(z, targets, [-np.inf] * len(z) if floor is None else floor, strict=True):
        logp = log_softmax(row)
        kept.append([v for v in range(len(row)) if logp[v] >= least or v == target])
    return kept


def by_loop(z: np.ndarray, targets: np.ndarray, kept: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Log-probability and entropy from float64 logits, one token at a time."""
    pairs = []
    for row, target, tokens in zip(z, targets, kept, strict=True):
        logp = dict(zip(tokens, log_softmax(row[tokens]), strict=True))
        pairs.append((logp[target], -sum(np.exp(value) * value for value in logp.values())))
    return np.array([p for p, _ in pairs]), np.array([h for _, h in pairs])


def settled(case: dict[str, Any], seed: int) -> tuple[tuple[np.ndarray, ...], dict[str, Any]]:
    """The arrays and the keyword arguments of a case. Floors lie half-way between two tokens, away from rounding."""
    hidden, unembedding, targets = drawn(seed)
    temperature = np.linspace(0.5, 2.0, M).astype(np.float32) if case["temperature"] == "rows" else case["temperature"]
    ordered = np.sort([log_softmax(row) for row in logits(hidden, unembedding, temperature, case["softcap"])])[:, ::-1]
    floor = None
    if case["floor"] == "everything":
        floor = np.full(M, -np.inf, np.float32)
    elif case["floor"] is not None:
        share = 0.9 if case["floor"] == "top_p" else 0.3
        count = (np.cumsum(np.exp(ordered), axis=1) < share).sum(axis=1) + 1
        floor = np.array([(row[n - 1] + row[n]) / 2 for row, n in zip(ordered, count, strict=True)], np.float32)
        if case["floor"] == "without_target":
            targets = logits(hidden, unembedding, temperature, case["softcap"]).argmin(axis=1).astype(np.int32)
    floor = None if floor is None else jnp.asarray(floor)
    return (hidden, unembedding, targets), {
        "temperature": temperature,
        "softcap": case["softcap"],
        "support_floor": floor,
    }


STATIC = ("softcap", "block_size", "implementation")
values = jax.jit(fused_logprob, static_argnames=STATIC)


@partial(jax.jit, static_argnames=STATIC)
def evaluate(hidden: Any, unembedding: Any, targets: Any, cotangents: Any, **settings_: Any) -> tuple[Any, Any]:
    """(logp, entropy), and the gradients of their products with the cotangents: d hidden, d unembedding."""
    found, pull = jax.vjp(lambda *arrays: fused_logprob(*arrays, targets, **settings_), hidden, unembedding)
    return found, pull((cotangents[0], cotangents[1]))


def total(hidden: Any, unembedding: Any, targets: Any, **settings_: Any) -> jax.Array:
    return sum(map(jnp.sum, fused_logprob(hidden, unembedding, targets, **settings_)))


def random_cotangents(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(2, M)).astype(np.float32)


def assert_near(found: Any, wanted: Any, relative: float) -> None:
    """Largest error relative to the largest entry."""
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() <= relative * max(np.abs(wanted).max(), 1e-3)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_three_tokens_by_hand(implementation: str) -> None:
    # Probabilities 1/2, 1/4, 1/4; then only the first two; then the square of each, normalised, at temperature 1/2.
    unembedding = jnp.log(jnp.array([[2.0], [1.0], [1.0]]))
    call = partial(fused_logprob, jnp.ones((1, 1)), unembedding, implementation=implementation, block_size=2)
    np.testing.assert_allclose(call(jnp.array([1])), [[-np.log(4)], [1.5 * np.log(2)]], rtol=1e-6)
    found = call(jnp.array([1]), support_floor=jnp.log(jnp.array([0.3])))
    np.testing.assert_allclose(found, [[np.log(1 / 3)], [np.log(3) - 2 / 3 * np.log(2)]], rtol=1e-6)
    found = call(jnp.array([0]), temperature=0.5)
    np.testing.assert_allclose(found, [[np.log(2 / 3)], [np.log(6) - 2 / 3 * np.log(4)]], rtol=1e-6)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference_is_the_float64_loop(case: dict[str, Any]) -> None:
    arrays, settings_ = settled(case, seed=1)
    z = logits(*arrays[:2], settings_["temperature"], settings_["softcap"])
    kept = supports(z, arrays[2], settings_["support_floor"])
    if case["floor"] in ("top_p", "without_target"):
        assert all(1 < len(tokens) < V for tokens in kept)
    found = values(*arrays, **settings_, implementation="reference")
    np.testing.assert_allclose(found, by_loop(z, arrays[2], kept), rtol=1e-5, atol=1e-5)


def assert_blocked_is_the_reference(case: dict[str, Any], block_size: int) -> None:
    arrays, settings_ = settled(case, seed=2)
    wanted, slopes = evaluate(*arrays, random_cotangents(3), **settings_, implementation="reference")
    found, found_slopes = evaluate(*arrays, random_cotangents(3), **settings_, block_size=block_size)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    for slope, expected in zip(found_slopes, slopes, strict=True):
        assert_near(slope, expected, 1e-5)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_blocked_is_the_reference(case: dict[str, Any]) -> None:
    assert_blocked_is_the_reference(case, block_size=7)


@pytest.mark.parametrize("block_size", few(BLOCKS, (7, V + 9)))
def test_blocked_is_the_reference_at_any_block_size(block_size: int) -> None:
    for floor in (None, "top_p"):
        assert_blocked_is_the_reference({"softcap": 2.0, "temperature": "rows", "floor": floor}, block_size)


@pytest.mark.parametrize("case", few(CASES, CASES[::3]), ids=str)
def test_gradient_is_the_finite_difference(case: dict[str, Any]) -> None:
    (hidden, unembedding, targets), settings_ = settled(case, seed=4)
    cotangents = random_cotangents(5)
    setting = settings_["temperature"], settings_["softcap"]
    kept = supports(logits(hidden, unembedding, *setting), targets, settings_["support_floor"])

    def value(arrays: list[np.ndarray]) -> float:
        return float(np.sum(cotangents * np.stack(by_loop(logits(*arrays, *setting), targets, kept))))

    slopes = evaluate(hidden, unembedding, targets, cotangents, **settings_, block_size=7)[1]
    for which, slope in enumerate(slopes):
        wanted = np.zeros(slope.shape)
        for index in np.ndindex(*slope.shape):
            ends = []
            for step in (1e-5, -1e-5):
                moved = [hidden.astype(np.float64), unembedding.astype(np.float64)]
                moved[which][index] += step
                ends.append(value(moved))
            wanted[index] = (ends[0] - ends[1]) / 2e-5
        assert_near(slope, wanted, 2e-5)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**16), block_size=st.sampled_from((4, V)), temperature=st.floats(0.3, 3.0))
def test_invariances(seed: int, block_size: int, temperature: float) -> None:
    hidden, unembedding, targets = drawn(seed)
    random = np.random.default_rng(seed + 1)
    floor = jnp.asarray(random.uniform(-6, -2, M), jnp.float32)
    for support_floor in (None, floor):
        call = partial(values, support_floor=support_floor)
        wanted = call(hidden, unembedding, targets, temperature=temperature)
        same = partial(np.testing.assert_allclose, desired=wanted, rtol=2e-5, atol=2e-5)
        same(call(hidden, unembedding, targets, temperature=temperature, block_size=block_size))
        # Temperature is a scale of the hidden state; a vector added to all rows shifts all logits alike.
        same(call(hidden / np.float32(temperature), unembedding, targets, temperature=1.0, block_size=block_size))
        shift = random.normal(size=D).astype(np.float32)
        same(call(hidden, unembedding + shift, targets, temperature=temperature, block_size=block_size))
        # The order of the vocabulary does not matter, nor do the other rows.
        order = random.permutation(V)
        renamed = np.argsort(order)[targets]
        same(call(hidden, unembedding[order], renamed, temperature=temperature, block_size=block_size))
        alone = None if support_floor is None else support_floor[2:3]
        single = values(hidden[2:3], unembedding, targets[2:3], temperature=temperature, support_floor=alone)
        np.testing.assert_allclose(np.ravel(single), np.stack(wanted)[:, 2], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("block_size", [1, 2, 8])
@pytest.mark.parametrize("floor", [None, -np.inf, -3.0])
def test_extreme_logits(block_size: int, floor: float | None) -> None:
    unembedding = jnp.array([[-1e4], [1e4], [0.0], [1e4 - 2]])
    hidden, targets = jnp.ones((4, 1)), jnp.arange(4)
    settings_ = {"block_size": block_size, "support_floor": None if floor is None else jnp.full(4, floor)}
    logp, entropy = values(hidden, unembedding, targets, **settings_)
    top = -np.log1p(np.exp(-2.0))  # the other two tokens have probability zero
    np.testing.assert_allclose(logp, [top - 2e4, top, top - 1e4, top - 2], rtol=1e-6)
    np.testing.assert_allclose(entropy, np.full(4, -top + 2 * np.exp(top - 2)), rtol=1e-5)
    for slope in evaluate(hidden, unembedding, targets, np.ones((2, 4), np.float32), **settings_)[1]:
        assert np.isfinite(slope).all()


def test_target_below_a_far_likelier_excluded_token() -> None:
    # Nothing reaches the floor, so the target stands alone though others are e^20000 times as likely.
    unembedding, hidden = jnp.array([[-1e4], [1e4], [1e4], [0.0]]), jnp.ones((1, 1))
    settings_ = {"support_floor": jnp.array([-0.1]), "block_size": 2}
    found, slopes = evaluate(hidden, unembedding, jnp.array([0]), np.ones((2, 1), np.float32), **settings_)
    np.testing.assert_array_equal(found, [[0.0], [0.0]])
    for slope in slopes:
        np.testing.assert_array_equal(slope, np.zeros(slope.shape))


@pytest.mark.parametrize("level", [0.0, -3.0, 1e4])
def test_equal_logits_are_uniform_at_any_level(level: float) -> None:
    found = fused_logprob(jnp.ones((2, 1)), jnp.full((7, 1), level), jnp.array([0, 6]), block_size=3)
    np.testing.assert_allclose(found, [[-np.log(7)] * 2, [np.log(7)] * 2], rtol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_smallest_sizes_and_targets_out_of_range(implementation: str) -> None:
    call = partial(fused_logprob, implementation=implementation)
    np.testing.assert_array_equal(call(jnp.ones((1, 2)), jnp.ones((1, 2)), jnp.array([0])), [[0.0], [0.0]])
    assert [x.shape for x in call(jnp.ones((0, 2)), jnp.ones((3, 2)), jnp.zeros(0, jnp.int32))] == [(0,), (0,)]
    np.testing.assert_array_equal(call(jnp.ones((2, 2)), jnp.ones((3, 2)), jnp.array([3, -1]))[0], [-np.inf, -np.inf])


def test_bfloat16_inputs_sum_in_float32() -> None:
    (hidden, unembedding, targets), _ = settled(CASES[0], seed=6)
    low = jnp.asarray(hidden, jnp.bfloat16), jnp.asarray(unembedding, jnp.bfloat16)
    rounded = [np.asarray(array, np.float32) for array in low]
    z = logits(*rounded, 1.0, 0.0)
    cotangents = random_cotangents(7)
    found, slopes = evaluate(*low, targets, cotangents, block_size=7)
    np.testing.assert_allclose(found, by_loop(z, targets, supports(z, targets, None)), rtol=1e-5, atol=1e-5)
    assert found[0].dtype == found[1].dtype == jnp.float32
    _, exact = evaluate(*rounded, targets, cotangents, implementation="reference")
    for slope, wanted in zip(slopes, exact, strict=True):
        assert slope.dtype == jnp.bfloat16
        assert_near(slope, wanted, 1e-2)
    _, mixed = evaluate(low[0], rounded[1], targets, cotangents, block_size=7)
    assert [slope.dtype for slope in mixed] == [jnp.bfloat16, jnp.float32]
    assert_near(mixed[1], exact[1], 1e-5)


@pytest.mark.parametrize("case", few(CASES, CASES[::3]), ids=str)
def test_float64_loses_nothing(case: dict[str, Any]) -> None:
    (hidden, unembedding, targets), options = settled(case, seed=8)
    z = logits(hidden, unembedding, options["temperature"], case["softcap"])
    expected = by_loop(z, targets, supports(z, targets, options["support_floor"]))
    with jax.enable_x64(True):
        wide = jnp.asarray(hidden, jnp.float64), jnp.asarray(unembedding, jnp.float64)
        cotangents = jnp.asarray(random_cotangents(9), jnp.float64)
        found, slopes = evaluate(*wide, targets, cotangents, block_size=7, **options)
        _, exact = evaluate(*wide, targets, cotangents, implementation="reference", **options)
        assert {x.dtype for x in (*found, *slopes)} == {jnp.dtype(jnp.float64)}
        np.testing.assert_allclose(found, expected, rtol=1e-12)
        for slope, wanted in zip(slopes, exact, strict=True):
            assert_near(slope, wanted, 1e-13)


def test_rows_with_zero_cotangents_leave_no_trace() -> None:
    hidden, unembedding, targets = drawn(8)
    cotangents = random_cotangents(9)
    cotangents[:, 3:] = 0
    hidden[3:], targets[3:] = 1e4, 0
    _, whole = evaluate(hidden, unembedding, targets, cotangents, block_size=7)
    _, part = evaluate(hidden[:3], unembedding, targets[:3], cotangents[:, :3], block_size=7)
    np.testing.assert_array_equal(whole[0][3:], 0)
    assert_near(whole[1], part[1], 1e-6)


@pytest.mark.heavy
@pytest.mark.parametrize("floor", [None, -3.0])
def test_under_vmap_checkpoint_and_shard_map(floor: float | None) -> None:
    hidden, unembedding, targets = map(jnp.asarray, drawn(10))
    cotangents = random_cotangents(11)

    def loss(hidden: jax.Array, unembedding: jax.Array, targets: jax.Array, cotangents: Any) -> jax.Array:
        support_floor = None if floor is None else jnp.full(hidden.shape[:1], floor)
        logp, entropy = fused_logprob(hidden, unembedding, targets, block_size=7, support_floor=support_floor)
        return jnp.sum(cotangents[0] * logp) + jnp.sum(cotangents[1] * entropy)

    wanted = jax.jit(jax.grad(loss, argnums=(0, 1)))(hidden, unembedding, targets, cotangents)
    again = jax.jit(jax.grad(jax.checkpoint(loss), argnums=(0, 1)))(hidden, unembedding, targets, cotangents)
    halves = hidden.reshape(2, -1, D), unembedding, targets.reshape(2, -1), cotangents.reshape(2, 2, -1).swapaxes(0, 1)
    mapped = jax.jit(jax.vmap(jax.grad(loss, argnums=(0, 1)), in_axes=(0, None, 0, 0)))(*halves)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), "data")
    rows, all_ = jax.P("data"), jax.P()
    sharded = jax.shard_map(
        lambda *arrays: jax.lax.psum(loss(*arrays), "data"),
        mesh=mesh,
        in_specs=(rows, all_, rows, jax.P(None, "data")),
        out_specs=all_,
    )
    spread = jax.jit(jax.grad(sharded, argnums=(0, 1)))(hidden, unembedding, targets, cotangents)
    for found in (again, (mapped[0].reshape(M, D), mapped[1].sum(axis=0)), spread):
        assert_near(found[0], wanted[0], 1e-5)
        assert_near(found[1], wanted[1], 1e-5)


def test_temperature_floor_and_cotangent_of_hidden_alone() -> None:
    hidden, unembedding, targets = map(jnp.asarray, drawn(12))

    def loss(hidden: jax.Array, temperature: jax.Array, floor: jax.Array, implementation: str) -> jax.Array:
        settings_ = {"temperature": temperature, "support_floor": floor, "implementation": implementation}
        return total(hidden, unembedding, targets, **settings_)

    slope_of = jax.jit(jax.grad(loss, argnums=(0, 1, 2)), static_argnums=3)
    slopes = {name: slope_of(hidden, jnp.float32(0.7), jnp.full(M, -3.0), name) for name in IMPLEMENTATIONS}
    for name in IMPLEMENTATIONS:
        assert_near(slopes[name][0], slopes["reference"][0], 1e-5)
    for slope in slopes.values():
        assert slope[1] == 0
        np.testing.assert_array_equal(slope[2], 0)


def shaped(rows: int, width: int, vocabulary: int, dtype: Any = jnp.float32) -> tuple[jax.ShapeDtypeStruct, ...]:
    integers = jax.ShapeDtypeStruct((rows,), jnp.int32)
    return jax.ShapeDtypeStruct((rows, width), dtype), jax.ShapeDtypeStruct((vocabulary, width), dtype), integers


@pytest.mark.parametrize("floor", [False, True])
def test_no_array_is_as_large_as_the_logits(floor: bool) -> None:
    arrays = shaped(64, 8, 1000)

    def largest(**settings_: Any) -> int:
        settings_["support_floor"] = jnp.full(64, -3.0) if floor else None
        traced = jax.make_jaxpr(jax.value_and_grad(partial(total, **settings_), argnums=(0, 1)))(*arrays)
        return max(sizes(traced.jaxpr))

    assert largest(implementation="reference") >= 64 * 1000
    assert largest(block_size=128) == 64 * 128


def temporaries(argnums: Any, arrays: tuple[Any, ...], **settings_: Any) -> int:
    """Bytes of temporary memory of the compiled gradient."""
    compiled = jax.jit(jax.value_and_grad(partial(total, **settings_), argnums=argnums)).lower(*arrays).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@optimised
def test_compiled_memory() -> None:
    arrays = shaped(512, 64, 16384)
    blocked = temporaries((0, 1), arrays, block_size=1024)
    assert blocked < 6 * 4 * 512 * 1024
    assert temporaries((0, 1), arrays, implementation="reference") > 4 * blocked
    # A frozen unembedding gets no buffer for its gradient.
    assert temporaries(0, shaped(16, 256, 8192), block_size=512) < 4 * 8192 * 256 / 4


def test_lowers_for_cuda() -> None:
    gradient = jax.jit(jax.grad(partial(total, block_size=128, temperature=0.7), argnums=(0, 1)))
    text = gradient.trace(*shaped(64, 32, 1000, jnp.bfloat16)).lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.while" in text
    assert "64x1000" not in text


GOOD = {"hidden": jnp.ones((3, 2)), "unembedding": jnp.ones((5, 2)), "targets": jnp.zeros(3, jnp.int32)}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"hidden": jnp.ones(3)}, r"hidden must be .* matrix, found float32\[3\]"),
        ({"unembedding": jnp.ones((5, 2), jnp.int32)}, "unembedding must be a float32 or bfloat16"),
        ({"unembedding": jnp.ones((2, 5))}, r"same D, found \[3, 2\] and \[2, 5\]"),
        ({"unembedding": jnp.ones((0, 2))}, "the vocabulary is empty"),
        ({"targets": jnp.zeros(4, jnp.int32)}, r"targets must be int32\[3\], found int32\[4\]"),
        ({"targets": jnp.zeros(3)}, r"targets must be int32\[3\], found float32\[3\]"),
        ({"temperature": jnp.ones(2)}, r"temperature must be a scalar or f32\[3\]"),
        ({"temperature": 0.0}, "temperature must be above 0, found 0.0"),
        ({"support_floor": jnp.zeros((3, 1))}, r"support_floor must be f32\[3\], found shape \[3, 1\]"),
        ({"softcap": -1.0}, "softcap must be 0 .* found -1.0"),
        ({"block_size": 0}, "block_size must be at least 1, found 0"),
        ({"row_block": 0}, "row_block must be at least 1, found 0"),
        (
            {"implementation": "triton"},
            "unknown implementation 'triton': use None or one of pallas, xla, reference",
        ),
    ],
)
def test_errors_say_what_was_found(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fused_logprob(**{**GOOD, **change})


def test_one_float64_input_is_an_error() -> None:
    with jax.enable_x64(True), pytest.raises(ValueError, match="must both be float64, found float32 and float64"):
        fused_logprob(**{**GOOD, "unembedding": GOOD["unembedding"].astype(jnp.float64)})


def test_docstring_example() -> None:
    assert doctest.testmod(jaxrl_kernels.logprob) == (0, 4)
