"""Losses that regress ratios or log-probabilities onto targets, and masked, weighted score functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.group import above_baseline
from jaxrl_llm.core.choices import Clipping, Source
from jaxrl_llm.core.coefficients import check_bounds, check_number
from jaxrl_llm.core.log_ratios import absolute, log_ratio, needed
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import PolicyOutputs, Trajectories, bucket_moments
from jaxrl_llm.core.transform import Metrics, Objective, Transform, stateless
from jaxrl_llm.objectives.averaging.averages import Average, Mean, as_average, averaged
from jaxrl_llm.objectives.ratios import log_ratio_to
from jaxrl_llm.objectives.surrogates import Surrogate
from jaxrl_llm.utils.errors import require_choice

Number = float | jax.Array
CLIPS = ("none", "one-side", "two-side", "ring")
WEIGHTS = ("none", "importance", "advantage")


def clip_mask(
    shape: Clipping,
    ratio: jax.Array,
    advantages: jax.Array,
    low: Number,
    high: Number,
    far_low: Number,
    far_high: Number,
) -> jax.Array:
    """True where a token's gradient is kept (2509.24203), bool, elementwise.

    "none": everywhere. "one-side": PPO's clip, rho <= 1 + high where A >= 0, rho >= 1 - low where A <= 0.
    "two-side": 1 - low <= rho <= 1 + high. "ring": as "two-side", and where the step moves a distant ratio back towards
    1: A >= 0 and rho <= 1 - far_low, or A <= 0 and rho >= 1 + far_high.
    """
    require_choice("clip", shape, CLIPS)
    good, bad = advantages >= 0, advantages <= 0
    if shape == "none":
        return jnp.ones(ratio.shape, bool)
    if shape == "one-side":
        return (good & (ratio <= 1 + high)) | (bad & (ratio >= 1 - low))
    inside = (ratio >= 1 - low) & (ratio <= 1 + high)
    if shape == "two-side":
        return inside
    return inside | (good & (ratio <= 1 - far_low)) | (bad & (ratio >= 1 + far_high))


def score_weight(
    shape: Literal["none", "importance", "advantage"],
    ratio: jax.Array,
    advantages: jax.Array,
    temperature: Number = 1.0,
) -> jax.Array:
    """Weight of the score function: 1, rho ("importance"), or exp(A / temperature) ("advantage"), elementwise."""
    require_choice("weight", shape, WEIGHTS)
    if shape == "importance":
        return ratio
    # The exponent is clipped like log-ratios, so that weights and gradients stay finite.
    return jnp.exp(jnp.clip(advantages / temperature, -20.0, 20.0)) if shape == "advantage" else jnp.ones_like(ratio)


def signed_ratio_distance(ratio: jax.Array, target: jax.Array, advantages: jax.Array) -> jax.Array:
    """|(rho - target) A|: a weighted L1 regression of the ratio, with gradient 0 at the target; elementwise.

    At the target means within `log_ratios.ROUNDING` of it.
    """
    return absolute(ratio - target) * jnp.abs(advantages)


def bounded_ratio(z: jax.Array, low: Number, high: Number) -> jax.Array:
    """1 - low + (low + high) sigmoid(z): the target ratio, in [1 - low, 1 + high] (2604.18578); elementwise."""
    return 1 - low + (low + high) * jax.nn.sigmoid(z)


@part
def aim_at_bounds(low: Number, high: Number, temperature: Number, ddof: int = 1, epsilon: Number = 1e-6) -> Transform:
    """Write info["ratio_target"] f32[N], `bounded_ratio` of z = (r - median_g) / (std_g + epsilon) / temperature."""
    check_number("low", low, least=0, most=1)
    check_number("high", high, least=0)

    def aim(batch: Trajectories) -> Trajectories:
        deviation = bucket_moments(batch.group, batch.scores, ddof)[2]
        z = above_baseline(batch.scores, batch.group, "median") / (deviation + epsilon) / temperature
        return batch.with_info(ratio_target=bounded_ratio(z, low, high))

    return stateless(aim)


@part
def toward_ratio(name: str = "ratio_target") -> Surrogate:
    """The negative `signed_ratio_distance` to the targets info[name] f32[N]."""

    def surrogate(ratio: jax.Array, outputs: PolicyOutputs, batch: Trajectories) -> tuple[jax.Array, Metrics]:
        target = jnp.broadcast_to(batch.need(name)[:, None], ratio.shape)
        return -signed_ratio_distance(ratio, target, batch.need("advantages")), {"ratio/target": target}

    return surrogate


def next_action_value(values: jax.Array, mask: jax.Array) -> jax.Array:
    """values f32[N, L] at the next masked position of the row, f32[N, L]; 0 after the last one and outside the mask."""
    L = values.shape[1]
    position = jnp.where(mask, jnp.arange(L), L)
    after = jnp.pad(jax.lax.cummin(position, axis=1, reverse=True)[:, 1:], ((0, 0), (0, 1)), constant_values=L)
    found = jnp.take_along_axis(jnp.where(mask, values, 0.0), jnp.minimum(after, L - 1), axis=1)
    return jnp.where(mask & (after < L), found, 0.0)


def bellman_target(reward: jax.Array, next_values: jax.Array, scale: Number = 1.0) -> jax.Array:
    """r + scale V_next under stop-gradient; elementwise."""
    return jax.lax.stop_gradient(reward + scale * next_values)


@part
def random_policy_regression(
    scale: Number = 1.0, next_scale: Number = 1.0, against: Source = "behaviour", average: Average | Mean | None = None
) -> Objective:
    """Mean of (Q - sg(r + next_scale V_next))^2 with Q = scale (logp - logp_old).

    The log-ratio is interpreted as the Q-value of the uniform policy, whose state value V is the mean of Q over the
    vocabulary (ROVER, 2509.24981). V_next is the V of the row's next action, 0 after the last. r: the advantages.
    Needs "mean_logp". Metrics: "q/mean", "q/error".
    """
    mean = as_average(average)

    def objective(outputs: PolicyOutputs, batch: Trajectories) -> tuple[jax.Array, Metrics]:
        counts = batch.loss_weights != 0
        Q = scale * log_ratio_to(outputs, batch, against)
        now = (outputs.extras or {}).get("mean_logp", jnp.zeros_like(outputs.logp))
        V = scale * log_ratio(now, batch.need("mean_logp"), batch.action_mask)
        reward = jnp.where(counts, batch.need("advantages"), 0.0)
        error = mean((Q - bellman_target(reward, next_action_value(V, batch.action_mask), next_scale)) ** 2, batch)
        return error, {"q/mean": mean(Q, batch), "q/error": error}

    return averaged(objective, mean, needed(against) | {"mean_logp"})


def one_token_loss(logp: jax.Array, label: jax.Array, samples: jax.Array, penalty: Number = -0.1) -> jax.Array:
    """-(1/K) sum_k R(a_k) log p(a_k), R = 1 for the label and `penalty` for other tokens (2509.26313), f32[...].

    logp [..., V], label int [...], samples int [..., K].
    """
    reward = jnp.where(samples == label[..., None], 1.0, penalty)
    return -jnp.mean(reward * jnp.take_along_axis(logp, samples, axis=-1), axis=-1)


def expected_one_token_loss(
    logp: jax.Array, label: jax.Array, penalty: Number = -0.1, temperature: Number = 1.0
) -> jax.Array:
    """-sum_a q(a) R(a) log p(a), q = sg(softmax(logp / temperature)): the expected `one_token_loss`, f32[...]."""
    q = jax.lax.stop_gradient(jax.nn.softmax(logp / temperature, axis=-1))
    reward = jnp.where(jax.nn.one_hot(label, logp.shape[-1], dtype=bool), 1.0, penalty)
    return -jnp.sum(q * reward * logp, axis=-1)


def one_token_score(
    logp: jax.Array, heated_logp: jax.Array, label: jax.Array, penalty: Number = -0.1, temperature: Number = 1.0
) -> jax.Array:
    """A function with the gradient of -`expected_one_token_loss`, elementwise, from three log-probabilities.

    logp, heated_logp: of the label under the current policy, at temperature 1 and at `temperature` = k. label: q, the
    label's probability at k, without gradient. (1 - penalty) q grad log p + penalty sum_a q_a grad log p_a, where

        log p - k log p_k = k log Z_k - log Z_1,    whose gradient is q - p = sum_a q_a grad log p_a
    """
    return (1 - penalty) * jax.lax.stop_gradient(label) * logp + penalty * (logp - temperature * heated_logp)


@part
def one_token(penalty: Number = -0.1, temperature: float = 1.0) -> Surrogate:
    """A * `one_token_score`: the expectation of the score of tokens drawn at a temperature by the old policy.

    At temperature 1 the gradient is (1 - penalty) p grad log p, and that of the second term is 0. Only the gradient of
    the loss is meaningful, not its value. Needs "heated_logp:T" (`policy_gradient` with `needs`). Metric:
    "label/probability", of the label at the temperature.
    """

    def surrogate(ratio: jax.Array, outputs: PolicyOutputs, batch: Trajectories) -> tuple[jax.Array, Metrics]:
        counts = batch.loss_weights != 0
        heated = (outputs.extras or {}).get("heated_logp", outputs.logp)
        q = jnp.exp(jnp.minimum(jnp.where(counts, batch.need("heated_logp"), 0.0), 0.0))
        logp, heated = (jnp.where(counts, x, 0.0) for x in (outputs.logp, heated))
        score = one_token_score(logp, heated, q, penalty, temperature)
        return batch.need("advantages") * score, {"label/probability": q}

    return surrogate


@part
def masked_score(
    clip: Clipping = "none",
    weight: Literal["none", "importance", "advantage"] = "none",
    clip_low: Number = 0.2,
    clip_high: Number | None = None,
    far_low: Number = 0.6,
    far_high: Number = 2.0,
    temperature: Number = 1.0,
) -> Callable[[jax.Array, Trajectories], jax.Array]:
    """A weight for `log_probability`: `clip_mask` times `score_weight`; clip_high defaults to clip_low."""
    require_choice("clip", clip, CLIPS)
    require_choice("weight", weight, WEIGHTS)
    low, high = check_bounds("clip", clip_low, clip_high, most=1)
    check_number("far_low", far_low, least=0)
    check_number("far_high", far_high, least=0)
    check_number("temperature", temperature, above=0)

    def weigh(ratio: jax.Array, batch: Trajectories) -> jax.Array:
        A = batch.need("advantages")
        mask = clip_mask(clip, ratio, A, low, high, far_low, far_high)
        return jnp.where(mask, score_weight(weight, ratio, A, temperature), 0.0)

    return weigh
