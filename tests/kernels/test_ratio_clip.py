"""`ratio_clip` against worked numbers, a slow loop in double precision, finite differences and JAX's own derivative."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from heavy import few
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxrl_kernels import IMPLEMENTATIONS, ratio_clip
from jaxrl_kernels.ratio_clip import Clipped
from jaxrl_kernels.ratio_clip.rows import k3
from other_process import result_of
from tpu_environment import tpu_environment

FAST = ("xla", "pallas")
LEVELS = {
    "token": {"whole_row": False},
    "row mean": {"whole_row": True, "mean": True},
    "row sum": {"whole_row": True, "mean": False},
}
CLIPS = {
    "symmetric": {"low": 0.2, "high": 0.2},
    "asymmetric": {"low": 0.1, "high": 0.35},
    "dual": {"low": 0.2, "high": 0.28, "dual": 1.5},
}

Derived = tuple[Clipped, np.ndarray]


@partial(jax.jit, static_argnames=("whole_row", "mean", "implementation", "row_block"))
def derived(logp: Any, *arrays: Any, factor: Any = 1.0, **given: Any) -> Any:
    """What is told, and the gradient by logp of sum_n factor_n value_n."""

    def total(logp: jax.Array) -> tuple[jax.Array, Clipped]:
        told = ratio_clip(logp, *arrays, **given)
        return jnp.sum(factor * told.value), told

    gradient, told = jax.grad(total, has_aux=True)(logp)
    return told, gradient


def drawn(seed: int, N: int = 6, L: int = 9, scale: float = 0.4) -> tuple[jax.Array, ...]:
    """logp, other, advantages, weights (some 0, a row of them) and weights in the value."""
    random = np.random.default_rng(seed)
    logp, other = random.normal(-1, scale, (2, N, L))
    logp += np.linspace(-0.7, 0.7, N)[:, None]  # rows whose ratio is low, and high
    advantages = np.where(random.random((N, L)) < 0.1, 0, random.normal(size=(N, L)))
    weights = random.choice([0.0, 0.5, 1.0, 2.0], (N, L), p=[0.3, 0.1, 0.5, 0.1])
    weights[N // 2] = 0
    return tuple(jnp.asarray(x, jnp.float32) for x in (logp, other, advantages, weights, random.random((N, L))))


def by_loop(
    logp: Any,
    other: Any,
    advantages: Any,
    weights: Any,
    value_weights: Any,
    low: float,
    high: float,
    dual: float | None = None,
    whole_row: bool = False,
    mean: bool = True,
) -> np.ndarray:
    """value, ratio, cut_low, cut_high, kl and greatest of each row, token after token in double precision, [N, 6]."""
    rows = []
    for n in range(len(logp)):
        at = [t for t in range(len(logp[n])) if weights[n][t] != 0]
        d = {t: max(-20.0, min(20.0, float(logp[n][t]) - float(other[n][t]))) for t in at}
        whole = sum(d.values()) / (len(at) if mean and at else 1)
        told = [0.0] * 6
        for t in at:
            rho, A, w = np.exp(max(-20.0, min(20.0, whole if whole_row else d[t]))), advantages[n][t], weights[n][t]
            value = min(rho * A, max(1 - low, min(1 + high, rho)) * A)
            if dual is not None and A < 0:
                value = max(value, dual * A)
            told[0] += value_weights[n][t] * value
            told[1] += w * rho
            told[2] += w * (rho < 1 - low and A < 0)
            told[3] += w * (rho > 1 + high and A > 0)
            told[4] += w * (np.exp(-d[t]) - 1 + d[t])
            told[5] = max(told[5], rho)
        rows.append(told)
    return np.array(rows, np.float64).reshape(-1, 6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_two_tokens_by_hand(implementation: str) -> None:
    # Ratios 1.5 with A = 2: cut at 1.2; 0.5 with A = -1: cut at 0.8; 1.5 with A = -1; 1 with A = 3, not counted.
    logp = jnp.log(jnp.array([[0.3, 0.1], [0.3, 0.2]]))
    other = jnp.log(jnp.array([[0.2, 0.2], [0.2, 0.2]]))
    arrays = logp, other, jnp.array([[2.0, -1.0], [-1.0, 3.0]]), jnp.array([[1.0, 1.0], [2.0, 0.0]])
    told, slope = derived(*arrays, implementation=implementation)
    np.testing.assert_allclose(told.value, [2.4 - 0.8, 2 * -1.5], rtol=1e-6)
    np.testing.assert_allclose(slope, [[0, 0], [-3, 0]], rtol=1e-6)
    np.testing.assert_allclose(told.ratio, [2.0, 3.0], rtol=1e-6)
    assert [told.cut_low.tolist(), told.cut_high.tolist()] == [[1, 0], [1, 0]]
    np.testing.assert_allclose(
        told.kl, [1 / 1.5 + 1 / 0.5 - 2 + np.log(0.75), 2 * (1 / 1.5 - 1 + np.log(1.5))], rtol=1e-5
    )
    np.testing.assert_allclose(told.max_ratio, [1.5, 1.5], rtol=1e-6)
    # The dual clip holds the bad action at 1.25 times its advantage, without gradient.
    told, slope = derived(*arrays, dual=1.25, implementation=implementation)
    np.testing.assert_allclose(told.value, [1.6, -2.5], rtol=1e-6)
    np.testing.assert_array_equal(slope, 0)
    # The row's ratios: sqrt(1.5 * 0.5) = 0.866 and 1.5, within (0.5, 1.6): each token moves both.
    told, slope = derived(*arrays, low=0.5, high=0.6, whole_row=True, implementation=implementation)
    s = np.sqrt(0.75)
    np.testing.assert_allclose(told.value, [2 * s - s, -3], rtol=1e-6)
    np.testing.assert_allclose(slope, [[s / 2, s / 2], [-3, 0]], rtol=1e-5)
    # Their product 0.75: each token moves it with its full weight.
    told, slope = derived(*arrays, low=0.5, high=0.6, whole_row=True, mean=False, implementation=implementation)
    np.testing.assert_allclose(slope, [[0.75, 0.75], [-3, 0]], rtol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("clip", few(CLIPS, ["dual"]))
@pytest.mark.parametrize("level", LEVELS)
def test_values_of_a_loop_and_slopes_by_finite_differences(level: str, clip: str, implementation: str) -> None:
    *arrays, value_weights = drawn(3)
    given = {**LEVELS[level], **CLIPS[clip]}
    told, slope = derived(*arrays, value_weights=value_weights, implementation=implementation, **given)
    exact = [np.asarray(x, np.float64) for x in (*arrays, value_weights)]
    np.testing.assert_allclose(np.stack(told, axis=1), by_loop(*exact, **given), rtol=2e-5, atol=2e-6)
    numeric, step = np.zeros(slope.shape), 1e-7
    for at in np.ndindex(slope.shape):
        change = np.zeros(slope.shape)
        change[at] = step
        up, down = (by_loop(exact[0] + sign * change, *exact[1:], **given)[:, 0].sum() for sign in (1, -1))
        numeric[at] = (up - down) / (2 * step)
    np.testing.assert_allclose(slope, numeric, rtol=1e-4, atol=1e-5)
    # The draw has what it should: some tokens are cut on both sides, some are not, and a row does not count.
    assert np.sum(told.cut_low) > 0
    assert np.sum(told.cut_high) > 0
    assert np.count_nonzero(slope) > 5
    assert told.max_ratio[3] == told.value[3] == 0


@pytest.mark.parametrize("implementation", few(FAST, ["pallas"]))
@pytest.mark.parametrize("level", LEVELS)
def test_derivative_at_kinks_is_that_of_the_formula(level: str, implementation: str) -> None:
    """Ratios of exactly 1 at the edge of the range, of exactly 1 + high, log-ratios at their bound and beyond it."""
    logp = jnp.array([[0.0, 0.0, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25], [20.0, 30.0, -20.0, -25.0], [20, 20, 20, 20]])
    A = jnp.array([[1.0, -1.0, 0.0, 2.0], [1.0, -1.0, 0.5, 1.0], [1.0, -1.0, -1.0, 1.0], [-1.0, -1.0, -1.0, -1.0]])
    arrays = logp, jnp.zeros((4, 4)), A, jnp.ones((4, 4))
    for low, high, dual in ((0.0, 0.0, None), (0.0, float(np.exp(np.float32(0.25))) - 1, None), (0.2, 0.2, 1.1)):
        given = {"low": low, "high": high, "dual": dual, **LEVELS[level]}
        wanted = derived(*arrays, implementation="reference", **given)
        found = derived(*arrays, implementation=implementation, **given)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6)
    # An edge met on policy, by hand: half the gradient of rho A, and half of the bounded one, whose own half is cut.
    _, slope = derived(*arrays, low=0.0, high=0.0, implementation=implementation)
    np.testing.assert_allclose(slope[0], [0.625, -0.625, 0, 1.25], rtol=1e-6)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), level=st.sampled_from(list(LEVELS)), clip=st.sampled_from(list(CLIPS)))
def test_order_of_rows_and_padding_change_nothing(seed: int, level: str, clip: str) -> None:
    N, L = 6, 9
    arrays = drawn(seed)
    given = {**LEVELS[level], **CLIPS[clip], "implementation": "xla"}

    def of(*arrays: Any) -> Derived:
        return derived(*arrays[:4], value_weights=arrays[4], **given)

    told, slope = of(*arrays)
    order = np.random.default_rng(seed).permutation(N)
    again, moved = of(*(x[order] for x in arrays))
    np.testing.assert_array_equal(moved, slope[order])
    np.testing.assert_array_equal(np.stack(again), np.stack(told)[:, order])
    # Padding before and behind, which may hold anything where the weight is 0.
    garbage = np.resize([np.nan, np.inf, -np.inf, 7.0], (N, 7))
    padded = [jnp.concatenate([garbage[:, :3], x, garbage[:, 3:]], axis=1).astype(jnp.float32) for x in arrays]
    padded[3] = jnp.pad(arrays[3], ((0, 0), (3, 4)))
    again, wide = of(*padded)
    np.testing.assert_allclose(np.stack(again), np.stack(told), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(wide[:, 3 : 3 + L], slope, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(wide[:, :3], 0)
    np.testing.assert_array_equal(wide[:, 3 + L :], 0)


@pytest.mark.parametrize("implementation", FAST)
@pytest.mark.parametrize("level", LEVELS)
def test_what_does_not_count_may_be_anything(level: str, implementation: str) -> None:
    arrays = drawn(5)
    hole = np.asarray(arrays[3]) == 0
    garbage = np.resize([np.nan, np.inf, -np.inf], hole.shape)
    dirty = [jnp.where(hole, garbage, x) if place != 3 else x for place, x in enumerate(arrays)]
    given = {**LEVELS[level], "dual": 2.0, "implementation": implementation}
    clean, found = (derived(*x[:4], value_weights=x[4], **given) for x in (arrays, dirty))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(clean), strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("implementation", FAST)
@pytest.mark.parametrize(
    "shape", few([(0, 5), (3, 0), (1, 1), (33, 130), (16, 128), (7, 300)], [(0, 5), (1, 1), (33, 130)])
)
def test_sizes(shape: tuple[int, int], implementation: str) -> None:
    random = np.random.default_rng(7)
    arrays = [jnp.asarray(random.normal(size=shape), jnp.float32) for _ in range(3)]
    weights = jnp.asarray(random.random(shape) < 0.8, jnp.float32)
    factor = jnp.asarray(random.normal(size=shape[0]), jnp.float32)
    for level in ("token", "row mean"):
        given = {"factor": factor, "row_block": 8, **LEVELS[level]}
        wanted = derived(*arrays, weights, implementation="reference", **given)
        found = derived(*arrays, weights, implementation=implementation, **given)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            assert a.shape == b.shape
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_k3_is_exact_where_its_terms_cancel() -> None:
    x = np.concatenate([-np.logspace(-6, 1.3, 400), np.logspace(-6, 1.3, 400), [0.5, -0.5]]).astype(np.float32)
    exact = np.expm1(-x.astype(np.longdouble)) + x
    small = np.abs(x) < 1e-2
    exact[small] = (
        x.astype(np.longdouble) ** 2 / 2 - x.astype(np.longdouble) ** 3 / 6 + x.astype(np.longdouble) ** 4 / 24
    )[small]
    np.testing.assert_allclose(k3(jnp.asarray(x)), exact, rtol=2e-6)
    assert float(k3(jnp.float32(0))) == 0


def test_bounds_may_be_traced_and_mapped() -> None:
    arrays = drawn(8)[:4]
    lows, highs, duals = jnp.array([0.1, 0.3]), jnp.array([0.2, 0.4]), jnp.array([1.5, 3.0])
    for implementation in FAST:
        mapped = jax.vmap(
            lambda low, high, dual, name=implementation: derived(
                *arrays, low=low, high=high, dual=dual, whole_row=True, implementation=name
            )
        )(lows, highs, duals)
        for n in range(2):
            one = {"low": float(lows[n]), "high": float(highs[n]), "dual": float(duals[n]), "whole_row": True}
            wanted = derived(*arrays, implementation="reference", **one)
            for a, b in zip(jax.tree.leaves(mapped), jax.tree.leaves(wanted), strict=True):
                np.testing.assert_allclose(a[n], b, rtol=1e-5, atol=1e-5)


def test_one_array_is_kept_for_the_backward_pass() -> None:
    arrays = drawn(9, 8, 64)[:4]
    for level in LEVELS.values():
        _, back = jax.vjp(lambda x, level=level: ratio_clip(x, *arrays[1:], **level).value, arrays[0])
        assert sum(x.size >= 8 * 64 for x in jax.tree.leaves(back)) == 1


def test_only_the_value_has_a_gradient_and_only_by_logp() -> None:
    arrays = drawn(10)[:4]
    for implementation in IMPLEMENTATIONS:
        of = partial(ratio_clip, implementation=implementation)
        by_all = jax.grad(lambda *x, of=of: jnp.sum(of(*x).value), argnums=(0, 1, 2, 3))(*arrays)
        assert np.count_nonzero(by_all[0]) > 5
        assert not any(np.any(x) for x in by_all[1:])
        statistics = jax.grad(lambda x, of=of: sum(jnp.sum(s) for s in of(x, *arrays[1:])[1:]))(arrays[0])
        np.testing.assert_array_equal(statistics, 0)


def test_inside_shard_map_it_derives_too() -> None:
    arrays = drawn(11)[:4]
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    rows = jax.P("data")
    for implementation in (None, "xla", "reference"):
        of = partial(derived, whole_row=True, implementation=implementation)
        spread = jax.shard_map(of, mesh=mesh, in_specs=rows, out_specs=rows)
        for a, b in zip(jax.tree.leaves(spread(*arrays)), jax.tree.leaves(of(*arrays)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_each_platform_gets_its_program() -> None:
    shapes = [jax.ShapeDtypeStruct((16, 256), jnp.float32)] * 4
    traced = derived.trace(*shapes, whole_row=True)
    for platform, kernels in (("cpu", 0), ("cuda", 0), ("tpu", 1)):
        assert traced.lower(lowering_platforms=(platform,)).as_text().count("tpu_custom_call") == kernels, platform
    # Rows that do not fit in memory whole are left to XLA.
    long = [jax.ShapeDtypeStruct((8, 20000), jnp.float32)] * 4
    assert "tpu_custom_call" not in derived.trace(*long).lower(lowering_platforms=("tpu",)).as_text()


ON_TPU = """
import json
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jaxrl_kernels import ratio_clip

devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
mesh = jax.sharding.Mesh(np.array(devices), ("data",))

def step(logp, other, advantages, mask, implementation=None, **level):
    weights = jnp.where(mask, 1.0, 0.0)
    share = weights / jnp.maximum(jnp.sum(weights, axis=1, keepdims=True), 1)

    def loss(logp):
        told = ratio_clip(
            logp, other, advantages, weights, value_weights=share, implementation=implementation, **level
        )
        return jnp.sum(told.value), told

    gradient, told = jax.grad(loss, has_aux=True)(logp)
    return gradient, told

def report(program, shape, place):
    kinds = [jnp.float32] * 3 + [jnp.bool_]
    arrays = [jax.ShapeDtypeStruct(shape, kind, sharding=place) for kind in kinds]
    compiled = jax.jit(program).lower(*arrays).compile()
    moved = compiled.cost_analysis()["bytes accessed"]
    return [compiled.as_text().count('"tpu_custom_call"'), moved, compiled.memory_analysis().temp_size_in_bytes]

one = jax.sharding.SingleDeviceSharding(devices[0])
rows = jax.P("data")
spread = lambda *x: step(*x, whole_row=True)
levels = {"token": {"dual": 3.0}, "row": {"whole_row": True}}
found = {f"{name} {kind}": report(lambda *x, k=kind, l=level: step(*x, implementation=k, **l), (512, 1024), one)
         for name, level in levels.items() for kind in (None, "reference")}
