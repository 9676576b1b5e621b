from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import Code, Count, Ours, Positive, PositiveNumber
from jaxrl_llm.core.log_ratios import source
from jaxrl_llm.core.parts import Objective, PolicyOutputs, Trajectories, chain, part, weighted
from jaxrl_llm.core.reference import periodic_reset
from jaxrl_llm.core.rollout import Rollout
from jaxrl_llm.objectives import coupled
from jaxrl_llm.objectives.preference.pairs import win_rates
from jaxrl_llm.rollouts.pairs import best_and_worst_of, with_win_rates


@method(paper="arXiv 2405.00675", test="test_online_preferences.py::test_sppo_by_loop_and_worked_example")
def sppo(beta: Code[Positive] = 0.001, reset: Ours[Count] = 100) -> Algorithm:
    """Self-Play Preference Optimization (SPPO).

    Of K samples (--group-size, 5 in the paper) each response's win rate against the policy is that against all K,
    itself included, and the log-ratio to the policy of the round, pi_t, is regressed onto it:

        P(y_i > pi_t) = mean over j of P(y_i > y_j),   d(y) = log pi(y) - log pi_t(y), sums over tokens
        loss = mean over rows of (d(y) - (P(y > pi_t) - 1/2) / beta)^2

    The rows are the best and the worst of the K. P(y_i > y_j) is 1 / (1 + exp(r_j - r_i)) of the run's rewards, or the
    verdict of a judge of pairs (--rollout judged_pairs --rewards judge). pi_t is the policy at the beginning of a round
    of `reset` updates; the paper has three rounds of 20,000 prompts. 1 / beta = eta is some hundred nats, which the
    loss never reaches: it is a push of that size, so that learning rates are small (5e-7).
    """
    return Algorithm(
        chain(), win_rate_regression(1 / beta), rollout=ends_by_win_rate(), reference=periodic_reset(reset)
    )


@part
def ends_by_win_rate(rollout: Rollout | None = None) -> Rollout:
    """The best and the worst of a group, with their win rates against the whole of it."""
    return replace(best_and_worst_of(with_win_rates(rollout, itself=True)), wrap=ends_by_win_rate)


@part
def win_rate_regression(eta: PositiveNumber = 1000.0) -> Objective:
    """The mean over rows with a win rate of (d - eta (win rate - 1/2))^2, d the log-ratio to the reference.

    Unless info["win_rate"] is given, it is that of log-odds of the rewards, itself included (`win_rates`).

    Metric: "win_rate_regression".
    """

    def score(outputs: PolicyOutputs, batch: Trajectories) -> jax.Array:
        return jnp.sum(weighted(outputs.logp - source(batch, "reference"), batch), axis=1)

    def shares(d: jax.Array, batch: Trajectories) -> jax.Array:
        rate = win_rates(batch, jax.nn.sigmoid, itself=True)
        known = ~jnp.isnan(rate) & jnp.any(batch.action_mask, axis=1)
        error = jnp.where(known, d - eta * (jnp.nan_to_num(rate) - 0.5), 0.0)
        return error**2 / jnp.maximum(jnp.sum(known), 1)

    return coupled(score, shares, "win_rate_regression", frozenset({"reference_logp", "win_rate"}))
