"""Policy-space response oracles: a population of strategies that grows by best responses to a mixture of itself."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core.arguments.ranges import check_number
from jaxrl_llm.games.extensive import (
    Node,
    Strategy,
    average_strategy,
    best_response,
    expected_payoffs,
    information_sets,
    uniform_strategy,
)
from jaxrl_llm.games.meta_solvers import MetaSolver

Array = np.ndarray[Any, Any]


class Population(NamedTuple):
    """Strategies, what each gets against each, and how often the solver plays them."""

    members: list[Strategy]
    payoffs: Array  # f64[K, K]
    mixture: Array  # f64[K]

    def strategy(self, game: Node) -> dict[str, Array]:
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
