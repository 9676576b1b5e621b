"""`own_attention` against a loop over the tokens of each row's ring in float64, and what it compiles to."""

from __future__ import annotations

import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from heavy import few
from jaxrl_kernels.decode_attention import MASKED, PartialAttention, own_attention
from other_process import result_of
from tpu_environment import tpu_environment

FAST = ("pallas", "xla")  # "reference" is "xla" here
attend = jax.jit(own_attention, static_argnames=("query_scale", "softcap", "window", "implementation", "tile"))
SCALE = 0.3
OTHERS = 90.0  # what columns hold that are not the row's own


def drawn(B: int, K: int, R: int, h: int, S: int, step: int, dtype: Any = jnp.float32) -> dict[str, Any]:
    """Arguments: rows with one own token, as many as the ring holds, and any number; others' are large numbers.

    The ring is as the step before left it; the prompt's part is that of three tokens, and of none for the last row.
    """
    random = np.random.default_rng(step)
    most = min(S, step + 1)
    count = random.integers(0, most, B)
    count[0], count[-1] = 0, most - 1
    k, v = random.normal(size=(2, B, K, S, h)) * 1.5
    age = (step - np.arange(S)) % S
    others = ((age > count[:, None]) | (age == 0))[:, None, :, None]
    newest = [x[:, :, step % S] for x in (k, v)]
    k, v = np.where(others, OTHERS, k), np.where(others, -OTHERS, v)
    out: dict[str, Any] = {}
    if dtype == jnp.int8:
        scales = np.abs(k).max(-1) / 127, np.abs(v).max(-1) / 127
        new_scales = [np.abs(x).max(-1) / 127 for x in newest]
        out["scales"] = tuple(jnp.asarray(x, jnp.float32) for x in scales)
        out["new_scales"] = tuple(jnp.asarray(x, jnp.float32) for x in new_scales)
        k, v = (np.round(x / scale[..., None]) for x, scale in zip((k, v), scales, strict=True))
        newest = [np.round(x / scale[..., None]) for x, scale in zip(newest, new_scales, strict=True)]
    q = jnp.asarray(random.normal(size=(B, K, R, h)), jnp.float32 if dtype == jnp.int8 else dtype)
    logits, values = random.normal(size=(B, K, R, 3)), random.normal(size=(B, K, 3, h))
    m = logits.max(-1)
    weights = np.exp(logits - m[..., None])
    weights[-1], m[-1] = 0.0, MASKED
    part = weights @ values, m, weights.sum(-1)
    return out | {
        "q": q, "k": jnp.asarray(newest[0], dtype), "v": jnp.asarray(newest[1], dtype),
        "keys": jnp.asarray(k.swapaxes(2, 3), dtype), "values": jnp.asarray(v, dtype),
        "count": jnp.asarray(count, jnp.int32), "step": jnp.int32(step),
        "prompt": PartialAttention(*(jnp.asarray(x, jnp.float32) for x in part)),
    }  # fmt: skip


def ring_after(given: dict[str, Any]) -> dict[str, np.ndarray]:
    """The ring with the newest token: all but one column is as it was, to the bit."""
    column = int(given["step"]) % given["keys"].shape[3]
    out = {name: np.array(given[name]) for name in ("keys", "values")}
    out["keys"][..., column], out["values"][:, :, column] = given["k"], given["v"]
    for name, old, new in zip(("key", "value"), given.get("scales", ()), given.get("new_scales", ()), strict=False):
        out[name] = np.array(old)
        out[name][..., column] = new
    return out


def expected(given: dict[str, Any], softcap: float = 0.0, window: int = 0) -> np.ndarray:
    """[B, K, R, h] by a walk back from the newest token of each row, and the prompt's sums, in float64."""
    ring = ring_after(given)
    k, v = (ring[name].astype(np.float64) for name in ("keys", "values"))
    if "scales" in given:
        k, v = k * ring["key"][:, :, None], v * ring["value"][..., None]
    q = np.asarray(given["q"].astype(jnp.float32), np.float64)
    acc, m, l = (np.asarray(x, np.float64) for x in given["prompt"])
    B, K, R, _ = q.shape
    S, step = k.shape[3], int(given["step"])
    out = np.zeros(q.shape)
    for row in range(B):
        tokens = int(given["count"][row]) + 1
        columns = [(step - back) % S for back in range(min(tokens, window) if window else tokens)]
        for head in range(K):
            for r in range(R):
                here = row, head, r
                z = SCALE * q[here] @ k[row, head][:, columns]
                z = softcap * np.tanh(z / softcap) if softcap else z
                most = max(z.max(), m[here])
                weights, of_prompt = np.exp(z - most), np.exp(m[here] - most)
                sums = weights @ v[row, head, columns] + of_prompt * acc[here]
                out[here] = sums / (weights.sum() + of_prompt * l[here])
    return out


