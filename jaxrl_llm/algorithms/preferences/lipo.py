from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.method import Algorithm, given_responses, method, run_settings
from jaxrl_llm.core.annotations import Ours, Positive, PositiveNumber, Recalled
from jaxrl_llm.core.parts import Metrics, Objective, PolicyOutputs, Trajectories, chain, part, weighted
from jaxrl_llm.objectives import coupled
from jaxrl_llm.objectives.preference.pairs import scored_rows
from jaxrl_llm.objectives.ratios import log_ratio_to
from jaxrl_llm.rollouts.guidance.responses import listed_completions
from jaxrl_llm.utils.errors import unknown

LARGEST = 60.0  # label whose gain, and what is made of it, is finite


class Lists(NamedTuple):
    """N rows of lists: their labels, scores and which are of one list."""

    label: jax.Array  # f32[N], 0 where a row is of no list
    score: jax.Array  # f32[N]
    mates: jax.Array  # bool[N, N]: of one list, each with itself
    above: jax.Array  # bool[N, N]: of one list, and [i, j] where i has the larger label


ListLoss = Callable[[Lists], jax.Array]  # -> f32[N], shares of the sum over lists


@method(paper="arXiv 2402.01878", test="test_lists.py::test_lipo_by_loop")
@run_settings(*given_responses(None))
def lipo(loss: Ours[str | ListLoss] = "lambda", beta: Recalled[Positive] = 0.05) -> Algorithm:
    """Listwise Preference Optimization (LiPO).

    The columns completions and labels of a row are K responses to its prompt and a number for each, 0 to 1, such as
    the share of the others that a judge finds worse; group_size is the longest list. With s_i = beta (log pi(y_i) -
    log pi_ref(y_i)) and tau_i the rank of s_i in its list, 1 for the highest,

        loss = mean over lists of sum over pairs with psi_i > psi_j of D_ij log(1 + exp(s_j - s_i))
        D_ij = |2^psi_i - 2^psi_j| |1 / log(1 + tau_i) - 1 / log(1 + tau_j)|, without a gradient

    loss: another of `LIST_LOSSES` (logistic: all D are 1, hinge, list_mle, softmax, squares, sigmoid), by name or as
    a function Lists -> f[N]. A list whose labels are all equal teaches nothing. beta is from memory of the paper.
    """
    if isinstance(loss, str) and loss not in LIST_LOSSES:
        raise unknown("loss of lists", loss, LIST_LOSSES)
    chosen = LIST_LOSSES[loss] if isinstance(loss, str) else loss
    return Algorithm(chain(), listwise(chosen, beta), rollout=listed_completions())


@part
def listwise(loss: ListLoss, beta: PositiveNumber = 0.05) -> Objective:
    """The mean over lists, the scored rows of a group, of a loss of their scores beta times the log-ratio to the
    reference, whose labels are the rewards. Metrics: "listwise", the loss; "rewards/accuracies" and "rewards/margins",
    means over the pairs of a list with different labels of whether, and by how much, the scores differ likewise.
    """

    def score(outputs: PolicyOutputs, batch: Trajectories) -> jax.Array:
        return beta * jnp.sum(weighted(log_ratio_to(outputs, batch, "reference"), batch), axis=1)

    def shares(s: jax.Array, batch: Trajectories) -> jax.Array:
        lists = _lists(s, batch)
        return loss(lists) * jnp.any(lists.above | lists.above.T, axis=1) / _count(batch)

    def report(s: jax.Array, batch: Trajectories) -> Metrics:
        lists = _lists(s, batch)
        gaps, pairs = s[:, None] - s, jnp.maximum(jnp.sum(lists.above), 1)
        values = {"rewards/accuracies": gaps > 0, "rewards/margins": gaps}
        return {name: jnp.sum(jnp.where(lists.above, x, 0.0), axis=1) / pairs for name, x in values.items()}

    return coupled(score, shares, "listwise", frozenset({"reference_logp"}), report)


def _lists(s: jax.Array, batch: Trajectories) -> Lists:
    valid = scored_rows(batch)
    label = jnp.where(valid, batch.scores, 0.0)
    mates = (batch.group[:, None] == batch.group) & valid[:, None] & valid
    return Lists(label, s, mates, mates & (label[:, None] > label))


