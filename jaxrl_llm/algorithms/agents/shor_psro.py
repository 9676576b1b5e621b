from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages import group_relative
from jaxrl_llm.algorithms.method import Algorithm, beside, method, run_needs
from jaxrl_llm.core.annotations import AtLeastTwo, Code, Count, Fraction, NonNegative, Ours, Positive
from jaxrl_llm.core.parts import Array, State, Trajectories, Transform, chain, part
from jaxrl_llm.core.population import League
from jaxrl_llm.games import MetaSolver, shor
from jaxrl_llm.objectives import clipped_policy
from jaxrl_llm.rollouts.agents.self_play import MEMBER, against_league


@method(paper="arXiv 2602.16928", test="test_shor_psro.py::test_payoffs_and_mixtures_are_the_loop")
@run_needs(league_member="games against a league: --environment GAME --players 2")
@beside("search", "the search for solvers by a language model", "evolution of programs")
def shor_psro(
    size: Ours[AtLeastTwo] = 8,
    every: Ours[Count] = 20,
    rate: Ours[Fraction] = 0.2,
    payoff_range: Ours[Positive] = 1.0,
    iterations: Code[Count] = 75,
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
) -> Algorithm:
    """Self-play against a league, by a mixture from diversity to equilibrium (SHOR-PSRO).

    A league keeps `size` policies: the first, and a snapshot after every `every` updates. The policy plays against
    members that are drawn by a mixture x, and learns from the payoffs of its own player alone, a policy gradient with
    the group's mean as baseline and PPO's clip (clip_low, clip_high): an approximate best response to x. Its payoff
    against each member is tracked,

        m_j <- m_j + rate (mean payoff of the step's games against j - m_j)

    and when it becomes the snapshot i, M_ij = m_j / payoff_range and M_ji = -M_ij: the game must be zero-sum, and the
    policy plays each seat equally often. Then x = SHOR(M), regret matching with a share of a softmax, whose share,
    temperature and bonus for rare members fall over `iterations` snapshots (`games.shor`). payoff_range: of a game, so
    that M is of the size of 1. The population's strategy is the draw by x.
    """
    league = League(size, every)
    before = chain(league_mixture(league, shor(iterations), rate, payoff_range), group_relative("none"))
    return Algorithm(before, clipped_policy(clip_low, clip_high), rollout=against_league(league))


class Payoffs(NamedTuple):
    """What is known of a league of K policies."""

    matrix: Array  # f32[K, K], of row against column
    own: Array  # f32[K], of the policy that learns against each
    mixture: Array  # f32[K]
    updates: Array  # int32[]


@part
def league_mixture(league: League, solver: MetaSolver, rate: Fraction = 0.2, payoff_range: Positive = 1.0) -> Transform:
    """Track payoffs against the members of a league, and write the mixture to play against as controls "league/0" ...

    The payoffs of a row are its score, against the member info["league_member"]; without that, the first policy. Places
    that no snapshot has taken are the first policy's. The mixture is solved anew when a snapshot is taken; until the
    first it is the first policy.
    """
    K = league.size

    def apply(state: Payoffs, batch: Trajectories) -> tuple[State, Trajectories]:
        member = (batch.info or {}).get(MEMBER, jnp.zeros(batch.scores.shape))
        member = jnp.where(jnp.isnan(batch.scores + member), K, jnp.nan_to_num(member)).astype(jnp.int32)
        taken = (state.updates // league.every).astype(jnp.int32)  # snapshots so far
        of = jnp.where(jnp.arange(K) <= taken, jnp.arange(K), 0)  # the policy in each place
        played = jax.nn.one_hot(jnp.append(of, K)[jnp.clip(member, 0, K)], K)
        count = jnp.sum(played, axis=0)
        mean = jnp.nan_to_num(batch.scores) @ played / jnp.maximum(count, 1) / payoff_range
        own = jnp.where(count > 0, state.own + rate * (mean - state.own), state.own)
        updates = state.updates + 1
        place = league.place(updates)
        row = own[of].at[place].set(0.0, mode="drop")
        matrix = state.matrix.at[place].set(row, mode="drop").at[:, place].set(-row, mode="drop")
        after = (updates // league.every).astype(jnp.int32)
        of = jnp.where(jnp.arange(K) <= after, jnp.arange(K), 0)
        solved = jnp.zeros(K).at[of].add(solver(matrix[of][:, of], after))
        mixture = jnp.where(place < K, solved, state.mixture)
        own = jnp.where(place < K, row, own)
        state = Payoffs(matrix, own, mixture, updates)
        return state, batch.with_controls(**{f"league/{k}": mixture[k] for k in range(K)})

    def init() -> Payoffs:
        return Payoffs(jnp.zeros((K, K)), jnp.zeros(K), jnp.zeros(K).at[0].set(1.0), jnp.int32(0))

    return Transform(init, apply, frozenset({MEMBER}))
