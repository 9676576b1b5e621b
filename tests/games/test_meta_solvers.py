"""Mixtures over populations: known equilibria, a slow loop of SHOR, and populations that come nearer to Nash."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from test_extensive import KUHN, ROCK_PAPER_SCISSORS

from jaxrl_llm.games import (
    exploitability,
    fictitious_play,
    matrix_game,
    payoff_range,
    psro,
    regret_matching_mixture,
    shor,
    uniform,
)
from jaxrl_llm.games.meta_solvers import hybrid
from jaxrl_llm.utils.errors import InputError

# Rock against scissors is worth 2: 1/4, 1/2 and 1/4; the fourth strategy loses to all.
WEIGHTED = np.array([[0, -1, 2, 1], [1, 0, -1, 1], [-2, 1, 0, 1], [-1, -1, -1, 0]], np.float32)
NASH = [0.25, 0.5, 0.25, 0]
SOLVERS = {"fictitious play": fictitious_play(), "regret matching": regret_matching_mixture(), "shor": shor()}


@pytest.mark.parametrize("name", SOLVERS)
def test_they_find_the_equilibrium_of_a_matrix(name: str) -> None:
    found = np.asarray(jax.jit(SOLVERS[name])(WEIGHTED, 75))
    assert found.sum() == pytest.approx(1, abs=1e-5)
    np.testing.assert_allclose(found, NASH, atol=0.06 if name == "shor" else 0.03)
    assert (WEIGHTED @ found).max() < 0.12


def test_uniform() -> None:
    assert uniform()(WEIGHTED, 3).tolist() == [0.25] * 4


def test_hybrid_worked_example() -> None:
    found = hybrid(np.array([0.2, 0.5, 0.1]), np.array([0.1, 0.4, -0.2]), 0.3, 0.1)
    np.testing.assert_allclose(found, [0.153984, 0.840872, 0.005144], atol=1e-6)
    np.testing.assert_allclose(hybrid(np.zeros(3), -np.ones(3), 0.0, 1.0), [1 / 3] * 3, atol=1e-6)


@pytest.mark.parametrize("iteration", [0, 30, 200])
def test_shor_is_the_loop(iteration: int) -> None:
    p = min(1.0, iteration / 75)
    share, temperature, diversity = 0.3 - 0.25 * p, 0.5 - 0.49 * p, 0.05 - 0.049 * p
    x, R, every = np.full(4, 0.25), np.zeros(4), []
    for _ in range(20):
        u = WEIGHTED @ x + diversity * (1 - x)
        R = R + u - x @ u
        positive = np.maximum(R + u - x @ u, 0)
        matched = positive / positive.sum() if positive.sum() > 0 else np.full(4, 0.25)
        soft = np.exp((u - u.max()) / temperature)
        x = (1 - share) * matched + share * soft / soft.sum()
        every.append(x)
    np.testing.assert_allclose(shor(rounds=20)(WEIGHTED, iteration), np.mean(every, axis=0), atol=1e-4)


@pytest.mark.parametrize("name", SOLVERS)
def test_populations_come_nearer_to_nash(name: str) -> None:
    """The card's proof of a meta-solver: exploitability falls as best responses are added."""
    solver = SOLVERS[name]
    found = [exploitability(KUHN, psro(KUHN, solver, count).strategy(KUHN)) for count in (0, 4, 10)]
    assert found[0] == pytest.approx(0.1145833)
    assert found[1] < 0.4 * found[0]
    assert found[2] < 0.02 * payoff_range(KUHN) / 4
    game = matrix_game(np.array(ROCK_PAPER_SCISSORS) * 3.0)
    rock = {"first": np.array([1.0, 0, 0]), "second": np.array([1.0, 0, 0])}
    population = psro(game, solver, 8, rock)
    np.testing.assert_allclose(population.payoffs, -population.payoffs.T)
    assert population.payoffs[1, 0] == 3  # paper is the best response to rock
    assert exploitability(game, population.strategy(game)) < 0.05 < exploitability(game, rock)


def test_what_is_refused() -> None:
    for bad in ({"share": (1.5, 0.1)}, {"temperature": (0.5, 0.0)}, {"rounds": 0}, {"diversity": (-1.0, 0.0)}):
        with pytest.raises(InputError, match=next(iter(bad))):
            shor(**bad)
    with pytest.raises(InputError, match="iterations"):
        psro(KUHN, uniform(), -1)