def compare(given: dict[str, Any], tile: int | None = None, tolerance: float = 2e-5, **numbers: Any) -> None:
    truth, ring = expected(given, **numbers), ring_after(given)
    for implementation in FAST:
        found = attend(**given, query_scale=SCALE, implementation=implementation, tile=tile, **numbers)
        result = np.asarray(found.result.astype(jnp.float32))
        np.testing.assert_allclose(result, truth, rtol=tolerance, atol=tolerance, err_msg=implementation)
        stored = {"keys": found.keys, "values": found.values}
        stored |= dict(zip(("key", "value"), found.scales or (), strict=False))
        assert stored.keys() == ring.keys()
        for name, x in stored.items():
            np.testing.assert_array_equal(np.asarray(x), ring[name], err_msg=f"{implementation} {name}")


# B, K, R, h, S: many rows in a block, each alone as there are many heads, a prime number of rows; one tile and several.
# Steps before, at and after the ring's end, and far behind it.
@pytest.mark.heavy
@pytest.mark.parametrize("shape, tile", [
    ((6, 3, 3, 64, 20), None),
    pytest.param((5, 2, 1, 128, 64), None, marks=pytest.mark.heavy),
    pytest.param((2, 16, 2, 64, 8), None, marks=pytest.mark.heavy),
    pytest.param((3, 2, 16, 64, 300), 128, marks=pytest.mark.heavy),
    ((3, 2, 2, 64, 256), 128),
    ((2, 2, 2, 16, 300), 256),
    pytest.param((2, 2, 2, 16, 300), None, marks=pytest.mark.heavy),
    ((2, 1, 1, 16, 1), None),
])  # fmt: skip
def test_against_a_loop(shape: tuple[int, ...], tile: int | None) -> None:
    S = shape[-1]
    for step in (0, S // 2, S - 1, S, 5 * S + S // 3):
        compare(drawn(*shape, step), tile)


@pytest.mark.parametrize(
    "window, softcap",
    few([(1, 0.0), (5, 2.0), (150, 0.0), (500, 2.0)], [(5, 2.0)], unpack=True),
)
def test_window_and_softcap(window: int, softcap: float) -> None:
    compare(drawn(3, 2, 2, 64, 160, 1000), 128, window=window, softcap=softcap)


@pytest.mark.heavy
@pytest.mark.parametrize("dtype, tolerance", [(jnp.bfloat16, 2e-2), (jnp.int8, 2e-5)])
@pytest.mark.parametrize("shape", few([(4, 3, 3, 64, 40), (2, 2, 4, 128, 200)], [(4, 3, 3, 64, 40)]))
def test_short_numbers(dtype: Any, tolerance: float, shape: tuple[int, ...]) -> None:
    compare(drawn(*shape, 70, dtype), None, tolerance)


def test_on_a_cpu_it_is_the_reference_to_the_bit() -> None:
    given = drawn(4, 3, 3, 64, 20, 30)
    found, wanted = (attend(**given, window=7, implementation=way) for way in (None, "reference"))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.heavy
def test_of_many_models_at_once() -> None:
    """vmap over queries and rings, as over seeds of a run, which may be at different steps."""
    givens = [drawn(3, 2, 2, 16, 40, step) for step in (21, 1000)]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *givens)
    for implementation in FAST:
        run = jax.vmap(lambda x: own_attention(**x, query_scale=SCALE, implementation=implementation))  # noqa: B023
        found = jax.jit(run)(stacked)
        for number, given in enumerate(givens):
            np.testing.assert_allclose(found.result[number], expected(given), rtol=2e-5, atol=2e-5)
            np.testing.assert_array_equal(found.keys[number], ring_after(given)["keys"])
            np.testing.assert_array_equal(found.values[number], ring_after(given)["values"])


def test_a_bad_number_stays_in_its_row() -> None:
    """NaN in the newest key of a row reaches its own column alone, also where a row is made a column."""
    given = drawn(3, 2, 2, 16, 40, 50)
    given["k"] = given["k"].at[1, 0, 3].set(jnp.nan)
    found = attend(**given, query_scale=SCALE, implementation="pallas")
    np.testing.assert_array_equal(found.keys, ring_after(given)["keys"])
    np.testing.assert_array_equal(np.isnan(found.result).any(axis=(2, 3)), [[False, False], [True, False], [False] * 2])


def test_lowers_for_cuda() -> None:
    given = drawn(4, 3, 2, 64, 20, 30, jnp.bfloat16)
    text = jax.jit(own_attention).trace(**given).lower(lowering_platforms=("cuda",)).as_text()
    assert "tensor<4x3x2x20xf32>" in text  # the logits of the plain path
    assert "tpu_custom_call" not in text


def test_the_ring_stays_in_hbm_on_a_tpu() -> None:
    """XLA places neither the keys and values that the kernel reads nor those that it updates in VMEM, also in vmap."""
    given = drawn(4, 2, 2, 128, 256, 3, jnp.int8)
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), given)

    def run(given: dict[str, Any]) -> Any:
        return own_attention(**given)

    for function, arguments in ((run, given), (jax.vmap(run), stacked)):
        lowered = jax.jit(function).trace(arguments).lower(lowering_platforms=("tpu",)).as_text()
        places = re.search(r'"output_memory_space_colors": (\[.*?\}\])', lowered.replace(r"\22", '"'))
        assert places is not None
        assert json.loads(places[1]) == [{"color": 0, "shape_index": [1]}, {"color": 0, "shape_index": [2]}]


