"""The fused policy gradient against the one composed of its parts: loss, gradient and metrics."""

from __future__ import annotations

from functools import partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from heavy import few
from jaxrl_kernels import ratio_clip

from jaxrl_llm.algorithms.policy_loss.bapo_adaptive_clip import controlled_clip
from jaxrl_llm.algorithms.regularisation.epo import turn_mean
from jaxrl_llm.core.trajectory import PolicyOutputs, Trajectories, map_rows, with_totals
from jaxrl_llm.objectives import (
    clip,
    kl,
    policy_gradient,
    sequence_mean,
    sequence_ratio,
    soft_gate,
    token_mean,
    token_ratio,
)
from jaxrl_llm.objectives.averages import AverageName, average_by_name
from jaxrl_llm.objectives.policy_gradient import token_weights
from jaxrl_llm.objectives.ratios import Ratio, span_ratio
from jaxrl_llm.utils.errors import InputError

N, L = 8, 11
RATIOS = {
    "token": token_ratio(),
    "old": token_ratio("old"),
    "sequence": sequence_ratio("reference"),
    "product": sequence_ratio(mean=False),
}
CLIPS = {"symmetric": clip(0.2, 0.2), "asymmetric": clip(0.1, 0.35), "dual": clip(0.2, 0.28, 1.5)}


