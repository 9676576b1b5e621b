"""Populations of strategies, and meta-solvers: mixtures over members, from what they have against each other."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core.arguments.ranges import Count, Fraction, NonNegative, Positive, check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Array
from jaxrl_llm.games.extensive import (
    Node,
    Strategy,
    average_strategy,
    best_response,
    expected_payoffs,
    information_sets,
    uniform_strategy,
)

MetaSolver = Callable[[Array, Array | int], Array]
"""(payoffs f32[K, K], what row i gets against column j, iteration of the population from 0) -> f32[K], probabilities.
The game is symmetric and zero-sum: payoffs = -payoffs.T."""


@part
def uniform() -> MetaSolver:
    """All members alike: fictitious play, if each member is a best response to it."""
    return lambda payoffs, iteration: jnp.full(payoffs.shape[0], 1 / payoffs.shape[0])


@part
def fictitious_play(rounds: Count = 1000) -> MetaSolver:
    """How often each member was a best response in `rounds` rounds, each to the mean of those before (Brown 1951).

    It tends to a Nash equilibrium of the matrix, by 1 / sqrt(rounds) at worst; the first of equals is taken.
    """

    def solve(payoffs: Array, iteration: Array | int) -> Array:
        K = payoffs.shape[0]

        def one(_: int, counts: Array) -> Array:
            return counts.at[jnp.argmax(payoffs @ counts)].add(1.0)

        counts = jax.lax.fori_loop(0, rounds, one, jnp.full(K, 1 / K))
        return counts / (rounds + 1)

    return solve


@part
def regret_matching_mixture(rounds: Count = 1000) -> MetaSolver:
    """The mean of `rounds` mixtures of regret matching+ against itself, the t-th with weight t."""

    def solve(payoffs: Array, iteration: Array | int) -> Array:
        def one(t: int, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            regrets, total = carry
            x = _matched(regrets)
            u = payoffs @ x
            return jnp.maximum(regrets + u - x @ u, 0), total + (t + 1) * x

        zeros = jnp.zeros(payoffs.shape[0])
        _, total = jax.lax.fori_loop(0, rounds, one, (zeros, zeros))
        return total / jnp.sum(total)

    return solve


@part
def shor(
    iterations: Count = 75,
    rounds: Count = 200,
    share: tuple[Fraction, Fraction] = (0.30, 0.05),
    temperature: tuple[Positive, Positive] = (0.50, 0.01),
    diversity: tuple[NonNegative, NonNegative] = (0.05, 0.001),
) -> MetaSolver:
    """Smoothed hybrid of optimistic regret matching (SHOR, arXiv 2602.16928): from diversity to equilibrium.

    `rounds` times, from a uniform x with regrets R = 0, against itself:

        u = M x + diversity (1 - x),   R <- R + g,   g = u - x . u
        x <- (1 - share) matched(R + g) + share softmax(u / temperature)

    and the mean of all x is the mixture. share, temperature and diversity go linearly from their first to their last
    value over `iterations` members of the population. How many rounds, and the mean, are choices made here.
    """

    def solve(payoffs: Array, iteration: Array | int) -> Array:
        K, p = payoffs.shape[0], jnp.minimum(1.0, jnp.asarray(iteration, jnp.float32) / iterations)
        now = [first + p * (last - first) for first, last in (share, temperature, diversity)]

        def one(_: int, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            x, regrets, total = carry
            u = payoffs @ x + now[2] * (1 - x)
            regrets = regrets + u - x @ u
            x = hybrid(u, regrets + u - x @ u, now[0], now[1])
            return x, regrets, total + x

        _, _, total = jax.lax.fori_loop(0, rounds, one, (jnp.full(K, 1 / K), jnp.zeros(K), jnp.zeros(K)))
        return total / rounds

    return solve


def _matched(regrets: Array) -> Array:
    """f32[K]: in proportion to the positive regrets f32[K]; uniform where there is none."""
    positive = jnp.maximum(regrets, 0.0)
    total = jnp.sum(positive)
    return jnp.where(total > 0, positive / jnp.where(total > 0, total, 1.0), 1 / regrets.shape[0])


def hybrid(u: Array, regrets: Array, share: Array | float, temperature: Array | float) -> Array:
    """f32[K]: (1 - share) matched(regrets) + share softmax(u / temperature), of payoffs u f32[K]."""
    return (1 - share) * _matched(regrets) + share * jax.nn.softmax(u / temperature)


class Population(NamedTuple):
    """Strategies, what each gets against each, and how often the solver plays them."""

    members: list[Strategy]
    payoffs: np.ndarray[Any, Any]  # f64[K, K]
    mixture: np.ndarray[Any, Any]  # f64[K]

    def strategy(self, game: Node) -> dict[str, np.ndarray[Any, Any]]:
        """The members drawn by the mixture, as one strategy."""
        return average_strategy(game, self.members, self.mixture)


def psro(game: Node, solver: MetaSolver, iterations: int, start: Strategy | None = None) -> Population:
    """Policy-space response oracles (arXiv 1711.00832) with exact best responses.

    game: of two players, zero-sum. Each iteration adds, of both seats, the best response to the mixture of the
    population, which begins with `start`, the uniform strategy. A member's payoff against another is the mean over
    seats, so that the matrix is that of a symmetric game. InputError for fewer than 0 iterations.
    """
    check_number("iterations", iterations, least=0, whole=True)
    owner = {name: player for name, (player, _) in information_sets(game).items()}
    members: list[Strategy] = [uniform_strategy(game) if start is None else start]
    payoffs, mixture = np.zeros((1, 1)), np.ones(1)
    for iteration in range(1, iterations + 1):
        mean = average_strategy(game, members, mixture)
        members.append(best_response(game, mean, 0)[0] | best_response(game, mean, 1)[0])
        row = np.asarray([_payoff(game, owner, members[-1], other) for other in members])
        payoffs = np.block([[payoffs, -row[:-1, None]], [row[None, :-1], np.zeros((1, 1))]])
        mixture = np.asarray(solver(jnp.asarray(payoffs), iteration), np.float64)
    return Population(members, payoffs, mixture)


def _payoff(game: Node, owner: dict[str, int], one: Strategy, other: Strategy) -> float:
    """The mean over both seats of what one gets against the other."""
    first = {name: (one if player == 0 else other)[name] for name, player in owner.items()}
    second = {name: (other if player == 0 else one)[name] for name, player in owner.items()}
    return float(expected_payoffs(game, first)[0] + expected_payoffs(game, second)[1]) / 2
