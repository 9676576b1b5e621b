"""The game of advice: what friends and enemies gain by words, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from jaxrl_llm.games import advice_game, best_response, expected_payoffs, information_sets

HONEST, LYING = [1.0, 0.0], [0.0, 1.0]  # of "the left way is free": says left, or right


def strategy(friend_lies: bool, enemy_lies: bool, heeds: float) -> dict[str, np.ndarray]:
    found = {}
    for role, lies in (("a friend", friend_lies), ("an enemy", enemy_lies)):
        found[f"adviser, {role}: the left way is free"] = np.array(LYING if lies else HONEST)
        found[f"adviser, {role}: the right way is free"] = np.array(HONEST if lies else LYING)
    found["walker: the adviser says left"] = np.array([heeds, 1 - heeds])
    found["walker: the adviser says right"] = np.array([1 - heeds, heeds])
    return found


@pytest.mark.parametrize("enemies", [0.0, 0.2, 0.5, 0.9, 1.0])
def test_payoffs_are_those_by_hand(enemies: float) -> None:
    game = advice_game(enemies)
    assert {player for player, _ in information_sets(game).values()} == {0, 1}
    walker, adviser = expected_payoffs(game, strategy(False, True, 1.0))
    assert walker == pytest.approx(1 - 2 * enemies)
    assert adviser == pytest.approx(1.0)  # friends help and enemies deceive one who heeds them
    response, value = best_response(game, strategy(False, True, 0.5), player=0)
    assert value == pytest.approx(abs(1 - 2 * enemies))
    if enemies != 0.5:
        assert response["walker: the adviser says left"][0] == float(enemies < 0.5)
    assert expected_payoffs(game, strategy(False, False, 1.0)) == pytest.approx([1.0, 1 - 2 * enemies])
