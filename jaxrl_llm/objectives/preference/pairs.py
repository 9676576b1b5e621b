"""Losses that couple the rows of a group: preferences between samples, right answers against wrong ones, win rates.

Each row has one differentiable number, its score. The loss is not a sum of functions of single rows, so `coupled`
computes over the whole batch each row's share of the loss, and the derivative of the loss with respect to its score.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_llm.core.annotations import NonNegativeNumber, Number, PositiveNumber, Source
from jaxrl_llm.core.arguments.checks import require_function
from jaxrl_llm.core.buckets import bucket_best, bucket_sums
from jaxrl_llm.core.log_ratios import needed
from jaxrl_llm.core.parts import Array, Metrics, Objective, PolicyOutputs, Trajectories, part, row_means, weighted
from jaxrl_llm.objectives.ratios import log_ratio_to
from jaxrl_llm.utils.value_digest import value_digest

RowScore = Callable[[PolicyOutputs, Trajectories], Array]  # -> f32[N], or several each, f32[N, H]; finite


def coupled(
    score: RowScore,
    shares: Callable[[Array, Trajectories], Array],
    metric: str = "coupled",
    needs: frozenset[str] = frozenset(),
    report: Callable[[Array, Trajectories], Metrics] | None = None,
    by_groups: bool = False,
) -> Objective:
    """The loss sum_i c_i, c = shares(s, batch) f32[N], s the scores of all rows; exact for any split into slices.

    `refresh` computes c and g = d (sum c) / d s at the current scores s0; each row of a slice then contributes
    c_i + g_i (s_i - s0_i), which has the exact value and gradient at s = s0. report: further metrics, each as the rows'
    shares f32[N] of it. by_groups: whether the shares of some groups' rows are the same without the other groups.
    """

    # Its entries of info: a sum may have two such terms, and a name is the same in every process.
    own = f"{metric}/{value_digest((score, shares, report))[:12]}"

    def refresh(outputs: PolicyOutputs, batch: Trajectories) -> Trajectories:
        def total(s: Array) -> tuple[Array, Array]:
            c = shares(s, batch)
            return jnp.sum(c), c

        s = score(outputs, batch)
        slope, c = jax.grad(total, has_aux=True)(s)
        further = {} if report is None else {f"{own}/of/{name}": x for name, x in report(s, batch).items()}
        return batch.with_info(**{f"{own}/share": c, f"{own}/slope": jax.lax.stop_gradient(slope)}, **further)

    def objective(outputs: PolicyOutputs, batch: Trajectories) -> tuple[Array, Metrics]:
        s = score(outputs, batch)
        slope, c = batch.need(f"{own}/slope"), batch.need(f"{own}/share")
        value = jnp.sum(jax.lax.stop_gradient(c)) + jnp.sum(slope * (s - jax.lax.stop_gradient(s)))
        prefix = f"{own}/of/"
        further = {name[len(prefix) :]: jnp.sum(x) for name, x in (batch.info or {}).items() if name.startswith(prefix)}
        return value, {metric: value, **further}

    return Objective(objective, needs, refresh, by_groups)


def total_logp(outputs: PolicyOutputs, batch: Trajectories) -> Array:
    """Weighted log-probability of each row, f32[N]."""
    return jnp.sum(weighted(jnp.where(batch.loss_weights != 0, outputs.logp, 0.0), batch), axis=1)


def mean_logp(outputs: PolicyOutputs, batch: Trajectories) -> Array:
    """Weighted mean log-probability of each row's tokens, f32[N]."""
    return row_means(jnp.where(batch.loss_weights != 0, outputs.logp, 0.0), batch)


def mean_log_ratio(against: str = "reference") -> RowScore:
    """Weighted mean log-ratio of each row's tokens, f32[N]: DPO's implicit reward, normalised by length."""
    return lambda outputs, batch: row_means(log_ratio_to(outputs, batch, against), batch)


def shares_of_pairs(z: Array, pairs: Array) -> Array:
    """Each row's share f32[N] of the mean of -log sigmoid(z_ij) over pairs bool[N, N], in those where it is i."""
    return jnp.sum(jnp.where(pairs, jax.nn.softplus(-z), 0.0), axis=1) / jnp.maximum(jnp.sum(pairs), 1)


def preference_shares(
    implied: Array, reward: Array, group: Array, beta: Number = 0.1, best: Number = 1.0, best_scale: Number = 1.0
) -> Array:
    """Each row's share f32[N] of mean -log sigmoid(c beta (h_i - h_j)) over the pairs of a group with r_i > r_j.

    implied f32[N]: h, the implicit rewards. c = best_scale where r_i >= best, else 1. In a batch without pairs the loss
    is mean -log sigmoid(+-h_i), + where r_i >= best. Rows with NaN rewards are ignored.
    """
    known = ~jnp.isnan(reward)
    good = reward >= best
    pairs = (group[:, None] == group) & (reward[:, None] > reward)
    z = jnp.where(good, best_scale, 1.0)[:, None] * beta * (implied[:, None] - implied)
    of_pairs = shares_of_pairs(z, pairs)
    alone = jnp.where(known, jax.nn.softplus(jnp.where(good, -implied, implied)), 0.0) / jnp.maximum(jnp.sum(known), 1)
    return jnp.where(jnp.any(pairs), of_pairs, alone)


