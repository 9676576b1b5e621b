from typing import Literal

import jax.numpy as jnp

from jaxrl_llm.algorithms.method import Algorithm, judge_among_rewards, method, run_settings
from jaxrl_llm.core.annotations import Code, NonNegative, OfRun, Positive
from jaxrl_llm.core.parts import Array, Objective, Trajectories, batch_part, chain, part
from jaxrl_llm.objectives import coupled
from jaxrl_llm.objectives.preference.losses import PairLoss, ipo, of_sums, sigmoid
from jaxrl_llm.objectives.preference.pairs import higher_of, opponents, total_logp, win_rates
from jaxrl_llm.objectives.preference.pairwise import RowPairs, pairwise
from jaxrl_llm.rollouts.judges.comparisons import pair_judge
from jaxrl_llm.rollouts.pairs import against_opponent
from jaxrl_llm.selection.rows import row_noise

LOSSES: dict[str, PairLoss] = {"sigmoid": sigmoid, "ipo": of_sums(ipo)}


@method(paper="arXiv 2405.21046", test="test_online_preferences.py::test_xpo_is_that_of_trl")
@run_settings(*judge_among_rewards())
def xpo(
    beta: Code[Positive] = 0.1,
    alpha: Code[NonNegative] = 1e-5,
    loss: Code[Literal["sigmoid", "ipo"]] = "sigmoid",
    judge: OfRun[str | None] = None,
) -> Algorithm:
    """Exploratory Preference Optimization (XPO).

    Each sample y of the policy is compared with one of the reference policy, y'. The better of the two is the chosen
    one, y where they are equal, and with u the log-ratio of a whole response to the reference

        loss = mean over pairs of -log sigmoid(beta (u_chosen - u_rejected)) + alpha log pi(y')

    The second term lowers the likelihood of what the reference says: optimism about what it does not say. loss "ipo":
    (u_chosen - u_rejected - 1 / (2 beta))^2 in place of the first. judge: who compares, "policy", "reference", a URL or
    a model (docs/rewards.md), in both orders; None compares the run's rewards. alpha is TRL's; the paper's falls with
    the number of steps.
    """
    return Algorithm(
        chain(), pairwise(LOSSES[loss], beta, pairs=own_and_opponent()) + alpha * opponent_likelihood(),
        rollout=against_opponent(None if judge is None else pair_judge(judge), trained=True),
    )  # fmt: skip


@batch_part
def own_and_opponent(batch: Trajectories) -> RowPairs:
    """Each row that is not an opponent's and one of its group that is; chosen is whose win rate is higher; P = N.

    Of equals the policy's own is chosen.
    """
    rate, theirs, rows = win_rates(batch, higher_of), opponents(batch) > 0, jnp.arange(batch.group.shape[0])
    acts = jnp.any(batch.action_mask, axis=1)
    mates = (batch.group[:, None] == batch.group) & (theirs & acts)
    mate = jnp.argmax(jnp.where(mates, row_noise(batch, 0), -1.0), axis=1)
    valid = jnp.any(mates, axis=1) & ~theirs & acts & ~jnp.isnan(rate)
    wins = rate >= 0.5
    return RowPairs(jnp.where(wins, rows, mate), jnp.where(wins, mate, rows), valid)


@part
def opponent_likelihood() -> Objective:
    """The mean over pairs of the log-probability of the opponent's response. Metric: "opponent_logp"."""
    choose = own_and_opponent()

    def shares(s: Array, batch: Trajectories) -> Array:
        pairs = choose(batch)
        theirs = jnp.where(opponents(batch)[pairs.chosen] > 0, pairs.chosen, pairs.rejected)
        times = jnp.zeros_like(s).at[theirs].add(pairs.valid.astype(s.dtype))
        return s * times / jnp.maximum(jnp.sum(pairs.valid), 1)

    return coupled(total_logp, shares, "opponent_logp", frozenset({"win_rate", "opponent"}))
