"""Interaction-perceptive agentic policy optimization (IPA of ROME)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import jax.numpy as jnp

from jaxrl_llm.advantages.turns.episodes import EPISODES, one_row_each
from jaxrl_llm.advantages.turns.rounds import episode_backwards
from jaxrl_llm.advantages.turns.turn_rewards import needs_turns
from jaxrl_llm.advantages.turns.turns import OfTurns, episode_returns, on_tokens, rewards_of_turns
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.arguments.hyperparameters import OURS
from jaxrl_llm.core.arguments.ranges import Fraction, NonNegative, Positive, Range
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Array, Trajectories
from jaxrl_llm.core.transform import Transform, chain, stateless
from jaxrl_llm.objectives import policy_gradient
from jaxrl_llm.objectives.averaging.averages import sequence_sum
from jaxrl_llm.objectives.off_policy import mismatch
from jaxrl_llm.objectives.ratios import over_span, span_ratio
from jaxrl_llm.objectives.surrogates import log_probability
from jaxrl_llm.objectives.weights import Weight
from jaxrl_llm.rewards.transforms import rescore

TAKEN_OVER = frozenset({"imitated", "imitated_score"})


@part
def failures_at(reward: Annotated[float | None, Range(most=0)]) -> Callable[[Trajectories], Array]:
    """A function `batch -> f32[N]`: the score, or `reward` of rows whose score is not above 0; None: the score."""
    if reward is None:
        return lambda batch: batch.scores
    return lambda batch: jnp.where(batch.scores <= 0, reward, batch.scores)


def imitated(batch: Trajectories) -> Array:
    """f32[N, L]: info["imitated"] of actions, 0 without it."""
    left = (batch.info or {}).get("imitated")
    return jnp.zeros(batch.tokens.shape) if left is None else jnp.where(batch.action_mask, jnp.nan_to_num(left), 0.0)


@part
def chunk_returns(
    gamma: float, mismatch_limit: Positive, imitation_weight: NonNegative, chunk_weight: NonNegative
) -> Transform:
    """Advantages of actions: those of IPA, see `ipa`."""
    returns = episode_turn_returns(gamma)

    def apply(batch: Trajectories) -> Trajectories:
        G = on_tokens(returns(batch), batch)
        near = over_span(mismatch(batch), batch, "turn", mean=True) <= jnp.log(mismatch_limit)
        own = chunk_weight * jnp.where(near, G, 0.0)
        left = imitated(batch)
        score = (batch.info or {}).get("imitated_score")
        model = jnp.zeros(batch.group.shape) if score is None else jnp.nan_to_num(score)
        taken = imitation_weight * gamma ** jnp.maximum(left - 1, 0) * model[:, None]
        known = batch.action_mask & ~jnp.isnan(batch.scores)[:, None]
        return batch.replace(advantages=jnp.where(known, jnp.where(left > 0, taken, own), 0.0))

    return stateless(apply, TAKEN_OVER | EPISODES | {"old_logp"})


@part
def truncated_in_failures() -> Weight:
    """min(rho, 1) in episodes whose return is not above 0; 1 in others, and on tokens that were taken over."""

    def weight(ratio: Array, batch: Trajectories) -> Array:
        won = (jnp.nan_to_num(episode_returns(batch)) > 0)[:, None]
        return jnp.where(won | (imitated(batch) > 0), 1.0, jnp.minimum(ratio, 1.0))

    return weight


@method(
    paper="arXiv 2512.24873",
    year=2025,
    test="test_turn_chunks.py::test_ipa_worked_example_and_loop",
    needs={
        "episode": "rows of one episode",
        "first_turn": "the order of these rows",
        "imitated": "restarts in the middle of a success",
        "imitated_score": "the score of that success",
        "turns": "episodes of several turns",
    },
    beside={"restarts": ("restarts from teachers' episodes and successes of earlier steps", "a store of episodes")},
)
def ipa(
    gamma: Annotated[float, OURS] = 0.95,
    failure: Annotated[float | None, OURS] = -1.0,
    mismatch_limit: Annotated[float, OURS] = 2.0,
    imitation_weight: Annotated[float, OURS] = 1.0,
    chunk_weight: Annotated[float, OURS] = 1.0,
) -> Algorithm:
    """Interaction-perceptive agentic policy optimization (IPA of ROME).

    Return, importance weight and mask are those of chunks, what the policy says between two observations. Of K chunks

        G_k = gamma^(K - k) R,    m_k = 1 if exp(mean over the chunk of log pi_old - log pi_behaviour) <= H, else 0
        loss = - mean over episodes of sum_k sg(w_k) G_k m_k sum_t log pi_t,
        w_k = 1 if R > 0, else min(rho_k, 1),    rho_k = exp(mean over the chunk of log pi - log pi_old)

    H = mismatch_limit. Rewards of turns, if there are, count from their turn back: G_k = r_k + gamma G_{k+1}. failure:
    R of rows whose score is not above 0, which would teach nothing at 0; None: their score.

    Half of each group's samples restart in the middle of a success of the group, at several places at once
    (`rollouts.agents.restarts.restarting`, the paper's parallel form). What they take over is imitated: its tokens have
    imitation_weight times the success's G_k, without weights and masks, and the chunks that they sample chunk_weight
    times their own. The paper also takes trajectories of a teacher, and rolls back one chunk after the other.
    """
    ratio = span_ratio("turn", against="old")
    returns = chunk_returns(gamma, mismatch_limit, imitation_weight, chunk_weight)
    return Algorithm(
        chain(needs_turns(), rescore(failures_at(failure)), returns),
        policy_gradient(ratio, log_probability(truncated_in_failures()), sequence_sum()),
    )


@part
def episode_turn_returns(gamma: Fraction = 1.0) -> OfTurns:
    """Values: discounted returns from each turn on, G_t = r_t + gamma G_{t+1}, also over the rows of an episode.

    The score comes with the last turn of the episode, beside the environment's rewards of turns.
    """

    def values(batch: Trajectories) -> Array:
        last = one_row_each(batch)
        r = rewards_of_turns(batch.replace(reward=jnp.where(last | jnp.isnan(batch.scores), batch.scores, 0.0)))
        return episode_backwards(batch, r, gamma, jnp.ones(r.shape, bool))

    return values