def drawn(seed: int = 0, *, weights: bool = True, garbage: bool = True) -> tuple[PolicyOutputs, Trajectories]:
    """A batch with holes, padding, an empty row, weights, and garbage on tokens with weight 0."""
    random = np.random.default_rng(seed)
    mask = random.random((N, L)) < 0.8
    mask[:, 9:] = False
    mask[2] = False
    scale = np.where(mask, random.choice([0.0, 0.5, 1.0, 3.0], (N, L)), 0) if weights else np.ones((N, L))
    counts = mask & (scale != 0)

    def noise(values: np.ndarray) -> jax.Array:
        bad = np.resize([np.nan, np.inf, -np.inf], (N, L)) if garbage else 0.0
        return jnp.asarray(np.where(counts, values, bad), jnp.float32)

    logp, behaviour, old, reference = random.normal(-1, 0.4, (4, N, L))
    logp += np.linspace(-0.7, 0.7, N)[:, None]
    zeros = jnp.zeros((N, L), jnp.int32)
    batch = Trajectories(
        tokens=zeros,
        token_mask=jnp.arange(L)[None] < 9 + zeros,
        action_mask=jnp.asarray(mask),
        behaviour_logp=noise(behaviour),
        policy_step=zeros,
        turn=jnp.where(mask, jnp.arange(L) // 4, -1),
        group=jnp.arange(N) // 2,
        prompt_id=jnp.arange(N) // 2,
        truncated=jnp.zeros(N, bool),
        advantages=noise(random.normal(size=(N, L))),
        weights=jnp.asarray(scale, jnp.float32) if weights else None,
        old_logp=noise(old),
        reference_logp=noise(reference),
    )
    return PolicyOutputs(noise(logp), jnp.zeros((N, L))), batch


def value_and_grad(objective: Any, outputs: PolicyOutputs, batch: Trajectories) -> Any:
    """(loss, metrics), and the gradient with respect to logp."""

    def loss(logp: jax.Array) -> Any:
        return objective(outputs.replace(logp=logp), batch)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(outputs.logp)


def agree(found: Any, wanted: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("kernel", few(["xla", "pallas"], ["pallas"]))
@pytest.mark.parametrize("surrogate", few(CLIPS, ["asymmetric", "dual"]))
@pytest.mark.parametrize("ratio", few(RATIOS, ["token", "sequence"]))
def test_the_kernel_is_the_composition(ratio: str, surrogate: str, kernel: str) -> None:
    outputs, batch = drawn()
    by_kernel = partial(ratio_clip, implementation=kernel)
    make = partial(policy_gradient, RATIOS[ratio], CLIPS[surrogate])
    for average in (token_mean(), sequence_mean()):
        composed, fused = make(average, kernel=None), make(average, kernel=by_kernel)
        wanted = value_and_grad(composed, outputs, batch)
        agree(value_and_grad(fused, outputs, batch), wanted)
        assert fused.needs == composed.needs
    (loss, metrics), gradient = wanted
    assert np.isfinite(loss)
    assert set(metrics) == {"ratio/mean", "clip/low", "clip/high"}
    assert 0 < metrics["clip/low"] < 1
    assert 0 < metrics["clip/high"] < 1
    assert np.count_nonzero(gradient) > 5


@pytest.mark.parametrize("name", few([*get_args(AverageName), "turns"], ["turns"]))
def test_with_every_average(name: str) -> None:
    average = turn_mean() if name == "turns" else average_by_name(name)
    for weights in (False, True):
        outputs, batch = drawn(1, weights=weights)
        make = partial(policy_gradient, sequence_ratio(), clip(0.2, 0.28), average)
        agree(value_and_grad(make(), outputs, batch), value_and_grad(make(kernel=None), outputs, batch))


def test_the_weights_of_tokens_in_an_average_by_hand() -> None:
    outputs, batch = drawn(2, weights=False)
    mask = np.asarray(batch.action_mask)
    np.testing.assert_allclose(token_weights(token_mean(), batch), mask / mask.sum(), rtol=1e-6)
    lengths = np.maximum(mask.sum(axis=1, keepdims=True), 1)
    np.testing.assert_allclose(token_weights(sequence_mean(), batch), mask / lengths / (N - 1), rtol=1e-6)
    for average in (lambda x, _: jnp.max(x), lambda x, _: jnp.sum(x * x), lambda x, _: jnp.sum(jnp.exp(x))):
        assert token_weights(average, batch) is None
        # These fall back to the composed loss.
        make = partial(policy_gradient, token_ratio(), clip(), average)
        agree(value_and_grad(make(kernel=refuses), outputs, batch), value_and_grad(make(kernel=None), outputs, batch))


def test_slices_add_up_and_objectives_add() -> None:
    outputs, batch = drawn(3)
    whole = policy_gradient(sequence_ratio(), clip(), sequence_mean()) + 0.1 * kl()
    wanted = value_and_grad(whole, outputs, batch)
    batch = with_totals(batch)
    parts = [
        value_and_grad(whole, jax.tree.map(lambda x, s=s: x[s], outputs), map_rows(lambda x, s=s: x[s], batch))
        for s in (slice(0, 3), slice(3, 4), slice(4, N))
    ]
    agree(jax.tree.map(lambda *x: sum(x), *[part[0] for part in parts]), wanted[0])
    np.testing.assert_allclose(np.concatenate([part[1] for part in parts]), wanted[1], rtol=1e-6, atol=1e-7)


def test_a_traced_range_is_taken_too() -> None:
    outputs, batch = drawn(4)

    def found(low: jax.Array, high: jax.Array, dual: jax.Array) -> Any:
        return value_and_grad(policy_gradient(token_ratio(), clip(low, high, dual), token_mean()), outputs, batch)

    mapped = jax.vmap(found)(jnp.array([0.1, 0.2]), jnp.array([0.3, 0.1]), jnp.array([1.5, 4.0]))
    for n, given in enumerate(((0.1, 0.3, 1.5), (0.2, 0.1, 4.0))):
        wanted = value_and_grad(policy_gradient(token_ratio(), clip(*given), token_mean(), kernel=None), outputs, batch)
        agree(jax.tree.map(lambda x, n=n: x[n], mapped), wanted)


def refuses(*arrays: Any, **given: Any) -> Any:
    raise AssertionError("the kernel was called")


def plain(outputs: PolicyOutputs, batch: Trajectories) -> jax.Array:
    return jnp.exp(jnp.where(batch.loss_weights != 0, outputs.logp - batch.behaviour_logp, 0.0))


@pytest.mark.parametrize(
    ("ratio", "surrogate"),
    [
        (sequence_ratio(gradient="token"), clip()),
        (span_ratio("turn"), clip()),
        (Ratio(plain), clip()),
        (token_ratio(), soft_gate()),
        (token_ratio(), controlled_clip()),
        (token_ratio(), lambda ratio, outputs, batch: clip()(ratio, outputs, batch)),
        (token_ratio(), clip(jnp.full((N, L), 0.2), 0.2)),
    ],
)
def test_anything_else_is_composed(ratio: Ratio, surrogate: Any) -> None:
    outputs, batch = drawn(5)
    batch = batch.with_controls(clip_low=jnp.float32(0.8), clip_high=jnp.float32(1.2))
    make = partial(policy_gradient, ratio, surrogate, token_mean())
    agree(value_and_grad(make(kernel=refuses), outputs, batch), value_and_grad(make(kernel=None), outputs, batch))


def test_the_plain_ones_do_reach_the_kernel() -> None:
    outputs, batch = drawn(6)
    for ratio in RATIOS.values():
        with pytest.raises(AssertionError, match="the kernel was called"):
            policy_gradient(ratio, clip(), token_mean(), kernel=refuses)(outputs, batch)


def test_what_is_missing_is_said_as_ever() -> None:
    outputs, batch = drawn(7)
    whole = policy_gradient(token_ratio("old"), clip(), token_mean())
    with pytest.raises(InputError, match="the batch has no advantages"):
        whole(outputs, batch.replace(advantages=None))
    with pytest.raises(InputError, match="needs old_logp"):
        whole(outputs, batch.replace(old_logp=None))
