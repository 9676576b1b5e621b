"""One token from logits: the right frequencies, log-probabilities and entropies, and keys that name a token."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.sampling.draw import categorical, draw, token_keys
from jaxrl_llm.sampling.filters import Filters

run = jax.jit(draw, static_argnames=("greedy",))
invert = jax.jit(categorical, static_argnames=("block",))


def keys_of(count: int, seed: int = 0) -> jax.Array:
    zeros = jnp.zeros(count, jnp.int32)
    return token_keys(jax.random.key(seed), zeros, jnp.arange(count, dtype=jnp.int32), zeros)


def chi_square(counts: np.ndarray, probability: np.ndarray) -> float:
    """The statistic, over the tokens that are expected five times or more, in standard deviations from its mean."""
    expected = probability * counts.sum()
    often = expected >= 5
    statistic = ((counts[often] - expected[often]) ** 2 / expected[often]).sum()
    freedom = often.sum() - 1
    return float((statistic - freedom) / np.sqrt(2 * freedom))


@pytest.mark.parametrize("vocabulary, block", [(7, 256), (1000, 256), (1000, 7), (256, 256), (257, 256)])
def test_frequencies(vocabulary: int, block: int) -> None:
    random = np.random.default_rng(vocabulary)
    mass = np.exp(random.normal(size=vocabulary) * 1.5)
    mass[random.random(vocabulary) < 0.2] = 0.0
    draws = 40_000
    uniforms = jax.random.uniform(jax.random.key(1), (draws, 2))
    tokens = np.asarray(invert(jnp.broadcast_to(jnp.asarray(mass, jnp.float32), (draws, vocabulary)), uniforms, block))
    counts = np.bincount(tokens, minlength=vocabulary)
    assert not counts[mass == 0].any()
    assert abs(chi_square(counts, mass / mass.sum())) < 5
    # The test can fail: other masses are far away.
    assert chi_square(counts, (mass + 0.1 * mass.max()) / (mass + 0.1 * mass.max()).sum()) > 20


def test_the_ends_of_the_unit_interval() -> None:
    mass = jnp.asarray([[0.0, 2.0, 0.0, 1.0, 0.0]])
    almost_one = float(np.nextafter(np.float32(1), np.float32(0)))
    assert invert(mass, jnp.zeros((1, 2)), 2).tolist() == [1]
    assert invert(mass, jnp.full((1, 2), almost_one), 2).tolist() == [3]
    assert invert(mass, jnp.asarray([[0.5, 0.5]]), 256).tolist() == [1]
    assert invert(mass, jnp.asarray([[0.5, 0.7]]), 256).tolist() == [3]


@settings(max_examples=100, deadline=None)
@given(
    values=st.lists(st.sampled_from([0.0, 1e-38, 1e-20, 1e-7, 0.3, 1.0]), min_size=9, max_size=9),
    uniforms=st.tuples(*[st.one_of(st.floats(0, 1, exclude_max=True, width=32), st.just(1 - 2.0**-24))] * 2),
)
def test_only_tokens_with_mass_are_drawn(values: list[float], uniforms: tuple[float, float]) -> None:
    mass = np.asarray([values], np.float32)
    mass[0, 4] = max(mass[0, 4], 0.1)
    token = int(invert(jnp.asarray(mass), jnp.asarray([uniforms], jnp.float32), 4)[0])
    assert mass[0, token] > 0


def test_minus_infinity_is_never_drawn() -> None:
    logits = np.full((5000, 300), -np.inf, np.float32)
    logits[:, [3, 256, 299]] = [0.0, 1.0, -2.0]
    drawn = run(jnp.asarray(logits), keys_of(5000), 1.0, None)
    assert set(np.asarray(drawn.token).tolist()) == {3, 256, 299}
    p = np.exp([0.0, 1.0, -2.0]) / np.exp([0.0, 1.0, -2.0]).sum()
    np.testing.assert_allclose(drawn.entropy, -(p * np.log(p)).sum(), rtol=1e-5)
    assert np.isfinite(drawn.logp).all()


def expected_of(logits: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Log-probability and entropy in float64; logits may be -inf."""
    z = logits.astype(np.float64)
    z = z - z.max(axis=1, keepdims=True)
    p = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    terms = np.where(p > 0, p * np.log(np.where(p > 0, p, 1.0)), 0.0)
    return np.log(p[np.arange(len(p)), tokens]), -terms.sum(axis=1)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("filters", [None, (5, 1.0, 0.0), (0, 0.7, 0.0), (0, 1.0, 0.2), (9, 0.8, 0.05)])
