"""`own_attention` against a loop over the tokens of each row's ring in float64, and what it compiles to."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxrl_kernels.decode_attention import IMPLEMENTATIONS, own_attention
from tpu_environment import tpu_environment

attend = jax.jit(own_attention, static_argnames=("query_scale", "softcap", "window", "implementation", "tile"))
SCALE = 0.3


def drawn(B: int, K: int, R: int, h: int, S: int, step: int, dtype: Any = jnp.float32) -> dict[str, Any]:
    """Arguments: rows with one own token, as many as the ring holds, and any number; others' are large numbers."""
    random = np.random.default_rng(step)
    most = min(S, step + 1)
    count = random.integers(0, most, B)
    count[0], count[-1] = 0, most - 1
    k, v = random.normal(size=(2, B, K, S, h)) * 1.5
    others = ((step - np.arange(S)) % S > count[:, None])[:, None, :, None]
    k, v = np.where(others, 90.0, k), np.where(others, -90.0, v)
    out: dict[str, Any] = {}
    if dtype == jnp.int8:
        scales = np.abs(k).max(-1) / 127, np.abs(v).max(-1) / 127
        out["key_scale"], out["value_scale"] = (jnp.asarray(x, jnp.float32) for x in scales)
        k, v = (np.round(x / scale[..., None]) for x, scale in zip((k, v), scales, strict=True))
    q = jnp.asarray(random.normal(size=(B, K, R, h)), jnp.float32 if dtype == jnp.int8 else dtype)
    keys, values = jnp.asarray(k.swapaxes(2, 3), dtype), jnp.asarray(v, dtype)
    return out | {
        "q": q, "keys": keys, "values": values, "count": jnp.asarray(count, jnp.int32), "step": jnp.int32(step),
    }  # fmt: skip


def expected(given: dict[str, Any], softcap: float = 0.0, window: int = 0) -> np.ndarray:
    """[B, K, R, h] by a walk back from the newest token of each row, in float64."""
    q, k, v = (np.asarray(given[name].astype(jnp.float32), np.float64) for name in ("q", "keys", "values"))
    if "key_scale" in given:
        k, v = k * np.asarray(given["key_scale"])[:, :, None], v * np.asarray(given["value_scale"])[..., None]
    B, K, R, _ = q.shape
    S, step = k.shape[3], int(given["step"])
    out = np.zeros(q.shape)
    for row in range(B):
        tokens = int(given["count"][row]) + 1
        columns = [(step - back) % S for back in range(min(tokens, window) if window else tokens)]
        for head in range(K):
            for r in range(R):
                z = SCALE * q[row, head, r] @ k[row, head][:, columns]
                z = softcap * np.tanh(z / softcap) if softcap else z
                weights = np.exp(z - z.max())
                out[row, head, r] = weights @ v[row, head, columns] / weights.sum()
    return out


def compare(given: dict[str, Any], tile: int | None = None, tolerance: float = 2e-5, **numbers: Any) -> None:
    truth = expected(given, **numbers)
    for implementation in IMPLEMENTATIONS:
        part = attend(**given, query_scale=SCALE, implementation=implementation, tile=tile, **numbers)
        found = np.asarray(part.weighted / part.total[..., None])[:, :, 0]
        np.testing.assert_allclose(found, truth, rtol=tolerance, atol=tolerance, err_msg=implementation)


