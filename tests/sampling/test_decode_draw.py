"""One token from a hidden state: the right frequencies, log-probabilities and entropies, and noise by counters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from heavy import few
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from jaxrl_kernels.sample import sample_logits

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.sampling.draw import Drawn, DrawSettings, draw, seed_of
from jaxrl_llm.sampling.filters import Filters

SEED = 17
run = jax.jit(draw, static_argnums=0)
run_logits = jax.jit(sample_logits)


def policy_of(vocabulary: int, hidden: int, softcap: float = 0.0) -> Policy:
    """A policy of which only the unembedding is used."""
    return Policy(ModelConfig("llama", vocabulary, hidden, 1, 1, 1, 1, 1, 1e-6, False, "silu", logit_softcap=softcap))


def settings_of(temperature: float = 1.0, filters: Any = None, allowed: Any = None) -> DrawSettings:
    typed = None if filters is None else Filters(*(jnp.asarray(x) for x in filters))
    mask = None if allowed is None else jnp.asarray(allowed, bool)
    return DrawSettings(jnp.uint32(SEED), jnp.float32(temperature), typed, mask, jnp.asarray([-1], jnp.int32))


def counters_of(rows: int, seed: int = SEED, word: int = 3) -> jax.Array:
    """Rows that differ in one of the four words."""
    counters = np.zeros((rows, 4), np.uint32)
    counters[:, 0], counters[:, word] = seed, np.arange(rows)
    return jnp.asarray(counters)


def drawn_from(logits: np.ndarray, *, softcap: float = 0.0, seed: int = SEED, **settings: Any) -> Drawn:
    """One token for each row of logits [N, V]: row i of the identity times the unembedding is row i of the logits."""
    N, V = logits.shape
    params = {"unembed": jnp.asarray(logits.T, jnp.float32)}
    return run(policy_of(V, N, softcap), params, jnp.eye(N), counters_of(N, seed), settings_of(**settings))


def many_from(logits: np.ndarray, rows: int, **settings: Any) -> Drawn:
    """`rows` tokens from the same logits [V]."""
    params = {"unembed": jnp.asarray(logits[:, None], jnp.float32)}
    hidden = jnp.ones((rows, 1))
    return run(policy_of(logits.size, 1), params, hidden, counters_of(rows), settings_of(**settings))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """float64, over the last axis; logits may be -inf."""
    z = logits.astype(np.float64)
    z = z - z.max(axis=-1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))


def entropy_of(logp: np.ndarray) -> np.ndarray:
    p = np.exp(logp)
    return -np.where(p > 0, p * np.where(p > 0, logp, 0.0), 0.0).sum(axis=-1)


def support(logits: np.ndarray, filters: Any, allowed: Any) -> np.ndarray:
    """bool[V] of one row by sorting, in float64: allowed tokens, then top-k, top-p and min-p, each of what is left."""
    kept = np.ones(logits.size, bool) if allowed is None else np.asarray(allowed, bool).copy()
    if filters is None:
        return kept
    top_k, top_p, min_p = filters
    if 0 < top_k < kept.sum():
        kept &= logits >= np.sort(logits[kept])[-top_k]
    if top_p < 1:
        p = np.exp(log_softmax(np.where(kept, logits, -np.inf)))
        order = np.argsort(-p, kind="stable")
        kept[order[np.searchsorted(np.cumsum(p[order]), top_p) + 1 :]] = False
    if min_p > 0:
        kept &= logits >= logits[kept].max() + np.log(min_p)
    return kept


def chi_square(counts: np.ndarray, probability: np.ndarray) -> float:
    """The statistic, over the tokens that are expected five times or more, in standard deviations from its mean."""
    expected = probability * counts.sum()
    often = expected >= 5
    statistic = ((counts[often] - expected[often]) ** 2 / expected[often]).sum()
    freedom = often.sum() - 1
    return float((statistic - freedom) / np.sqrt(2 * freedom))


ODD = np.arange(300) % 2 == 1
CASES = [
    {},
    {"temperature": 1.7},
    {"filters": (40, 1.0, 0.0)},
    {"filters": (0, 0.8, 0.0)},
    {"filters": (0, 1.0, 0.05), "temperature": 1.7},
    {"allowed": ODD},
    {"allowed": ODD, "filters": (60, 0.9, 0.01), "temperature": 0.8},
]


@pytest.mark.heavy
@pytest.mark.parametrize("case", few(CASES, CASES[-3:]))
def test_frequencies(case: dict[str, Any]) -> None:
    """300 tokens are three blocks of the noise, the last of them short."""
    logits = np.random.default_rng(3).normal(size=300).astype(np.float32) * 1.5
    scaled = logits.astype(np.float64) / case.get("temperature", 1.0)
    kept = support(scaled, case.get("filters"), case.get("allowed"))
    counts = np.bincount(np.asarray(many_from(logits, 20_000, **case).token), minlength=300)
    assert not counts[~kept].any()
    p = np.exp(log_softmax(np.where(kept, scaled, -np.inf)))
    assert abs(chi_square(counts, p)) < 5
    # The test can fail: other probabilities are far away.
    other = p + 0.1 * p.max()
    assert chi_square(counts, other / other.sum()) > 20
    cooler = np.exp(log_softmax(np.where(kept, scaled * 1.2, -np.inf)))
    assert chi_square(counts, cooler) > 5


@pytest.mark.parametrize("word", [1, 2, 3])
def test_neighbouring_counters_are_independent(word: int) -> None:
    """Draws at neighbouring prompts, samples and positions: every pair of two tokens comes equally often."""
    params = {"unembed": jnp.zeros((2, 1))}
    token = run(policy_of(2, 1), params, jnp.ones((4000, 1)), counters_of(4000, word=word), settings_of()).token
    pairs = np.bincount(np.asarray(token)[:-1] * 2 + np.asarray(token)[1:], minlength=4)
    assert abs(chi_square(pairs, np.full(4, 0.25))) < 5


def test_counters_name_a_token() -> None:
    """Each of the four words changes the draws; equal words give equal draws in whatever row and company."""
    logits = np.zeros(1000)
    params, policy = {"unembed": jnp.asarray(logits[:, None], jnp.float32)}, policy_of(1000, 1)
    names = np.asarray([(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0, 0, 2**31, 0)])
    # 16 positions of each, so that two equal series are no chance.
    series = np.repeat(names, 16, axis=0) + np.tile(np.arange(16), len(names))[:, None] * np.asarray([0, 0, 0, 16])
    counters = jnp.asarray(series, jnp.uint32)
    token = np.asarray(run(policy, params, jnp.ones((len(series), 1)), counters, settings_of()).token)
    assert len({tuple(row) for row in token.reshape(-1, 16).tolist()}) == len(names)
    order = np.random.default_rng(0).permutation(len(series))
    again = np.asarray(run(policy, params, jnp.ones((len(series), 1)), counters[order], settings_of()).token)
    np.testing.assert_array_equal(again, token[order])


def test_the_seed_is_a_word_of_the_key() -> None:
    seeds = [int(seed_of(jax.random.key(i))) for i in range(20)]
    assert len(set(seeds)) == 20
    assert seeds[3] == int(seed_of(jax.random.key(3)))
    assert seed_of(jax.random.key(0)).dtype == jnp.uint32


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("allowed", [None, np.arange(30) % 3 > 0])
@pytest.mark.parametrize("filters", [None, (5, 1.0, 0.0), (0, 0.7, 0.0), (0, 1.0, 0.2), (9, 0.8, 0.05)])
def test_what_is_remembered_of_a_token(temperature: float, allowed: Any, filters: Any) -> None:
    logits = (np.random.default_rng(0).normal(size=(64, 30)) * 3).astype(np.float32)
    found = drawn_from(logits, temperature=temperature, filters=filters, allowed=allowed)
    token, rows = np.asarray(found.token), np.arange(64)
    scaled = logits.astype(np.float64) / temperature
    kept = np.stack([support(row, filters, allowed) for row in scaled])
    assert kept[rows, token].all()
    logp = log_softmax(np.where(kept, scaled, -np.inf))
    np.testing.assert_allclose(found.logp, logp[rows, token], atol=2e-5)
    np.testing.assert_allclose(found.entropy, entropy_of(logp), atol=2e-5)
    np.testing.assert_allclose(found.untruncated_logp, log_softmax(scaled)[rows, token], atol=2e-5)
    if filters is None:
        assert (np.asarray(found.floor) == -np.inf).all()
        return
    # The floor parts kept from dropped tokens among the allowed ones, by their log-probabilities before the filters.
    before = log_softmax(scaled if allowed is None else np.where(allowed, scaled, -np.inf))
    permitted = np.ones((64, 30), bool) if allowed is None else np.broadcast_to(allowed, (64, 30))
    above = before >= np.asarray(found.floor, np.float64)[:, None]
    assert (permitted & ~kept).any()
    np.testing.assert_array_equal(above & permitted, kept)


@pytest.mark.parametrize("filters", [None, (2, 1.0, 0.0), (0, 0.7, 0.0)])
def test_the_most_probable_tokens_are_recorded(filters: Any) -> None:
    """By the distribution that is drawn from, the first of equal ones first; and the same tokens are drawn."""
    logits = (np.random.default_rng(3).normal(size=(64, 30)) * 3).astype(np.float32)
    if filters is None:
        logits[0, :] = 0.0
    settings, plain = settings_of(0.8, filters), drawn_from(logits, temperature=0.8, filters=filters)
    params = {"unembed": jnp.asarray(logits.T)}
    ranking = jax.jit(lambda x: draw(policy_of(30, 64), params, x, counters_of(64), settings, ranked=3))
    found = ranking(jnp.eye(64))
    assert found.token.tolist() == plain.token.tolist()
    np.testing.assert_allclose(found.logp, plain.logp, atol=1e-5)
    scaled = logits.astype(np.float64) / 0.8
    kept = np.stack([support(row, filters, None) for row in scaled])
    logp, whole = log_softmax(np.where(kept, scaled, -np.inf)), log_softmax(scaled)
    ids = np.argsort(-logp, axis=1, kind="stable")[:, :3]
    np.testing.assert_array_equal(found.ranked[:, 0], ids)  # type: ignore[index]
    for place, exact in ((1, logp), (2, whole)):
        np.testing.assert_allclose(
            found.ranked[:, place],  # type: ignore[index]
            np.take_along_axis(exact, ids, axis=1), atol=2e-5,
        )  # fmt: skip


def test_filters_count_allowed_tokens_only() -> None:
    """The best two of all are forbidden; top-k 2 keeps the next two."""
    logits = np.log([[0.4, 0.3, 0.1, 0.15, 0.05]])
    found = many_from(logits[0], 200, filters=(2, 1.0, 0.0), allowed=[False, False, True, True, True])
    assert set(np.asarray(found.token).tolist()) == {2, 3}
    p = np.asarray([0.4, 0.6])
    np.testing.assert_allclose(found.entropy, -(p * np.log(p)).sum(), atol=1e-5)
    expected = np.log(np.where(np.asarray(found.token) == 2, 0.1, 0.15))
    np.testing.assert_allclose(found.untruncated_logp, expected, atol=1e-5)


def test_one_allowed_token() -> None:
    found = drawn_from(np.random.default_rng(1).normal(size=(8, 300)) * 4, allowed=np.arange(300) == 130)
    assert found.token.tolist() == [130] * 8
    np.testing.assert_allclose(found.logp, 0.0, atol=1e-6)
    np.testing.assert_allclose(found.entropy, 0.0, atol=1e-6)
    assert (np.asarray(found.untruncated_logp) < 0).all()


def test_with_and_without_logits_in_memory() -> None:
    """Filters that keep all, and a mask that allows all, take the other way and draw the same tokens."""
    logits = np.random.default_rng(4).normal(size=(64, 300)) * 2
    fused = drawn_from(logits, temperature=0.9)
    assert len(set(np.asarray(fused.token).tolist())) > 30
    for found in (
        drawn_from(logits, temperature=0.9, filters=(0, 1.0, 0.0)),
        drawn_from(logits, temperature=0.9, allowed=np.ones(300, bool)),
    ):
        assert found.token.tolist() == fused.token.tolist()
        assert (np.asarray(found.floor) == -np.inf).all()
        for name in ("logp", "entropy", "untruncated_logp"):
            np.testing.assert_allclose(getattr(found, name), getattr(fused, name), atol=1e-5)


@pytest.mark.parametrize("filters", [None, (0, 1.0, 0.0)])
def test_soft_cap(filters: Any) -> None:
    logits = (np.random.default_rng(5).normal(size=(32, 40)) * 20).astype(np.float32)
    found = drawn_from(logits, softcap=6.0, temperature=2.0, filters=filters)
    logp = log_softmax(6.0 * np.tanh(logits.astype(np.float64) / 6.0) / 2.0)
    np.testing.assert_allclose(found.logp, logp[np.arange(32), np.asarray(found.token)], atol=2e-5)
    np.testing.assert_allclose(found.entropy, entropy_of(logp), atol=2e-5)


@pytest.mark.parametrize("allowed", [None, [True, False, True]])
def test_greedy_is_the_first_best_of_the_plain_distribution(allowed: Any) -> None:
    logits = np.asarray([[1.0, 4.0, 2.0], [3.0, 3.0, 0.0], [-5.0, -6.0, -4.0]], np.float32)
    found = drawn_from(logits, temperature=0.0, allowed=allowed)
    best = [1, 0, 2] if allowed is None else [2, 0, 2]
    assert found.token.tolist() == best
    logp = log_softmax(logits if allowed is None else np.where(allowed, logits, -np.inf))
    np.testing.assert_allclose(found.logp, logp[np.arange(3), best], atol=1e-6)
    np.testing.assert_allclose(found.entropy, entropy_of(logp), atol=1e-6)
    np.testing.assert_allclose(found.untruncated_logp, log_softmax(logits)[np.arange(3), best], atol=1e-6)
    assert drawn_from(logits, temperature=0.0, allowed=allowed, seed=5).token.tolist() == best


def test_minus_infinity_is_never_drawn() -> None:
    logits = np.full((5000, 300), -np.inf, np.float32)
    logits[:, [3, 256, 299]] = [0.0, 1.0, -2.0]
    token, logp, entropy = run_logits(jnp.asarray(logits), counters_of(5000))
    assert set(np.asarray(token).tolist()) == {3, 256, 299}
    exact = log_softmax(np.asarray([0.0, 1.0, -2.0]))
    np.testing.assert_allclose(entropy, entropy_of(exact), rtol=1e-5)
    expected = exact[np.searchsorted([3, 256, 299], np.asarray(token))]
    np.testing.assert_allclose(logp, expected, atol=1e-5)


@examples(max_examples=60, deadline=None)
@given(
    logits=st.lists(st.sampled_from([-np.inf, -87.0, -30.0, 0.0, 1.0, 60.0]), min_size=150, max_size=150),
    finite=st.integers(0, 149),
    row=st.integers(0, 2**32 - 1),
)
def test_only_tokens_with_mass_are_drawn(logits: list[float], finite: int, row: int) -> None:
    """Whatever the counters and wherever the forbidden tokens stand, whole blocks of them too."""
    z = np.asarray([logits] * 8, np.float32)
    z[:, finite] = 0.0
    counters = counters_of(8, row)
    token, logp, entropy = run_logits(jnp.asarray(z), counters)
    assert np.isfinite(z[0, np.asarray(token)]).all()
    assert np.isfinite(logp).all()
    assert (np.asarray(entropy) >= -1e-5).all()
