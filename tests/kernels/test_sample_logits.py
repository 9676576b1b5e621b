"""`sample_logits` against `fused_sample` on the same logits, numpy, and over a vocabulary that the compiler shards."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from heavy import few
from jaxrl_kernels.sample import fused_sample, sample_logits
from other_process import on_devices, result_of

N = 33
draw = jax.jit(sample_logits)


def drawn(seed: int, V: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Logits [N, V], the hidden states and unembedding that they are the exact product of, and counters."""
    random = np.random.default_rng(seed)
    # Multiples of 1/16: their products sum without rounding in any order.
    hidden, unembedding = (np.round(16 * random.normal(size=(n, 24)) * s) / 16 for n, s in ((N, 1.0), (V, 0.4)))
    arrays = hidden @ unembedding.T, hidden, unembedding
    counters = jnp.asarray(random.integers(0, 2**32, size=(N, 4), dtype=np.uint32))
    logits, hidden, unembedding = (jnp.asarray(array, jnp.float32) for array in arrays)
    return logits, hidden, unembedding, counters


@pytest.mark.parametrize("implementation", few(["xla", "pallas", "reference"], ["pallas"]))
@pytest.mark.parametrize("V", few([3, 128, 700, 1024], [700]))
def test_draws_the_tokens_of_fused_sample(V: int, implementation: str) -> None:
    logits, hidden, unembedding, counters = drawn(V, V)
    heat = jnp.asarray(np.where(np.arange(N) % 4 == 0, 0, 0.7), jnp.float32)
    allowed = jnp.asarray(np.random.default_rng(1).random((N, V)) < 0.6).at[2].set(False)
    for settings in ({}, {"temperature": heat}, {"temperature": 1.7, "allowed": allowed}):
        found = draw(logits, counters, **settings)
        wanted = fused_sample(hidden, unembedding, counters, implementation=implementation, **settings)
        np.testing.assert_array_equal(found[0], wanted[0])
        np.testing.assert_allclose(found[1:], wanted[1:], rtol=2e-6, atol=2e-6)
    np.testing.assert_array_equal(found[0][2], -1)


def test_lowers_for_cuda() -> None:
    given = jax.ShapeDtypeStruct((N, 700), jnp.float32), jax.ShapeDtypeStruct((N, 4), jnp.uint32)
    assert "tpu_custom_call" not in draw.trace(*given).lower(lowering_platforms=("cuda",)).as_text()


def test_logp_and_entropy_are_those_of_the_distribution() -> None:
    logits, *_, counters = drawn(5, 700)
    allowed = np.random.default_rng(6).random((N, 700)) < 0.5
    z = np.where(allowed, np.asarray(logits, np.float64) / 0.6, -np.inf)
    logp = z - np.logaddexp.reduce(z, axis=1, keepdims=True)
    # A mask, its int8 form, and logits of -inf forbid the same.
    ways = (
        (logits, {"allowed": jnp.asarray(allowed)}),
        (logits, {"allowed": jnp.asarray(allowed, jnp.int8)}),
        (jnp.where(allowed, logits, -jnp.inf), {}),
    )
    for masked, settings in ways:
        token, found, entropy = map(np.asarray, draw(masked, counters, temperature=0.6, **settings))
        assert allowed[np.arange(N), token].all()
        np.testing.assert_allclose(found, logp[np.arange(N), token], rtol=1e-5)
        np.testing.assert_allclose(entropy, -np.sum(np.exp(logp) * np.where(allowed, logp, 0), axis=1), rtol=1e-5)


def test_greedy_takes_the_lowest_of_equal_tokens() -> None:
    # The first block has the greatest sum, but the greatest logits are further on.
    logits = jnp.zeros((2, 600)).at[:, :128].set(1.99).at[:, jnp.array([300, 301, 599])].set(2.0).at[1, 300].set(0.0)
    found = draw(logits, jnp.zeros((2, 4), jnp.uint32), temperature=0.0)
    np.testing.assert_array_equal(found[0], [300, 301])


