"""`decode_attention` against a loop in float64 and its plain reference, and what it compiles to."""

from __future__ import annotations

import doctest
import importlib
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from heavy import few
from jaxrl_kernels import decode_attention
from jaxrl_kernels.decode_attention import MASKED, PartialAttention, merge
from other_process import result_of
from tpu_environment import tpu_environment

FAST = ("pallas", "xla")  # "reference" is "xla" here
STATIC = ("query_scale", "softcap", "window", "implementation", "tile")
attend = jax.jit(decode_attention, static_argnames=STATIC)
SCALE = 0.3


def drawn(P: int, K: int, W: int, R: int, h: int, S: int, dtype: Any = jnp.float32, seed: int = 0) -> dict[str, Any]:
    """Arguments: prompts of all lengths, one of them empty if there are several, and rows some way behind their ends.

    Columns without a token hold large numbers, as stores that were used before do.
    """
    random = np.random.default_rng(seed)
    length = random.integers(1, S + 1, P)
    length[0] = S
    length[1:2] = 1
    length[2:3] = 0
    k, v = random.normal(size=(2, P, K, S, h)) * 1.5
    behind = (np.arange(S) >= length[:, None])[:, None, :, None]
    k, v = np.where(behind, 90.0, k), np.where(behind, -90.0, v)
    out: dict[str, Any] = {
        "q": random.normal(size=(P, K, W, R, h)), "length": length, "position": length[:, None] + np.arange(W),
    }  # fmt: skip
    if dtype == jnp.int8:
        scales = np.maximum(np.abs(k).max(-1), 1e-3) / 127, np.maximum(np.abs(v).max(-1), 1e-3) / 127
        out["key_scale"], out["value_scale"] = (jnp.asarray(x, jnp.float32) for x in scales)
        k, v = (np.round(x / scale[..., None]) for x, scale in zip((k, v), scales, strict=True))
    out["keys"], out["values"] = jnp.asarray(k.swapaxes(2, 3), dtype), jnp.asarray(v, dtype)
    out["q"] = jnp.asarray(out["q"], jnp.float32 if dtype == jnp.int8 else dtype)
    out["length"], out["position"] = (jnp.asarray(out[name], jnp.int32) for name in ("length", "position"))
    return out