TPU_PROGRAM = r"""
import json, math, re, sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jaxrl_kernels.decode_attention import PartialAttention, own_attention

def report(chip, shape, dtype):
    B, K, R, h, S = shape
    one = jax.sharding.SingleDeviceSharding(topologies.get_topology_desc(platform="tpu", topology_name=chip).devices[0])
    of = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=one)
    ring = of(dtype, B, K, h, S), of(dtype, B, K, S, h)
    scales = (of("float32", B, K, S),) * 2 if dtype == "int8" else None
    rest = [
        of("bfloat16", B, K, R, h), of(dtype, B, K, h), of(dtype, B, K, h), of("int32", B),
        PartialAttention(of("float32", B, K, R, h), of("float32", B, K, R), of("float32", B, K, R)),
        (of("float32", B, K),) * 2 if dtype == "int8" else None,
    ]

    def steps(ring, scales, q, k, v, count, prompt, new_scales):
        def step(number, carry):
            q, ring, scales = carry
            found = own_attention(q, k, v, *ring, count, number, prompt, new_scales=new_scales, scales=scales)
            return found.result, (found.keys, found.values), found.scales
        return jax.lax.fori_loop(0, count[0], step, (q, ring, scales))

    text = jax.jit(steps, donate_argnums=(0,)).lower(ring, scales, *rest).compile().as_text()
    copies = re.findall(r"= \w+\[([\d,]+)\]\S* copy\(", text)
    aliased = len(re.findall(r"output_to_operand_aliasing=\{\{1\}: \(\d+, \{\}\), \{2\}: \(\d+, \{\}\)\}", text))
    largest = max((math.prod(map(int, x.split(","))) for x in copies), default=0)
    return [text.count('"tpu_custom_call"'), aliased, largest, text.count(" dynamic-update-slice(")]

print("RESULT" + json.dumps([report(*case) for case in json.loads(sys.argv[1])]))
"""
# Rings shorter than a piece that is written and longer, one of no whole number of pieces.
COMPILED = [
    ((64, 3, 3, 64, 64), "bfloat16"),
    ((64, 2, 4, 128, 1024), "bfloat16"),
    ((7, 8, 16, 64, 2048), "bfloat16"),
    ((16, 2, 2, 128, 504), "bfloat16"),
    ((16, 2, 2, 128, 512), "int8"),
    ((16, 3, 3, 64, 320), "float32"),
]


@pytest.mark.heavy
@pytest.mark.parametrize("chip", ["v5e:2x2", "v6e:2x2"])
def test_compiles_for_tpu_as_a_mosaic_kernel_that_writes_in_place(chip: str) -> None:
    cases = json.dumps([(chip, *case) for case in COMPILED])
    results = result_of(TPU_PROGRAM, cases, environment=tpu_environment())
    for case, (*kernels, copied, updates) in zip(COMPILED, results, strict=True):
        B, K, R, h, S = case[0]
        assert kernels == [1, 1], case
        # Queries and results may be turned round, the ring is not copied. Scales, which are small, are laid out for
        # the kernel, and written by themselves.
        eight_bit = case[1] == "int8"
        assert copied <= max(B * K * R * h, eight_bit * B * K * S) < B * K * S * h, case
        assert updates == 2 * eight_bit, case


GOOD: dict[str, Any] = drawn(2, 3, 1, 5, 6, 8)


@pytest.mark.parametrize("change, message", [
    ({"q": jnp.ones((2, 3, 1, 1, 5))}, r"q must be .* \[B, K, R, h\], found float32\[2, 3, 1, 1, 5\]"),
    ({"values": jnp.ones((2, 3, 5, 6))}, r"values must be float32\[2, 3, 6, 5\], .* found float32\[2, 3, 5, 6\]"),
    ({"count": jnp.ones(3, jnp.int32)}, r"count must be int32\[2\], found int32\[3\]"),
    ({"step": jnp.ones((), jnp.float32)}, r"step must be int32\[\], found float32\[\]"),
    ({"scales": (jnp.ones((2, 3, 6)),) * 2}, "pass both new_scales and scales, or neither"),
    ({"scales": (jnp.ones((2, 3, 6)), jnp.ones((2, 6)))}, r"value_scale must be float32\[2, 3, 6\]"),
    ({"k": jnp.ones((2, 3, 1, 5))}, r"k must be float32\[2, 3, 5\], found float32\[2, 3, 1, 5\]"),
    ({"v": jnp.ones((2, 3, 5), jnp.int8)}, r"v must be float32\[2, 3, 5\], found int8"),
    ({"prompt": GOOD["prompt"]._replace(m=jnp.ones((2, 3)))}, r"prompt.m must be float32\[2, 3, 1\]"),
    ({"window": -1}, "window must be 0 .* found -1"),
    ({"implementation": "triton"}, "unknown implementation 'triton'"),
])  # fmt: skip
def test_errors_say_what_was_found(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        own_attention(**GOOD | change)