# B, K, R, h, S: many rows in a block, each alone as there are many heads, a prime number of rows; one tile and several.
# Steps before, at and after the ring's end, and far behind it.
@pytest.mark.parametrize("shape, tile", [
    ((6, 3, 3, 64, 20), None),
    ((5, 2, 1, 128, 64), None),
    ((2, 16, 2, 64, 8), None),
    ((3, 2, 16, 64, 300), 128),
    ((2, 1, 1, 16, 1), None),
])  # fmt: skip
def test_against_a_loop(shape: tuple[int, ...], tile: int | None) -> None:
    S = shape[-1]
    for step in (0, S // 2, S - 1, S, 5 * S + S // 3):
        compare(drawn(*shape, step), tile)


@pytest.mark.parametrize("window, softcap", [(1, 0.0), (5, 2.0), (150, 0.0), (500, 2.0)])
def test_window_and_softcap(window: int, softcap: float) -> None:
    compare(drawn(3, 2, 2, 64, 160, 1000), 128, window=window, softcap=softcap)


@pytest.mark.parametrize("dtype, tolerance", [(jnp.bfloat16, 2e-2), (jnp.int8, 2e-5)])
@pytest.mark.parametrize("shape", [(4, 3, 3, 64, 40), (2, 2, 4, 128, 200)])
def test_short_numbers(dtype: Any, tolerance: float, shape: tuple[int, ...]) -> None:
    compare(drawn(*shape, 70, dtype), None, tolerance)


def test_on_a_cpu_it_is_the_reference_to_the_bit() -> None:
    given = drawn(4, 3, 3, 64, 20, 30)
    found, wanted = (attend(**given, window=7, implementation=way) for way in (None, "reference"))
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(x, y)


def test_lowers_for_cuda() -> None:
    given = drawn(4, 3, 2, 64, 20, 30, jnp.bfloat16)
    text = jax.jit(own_attention).trace(**given).lower(lowering_platforms=("cuda",)).as_text()
    assert "tensor<4x3x2x20xf32>" in text  # the logits of the plain path
    assert "tpu_custom_call" not in text


TPU_PROGRAM = r"""
import json, math, re, sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jaxrl_kernels.decode_attention import own_attention

def report(chip, shape, dtype):
    B, K, R, h, S = shape
    one = jax.sharding.SingleDeviceSharding(topologies.get_topology_desc(platform="tpu", topology_name=chip).devices[0])
    kinds = {
        "q": ((B, K, R, h), "bfloat16"), "keys": ((B, K, h, S), dtype), "values": ((B, K, S, h), dtype),
        "count": ((B,), "int32"), "step": ((), "int32"),
    }
    if dtype == "int8":
        kinds |= {name: ((B, K, S), "float32") for name in ("key_scale", "value_scale")}
    arrays = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=one) for name, (shape, dtype) in kinds.items()}
    text = jax.jit(own_attention).lower(**arrays).compile().as_text()
    copies = re.findall(r"= \w+\[([\d,]+)\]\S* copy\(", text)
    return [text.count('"tpu_custom_call"'), max((math.prod(map(int, x.split(","))) for x in copies), default=0)]

print("RESULT" + json.dumps([report(*case) for case in json.loads(sys.argv[1])]))
"""
COMPILED = [
    ((64, 3, 3, 64, 64), "bfloat16"),
    ((64, 2, 4, 128, 1024), "bfloat16"),
    ((7, 8, 16, 64, 2048), "bfloat16"),
    ((16, 2, 2, 128, 512), "int8"),
    ((16, 3, 3, 64, 320), "float32"),
]


@pytest.mark.parametrize("chip", ["v5e:2x2", "v6e:2x2"])
def test_compiles_for_tpu_as_a_mosaic_kernel(chip: str) -> None:
    command = [sys.executable, "-c", TPU_PROGRAM, json.dumps([(chip, *case) for case in COMPILED])]
    done = subprocess.run(command, env=tpu_environment(), capture_output=True, text=True, timeout=300)
    assert "RESULT" in done.stdout, done.stderr[-3000:]
    for case, (kernels, copied) in zip(COMPILED, json.loads(done.stdout.split("RESULT")[1]), strict=True):
        B, K, R, h, S = case[0]
        assert kernels == 1, case
        # Queries and results may be turned round, the ring not.
        assert copied <= B * K * R * h < B * K * S * h, case


GOOD: dict[str, Any] = drawn(2, 3, 1, 5, 6, 8)


@pytest.mark.parametrize("change, message", [
    ({"q": jnp.ones((2, 3, 1, 1, 5))}, r"q must be .* \[B, K, R, h\], found float32\[2, 3, 1, 1, 5\]"),
    ({"values": jnp.ones((2, 3, 5, 6))}, r"values must be float32\[2, 3, 6, 5\], .* found float32\[2, 3, 5, 6\]"),
    ({"count": jnp.ones(3, jnp.int32)}, r"count must be int32\[2\], found int32\[3\]"),
    ({"step": jnp.ones((), jnp.float32)}, r"step must be int32\[\], found float32\[\]"),
    ({"value_scale": jnp.ones((2, 3, 6))}, "give key_scale and value_scale, or neither"),
    ({"window": -1}, "window must be 0 .* found -1"),
    ({"implementation": "triton"}, "unknown implementation 'triton'"),
])  # fmt: skip
def test_errors_say_what_was_found(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        own_attention(**GOOD | change)
