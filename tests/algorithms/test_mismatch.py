"""Three policies: worked examples, loops in double precision, and cases in which methods are equal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import batch_of, gradient_of, loss_of, outputs_of
from ratio_loops import Rows, assert_is_the_loop, case, clipped, mean

from jaxrl_llm import algorithms
from jaxrl_llm.algorithms.classic.dapo import dapo
from jaxrl_llm.algorithms.classic.decoupled_ppo import decoupled_ppo
from jaxrl_llm.algorithms.classic.dr_grpo import dr_grpo
from jaxrl_llm.algorithms.classic.minirl import minirl
from jaxrl_llm.algorithms.policy_loss.hispo import hispo
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.transform import chain, stateless
from jaxrl_llm.objectives.off_policy import importance_correction, interpolated_proximal
from jaxrl_llm.training.asynchrony import with_correction
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.utils.errors import InputError

pytestmark = pytest.mark.heavy

RAGGED = case(3)


def given(advantages: Any, *after: Any) -> Any:
    """A transform that writes these advantages, then the rest of a method's."""
    return chain(stateless(lambda b: b.replace(advantages=jnp.asarray(advantages, jnp.float32))), *after)


def test_decoupled_ppo_worked_example() -> None:
    batch = batch_of(np.ones((1, 3)), [1.0], [[-1, -0.5, -2]], old_logp=np.array([[-0.8, -0.6, -0.3]]))
    logp, A = [[-0.7, -0.9, -0.25]], [[1.0, 1, -1]]
    expected = {("mask", False): -0.673393, ("mask", True): -2.020179 / 2}
    expected["truncate", False] = (-1.349859 - 0.670320 + 5 * 1.051271) / 3
    for (mode, leave), loss in expected.items():
        correction = importance_correction("token", mode, high=5.0, leave_count=leave)
        algorithm = Algorithm(given(A, correction), decoupled_ppo().objective)
        assert loss_of(algorithm, batch, logp) == pytest.approx(loss, abs=2e-6)


def mismatch(old: float, behaviour: float) -> float:
    return float(np.exp(old - behaviour))


@pytest.mark.parametrize(
    ("correction", "leave"), [("mask", False), ("mask", True), ("truncate", False), ("none", False)]
)
def test_decoupled_ppo_is_the_loop(correction: str, leave: bool) -> None:
    def loop(logp: Rows, held: Rows) -> float:
        total, count = 0.0, 0
        for row, old, b, A in zip(logp, RAGGED.old, RAGGED.behaviour, RAGGED.advantage, strict=True):
            for x, y, z in zip(row, old, b, strict=True):
                w = mismatch(y, z)
                kept = w <= 1.05 or correction != "mask"
                total += (w if correction == "none" else min(w, 1.05)) * kept * clipped(np.exp(x - y), A, 0.1, 0.1)
                count += kept or not leave
        return -total / count

    algorithm = decoupled_ppo(0.1, 0.1, cap=1.05, correction=correction, leave_count=leave)
    assert_is_the_loop(algorithm, RAGGED, loop)


STALE = np.resize([0, 1, 3, 1, 0, 2], RAGGED.batch.tokens.shape)  # steps since a token's weights


@pytest.mark.parametrize("correction", ["mask", "truncate", "none"])
def test_decoupled_ppo_around_an_interpolated_policy_is_the_loop(correction: str) -> None:
    """The proximal policy, and so the weight, follows the current one; neither has a gradient."""

    def loop(logp: Rows, held: Rows) -> float:
        total, count = 0.0, 0
        rows = zip(logp, held, RAGGED.rows(STALE), RAGGED.behaviour, RAGGED.advantage, strict=True)
        for row, fixed, stale, b, A in rows:
            for x, now, d, z in zip(row, fixed, stale, b, strict=True):
                proximal = (z + d * now) / (d + 1)
                w = mismatch(proximal, z)
                kept = w <= 1.05 or correction != "mask"
                weight = kept * (w if correction == "none" else min(w, 1.05))
                total += weight * clipped(np.exp(x - proximal), A, 0.1, 0.1)
                count += 1
        return -total / count

    algorithm = decoupled_ppo(0.1, 0.1, cap=1.05, correction=correction, proximal="interpolated")
    assert "old_logp" not in algorithm.needs, "it saves the forward pass"
    assert_is_the_loop(algorithm, replace(RAGGED, batch=RAGGED.batch.with_info(staleness=STALE)), loop)
    with pytest.raises(InputError, match="leave_count needs the weights before the update"):
        decoupled_ppo(proximal="interpolated", leave_count=True)


