"""Losses on lists and pairs of the samples of a prompt, whose scores are log-probabilities of whole sequences."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.log_ratios import LARGEST
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import PolicyOutputs, Trajectories, bucket_sums, weighted
from jaxrl_llm.core.transform import Objective
from jaxrl_llm.objectives.preference.pairs import bucket_log_sum_exp, coupled
from jaxrl_llm.utils.errors import require_choice

Number = float | jax.Array


def log_ratio_sum(outputs: PolicyOutputs, batch: Trajectories) -> jax.Array:
    """The weighted sum of each row's log-ratios to the behaviour policy, f32[N]: log pi(y) / q(y) of the sequence."""
    return sequence_log_ratios(outputs.logp, batch)


def sequence_log_ratios(logp: jax.Array, batch: Trajectories) -> jax.Array:
    inside = batch.loss_weights != 0
    return jnp.sum(weighted(jnp.where(inside, logp, 0.0) - jnp.where(inside, batch.behaviour_logp, 0.0), batch), axis=1)


def scored_rows(batch: Trajectories) -> jax.Array:
    """bool[N]: rows with a score and a weight in the loss."""
    return ~jnp.isnan(batch.scores) & jnp.any(batch.loss_weights != 0, axis=1)


def target_shares(
    score: jax.Array, target: jax.Array, known: jax.Array, group: jax.Array, scale: Number = 1.0
) -> jax.Array:
    """Each row's share f32[N] of the mean over prompts of -sum_i a_i log b_i.

    a = softmax(target) and b = softmax(scale score) over the known rows bool[N] of a prompt. The derivative with
    respect to the scores is scale (b - a) / prompts.

    >>> logp, log_p, r = jnp.array([-10.2, -10.8, -9.6]), jnp.array([-10.0, -11, -9.5]), jnp.array([1.0, 2, -1])
    >>> shares = target_shares(logp - log_p, r, r < 9, jnp.zeros(3, jnp.int32))
    >>> print(f"{jnp.sum(shares):.6f}")
    0.994433
    """
    a = jnp.where(known, jnp.exp(jnp.where(known, target - bucket_log_sum_exp(group, target, known), 0.0)), 0.0)
    log_b = scale * score - bucket_log_sum_exp(group, scale * score, known)
    (size,) = bucket_sums(group, known.astype(jnp.float32))
    prompts = jnp.maximum(jnp.sum(known / jnp.maximum(size, 1)), 1.0)
    return jnp.where(known, -a * log_b, 0.0) / prompts


@part
def tilted_targets(temperature: Number = 1.0, scale: Number = 1.0) -> Objective:
    """Cross-entropy of the policy's weights b with those a of the reward-tilted reference, over a prompt's samples.

    a = softmax(log p(y)/q(y) + r / temperature), b = softmax(scale log pi(y)/q(y)), with p the reference and q the
    behaviour policy, probabilities of whole sequences; see `target_shares`.
    """
    check_number("temperature", temperature, above=0)
    check_number("scale", scale, above=0)

    def shares(s: jax.Array, batch: Trajectories) -> jax.Array:
        known = scored_rows(batch)
        target = sequence_log_ratios(batch.need("reference_logp"), batch) + jnp.nan_to_num(batch.scores) / temperature
        return target_shares(s, target, known, batch.group, scale)

    return coupled(log_ratio_sum, shares, "listwise", frozenset({"reference_logp"}))


def pair_shares(
    log_ratio: jax.Array,
    reward: jax.Array,
    group: jax.Array,
    clip_range: Number = 0.2,
    clip: Literal["separate", "joint", "none"] = "separate",
) -> jax.Array:
    """Each row's share f32[N] of the mean over pairs of a prompt of a loss on the difference D of their rewards.

    log_ratio f32[N]: l = log pi(y)/q(y), w = exp(l), sg: without gradient. reward f32[N]: NaN to leave a row out.

        none      -D w_1 w_2 (l_1 - l_2) / 2, w without gradient
        separate  -[min(w_1 a_1, clip(w_1) a_1) + min(w_2 a_2, clip(w_2) a_2)] / 2, a_1 = D sg(w_2), a_2 = -D sg(w_1)
        joint     -min(c u, c clip(u, -clip_range, clip_range)) / 2, u = l_1 - l_2, c = D sg(w_1 w_2)
    """
    known = ~jnp.isnan(reward)
    pairs = (group[:, None] == group) & known[:, None] & known & ~jnp.eye(group.shape[0], dtype=bool)
    r = jnp.where(known, reward, 0.0)
    difference = jnp.where(pairs, r[:, None] - r, 0.0)
    l = jnp.clip(jnp.where(known, log_ratio, 0.0), -LARGEST, LARGEST)
    w, fixed = jnp.exp(l), jax.lax.stop_gradient(jnp.exp(l))
    if clip == "separate":
        a, inside = difference * fixed, jnp.clip(w, 1 - clip_range, 1 + clip_range)
        gain = 0.5 * jnp.minimum(w[:, None] * a, inside[:, None] * a)  # of the first of each ordered pair
    else:
        # A pair is here in both orders, each of which gets half.
        u, c = l[:, None] - l, difference * fixed[:, None] * fixed
        held = jnp.minimum(c * u, c * jnp.clip(u, -clip_range, clip_range)) if clip == "joint" else c * u
        gain = 0.25 * held
    number = jnp.maximum(0.5 * jnp.sum(pairs), 1.0)
    return -jnp.sum(jnp.where(pairs, gain, 0.0), axis=1) / number


@part
def pairwise_policy(
    clip_range: Number = 0.2,
    clip: Literal["separate", "joint", "none"] = "separate",
    kl_coefficient: Number = 0.0,
) -> Objective:
    """`pair_shares` of all pairs of a prompt's samples, with the rewards r - kl_coefficient log q(y)/p(y).

    q: the behaviour policy, p: the reference (not computed where kl_coefficient is 0), whole sequences.
    """
    require_choice("clip", clip, ("separate", "joint", "none"))
    check_number("clip_range", clip_range, least=0)
    check_number("kl_coefficient", kl_coefficient, least=0)
    penalised = not (isinstance(kl_coefficient, int | float) and kl_coefficient == 0)

    def shares(l: jax.Array, batch: Trajectories) -> jax.Array:
        reward = jnp.where(scored_rows(batch), batch.scores, jnp.nan)
        if penalised:
            reward = reward + kl_coefficient * sequence_log_ratios(batch.need("reference_logp"), batch)
        return pair_shares(l, reward, batch.group, clip_range, clip)

    needs = frozenset({"reference_logp"}) if penalised else frozenset[str]()
    return coupled(log_ratio_sum, shares, "pairwise", needs)