@part
def preference(
    beta: PositiveNumber = 0.1, best: Number = 1.0, best_scale: NonNegativeNumber = 1.0, against: Source = "reference"
) -> Objective:
    """`preference_shares` of the mean log-ratios: DPO on all pairs within a group that differ in reward."""

    def shares(h: Array, batch: Trajectories) -> Array:
        return preference_shares(h, batch.scores, batch.group, beta, best, best_scale)

    return coupled(mean_log_ratio(against), shares, "preference", needed(against))


def bucket_log_sum_exp(keys: Array, values: Array, mask: Array) -> Array:
    """Log-sum-exp of the masked values that share a sample's key, f32[N]; 0 if there are none."""
    top = bucket_best(keys, jax.lax.stop_gradient(jnp.where(mask, values, jnp.nan)))
    (total,) = bucket_sums(keys, jnp.where(mask, jnp.exp(jnp.where(mask, values - top, 0.0)), 0.0))
    return jnp.where(total > 0, top + jnp.log(jnp.where(total > 0, total, 1.0)), 0.0)


def discriminative_shares(
    score: Array,
    right: Array,
    wrong: Array,
    group: Array,
    merit: Array,
    merit_temperature: Number = 0.1,
    temperature: Number = 10.0,
) -> Array:
    """Each row's share f32[N] of sum_i w_i s_i - tau log mean_j exp(s_j / tau), summed over groups with both kinds.

    i: right rows of a group, w = softmax(merit / merit_temperature) over them; j: its wrong rows; tau = temperature.
    The wrong rows of a group have equal shares. right, wrong bool[N].
    """
    number_right, number_wrong = bucket_sums(group, right.astype(jnp.float32), wrong.astype(jnp.float32))
    both = (number_right > 0) & (number_wrong > 0)
    logits = merit / merit_temperature
    w = jnp.exp(jnp.where(right, logits - bucket_log_sum_exp(group, logits, right), 0.0))
    worst = bucket_log_sum_exp(group, score / temperature, wrong) - jnp.log(jnp.maximum(number_wrong, 1))
    share = jnp.where(right, w * score, 0.0) - jnp.where(wrong, temperature * worst / jnp.maximum(number_wrong, 1), 0.0)
    return jnp.where(both, share, 0.0)


@part
def discriminative(
    merit: Callable[[Trajectories], Array],
    threshold: Number = 0.5,
    merit_temperature: PositiveNumber = 0.1,
    temperature: PositiveNumber = 10.0,
) -> Objective:
    """-`discriminative_shares` of mean log-probabilities / number of prompts with an action (DRPO, 2510.04474).

    Rows with a score above the threshold are right, others wrong. merit: `batch -> f32[N]`.
    """
    require_function("merit", merit)

    def shares(s: Array, batch: Trajectories) -> Array:
        score, acts = batch.scores, jnp.any(batch.action_mask, axis=1).astype(jnp.float32)
        (size,) = bucket_sums(batch.group, acts)
        prompts = jnp.maximum(jnp.sum(acts / jnp.maximum(size, 1)), 1.0)
        right, wrong = score > threshold, score <= threshold
        gain = discriminative_shares(s, right, wrong, batch.group, merit(batch), merit_temperature, temperature)
        return -gain / prompts

    return coupled(mean_logp, shares, "discriminative")


def log_ratio_sum(outputs: PolicyOutputs, batch: Trajectories) -> Array:
    """The weighted sum of each row's log-ratios to the behaviour policy, f32[N]: log pi(y) / q(y) of the sequence."""
    return sequence_log_ratios(outputs.logp, batch)


def sequence_log_ratios(logp: Array, batch: Trajectories) -> Array:
    """The weighted sum of each row's log-ratios of `logp` f32[N, L] to the behaviour policy, f32[N]."""
    inside = batch.loss_weights != 0
    return jnp.sum(weighted(jnp.where(inside, logp, 0.0) - jnp.where(inside, batch.behaviour_logp, 0.0), batch), axis=1)


def scored_rows(batch: Trajectories) -> Array:
    """bool[N]: rows with a score and a weight in the loss."""
    return ~jnp.isnan(batch.scores) & jnp.any(batch.loss_weights != 0, axis=1)


WIN_RATE, OPPONENT = "win_rate", "opponent"  # entries of info


def higher_of(gap: Array) -> Array:
    """1 for a higher score, 1/2 for equal ones, 0 for a lower one, by how much it is higher."""
    return 0.5 * (1 + jnp.sign(gap))


def opponents(batch: Trajectories) -> Array:
    """f32[N]: info["opponent"], 1 where a row is an opponent's; 0 where the batch does not say."""
    return (batch.info or {}).get(OPPONENT, jnp.zeros(batch.group.shape))


def win_rates(batch: Trajectories, oracle: Callable[[Array], Array], itself: bool = False) -> Array:
    """f32[N]: info["win_rate"], or where the batch has none the mean over the scored others of the row's group of
    oracle(score - other score), 0 to 1; NaN where there is no other. itself: over the row too, whose oracle(0) counts.
    """
    known = (batch.info or {}).get(WIN_RATE)
    if known is not None:
        return known
    score = batch.scores
    there = ~jnp.isnan(score)
    mates = (batch.group[:, None] == batch.group) & there[:, None] & there
    mates &= itself | ~jnp.eye(len(score), dtype=bool)
    wins = jnp.where(mates, oracle(jnp.nan_to_num(score)[:, None] - jnp.nan_to_num(score)), 0.0)
    count = jnp.sum(mates, axis=1)
    return jnp.where(count > 0, jnp.sum(wins, axis=1) / jnp.maximum(count, 1), jnp.nan)