def test_an_interpolated_policy_of_fresh_tokens_changes_nothing() -> None:
    """Also of a loss that looks at the whole batch first. Of stale ones it moves the bounds of a clip."""
    fresh = RAGGED.batch.with_info(staleness=0 * STALE)
    stale = RAGGED.batch.with_info(staleness=STALE)
    narrow = dapo(clip_low=0.03, clip_high=0.03)
    for method in (narrow, algorithms.get("clip_cov"), algorithms.get("kl_cov")):
        moved = replace(method, objective=interpolated_proximal(method.objective))
        pairs = (method, fresh), (moved, fresh), (moved, stale)
        found = [gradient_of(one, batch, RAGGED.logp) for one, batch in pairs]
        np.testing.assert_allclose(found[1], found[0], rtol=1e-6, atol=1e-9)
        assert method is not narrow or np.abs(found[2] - found[0]).max() > 1e-2
    config = TrainConfig(max_staleness=1, stale_correction="interpolate")
    assert repr(with_correction(config, narrow).objective) == repr(interpolated_proximal(narrow.objective, cap=2.0))


def test_decoupled_ppo_with_one_old_policy_is_ppo() -> None:
    batch = RAGGED.batch.replace(old_logp=RAGGED.batch.behaviour_logp)
    plain = dapo(clip_high=0.2, dynamic_sampling=False)
    found, expected = (gradient_of(a, batch, RAGGED.logp) for a in (decoupled_ppo(), plain))
    np.testing.assert_allclose(found, expected, atol=1e-7)


@pytest.mark.parametrize("correction", ["truncate", "mask"])
def test_a_corrected_method_of_an_asynchronous_run_is_decoupled(correction: str) -> None:
    """Its ratio is to the policy before the update, and tokens are weighted as AReaL's are."""
    plain = dapo(clip_high=0.2, dynamic_sampling=False)
    config = TrainConfig(max_staleness=1, stale_correction=correction)
    found = with_correction(config, plain)
    expected = decoupled_ppo(cap=2.0, correction=correction)
    assert "old_logp" in found.needs
    found, expected = (gradient_of(a, RAGGED.batch, RAGGED.logp) for a in (found, expected))
    np.testing.assert_allclose(found, expected, atol=1e-7)
    for kept in (TrainConfig(), replace(config, stale_correction="none")):
        assert with_correction(kept, plain) is plain
    own = decoupled_ppo()
    assert with_correction(config, own) is own


@pytest.mark.parametrize(
    ("A", "loss", "gradient"),
    [(0.75, 1.267854, [0, -0.645531, -0.528516]), (-0.25, -0.514263, [0.372956, 0.215177, 0])],
)
def test_minirl_worked_example(A: float, loss: float, gradient: list[float]) -> None:
    old = np.array([[-0.9, -1.3, -0.4]])
    batch = batch_of(np.ones((1, 3)), [1.0], [[-1, -1.2, -0.4]], old_logp=old, advantages=np.full((1, 3), A))

    def value(logp: jax.Array) -> jax.Array:
        return minirl().objective(outputs_of(logp), batch)[0]

    found, slope = jax.value_and_grad(value)(jnp.array([[-0.6, -1.35, -0.75]]))
    assert float(found) == pytest.approx(loss, abs=1.5e-6)
    np.testing.assert_allclose(slope[0], gradient, atol=1.5e-6)


