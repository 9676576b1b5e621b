"""Regret minimisation: worked examples, known values, and regrets against differences of payoffs."""

from __future__ import annotations

import numpy as np
import pytest
from test_extensive import KUHN, ROCK_PAPER_SCISSORS, drawn

from jaxrl_llm.games import (
    cfr,
    expected_payoffs,
    exploitability,
    information_sets,
    matrix_game,
    regret_matching,
    regret_matching_plus,
    regret_policy,
    volatility_adaptive,
)
from jaxrl_llm.games.regret import Regrets, counterfactual_regrets
from jaxrl_llm.utils.errors import InputError

RULES = {
    "rm": (regret_matching(), 0.006),
    "rm+": (regret_matching_plus(), 0.004),
    "vad": (volatility_adaptive(50), 0.006),
}


@pytest.mark.parametrize("rule", RULES)
def test_kuhn_poker_is_solved(rule: str) -> None:
    found = cfr(KUHN, RULES[rule][0], 200)
    assert expected_payoffs(KUHN, found)[0] == pytest.approx(-1 / 18, abs=3e-3)
    assert exploitability(KUHN, found) < RULES[rule][1]
    assert found["king: bet"][1] > 0.99
    assert found["jack: bet"][0] > 0.99


def test_a_matrix_game_whose_equilibrium_is_not_uniform() -> None:
    """Rock against scissors is worth 2: rock, paper and scissors are played 1/4, 1/2 and 1/4 of the time."""
    payoffs = np.array(ROCK_PAPER_SCISSORS) * [[1, 1, 2], [1, 1, 1], [2, 1, 1]]
    found = cfr(matrix_game(payoffs), regret_matching_plus(), 600)
    for player in ("first", "second"):
        np.testing.assert_allclose(found[player], [0.25, 0.5, 0.25], atol=0.02)


def test_regrets_of_one_set_are_what_a_change_there_gains() -> None:
    """Where a player decides once, the gain of an action is its counterfactual regret."""
    strategy = drawn(3)
    regrets = counterfactual_regrets(KUHN, strategy)
    for name, (player, actions) in information_sets(KUHN).items():
        if name.endswith("check bet") or player == 0:
            continue
        for place in range(len(actions)):
            changed = {**strategy, name: np.eye(len(actions))[place]}
            gain = expected_payoffs(KUHN, changed)[player] - expected_payoffs(KUHN, strategy)[player]
            assert regrets[name][place] == pytest.approx(gain, abs=1e-12)


def test_volatility_adaptive_worked_example() -> None:
    rule, r = volatility_adaptive(1), np.array([0.4, -1.0, 0.2])
    found = rule.observe(Regrets(np.array([1.0, -2.0, 0.5]), 0.6), r, 4)
    assert found.volatility == pytest.approx(0.64)
    np.testing.assert_allclose(found.total, [1.305021, -1.821708, 0.652510], atol=1e-6)
    assert rule.weight(found, r, 4) == pytest.approx(19.060067, abs=1e-6)
    assert volatility_adaptive().weight(found, r, 4) == 0
    assert rule.observe(found, np.array([-90.0, 0, 0]), 5).total[0] == -20


def test_policies_and_what_is_refused() -> None:
    assert regret_policy(np.array([-1.0, -2.0])).tolist() == [0.5, 0.5]
    with pytest.raises(InputError, match="iterations"):
        cfr(KUHN, regret_matching(), 0)
    with pytest.raises(InputError, match="warm_up"):
        volatility_adaptive(0)
