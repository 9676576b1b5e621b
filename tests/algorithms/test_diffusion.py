"""Methods of masked-diffusion models against loops over rows and samples of the bound."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import batch_of, outputs_of, prepared, random_batch

from jaxrl_llm.algorithms.diffusion.bgpo import bgpo
from jaxrl_llm.algorithms.diffusion.igpo_inpainting import given_places, igpo_inpainting
from jaxrl_llm.algorithms.diffusion.masked_sft import masked_sft
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.utils.errors import InputError

sys.path += [str(Path(__file__).resolve().parents[1] / "rollouts")]

import fake_engine
from fake_engine import Ran, begin

from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.runtime.admission import Rule

CHANGE = np.array([0.2, -0.1, 0.05, 0.0])


def of_terms(algorithm: Algorithm, batch: Any, new: np.ndarray) -> tuple[float, np.ndarray]:
    """The loss, and its gradient with respect to the terms f[N, n]."""
    ready = prepared(algorithm, batch)

    def loss(terms: jax.Array) -> jax.Array:
        outputs = outputs_of(np.zeros(batch.tokens.shape)).replace(extras={"elbo_terms": terms})
        return algorithm.objective(outputs, ready)[0]

    value, slope = jax.value_and_grad(loss)(jnp.asarray(new, jnp.float32))
    return float(value), np.asarray(slope)


@pytest.mark.parametrize(("sign", "expected"), [(1.0, 1.0375), (-1.0, -1.044378)])
def test_bgpo_worked_example(sign: float, expected: float) -> None:
    """The bound of the card, on one side and on the other of a group of two."""
    old = np.full((2, 4), -3.0)
    batch = batch_of(np.ones((2, 1)), [sign, -sign], np.zeros((2, 1)), info={"elbo_terms": old})
    algorithm = bgpo(samples=4, ddof=0, epsilon=0)
    new = old + np.array([CHANGE, np.zeros(4)])
    value, _ = of_terms(algorithm, batch, new)
    assert -2 * value == pytest.approx(expected - sign, abs=1e-6)


def test_bgpo_is_the_loop() -> None:
    random = np.random.default_rng(3)
    old = random.normal(-8, 2, (11, 5))
    new = old + random.normal(0, 1.5, old.shape)
    new[2, 1] = old[2, 1] + 9.0  # beyond what is exponentiated
    batch, _ = random_batch(1, info={"elbo_terms": old})
    value, slope = of_terms(bgpo(samples=5, largest=5.0), batch, new)
    reward, group = np.asarray(batch.reward), np.asarray(batch.group)
    loop, steep = 0.0, np.zeros(old.shape)
    for i in range(11):
        own = reward[group == group[i]]
        A = (reward[i] - own.mean()) / (own.std(ddof=1) + 1e-6)
        for j in range(5):
            d = new[i, j] - old[i, j]
            loop -= ((1 + d) * A if A >= 0 else np.exp(np.clip(d, -5, 5)) * A) / 5 / 11
            steep[i, j] = -(A if A >= 0 else A * np.exp(d) * (abs(d) < 5)) / 5 / 11
    assert value == pytest.approx(loop, rel=1e-5)
    np.testing.assert_allclose(slope, steep, rtol=2e-4, atol=1e-6)


def test_bgpo_has_the_gradient_of_the_ratio_before_the_first_step() -> None:
    old = np.random.default_rng(5).normal(-8, 2, (11, 4))
    batch, _ = random_batch(2, info={"elbo_terms": old})
    algorithm = bgpo(samples=4)
    _, slope = of_terms(algorithm, batch, old)
    A = np.asarray(prepared(algorithm, batch).advantages)[:, :1]
    np.testing.assert_allclose(slope, -A / 4 / 11 * np.ones(old.shape), rtol=1e-4, atol=1e-7)


def test_masked_sft_is_the_loop() -> None:
    terms = np.random.default_rng(0).normal(-6, 2, (11, 2))
    batch, _ = random_batch(7)
    value, _ = of_terms(masked_sft(samples=2), batch, terms)
    length = np.asarray(batch.action_mask).sum(axis=1)
    assert value == pytest.approx(np.mean([-terms[i].mean() / length[i] for i in range(11)]), rel=1e-5)


def test_igpo_fixes_parts_of_a_trace_and_learns_the_uncertain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four samples with parts of the solution two succeed: they take the place of the first two failures."""

    async def score(task: Any, episodes: Sequence[Episode]) -> list[Episode]:
        return [one.scored(float(one.sample in (5, 7))) for one in episodes]

    monkeypatch.setattr(fake_engine, "score", score)
    trace = [1000 + i for i in range(40)]
    rollout = igpo_inpainting(low=0.5, high=0.5).rollout
    assert rollout is not None
    ran = Ran(begin([5], 4), Rule(), rollout, row={"solution": " ".join(map(str, trace))})
    asked = [request.fixed for request in ran.requests]
    assert asked[:4] == [()] * 4, "a group is first sampled as it is"
    for fixed in asked[4:]:
        shown = [token for token in fixed if token >= 0]
        assert shown == sorted(shown), "in the order of the trace"
        assert {*shown} <= {*trace}
        assert len(fixed) == fake_engine.LIMIT
    found = ran.found.groups[0].episodes
    assert [one.sample for one in found] == [5, 7, 2, 3]
    for one, fixed in zip(found[:2], (asked[5], asked[7]), strict=True):
        assert one.info["inpainted"] == [float(token >= 0) for token in fixed[: one.size]]
    assert [one.info["guided"] for one in found] == [1, 1, 0, 0]

    succeeds = Ran(begin([5], 8), Rule(), rollout, row={"solution": "1 2"})
    assert len(succeeds.requests) == 8, "samples 5 and 7 succeed without help"


def test_igpo_weighs_the_given_tokens_of_large_entropy() -> None:
    """One in five of ten given tokens, the two least certain; all that were drawn; one where there are few."""
    guided = np.zeros((2, 12))
    guided[0, :10], guided[1, :3] = 1, 1
    entropy = np.array([[*range(10), 0, 0], [3, 1, 2, *[0] * 9]], float)
    batch = batch_of(np.ones((2, 12)), [1.0, 0], np.zeros((2, 12)), info={"inpainted": guided}, entropy=entropy)
    ready = prepared(igpo_inpainting(), batch)
    np.testing.assert_array_equal(ready.weights[0], [0] * 8 + [1] * 4)
    np.testing.assert_array_equal(ready.weights[1], [1, 0, 0] + [1] * 9)
    np.testing.assert_allclose(ready.advantages[:, 0], [0.5, -0.5])


def test_given_places_are_about_the_share_and_never_among_the_last() -> None:
    trace, counts = list(range(100, 160)), []
    for seed in range(200):
        out = np.array(given_places(trace, 0.4, 128, 30, np.random.default_rng(seed)))
        assert (out[-30:] == -1).all()
        counts.append((out >= 0).sum())
    assert np.mean(counts) == pytest.approx(24, abs=1.5)
    assert min(counts) > 0
    whole = np.array(given_places(trace, 1.0, 128, 30, np.random.default_rng(0)))
    assert np.flatnonzero(whole >= 0).max() > 80, "pieces are spread where there is room"
    assert (np.array(given_places(trace, 1.0, 40, 30, np.random.default_rng(0)))[:20] == trace[:20]).all()


def test_a_larger_share_first_is_refused() -> None:
    with pytest.raises(InputError, match=r"low is 0\.7"):
        igpo_inpainting(low=0.7)