def test_minirl_is_the_loop() -> None:
    def loop(logp: Rows, held: Rows) -> float:
        rows = []
        for row, fixed, old, b, A in zip(logp, held, RAGGED.old, RAGGED.behaviour, RAGGED.centred, strict=True):
            total = 0.0
            for x, h, y, z in zip(row, fixed, old, b, strict=True):
                r = np.exp(h - y)
                masked = (A > 0 and r > 1.1) or (A < 0 and r < 0.9)
                total += 0.0 if masked else min(np.exp(h - z), 1.15) * A * x
            rows.append(total)
        return -mean(rows)

    assert_is_the_loop(minirl(0.1, 0.1, cap=1.15), RAGGED, loop)


def test_on_policy_minirl_and_hispo_are_the_policy_gradient() -> None:
    batch = RAGGED.batch.replace(old_logp=RAGGED.batch.behaviour_logp)
    expected = gradient_of(dr_grpo(max_length=1), batch, batch.behaviour_logp)
    np.testing.assert_allclose(gradient_of(minirl(), batch, batch.behaviour_logp), expected, atol=1e-6)
    found = gradient_of(hispo(scale="none", max_length=1), batch, batch.behaviour_logp)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_hispo_worked_example() -> None:
    old = np.array([[-1, -2, -0.5], [-1, -0.3, -0.7]])
    behaviour = np.array([[-1.02, -1.95, -0.9], [-1.3, -0.8, -1]])
    batch = batch_of(np.ones((2, 3)), [1.0, 0], behaviour, old_logp=old)
    masks = [
        importance_correction(level, "reject", 1 - bound, 1 + bound)
        for level, bound in (("geometric", 0.2), ("token", 0.3))
    ]
    algorithm = Algorithm(given([[1.0] * 3, [-1.0] * 3], *masks), hispo().objective)
    logp = old + np.array([[0.1, -0.1, 0.05], [0.2, 0, 0.1]])
    assert loss_of(algorithm, batch, logp) == pytest.approx(-0.331367, abs=1.5e-6)


def test_hispo_bounds_bad_actions_from_both_sides() -> None:
    batch = batch_of(np.ones((1, 3)), [1.0], [[-1.3, -0.8, -1]], advantages=-np.ones((1, 3)))

    def value(logp: jax.Array) -> jax.Array:
        return -3 * hispo(dual_clip=1.5).objective(outputs_of(logp), batch)[0]

    found, slope = jax.value_and_grad(value)(jnp.array([[-0.8, -1.5, -0.6]]))
    assert float(found) == pytest.approx(-1.5 - 0.8 - 1.491825, abs=1e-5)
    np.testing.assert_allclose(slope[0], [0, 0, -1.491825], atol=1e-5)


@pytest.mark.parametrize("max_length", [None, 9])
def test_hispo_is_the_loop(max_length: int | None) -> None:
    kept = []

    def loop(logp: Rows, held: Rows) -> float:
        rows = []
        for row, old, b, A in zip(logp, RAGGED.old, RAGGED.behaviour, RAGGED.advantage, strict=True):
            s = np.exp(mean([y - z for y, z in zip(old, b, strict=True)]))
            total = 0.0
            for x, y, z in zip(row, old, b, strict=True):
                r = np.exp(x - z)
                H = abs(s - 1) < 0.03 and abs(np.exp(y - z) - 1) < 0.05
                kept.append(H)
                total += H * (min(r, 1.12) * A if A >= 0 else min(max(r, 0.9), 1.15) * A)
            rows.append(total)
        return -mean(rows) / (max_length or max(len(row) for row in logp))

    algorithm = hispo(0.1, 0.12, dual_clip=1.15, sequence_bound=0.03, token_bound=0.05, max_length=max_length)
    assert_is_the_loop(algorithm, RAGGED, loop)
    assert 0 < sum(kept) < len(kept)