def test_log_probability_and_entropy(temperature: float, filters: tuple[Any, ...] | None) -> None:
    logits = (np.random.default_rng(0).normal(size=(64, 30)) * 3).astype(np.float32)
    given_filters = None if filters is None else Filters(*(jnp.asarray(x) for x in filters))
    drawn = run(jnp.asarray(logits), keys_of(64), jnp.float32(temperature), given_filters)
    tokens = np.asarray(drawn.token)
    scaled = logits / temperature
    if filters is None:
        assert (np.asarray(drawn.floor) == -np.inf).all()
    else:
        whole, _ = expected_of(scaled, scaled.argmax(axis=1))
        logp = scaled - scaled.max(axis=1, keepdims=True) + whole[:, None]
        dropped = logp < np.asarray(drawn.floor, np.float64)[:, None]
        assert dropped.any()
        assert not dropped[np.arange(64), tokens].any()
        scaled = np.where(dropped, -np.inf, scaled)
    logp, entropy = expected_of(scaled, tokens)
    np.testing.assert_allclose(drawn.logp, logp, atol=2e-5)
    np.testing.assert_allclose(drawn.entropy, entropy, atol=2e-5)


def test_greedy_is_the_first_best_of_the_plain_distribution() -> None:
    logits = np.asarray([[1.0, 4.0, 2.0], [3.0, 3.0, 0.0], [-5.0, -6.0, -4.0]], np.float32)
    drawn = run(jnp.asarray(logits), keys_of(3), jnp.float32(9.0), None, greedy=True)
    assert drawn.token.tolist() == [1, 0, 2]
    logp, entropy = expected_of(logits, np.asarray([1, 0, 2]))
    np.testing.assert_allclose(drawn.logp, logp, atol=1e-6)
    np.testing.assert_allclose(drawn.entropy, entropy, atol=1e-6)


def test_temperature_one_without_filters_samples() -> None:
    """Rows of equal logits differ, with the frequencies of the softmax, and any token may come."""
    p = np.asarray([0.5, 0.25, 0.125, 0.125])
    drawn = run(jnp.broadcast_to(jnp.log(jnp.asarray(p)), (20_000, 4)), keys_of(20_000), 1.0, None)
    counts = np.bincount(np.asarray(drawn.token), minlength=4)
    assert abs(chi_square(counts, p)) < 5
    hot = run(jnp.broadcast_to(jnp.log(jnp.asarray(p)), (20_000, 4)), keys_of(20_000), 2.0, None)
    flattened = np.sqrt(p) / np.sqrt(p).sum()
    counts = np.bincount(np.asarray(hot.token), minlength=4)
    assert abs(chi_square(counts, flattened)) < 5
    assert chi_square(counts, p) > 20


def test_keys_name_a_token() -> None:
    """A key depends on each of its names, and on nothing else."""
    key = jax.random.key(0)
    names = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (2**31 - 1, 0, 0), (-1, 0, 0)]
    together = jax.random.key_data(token_keys(key, *(jnp.asarray(x, jnp.int32) for x in zip(*names, strict=True))))
    assert len({tuple(row.tolist()) for row in together}) == len(names)
    for name, data in zip(names, together, strict=True):
        alone = token_keys(key, *(jnp.asarray([x], jnp.int32) for x in name))
        assert (jax.random.key_data(alone)[0] == data).all()
    other = jax.random.key_data(token_keys(jax.random.key(1), *[jnp.zeros(1, jnp.int32)] * 3))
    assert (other[0] != together[0]).any()


def test_neighbouring_keys_are_independent() -> None:
    """Pairs of draws at neighbouring positions, samples and prompts: every pair of bits comes equally often."""
    count = 4000
    number, zeros = jnp.arange(count, dtype=jnp.int32), jnp.zeros(count, jnp.int32)
    logits = jnp.zeros((count, 2))
    for names in ((number, zeros, zeros), (zeros, number, zeros), (zeros, zeros, number)):
        bits = np.asarray(run(logits, token_keys(jax.random.key(5), *names), 1.0, None).token)
        pairs = np.bincount(bits[:-1] * 2 + bits[1:], minlength=4)
        assert abs(chi_square(pairs, np.full(4, 0.25))) < 5
