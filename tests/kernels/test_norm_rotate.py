"""`norm_rotate` against a loop over tokens and heads in float64, and what it compiles to."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from heavy import few
from jaxrl_kernels import norm_rotate
from other_process import result_of
from tpu_environment import tpu_environment

FAST = ("pallas", "xla")
ONE_TOKEN = [(32, 1, 3, 128), (1056, 1, 2, 256)]  # of each row, as in a decode step; the latter in three blocks
SHAPES = few([(2, 256, 3, 16), (1, 128, 2, 128), (1, 1152, 5, 64), *ONE_TOKEN], [(2, 256, 3, 16), ONE_TOKEN[0]])


def drawn(shape: tuple[int, ...], dtype: Any) -> list[jax.Array]:
    """x, weight, cos and sin."""
    N, L, _, h = shape
    random = np.random.default_rng(L)
    angle = random.uniform(0, 6, (N, L, h // 2))
    arrays = random.normal(size=shape), random.normal(size=h), np.cos(angle), np.sin(angle)
    return [jnp.asarray(x, dtype if i < 2 else jnp.promote_types(dtype, jnp.float32)) for i, x in enumerate(arrays)]


def expected(x: Any, weight: Any, cos: Any, sin: Any, epsilon: float, offset: float) -> np.ndarray:
    """One head of one token at a time, as a product with a matrix of rotations."""
    x, cos, sin = (np.asarray(a, np.float64) for a in (x, cos, sin))
    N, L, H, h = x.shape
    out = np.zeros(x.shape)
    for n in range(N):
        for t in range(L):
            turn = np.zeros((h, h))
            for i in range(h // 2):
                j = i + h // 2
                turn[i, i] = turn[j, j] = cos[n, t, i]
                turn[i, j], turn[j, i] = -sin[n, t, i], sin[n, t, i]
            for head in range(H):
                y = x[n, t, head]
                if weight is not None:
                    y = y / np.sqrt(np.mean(y**2) + epsilon) * (offset + np.asarray(weight, np.float64))
                out[n, t, head] = turn @ y
    return out


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scaled", [False, True])
def test_against_a_loop(shape: tuple[int, ...], scaled: bool) -> None:
    with jax.enable_x64(True):
        x, weight, cos, sin = drawn(shape, jnp.float64)
        given = x, weight if scaled else None, cos, sin
        truth = expected(*given, 1e-3, 1.0)
        for way in FAST:
            found = norm_rotate(*given, epsilon=1e-3, offset=1.0, implementation=way)
            np.testing.assert_allclose(found, truth, rtol=1e-12, atol=1e-12, err_msg=way)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scaled", [False, True])
def test_gradients(shape: tuple[int, ...], scaled: bool) -> None:
    """The kernel's are those of the formula, which JAX differentiates, and agree with finite differences."""
    with jax.enable_x64(True):
        x, weight, cos, sin = drawn(shape, jnp.float64)
        w = jnp.cos(jnp.arange(x.size).reshape(x.shape))

        def loss(x: Any, weight: Any, way: str) -> Any:
            return jnp.sum(w * norm_rotate(x, weight if scaled else None, cos, sin, epsilon=1e-3, implementation=way))

        by_kernel, by_formula = (jax.grad(loss, (0, 1))(x, weight, way) for way in FAST)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-11), by_kernel, by_formula)
        random = np.random.default_rng(1)
        dx, dw = (jnp.asarray(random.normal(size=a.shape)) for a in (x, weight))
        step = 1e-5
        apart = [loss(x + sign * step * dx, weight + sign * step * dw, "xla") for sign in (1, -1)]
        slope = sum(jnp.vdot(a, b) for a, b in zip(by_kernel, (dx, dw), strict=True))
        np.testing.assert_allclose(slope, (apart[0] - apart[1]) / (2 * step), rtol=1e-6)


@pytest.mark.parametrize("dtype, tolerance", [(jnp.float32, 1e-5), (jnp.bfloat16, 2e-2)])
@pytest.mark.parametrize("shape", [(1, 128, 2, 32), ONE_TOKEN[0]])
def test_short_numbers(dtype: Any, tolerance: float, shape: tuple[int, ...]) -> None:
    given = drawn(shape, dtype)
    truth = expected(*(a.astype(jnp.float32) for a in given), 1e-6, 0.0)
    for way in FAST:
        found = norm_rotate(*given, implementation=way)
        assert found.dtype == dtype
        np.testing.assert_allclose(found.astype(jnp.float32), truth, rtol=tolerance, atol=tolerance, err_msg=way)


