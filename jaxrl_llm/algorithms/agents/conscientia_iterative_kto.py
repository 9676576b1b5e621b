from typing import Any

import jax.numpy as jnp

from jaxrl_llm.algorithms.method import Algorithm, beside, method, run_needs
from jaxrl_llm.core.annotations import AtLeastTwo, Count, NonNegative, Ours, Paper, Positive
from jaxrl_llm.core.log_ratios import log_ratio_sums
from jaxrl_llm.core.parts import Array, Trajectories, chain, counted_part, stateless_part
from jaxrl_llm.core.population import League
from jaxrl_llm.core.reference import periodic_reset
from jaxrl_llm.objectives.preference.verdicts import KL, verdicts
from jaxrl_llm.rollouts.agents.self_play import MEMBER, SEAT, against_league


@method(paper="arXiv 2604.09746", test="test_conscientia.py::test_sides_learn_by_turns_against_earlier_ones")
@run_needs(league_member="games against a league: --environment GAME --players 2")
@beside("city", "the simulated city and its two populations", "the run's own environment")
def conscientia_iterative_kto(
    round_updates: Ours[Count] = 20,
    size: Ours[AtLeastTwo] = 8,
    sides: Ours[AtLeastTwo] = 2,
    threshold: Ours[float] = 0.0,
    beta: Paper[Positive] = 0.1,
    desirable_weight: Paper[NonNegative] = 1.0,
    undesirable_weight: Paper[NonNegative] = 1.0,
) -> Algorithm:
    """Opponents that learn by turns, from verdicts on their games (CONSCIENTIA).

    A round is `round_updates` updates in which one side of the game learns: side 0, then 1, ... sides - 1, 0 ... The
    others are played by earlier policies: the first one and those at the ends of rounds, the newest size - 1, each as
    often. An episode of the side that learns is good if its payoff is above `threshold`, and else bad. With u the
    log-ratio of its actions to the policy at the start of the round, the loss is the mean over episodes of

        w_D (1 - sigmoid(beta (u - z)))  of good,   w_U (1 - sigmoid(beta (z - u)))  of bad ones

    w_D = desirable_weight, w_U = undesirable_weight. z = max(0, mean of u over the step's episodes) estimates
    KL(pi || reference) without gradient: they are the policy's own samples, where KTO (2402.01306), whose responses are
    given, takes mismatched pairs. The sides share their weights and are told who they are by their prompts; the paper
    trains a model for each. `games.advice_game` is a game of hidden roles.
    """
    league = League(size, round_updates)
    before = chain(sides_by_turns(league, sides), kl_of_samples())
    objective = verdicts(beta, desirable_weight, undesirable_weight, threshold=threshold)
    return Algorithm(
        before, objective, rollout=against_league(league, first_seat=0), reference=periodic_reset(round_updates)
    )


@counted_part({MEMBER})
def sides_by_turns(step: Array, batch: Trajectories, league: League, sides: Count = 2) -> Trajectories:
    """Write who learns next, the control "league/seat", and the policies that it meets, "league/0" ..., all alike.

    Each side learns for `league.every` updates. Places of the league that no snapshot has taken are not drawn.
    """
    rounds = (step + 1) // league.every
    taken: dict[str, Any] = {f"league/{k}": (rounds >= k).astype(jnp.float32) for k in range(league.size)}
    return batch.with_controls(**{SEAT: (rounds % sides).astype(jnp.float32)}, **taken)


@stateless_part({"old_logp", "reference_logp"})
def kl_of_samples(batch: Trajectories) -> Trajectories:
    """Write the control "sequence_kl": the mean log-ratio of the policy's own rows to the reference, at least 0.

    Needs "old_logp" and "reference_logp".
    """
    u = log_ratio_sums(batch.need("old_logp"), batch.need("reference_logp"), batch)
    rows = jnp.any(batch.loss_weights != 0, axis=1)
    mean: Array = jnp.sum(jnp.where(rows, u, 0.0)) / jnp.maximum(jnp.sum(rows), 1)
    return batch.with_controls(**{KL: jnp.maximum(mean, 0.0)})