found["long"] = report(lambda *x: step(*x, whole_row=True, dual=2.0), (13, 16384), one)
found["small"] = report(lambda *x: step(*x, whole_row=True), (5, 77), one)
found["spread"] = report(spread, (512, 1024), jax.sharding.NamedSharding(mesh, rows))
print("RESULT" + json.dumps(found))
"""


@pytest.mark.heavy
def test_compiles_for_tpus_and_moves_less_than_the_formula() -> None:
    found = result_of(ON_TPU, environment=tpu_environment())
    for name in ("token None", "row None", "long", "small", "spread"):
        assert found[name][0] == 1, name
    array = 4 * 512 * 1024
    for level in ("token", "row"):
        assert found[f"{level} reference"][0] == 0
        assert found[f"{level} None"][1] < 0.75 * found[f"{level} reference"][1]
        # Three arrays and the mask in, the slope out and in again, the gradient out.
        assert found[f"{level} None"][1] < 7 * array
        assert found[f"{level} None"][2] < array  # no temporary of that size


GOOD: dict[str, Any] = dict(zip(("logp", "other", "advantages", "weights"), drawn(12)[:4], strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logp": jnp.ones(6)}, r"logp must be a float32 matrix, found float32\[6\]"),
        ({"logp": jnp.ones((6, 9), jnp.bfloat16)}, r"found bfloat16\[6, 9\]"),
        ({"other": jnp.ones((6, 8))}, r"other must be float32\[6, 9\] as logp is, found float32\[6, 8\]"),
        ({"weights": jnp.ones((6, 9), bool)}, r"weights must be float32\[6, 9\] as logp is, found bool"),
        ({"value_weights": jnp.ones((6, 1))}, r"value_weights must be float32\[6, 9\]"),
        ({"low": 1.5}, "low must be at least 0 and at most 1, found 1.5"),
        ({"low": float("nan")}, "low must be at least 0"),
        ({"high": -0.1}, "high must be at least 0, found -0.1"),
        ({"high": jnp.ones((6, 9))}, r"high must be a number, found shape \[6, 9\]"),
        ({"dual": 1.0}, "dual must be above 1, found 1.0"),
        ({"row_block": 12}, "row_block must be a multiple of 8, found 12"),
        ({"implementation": "fast"}, "unknown implementation 'fast'"),
    ],
)
def test_errors_say_what_was_found_and_what_is_expected(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ratio_clip(**{**GOOD, **change})