@pytest.mark.parametrize("shape", [(1, 100, 2, 16), (24, 1, 2, 128), (32, 1, 2, 64)])
def test_shapes_that_the_kernel_does_not_take(shape: tuple[int, ...]) -> None:
    x, weight, cos, sin = drawn(shape, jnp.float32)
    found = norm_rotate(x, weight, cos, sin, implementation="pallas")
    np.testing.assert_array_equal(found, norm_rotate(x, weight, cos, sin, implementation="reference"))


def test_lowers_for_cuda() -> None:
    given = drawn((1, 128, 2, 32), jnp.bfloat16)
    gradient = jax.grad(lambda *x: jnp.sum(norm_rotate(*x).astype(jnp.float32)), (0, 1))
    for function in (norm_rotate, gradient):
        text = jax.jit(function).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
        assert "custom_call" not in text


PROGRAM = r"""
import json
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jaxrl_kernels import norm_rotate

def report(chip, H, h, T, dtype):
    one = jax.sharding.SingleDeviceSharding(topologies.get_topology_desc(platform="tpu", topology_name=chip).devices[0])
    of = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=one)

    def both(x, weight, cos, sin, dy):
        x, dy = (a.swapaxes(1, 2).reshape(1, T, H, h) for a in (x, dy))
        out, pull = jax.vjp(lambda x, w: norm_rotate(x, w, cos, sin), x, weight)
        dx, dw = pull(dy)
        return [a.reshape(1, T, -1).swapaxes(1, 2) for a in (out, dx)], dw

    x, angle = of(dtype, 1, H * h, T), of("float32", 1, T, h // 2)
    done = jax.jit(both).lower(x, of(dtype, h), angle, angle, x).compile()
    return [done.as_text().count('custom_call_target="tpu_custom_call"'), done.cost_analysis()["bytes accessed"]]

def of_rows(chip, N, H, h, dtype):
    one = jax.sharding.SingleDeviceSharding(topologies.get_topology_desc(platform="tpu", topology_name=chip).devices[0])
    of = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=one)
    angle = of("float32", N, 1, h // 2)
    done = jax.jit(norm_rotate).lower(of(dtype, N, 1, H, h), of("float32", h), angle, angle).compile()
    return done.as_text().count('custom_call_target="tpu_custom_call"')

print("RESULT" + json.dumps([
    report("v5e:2x2", 32, 128, 17408, "bfloat16"), report("v6e:2x2", 9, 64, 1152, "float32"),
    [of_rows("v6e:2x2", 64, 8, 128, "bfloat16"), of_rows("v5e:2x2", 256, 64, 128, "float32")],
]))
"""


@pytest.mark.heavy
def test_compiles_for_tpus() -> None:
    (kernels, moved), (others, _), of_rows = result_of(PROGRAM, environment=tpu_environment())
    assert of_rows == [1, 1]
    assert kernels == others == 2
    assert moved <= 1.2 * 5 * 32 * 128 * 17408 * 2, "x twice, dy, the result and dx"


@pytest.mark.parametrize("change, message", [
    ({"x": jnp.ones((1, 4, 16))}, r"x must be floating \[N, L, H, h\] with an even h, found float32\[1, 4, 16\]"),
    ({"x": jnp.ones((1, 4, 2, 15))}, r"with an even h, found"),
    ({"cos": jnp.ones((1, 4, 16))}, r"cos must be float32\[1, 4, 8\], found float32\[1, 4, 16\]"),
    ({"weight": jnp.ones(8)}, r"weight must be \[16\], found float32\[8\]"),
    ({"implementation": "triton"}, "unknown implementation 'triton'"),
])  # fmt: skip
def test_errors_say_what_was_found(change: dict[str, Any], message: str) -> None:
    good = {"x": jnp.ones((1, 4, 2, 16)), "weight": None, "cos": jnp.ones((1, 4, 8)), "sin": jnp.ones((1, 4, 8))}
    with pytest.raises(ValueError, match=message):
        norm_rotate(**good | change)