def expected(given: dict[str, Any], softcap: float = 0.0, window: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The attention's result and the logarithm of the sum of exp(logit), by a loop in float64; 0, -inf for nothing."""
    q, k, v = (np.asarray(given[name].astype(jnp.float32), np.float64) for name in ("q", "keys", "values"))
    if "key_scale" in given:
        k, v = k * np.asarray(given["key_scale"])[:, :, None], v * np.asarray(given["value_scale"])[..., None]
    P, K, W, R, _ = q.shape
    S = k.shape[3]
    out, log_sum = np.zeros(q.shape), np.full(q.shape[:4], -np.inf)
    for p in range(P):
        n = int(given["length"][p])
        first = max(n - S, 0)
        for w in range(W):
            seen = [s for s in range(min(n, S)) if not window or int(given["position"][p, w]) - (first + s) < window]
            if not seen:
                continue
            for head in range(K):
                for r in range(R):
                    z = SCALE * q[p, head, w, r] @ k[p, head][:, seen]
                    z = softcap * np.tanh(z / softcap) if softcap else z
                    weights = np.exp(z - z.max())
                    out[p, head, w, r] = weights @ v[p, head, seen] / weights.sum()
                    log_sum[p, head, w, r] = z.max() + np.log(weights.sum())
    return out, log_sum


def result(part: PartialAttention) -> tuple[np.ndarray, np.ndarray]:
    """As `expected`."""
    acc, m, l = (np.asarray(x, np.float64) for x in part)
    assert all(np.isfinite(x).all() for x in (acc, m, l))
    nothing = m == np.float32(MASKED)
    l = np.where(nothing, 1.0, l)
    return np.where(nothing[..., None], 0.0, acc / l[..., None]), np.where(nothing, -np.inf, m + np.log(l))


def compare(given: dict[str, Any], tile: int | None = None, tolerance: float = 2e-5, **numbers: Any) -> None:
    truth = expected(given, **numbers)
    for implementation in FAST:
        part = attend(**given, query_scale=SCALE, implementation=implementation, tile=tile, **numbers)
        for found, wanted in zip(result(part), truth, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance, err_msg=implementation)


# P, K, W, R, h, S and the tile: one tile that is all columns, several, a last one that is not full, one longer than S.
# Rows that share a prompt and rows alone with theirs; a block of all heads, and blocks of one where queries are many.
@pytest.mark.parametrize("shape, tile", [
    ((3, 2, 4, 3, 64, 48), None),
    ((3, 3, 2, 1, 64, 300), 128),
    pytest.param((4, 1, 1, 3, 64, 256), 128, marks=pytest.mark.heavy),
    pytest.param((3, 2, 1, 1, 128, 130), 128, marks=pytest.mark.heavy),
    pytest.param((2, 2, 64, 16, 64, 40), None, marks=pytest.mark.heavy),
    ((5, 2, 3, 4, 16, 1), None),
    ((3, 8, 2, 2, 128, 200), 256),
])  # fmt: skip
def test_against_a_loop(shape: tuple[int, ...], tile: int | None) -> None:
    compare(drawn(*shape), tile)


@pytest.mark.parametrize(
    "window, softcap",
    [(1, 0.0), (5, 2.0), *(pytest.param(*more, marks=pytest.mark.heavy) for more in ((130, 0.0), (500, 2.0)))],
)
def test_window_and_softcap(window: int, softcap: float) -> None:
    """Rows stand 0 to 3 behind the prompt's end, so that with a window of 1 or 5 some see nothing, or one column."""
    given = drawn(3, 2, 4, 2, 64, 150, seed=1)
    compare(given, 128, window=window, softcap=softcap)
    if window == 1:
        assert np.isneginf(expected(given, window=1)[1]).any()


def test_prompts_longer_than_the_store() -> None:
    """A layer with a window keeps the last tokens only: the first column is not position 0."""
    given = drawn(3, 2, 3, 2, 64, 140, seed=2)
    length = jnp.asarray([500, 141, 139], jnp.int32)
    given |= {"length": length, "position": length[:, None] + jnp.asarray([0, 30, 139])}
    given["keys"], given["values"] = (jnp.clip(given[name], -3, 3) for name in ("keys", "values"))
    compare(given, 128, window=140)


@pytest.mark.parametrize("dtype, tolerance", [(jnp.bfloat16, 2e-2), (jnp.int8, 2e-5)])
@pytest.mark.parametrize("shape", few([(3, 3, 4, 3, 64, 200), (3, 2, 1, 4, 128, 200)], [(3, 3, 4, 3, 64, 200)]))
def test_short_numbers(dtype: Any, tolerance: float, shape: tuple[int, ...]) -> None:
    """bfloat16: weights are rounded to 8 bits before the product with values of size 4; int8: exact but for float32."""
    compare(drawn(*shape, dtype), 128, tolerance)


def test_no_column_is_read_that_no_row_sees() -> None:
    """NaN in tiles behind all prompts' ends changes nothing: they are neither fetched nor computed."""
    given = drawn(2, 2, 2, 2, 64, 384, seed=3)
    given["length"] = jnp.asarray([100, 128], jnp.int32)
    for name, axis in (("keys", 3), ("values", 2)):
        there = (jnp.arange(384) < 128).reshape([-1 if i == axis else 1 for i in range(4)])
        given[name] = jnp.where(there, jnp.clip(given[name], -3, 3), jnp.nan)
    part = attend(**given, query_scale=SCALE, implementation="pallas", tile=128)
    truth = expected(given | {name: jnp.nan_to_num(given[name]) for name in ("keys", "values")})
    for found, wanted in zip(result(part), truth, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)


def test_large_logits_neither_overflow_nor_vanish() -> None:
    """The greatest logit comes in the last tile, or in the first: the others' sums fade, however far they are below."""
    given = drawn(2, 1, 1, 1, 64, 256, seed=4)
    given["length"] = jnp.asarray([256, 256], jnp.int32)
    keys = np.zeros((2, 1, 64, 256), np.float32)
    keys[0, 0, 0, 200], keys[1, 0, 0, 3] = 2000.0, 2000.0
    given |= {"keys": jnp.asarray(keys), "q": jnp.ones((2, 1, 1, 1, 64))}
    for implementation in FAST:
        found, log_sum = result(attend(**given, query_scale=1.0, implementation=implementation, tile=128))
        np.testing.assert_allclose(log_sum.ravel(), [2000.0, 2000.0])
        columns = np.asarray([given["values"][0, 0, 200], given["values"][1, 0, 3]])
        np.testing.assert_allclose(found.reshape(2, 64), columns, rtol=1e-6)


def test_parts_of_columns_merge_to_the_whole() -> None:
    """Halves of the columns as prompts of their own, one of them empty for some slot: the result of all columns."""
    given = drawn(3, 2, 2, 3, 64, 256, seed=5)
    given["length"] = jnp.asarray([256, 90, 129], jnp.int32)
    given["keys"], given["values"] = (jnp.clip(given[name], -3, 3) for name in ("keys", "values"))
    halves = []
    for start in (0, 128):
        cut = {"keys": given["keys"][..., start : start + 128], "values": given["values"][:, :, start : start + 128]}
        cut["length"] = jnp.clip(given["length"] - start, 0, 128)
        halves.append(attend(**given | cut, query_scale=SCALE, implementation="pallas"))
    np.testing.assert_allclose(merge(*halves), expected(given)[0], rtol=2e-5, atol=2e-5)


def test_on_a_cpu_it_is_the_reference_to_the_bit() -> None:
    for dtype in (jnp.float32, jnp.bfloat16, jnp.int8):
        given = drawn(3, 2, 4, 3, 64, 48, dtype)
        found, wanted = (attend(**given, window=7, implementation=way) for way in (None, "reference"))
        for x, y in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(x, y)


def test_of_many_models_at_once() -> None:
    """vmap over queries and caches, as over seeds of a run."""
    givens = [drawn(3, 2, 2, 3, 64, 140, seed=seed) for seed in (6, 7)]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *givens)
    for implementation in FAST:
        run = jax.vmap(lambda x: decode_attention(**x, query_scale=SCALE, implementation=implementation))  # noqa: B023
        found = jax.jit(run)(stacked)
        for number, given in enumerate(givens):
            for x, y in zip(result(PartialAttention(*(x[number] for x in found))), expected(given), strict=True):
                np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


