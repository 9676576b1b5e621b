"""Losses of `losses` on pairs of rows of a batch, and what changes the weights of their tokens and of the pairs.

A pair is two rows of a group of which one has the higher reward: a chosen and a rejected response of a data set, with
the rewards 1 and 0, or sampled ones. Rows may lie in different slices of the update.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax.numpy as jnp

from jaxrl_llm.core.annotations import FractionNumber, PositiveNumber, Source
from jaxrl_llm.core.arguments.checks import require_function
from jaxrl_llm.core.log_ratios import needed, source
from jaxrl_llm.core.parts import Array, batch_part, part, stateless_part
from jaxrl_llm.core.trajectory import PolicyOutputs, Trajectories, row_means, totals_of, weighted
from jaxrl_llm.core.transform import Metrics, Objective
from jaxrl_llm.objectives.preference.losses import PairLoss, Pairs, is_of_each_pair, sigmoid
from jaxrl_llm.objectives.preference.pairs import RowScore, coupled
from jaxrl_llm.selection.rows import row_noise

PAIR_WEIGHT, MARGIN = "pair_weight", "margin"  # entries of info, f32[N]


class RowPairs(NamedTuple):
    """P pairs of rows of a batch."""

    chosen: Array  # int32[P]
    rejected: Array  # int32[P]
    valid: Array  # bool[P]: others are places for pairs that this batch does not have


ChoosePairs = Callable[[Trajectories], RowPairs]


@batch_part
def best_and_worst(batch: Trajectories) -> RowPairs:
    """The best and the worst row of each group where they differ in reward, of equals one by their content; P = N."""
    reward, rows = batch.scores, jnp.arange(batch.tokens.shape[0])
    known, noise = ~jnp.isnan(reward), row_noise(batch, 0)
    mates = (batch.group[:, None] == batch.group) & known[:, None] & known

    def extreme(value: Array) -> Array:
        """int32[N]: of each row's mates one with the largest value."""
        largest = jnp.max(jnp.where(mates, value, -jnp.inf), axis=1, keepdims=True)
        return jnp.argmax(jnp.where(mates & (value == largest), noise, -1.0), axis=1)

    best, worst = extreme(reward), extreme(-reward)
    return RowPairs(rows, worst, (best == rows) & (reward > reward[worst]))


@batch_part
def all_pairs(batch: Trajectories) -> RowPairs:
    """All pairs of rows of a group with different rewards; P = N^2."""
    reward, rows = batch.scores, jnp.arange(batch.tokens.shape[0])
    better = (batch.group[:, None] == batch.group) & (reward[:, None] > reward)
    return RowPairs(*(x.reshape(-1) for x in (*jnp.meshgrid(rows, rows, indexing="ij"), better)))


