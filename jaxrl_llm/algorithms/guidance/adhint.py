from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages import group_relative
from jaxrl_llm.advantages.multipliers import row_mean
from jaxrl_llm.advantages.normalisation import apart
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import NonNegative, Ours, ZeroOrOne
from jaxrl_llm.core.buckets import bucket_moments
from jaxrl_llm.core.parts import Metrics, PolicyOutputs, Trajectories, chain, stateless_part, surrogate_part
from jaxrl_llm.objectives import clip, policy_gradient, token_mean, token_ratio
from jaxrl_llm.objectives.surrogates import Surrogate
from jaxrl_llm.rollouts.guidance.prefixes import hinted_by_failures


@method(paper="arXiv 2512.13095", test="test_hint_tokens.py::test_adhint_is_its_loop")
def adhint(
    hinted: Ours[int] = 4,
    hint_low: Ours[float] = 0.1,
    hint_high: Ours[float] = 0.9,
    noise: Ours[float] = 0.05,
    column: Ours[str] = "solution",
    compared: Ours[Literal["kind", "group"]] = "kind",
    balance: Ours[bool] = True,
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
    ddof: Ours[ZeroOrOne] = 1,
    epsilon: Ours[NonNegative] = 1e-6,
) -> Algorithm:
    """Adaptive Hints with Difficulty Priors (ADHint).

    A group of plain samples comes first. D_N = 1 - their mean reward (within 0 and 1) is the difficulty, and unless it
    is 0, `hinted` more samples of the group begin with the first floor(w T) of the T tokens of a known solution, in a
    column of the data set:

        w = (hint_high - hint_low) D_N + hint_low + noise N(0, 1), within [0, 1]

    With D_H = 1 - the mean reward of these, A_i = (r_i - mean)/(std + epsilon) over the rows of its kind (compared
    "group": of both kinds) is multiplied, with balance, by rho = D_N/(D_N + D_H + epsilon) for plain rows with A > 0
    and hinted rows with A < 0, and by 1 - rho for the others, divided by the group's mean. The hint is trained on, too:

        loss = -mean_t c_t min(rho_t A, clip(rho_t, 1 - clip_low, 1 + clip_high) A)

    c_t = exp(-|H_t - H_own| / H_own) on the tokens of a hint, with H_own the mean entropy of the row's continuation,
    c_t = 0 on those of a hint with A < 0, and c_t = 1 on all others. A hint's ratio is to the policy before the update,
    which scores it.

    The paper's schedule and masking rule are known to us; the forms of the weights rho and c_t, the normal noise, one
    hint for all hinted samples, and all numbers are ours, so results need not be the paper's. Without solutions this is
    `grpo` with a token mean.
    """
    credit = group_relative(ddof=ddof, epsilon=epsilon)
    credit = apart(hinted_rows, credit, {"hint_tokens"}) if compared == "kind" else credit
    transforms = [hints_under_old(), credit, *([balanced_kinds(epsilon)] if balance else [])]
    objective = policy_gradient(token_ratio(), shielded_hints(clip(clip_low, clip_high)), token_mean())
    rollout = hinted_by_failures(column, hinted, hint_low, hint_high, noise)
    return Algorithm(chain(*transforms), objective, rollout=rollout)


def hinted_rows(batch: Trajectories) -> jax.Array:
    """bool[N]: rows that begin with a hint."""
    return jnp.any(hint_tokens(batch), axis=1)


@stateless_part({"old_logp", "hint_tokens"})
def hints_under_old(b: Trajectories) -> Trajectories:
    """The behaviour policy of the hints is the one before the update: their ratio is pi / pi_old."""
    return b.replace(behaviour_logp=jnp.where(hint_tokens(b), b.need("old_logp"), b.behaviour_logp))


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


@surrogate_part
def shielded_hints(
    ratio: jax.Array, outputs: PolicyOutputs, batch: Trajectories, sampled: Surrogate
) -> tuple[jax.Array, Metrics]:
    """The surrogate `sampled`, times `consistency` on the tokens of hints, and 0 on these where A < 0 (2512.13095).

    The entropies are those of the current policy, under stop-gradient. Statistics, besides those of `sampled`:
    "hint/share" of the tokens, and "hint/weight", the mean over all tokens of the weights of hints.
    """
    hint = hint_tokens(batch)
    value = sampled(ratio, outputs, batch)
    weight = consistency(jax.lax.stop_gradient(outputs.entropy), hint, batch.action_mask & ~hint)
    weight = jnp.where(hint & (batch.need("advantages") < 0), 0.0, weight)
    statistics = {"hint/share": hint.astype(jnp.float32), "hint/weight": jnp.where(hint, weight, 0.0)}
    return weight * value[0], {**value[1], **statistics}


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


@stateless_part({"hint_tokens"})
def balanced_kinds(b: Trajectories, epsilon: float = 1e-6) -> Trajectories:
    """Weight the advantages of plain and hinted rows of a group by the failure rates D_N and D_H, 1 - mean reward.

    rho = D_N / (D_N + D_H + epsilon) for plain rows with A > 0 and hinted rows with A < 0, 1 - rho for the others,
    divided by the mean over the group's scored rows. 1 in groups without both kinds.
    """
    return b.replace(advantages=b.need("advantages") * failure_weights(b, epsilon)[:, None])


def hint_tokens(batch: Trajectories) -> jax.Array:
    """bool[N, L]: the first info["hint_tokens"] f32[N] actions of each row; none without the entry."""
    return batch.action_mask & (batch.action_index < batch.entry("hint_tokens", 0)[:, None])
