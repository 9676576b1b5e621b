"""Hints that are trained on: the first actions of a row, which the policy did not sample."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.multipliers import row_mean
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import PolicyOutputs, Trajectories, bucket_moments
from jaxrl_llm.core.transform import Metrics, Transform, stateless
from jaxrl_llm.objectives.surrogates import Surrogate


def hint_tokens(batch: Trajectories) -> jax.Array:
    """bool[N, L]: the first info["hint_tokens"] f32[N] actions of each row; none without the entry."""
    number = (batch.info or {}).get("hint_tokens")
    if number is None:
        return jnp.zeros(batch.action_mask.shape, bool)
    return batch.action_mask & (batch.action_index < jnp.nan_to_num(number)[:, None])


def hinted_rows(batch: Trajectories) -> jax.Array:
    """bool[N]: rows that begin with a hint."""
    return jnp.any(hint_tokens(batch), axis=1)


@part
def hints_under_old() -> Transform:
    """The behaviour policy of the hints is the one before the update: their ratio is pi / pi_old."""

    def apply(b: Trajectories) -> Trajectories:
        return b.replace(behaviour_logp=jnp.where(hint_tokens(b), b.need("old_logp"), b.behaviour_logp))

    return stateless(apply, {"old_logp", "hint_tokens"})


def consistency(entropy: jax.Array, hint: jax.Array, others: jax.Array) -> jax.Array:
    """exp(-|H_t - M| / M), f32[N, L], with M the mean entropy H of a row's `others`: 1 at M, less elsewhere.

    entropy f32[N, L]; hint, others bool[N, L]. 1 outside of the hint, and in rows without others.

    >>> entropy, hint = jnp.asarray([[0.5, 1.5, 1.0, 0.0]]), jnp.asarray([[True, True, False, False]])
    >>> print(consistency(entropy, hint, ~hint).round(4))
    [[1.     0.1353 1.     1.    ]]
    """
    mean = row_mean(entropy, others)[:, None]
    mismatch = jnp.where(hint, jnp.abs(entropy - mean), 0.0) / jnp.maximum(mean, 1e-6)
    return jnp.where(jnp.any(others, axis=1)[:, None], jnp.exp(-mismatch), 1.0)


@part
def shielded_hints(sampled: Surrogate) -> Surrogate:
    """The surrogate `sampled`, times `consistency` on the tokens of hints, and 0 on these where A < 0 (2512.13095).

    The entropies are those of the current policy, under stop-gradient. Statistics, besides those of `sampled`:
    "hint/share" of the tokens, and "hint/weight", the mean over all tokens of the weights of hints.
    """

    def surrogate(ratio: jax.Array, outputs: PolicyOutputs, batch: Trajectories) -> tuple[jax.Array, Metrics]:
        hint, value = hint_tokens(batch), sampled(ratio, outputs, batch)
        entropy = jax.lax.stop_gradient(outputs.entropy)
        weight = consistency(entropy, hint, batch.action_mask & ~hint)
        weight = jnp.where(hint & (batch.need("advantages") < 0), 0.0, weight)
        statistics = {"hint/share": hint.astype(jnp.float32), "hint/weight": jnp.where(hint, weight, 0.0)}
        return weight * value[0], {**value[1], **statistics}

    return surrogate


def failure_weights(batch: Trajectories, epsilon: float = 1e-6) -> jax.Array:
    """f32[N]: weights of the advantages of plain and hinted rows by how often each kind fails (`balanced_kinds`)."""
    hinted, scores = hinted_rows(batch), batch.scores
    failures = []
    for kind in (~hinted, hinted):
        number, mean, _ = bucket_moments(batch.group, jnp.where(kind, scores, jnp.nan))
        failures.append(jnp.where(number > 0, jnp.clip(1 - mean, 0.0, 1.0), jnp.nan))
    plain, helped = failures
    advantages = jnp.where(batch.action_mask, batch.need("advantages"), 0.0)
    good, bad = (jnp.any(x, axis=1) for x in (advantages > 0, advantages < 0))
    chosen = jnp.where(hinted, bad, good)
    factor = jnp.where(chosen, plain, helped + epsilon) / (plain + helped + epsilon)
    _, mean, _ = bucket_moments(batch.group, jnp.where(jnp.isnan(scores), jnp.nan, factor))
    return jnp.where(jnp.isnan(factor) | (mean <= 0), 1.0, factor / jnp.where(mean > 0, mean, 1.0))


@part
def balanced_kinds(epsilon: float = 1e-6) -> Transform:
    """Weight the advantages of plain and hinted rows of a group by the failure rates D_N and D_H, 1 - mean reward.

    rho = D_N / (D_N + D_H + epsilon) for plain rows with A > 0 and hinted rows with A < 0, 1 - rho for the others,
    divided by the mean over the group's scored rows. 1 in groups without both kinds.
    """

    def apply(b: Trajectories) -> Trajectories:
        return b.replace(advantages=b.need("advantages") * failure_weights(b, epsilon)[:, None])

    return stateless(apply, {"hint_tokens"})