def test_no_slot_gives_no_row() -> None:
    part = attend(
        jnp.zeros((0, 2, 3, 1, 8)), jnp.zeros((0, 2, 8, 5)), jnp.zeros((0, 2, 5, 8)), jnp.zeros(0, jnp.int32),
        jnp.zeros((0, 3), jnp.int32),
    )  # fmt: skip
    assert [x.shape for x in part] == [(0, 2, 3, 1, 8), (0, 2, 3, 1), (0, 2, 3, 1)]


def test_lowers_for_cuda() -> None:
    given = drawn(3, 2, 4, 3, 64, 200, jnp.bfloat16)
    text = jax.jit(decode_attention).trace(**given).lower(lowering_platforms=("cuda",)).as_text()
    assert "tensor<3x2x12x200xf32>" in text  # the logits of the plain path
    assert "tpu_custom_call" not in text


TPU_PROGRAM = r"""
import json, math, re, sys
from functools import partial
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jaxrl_kernels import decode_attention

def sizes(pattern, text):
    return [math.prod(map(int, dims.split(","))) for dims in re.findall(pattern, text)]

def report(chip, shape, dtype, numbers):
    P, K, W, R, h, S = shape
    one = jax.sharding.SingleDeviceSharding(topologies.get_topology_desc(platform="tpu", topology_name=chip).devices[0])
    kinds = {
        "q": ((P, K, W, R, h), "bfloat16"), "keys": ((P, K, h, S), dtype), "values": ((P, K, S, h), dtype),
        "length": ((P,), "int32"), "position": ((P, W), "int32"),
    }
    if dtype == "int8":
        kinds |= {name: ((P, K, S), "float32") for name in ("key_scale", "value_scale")}
    arrays = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=one) for name, (shape, dtype) in kinds.items()}
    compiled = jax.jit(partial(decode_attention, query_scale=0.1, **numbers)).lower(**arrays).compile()
    text = compiled.as_text()
    return {
        "kernels": text.count('"tpu_custom_call"'),
        "largest float32": max(sizes(r"f32\[([\d,]+)\]", text)),
        "largest copy": max(sizes(r"= \w+\[([\d,]+)\]\S* copy\(", text), default=0),
    }

print("RESULT" + json.dumps([report(*case) for case in json.loads(sys.argv[1])]))
"""
# P, K, W, R, h, S. Shared prompts and one of each row; small and large groups; the greatest number of queries.
COMPILED = [
    ((4, 3, 16, 3, 64, 1024), "bfloat16", {}),
    ((16, 3, 1, 3, 64, 1024), "bfloat16", {}),
    ((4, 2, 16, 4, 128, 2000), "bfloat16", {}),
    ((4, 8, 64, 16, 128, 4096), "bfloat16", {"softcap": 30.0}),
    ((4, 4, 8, 2, 128, 1024), "int8", {"window": 1024}),
    ((4, 3, 8, 3, 64, 512), "float32", {"window": 100}),
    ((2, 1, 1, 1, 64, 256), "bfloat16", {}),
]