def test_rows_with_nothing_to_draw_and_gradients() -> None:
    logits = jnp.array([[0.0, 1.0, 2.0], [-jnp.inf] * 3, [0.0, jnp.nan, 0.0], [0.0, jnp.inf, 0.0]])
    token, logp, entropy = draw(logits, jnp.zeros((4, 4), jnp.uint32))
    np.testing.assert_array_equal(token[1:], [-1, -1, -1])
    assert 0 <= int(token[0]) < 3
    np.testing.assert_array_equal(logp[1:], [-np.inf, np.nan, np.nan])
    np.testing.assert_array_equal(entropy[1:], [0, np.nan, np.nan])
    slope = jax.grad(lambda z: jnp.sum(sample_logits(z, jnp.zeros((1, 4), jnp.uint32))[1]))(logits[:1])
    np.testing.assert_array_equal(slope, 0)


ON_FOUR_DEVICES = """
import json, re
import jax, jax.numpy as jnp, numpy as np
from jax import P
from jax.sharding import Mesh, NamedSharding
from jaxrl_kernels.sample import sample_logits

random, out = np.random.default_rng(0), []
N, V = 16, 4096
logits = jnp.asarray(random.normal(size=(N, V)), jnp.float32)
logits = logits.at[3].set(-jnp.inf).at[4].set(0.0)  # nothing to draw; a greedy row that ties over the devices
counters = jnp.asarray(random.integers(0, 2**32, (N, 4)), jnp.uint32)
temperature = jnp.where(jnp.arange(N) < 6, 0.0, 0.8)
wanted = sample_logits(logits, counters, temperature=temperature)
for shape, spec in (((1, 4), P(None, "vocab")), ((2, 2), P("data", "vocab")), ((4, 1), P("data"))):
    mesh = Mesh(np.array(jax.devices()).reshape(shape), ("data", "vocab"))
    cut = jax.device_put(logits, NamedSharding(mesh, spec))
    call = jax.jit(lambda z, c, t: sample_logits(z, c, temperature=t))
    found = call(cut, counters, temperature)
    text = call.lower(cut, counters, temperature).compile().as_text()
    moved = [0]  # elements of the largest result of a collective
    for shape in re.findall(r"(.*?) (?:all-gather|all-reduce|all-to-all|collective-permute)\\(", text):
        results = re.findall(r"\\w\\[([\\d,]*)\\]", shape)
        moved += [int(np.prod([int(n) for n in dims.split(",") if n])) for dims in results]
    same = bool(jnp.all(found[0] == wanted[0]))
    finite = jnp.isfinite(wanted[1])
    far = float(jnp.max(jnp.abs(jnp.where(finite, jnp.stack(found[1:]) - jnp.stack(wanted[1:]), 0))))
    out.append([same, far, max(moved), str(spec)])
print("RESULT" + json.dumps(out))
"""


@pytest.mark.heavy
def test_logits_that_the_compiler_shards_are_not_gathered() -> None:
    found = result_of(ON_FOUR_DEVICES, environment=on_devices(4))
    assert len(found) == 3
    for same, far, moved, case in found:
        assert same, case
        assert far < 1e-5, case
        assert moved <= 16 * 128, case  # the best blocks, a thirty-second of the logits
    assert found[0][2] > 0  # collectives are seen at all


GOOD = {"logits": jnp.ones((3, 5)), "counters": jnp.zeros((3, 4), jnp.uint32)}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"logits": jnp.ones((3, 5), jnp.bfloat16)}, r"logits must be a float32 matrix, found bfloat16\[3, 5\]"),
        ({"logits": jnp.ones(3)}, r"logits must be a float32 matrix, found float32\[3\]"),
        ({"logits": jnp.ones((3, 0))}, "the vocabulary is empty"),
        ({"counters": jnp.zeros((2, 4), jnp.uint32)}, r"counters must be uint32\[3, 4\] .* found uint32\[2, 4\]"),
        ({"temperature": -0.5}, r"temperature must be 0 \(greedy\) or above, found -0.5"),
        ({"temperature": jnp.ones(2)}, r"temperature must be a scalar or f32\[3\]"),
        ({"allowed": jnp.ones((3, 4), bool)}, r"allowed must be bool or int8\[3, 5\], found bool\[3, 4\]"),
    ],
)
def test_errors_say_what_was_found_in_logits(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sample_logits(**{**GOOD, **change})