@part
def pairwise(
    loss: PairLoss = sigmoid,
    beta: PositiveNumber = 0.1,
    *,
    against: Source | None = "reference",
    pairs: ChoosePairs | None = None,
    per_token: bool = False,
    scores: RowScore | None = None,
    needs: Iterable[str] = (),
) -> Objective:
    """The mean over pairs of a loss of their log-probabilities, sums over each row's tokens by their loss weights.

    loss: of `losses`, or any function `(Pairs, beta) -> f[P]`. against: the policy of the log-ratios, None for
    log-probabilities alone. pairs: default `best_and_worst()`. per_token: means over tokens in place of sums, and
    lengths of 1. scores: `(outputs, batch) -> f[N]` in place of log-probabilities, with against=None; needs: what they
    need, such as those of a reward model. Pairs have a margin of info["margin"] of their chosen row, and are weighted
    by the product of both rows' info["pair_weight"], where the batch has them.

    Where the loss of a pair is known to depend on it alone (`losses.of_each_pair`) and the pairs are the default ones,
    micro-batches of whole groups need no pass over all rows before.

    Metrics, of which those of rewards are means over pairs of beta times the log-ratios: "pairwise", the loss;
    "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies" (the share of pairs whose chosen
    row has the larger one), and, without scores, "logps/chosen", "logps/rejected".
    """
    require_function("a loss of pairs", loss)
    choose = best_and_worst() if pairs is None else pairs
    by_groups = pairs is None and is_of_each_pair(loss)

    def of_rows(logp: Array, batch: Trajectories) -> Array:
        logp = jnp.where(batch.loss_weights != 0, logp, 0.0)
        return row_means(logp, batch) if per_token else jnp.sum(weighted(logp, batch), axis=1)

    def paired(s: Array, batch: Trajectories) -> tuple[RowPairs, Pairs]:
        rows, info = choose(batch), batch.info or {}
        ours, lengths = jnp.zeros_like(s), jnp.ones_like(s) if per_token else jnp.maximum(batch.lengths, 1)
        if against is not None:
            ours = of_rows(source(batch, against), batch)

        def of(x: Array, at: Array, otherwise: float = 0.0) -> Array:
            return jnp.where(rows.valid, x[at], otherwise)

        return rows, Pairs(
            of(s, rows.chosen), of(s, rows.rejected), of(ours, rows.chosen), of(ours, rows.rejected),
            of(lengths, rows.chosen, 1.0), of(lengths, rows.rejected, 1.0),
            of(jnp.nan_to_num(info[MARGIN]), rows.chosen) if MARGIN in info else 0.0, rows.valid,
        )  # fmt: skip

    def by_row(values: Array, rows: RowPairs, batch: Trajectories) -> Array:
        """Each row's share f32[N] of the mean over pairs of values f32[P]: those of pairs in which it is chosen."""
        count = totals_of(batch)["contrasts"] if pairs is None else jnp.maximum(jnp.sum(rows.valid), 1)
        share = jnp.where(rows.valid, values, 0.0) / count
        return jnp.zeros(len(batch.group), share.dtype).at[rows.chosen].add(share)

    def shares(s: Array, batch: Trajectories) -> Array:
        rows, found = paired(s, batch)
        values = loss(found, beta)
        if (weight := (batch.info or {}).get(PAIR_WEIGHT)) is not None:
            values = values * weight[rows.chosen] * weight[rows.rejected]
        return by_row(values, rows, batch)

    def report(s: Array, batch: Trajectories) -> Metrics:
        rows, found = paired(s, batch)
        w, l = (beta * u for u in found.log_ratios)
        values = {
            "rewards/chosen": w, "rewards/rejected": l, "rewards/margins": w - l,
            "rewards/accuracies": (w > l).astype(jnp.float32),
        }  # fmt: skip
        if scores is None:
            values |= {"logps/chosen": found.chosen_logp, "logps/rejected": found.rejected_logp}
        return {name: by_row(x, rows, batch) for name, x in values.items()}

    def score(outputs: PolicyOutputs, batch: Trajectories) -> Array:
        return of_rows(outputs.logp, batch)

    more = frozenset(needs) if against is None else needed(against) | frozenset(needs)
    return coupled(scores or score, shares, "pairwise", more, report, by_groups)


@part
def chosen_likelihood(pairs: ChoosePairs | None = None) -> Objective:
    """Negative log-likelihood of the chosen rows, nats a token, a mean over all their tokens: TRL's loss `sft`.

    Metric: "nll".
    """
    choose = best_and_worst() if pairs is None else pairs

    def refresh(outputs: PolicyOutputs, batch: Trajectories) -> Trajectories:
        rows = choose(batch)
        chosen = jnp.zeros(batch.lengths.shape).at[rows.chosen].max(rows.valid.astype(jnp.float32))
        return batch.with_info(nll_share=chosen / jnp.maximum(jnp.sum(chosen * batch.lengths), 1))

    def objective(outputs: PolicyOutputs, batch: Trajectories) -> tuple[Array, Metrics]:
        value = -jnp.sum(jnp.where(batch.action_mask, outputs.logp, 0.0) * batch.need("nll_share")[:, None])
        return value, {"nll": value}

    return Objective(objective, frozenset(), refresh)


@stateless_part()
def shared_length(batch: Trajectories, factor: FractionNumber = 0.5, pairs: ChoosePairs | None = None) -> Trajectories:
    """Weigh the tokens of a pair's longer row beyond the length of the shorter one by `factor` (LD-DPO, 2409.06411)."""
    rows, lengths = (pairs or best_and_worst())(batch), batch.lengths
    both = jnp.where(rows.valid, jnp.minimum(lengths[rows.chosen], lengths[rows.rejected]), jnp.inf)
    shorter = jnp.full(lengths.shape, jnp.inf).at[rows.chosen].min(both).at[rows.rejected].min(both)
    beyond = batch.action_index >= shorter[:, None]
    return batch.replace(weights=batch.loss_weights * jnp.where(beyond, factor, 1.0))


@stateless_part({"old_logp", "squared_probability"})
def on_policy_weights(batch: Trajectories) -> Trajectories:
    """Set info["pair_weight"] to exp(mean_t(log pi(y_t) - log sum_v pi(v)^2)), pi before the update (WPO, 2406.11827).

    1 where every token is as probable as one that pi draws is on average. Needs "old_logp", "squared_probability".
    """
    square = jnp.where(batch.action_mask, batch.need("squared_probability"), 1.0)
    excess = jnp.where(batch.action_mask, batch.need("old_logp"), 0.0) - jnp.log(square)
    return batch.with_info(**{PAIR_WEIGHT: jnp.exp(jnp.sum(excess, axis=1) / jnp.maximum(batch.lengths, 1))})
