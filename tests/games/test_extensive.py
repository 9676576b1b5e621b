"""Games as trees: payoffs, best responses and averages against hand-worked numbers and all pure strategies."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from jaxrl_llm.games import (
    Node,
    average_strategy,
    best_response,
    expected_payoffs,
    exploitability,
    information_sets,
    kuhn_poker,
    matrix_game,
    nash_conv,
    payoff_range,
    uniform_strategy,
    with_forfeits,
)
from jaxrl_llm.utils.errors import InputError

ROCK_PAPER_SCISSORS = [[0, -1, 1], [1, 0, -1], [-1, 1, 0]]
KUHN = kuhn_poker()


def kuhn_equilibrium(alpha: float) -> dict[str, Any]:
    """The equilibria of Kuhn (1950): alpha, from 0 to 1/3, is how often the first player bets a jack."""
    chances = {
        "jack:": alpha, "queen:": 0, "king:": 3 * alpha,
        "jack: check bet": 0, "queen: check bet": alpha + 1 / 3, "king: check bet": 1,
        "jack: check": 1 / 3, "queen: check": 0, "king: check": 1,
        "jack: bet": 0, "queen: bet": 1 / 3, "king: bet": 1,
    }  # fmt: skip
    return {name: np.array([1 - p, p]) for name, p in chances.items()}


def drawn(seed: int, game: Node = KUHN) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    return {name: random.dirichlet(np.ones(len(one[1]))) for name, one in information_sets(game).items()}


def pure(game: Node, player: int) -> list[dict[str, Any]]:
    sets = [(name, len(one[1])) for name, one in information_sets(game).items() if one[0] == player]
    return [
        {name: np.eye(count)[choice] for (name, count), choice in zip(sets, choices, strict=True)}
        for choices in product(*(range(count) for _, count in sets))
    ]


def test_matrix_games_by_hand() -> None:
    game = matrix_game(ROCK_PAPER_SCISSORS, names=["rock", "paper", "scissors"])
    assert information_sets(game)["second"] == (1, ("rock", "paper", "scissors"))
    assert nash_conv(game, uniform_strategy(game)) == pytest.approx(0, abs=1e-12)
    rock = {"first": np.array([1.0, 0, 0]), "second": np.full(3, 1 / 3)}
    assert expected_payoffs(game, rock).tolist() == pytest.approx([0, 0])
    assert best_response(game, rock, 1)[0]["second"].tolist() == [0, 1, 0]
    assert nash_conv(game, rock) == pytest.approx(1)  # paper gains 1, the other player nothing
    assert exploitability(game, rock) == pytest.approx(1 / 2 / 2)
    # Rows mix 2 : 3 and columns 1 : 4 in the equilibrium of this matrix, of value 2/5.
    two = matrix_game([[2, 0], [-2 / 3, 2 / 3]])
    nash = {"first": np.array([2, 3]) / 5, "second": np.array([1, 4]) / 5}
    assert expected_payoffs(two, nash)[0] == pytest.approx(2 / 5)
    assert nash_conv(two, nash) == pytest.approx(0, abs=1e-12)


def test_games_that_are_not_zero_sum() -> None:
    """The prisoners' dilemma: to defect is best against anything."""
    game = matrix_game([[3, 0], [5, 1]], [[3, 5], [0, 1]])
    defect = {"first": np.array([0.0, 1]), "second": np.array([0.0, 1])}
    assert nash_conv(game, defect) == 0
    assert expected_payoffs(game, uniform_strategy(game)).tolist() == [2.25, 2.25]
    assert nash_conv(game, uniform_strategy(game)) == pytest.approx(2 * (3 - 2.25))


@pytest.mark.parametrize("alpha", [0, 0.2, 1 / 3])
def test_kuhn_poker_has_the_known_equilibria(alpha: float) -> None:
    strategy = kuhn_equilibrium(alpha)
    assert expected_payoffs(KUHN, strategy).tolist() == pytest.approx([-1 / 18, 1 / 18])
    assert nash_conv(KUHN, strategy) == pytest.approx(0, abs=1e-12)
    assert payoff_range(KUHN) == 4


@pytest.mark.parametrize("player", [0, 1])
def test_best_responses_are_the_best_of_all_pure_strategies(player: int) -> None:
    for seed in range(2):
        strategy = drawn(seed)
        response, value = best_response(KUHN, strategy, player)
        assert expected_payoffs(KUHN, {**strategy, **response})[player] == pytest.approx(value)
        every = [expected_payoffs(KUHN, {**strategy, **one})[player] for one in pure(KUHN, player)]
        assert len(every) == 64
        assert value == pytest.approx(max(every))


def test_an_average_has_the_payoffs_of_the_draw() -> None:
    members, weights = [drawn(seed) for seed in range(3)], np.array([0.5, 0.2, 0.3])
    mean = average_strategy(KUHN, members, 7 * weights)
    for player, seed in product((0, 1), (8, 9)):
        names = [name for name, one in information_sets(KUHN).items() if one[0] == player]
        other = drawn(seed)
        apart = [expected_payoffs(KUHN, {**other, **{name: one[name] for name in names}}) for one in members]
        joint = expected_payoffs(KUHN, {**other, **{name: mean[name] for name in names}})
        np.testing.assert_allclose(joint, weights @ apart, rtol=1e-12)
    never = {**uniform_strategy(KUHN), "jack:": np.array([0.0, 1.0])}  # so that it never answers a bet with a jack
    assert average_strategy(KUHN, [never], [1.0])["jack: check bet"].tolist() == [0.5, 0.5]


def test_a_forfeit_loses_the_most() -> None:
    game = with_forfeits(KUHN)
    assert information_sets(game)["jack:"] == (0, ("check", "bet", "anything else"))
    keeps = {name: np.array([*p, 0.0]) for name, p in kuhn_equilibrium(0.1).items()}
    assert nash_conv(game, keeps) == pytest.approx(0, abs=1e-12)
    assert expected_payoffs(game, {**keeps, "jack:": np.eye(3)[2]})[0] == pytest.approx(
        expected_payoffs(game, {**keeps, "jack:": np.eye(3)[0]})[0] - 1 / 3
    )  # a jack that checks loses 1: once against a check of a queen, and against the bets of a king


def test_what_is_refused() -> None:
    for payoffs in ([1, 2], [[1, np.nan]], [[]]):
        with pytest.raises(InputError, match="a matrix of finite numbers"):
            matrix_game(payoffs)
    with pytest.raises(InputError, match="names has 1 entries, but the game has 2 actions"):
        matrix_game([[1, 2]], names=["only"])
    end = Node(payoffs=(0.0, 0.0))
    twice = Node(0, "one", ("a", "b"), (Node(0, "one", ("c",), (end,)), end))
    with pytest.raises(InputError, match="'one' has nodes with different players or actions"):
        information_sets(twice)