@pytest.mark.heavy
@pytest.mark.parametrize("chip", ["v5e:2x2", "v6e:2x2"])
def test_compiles_for_tpu_as_a_mosaic_kernel(chip: str) -> None:
    cases = json.dumps([(chip, *case) for case in COMPILED])
    for case, found in zip(COMPILED, result_of(TPU_PROGRAM, cases, environment=tpu_environment()), strict=True):
        P, K, W, R, h, S = case[0]
        assert found["kernels"] == 1, case
        # The largest float32 arrays are results, or arguments: no logits. Neither keys nor values are copied.
        given = P * K * S * (h if case[1] == "float32" else case[1] == "int8")
        assert found["largest float32"] <= max(P * K * W * R * h, given), case
        assert found["largest copy"] <= P * K * W * R * h < P * K * S * h, case


GOOD: dict[str, Any] = drawn(2, 3, 4, 1, 5, 6)


@pytest.mark.parametrize("change, message", [
    ({"q": jnp.ones((2, 3, 4, 5))}, r"q must be .* \[P, K, W, R, h\], found float32\[2, 3, 4, 5\]"),
    ({"q": jnp.ones((2, 3, 4, 1, 5), jnp.int8)}, "q must be float32 or bfloat16 .*, found int8"),
    ({"keys": jnp.ones((2, 3, 6, 5))}, r"keys must be .* \[2, 3, 5, S\], found float32\[2, 3, 6, 5\]"),
    ({"keys": jnp.ones((2, 3, 5, 0))}, "keys must be"),
    ({"keys": jnp.ones((2, 3, 5, 6), jnp.int32)}, "keys must be floating or int8"),
    ({"values": jnp.ones((2, 3, 5, 6))}, r"values must be float32\[2, 3, 6, 5\], .* found float32\[2, 3, 5, 6\]"),
    ({"values": jnp.ones((2, 3, 6, 5), jnp.int8)}, "as the keys are, found int8"),
    ({"length": jnp.ones(3, jnp.int32)}, r"length must be int32\[2\], found int32\[3\]"),
    ({"length": jnp.ones(2)}, "length must be int32.*found float32"),
    ({"position": jnp.ones((2, 3), jnp.int32)}, r"position must be int32\[2, 4\], found int32\[2, 3\]"),
    ({"key_scale": jnp.ones((2, 3, 6))}, "pass both key_scale and value_scale, or neither"),
    ({"key_scale": jnp.ones((2, 3, 6)), "value_scale": jnp.ones((2, 6))}, r"value_scale must be float32\[2, 3, 6\]"),
    ({"softcap": -1.0}, "softcap must be 0 .* found -1.0"),
    ({"window": -1}, "window must be 0 .* found -1"),
    ({"tile": 100}, "tile must be a multiple of 128, found 100"),
    ({"tile": 0}, "tile must be a multiple of 128, found 0"),
    ({"implementation": "triton"}, "unknown implementation 'triton': use None or one of pallas, xla, reference"),
])  # fmt: skip
def test_errors_say_what_was_found(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode_attention(**GOOD | change)


def test_the_examples_in_the_docstrings() -> None:
    # The function has the name of its package.
    found = doctest.testmod(importlib.import_module("jaxrl_kernels.decode_attention"))
    assert found.attempted == 11, found
    assert found.failed == 0, found