def _count(batch: Trajectories) -> jax.Array:
    """f32[]: the number of lists that have a scored row."""
    valid, N = scored_rows(batch), len(batch.group)
    first = ~jnp.any((batch.group[:, None] == batch.group) & valid & (jnp.arange(N)[:, None] > jnp.arange(N)), axis=1)
    return jnp.maximum(jnp.sum(valid & first), 1).astype(jnp.float32)


def lambda_loss(lists: Lists) -> jax.Array:
    """Pairs by how much their exchange would change the discounted cumulative gain (LambdaLoss).

    Labels above LARGEST count as that. Of equal scores, which all are before the first update, the first in the list
    has the higher rank.
    """
    score, place = lists.score, jnp.arange(len(lists.score))
    before = (score > score[:, None]) | ((score == score[:, None]) & (place < place[:, None]))
    rank = 1 + jnp.sum(lists.mates & before, axis=1)
    gain, discount = jnp.exp2(jnp.minimum(lists.label, LARGEST)), 1 / jnp.log1p(rank.astype(jnp.float32))
    weight = jnp.abs(gain[:, None] - gain) * jnp.abs(discount[:, None] - discount)
    return _over_pairs(lists, jax.lax.stop_gradient(weight) * jax.nn.softplus(_behind(lists)))


def logistic(lists: Lists) -> jax.Array:
    """-log sigmoid(s_i - s_j) of pairs: DPO's for two (Plackett-Luce's for pairs)."""
    return _over_pairs(lists, jax.nn.softplus(_behind(lists)))


def list_hinge(lists: Lists) -> jax.Array:
    """max(0, 1 - (s_i - s_j)) of pairs (SLiC)."""
    return _over_pairs(lists, jax.nn.relu(1 + _behind(lists)))


def list_mle(lists: Lists) -> jax.Array:
    """-log of the probability of the order by labels under Plackett and Luce's model; equals keep their order."""
    N = len(lists.label)
    ties = (lists.label[:, None] == lists.label) & (jnp.arange(N) >= jnp.arange(N)[:, None])
    left = lists.above | (lists.mates & ties)
    total = jax.nn.logsumexp(jnp.where(left, lists.score, -jnp.inf), axis=1, where=left)
    return jnp.where(jnp.any(lists.mates, axis=1), jnp.where(jnp.isfinite(total), total, 0.0) - lists.score, 0.0)


def list_softmax(lists: Lists) -> jax.Array:
    """-(psi_i / sum of psi) log softmax(s)_i (ListNet)."""
    sums = jnp.sum(jnp.where(lists.mates, lists.label, 0.0), axis=1)
    total = jax.nn.logsumexp(jnp.where(lists.mates, lists.score, -jnp.inf), axis=1, where=lists.mates)
    share = jnp.where(sums > 0, lists.label / jnp.where(sums > 0, sums, 1.0), 0.0)
    return share * (jnp.where(jnp.isfinite(total), total, 0.0) - lists.score)


def list_squares(lists: Lists) -> jax.Array:
    """(psi_i - s_i)^2."""
    return jnp.where(jnp.any(lists.mates, axis=1), (lists.label - lists.score) ** 2, 0.0)


def list_sigmoid(lists: Lists) -> jax.Array:
    """-psi_i log sigmoid(s_i) - (1 - psi_i) log(1 - sigmoid(s_i))."""
    return jnp.where(jnp.any(lists.mates, axis=1), jax.nn.softplus(lists.score) - lists.label * lists.score, 0.0)


def _behind(lists: Lists) -> jax.Array:
    """f32[N, N]: s_j - s_i."""
    return lists.score - lists.score[:, None]


def _over_pairs(lists: Lists, values: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(lists.above, values, 0.0), axis=1)


LIST_LOSSES: dict[str, ListLoss] = {
    "lambda": lambda_loss, "logistic": logistic, "hinge": list_hinge, "list_mle": list_mle, "softmax": list_softmax,
    "squares": list_squares, "sigmoid": list_sigmoid,
}  # fmt: skip
