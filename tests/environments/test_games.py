"""Games in words: what each player is told, payoffs of every line of play, and policies as strategies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxrl_llm.data.chat.calls import Reply
from jaxrl_llm.environments.games import TextGame, kuhn, matrix, strategy_of
from jaxrl_llm.games import expected_payoffs, kuhn_poker, matrix_game, with_forfeits
from jaxrl_llm.utils.errors import InputError


def play(game: TextGame, seed: int, *replies: str) -> tuple[list[tuple[int, Any]], list[float]]:
    seen = game.reset({}, seed)
    told = [(seen.player, seen.state)]
    for text in replies:
        assert not seen.done
        seen = game.step(Reply({"role": "assistant", "content": text}, ()))
        told += [] if seen.done else [(seen.player, seen.state)]
    return told, game.close()


def cards(seed: int) -> tuple[str, str]:
    told, _ = play(kuhn({}), seed, "check")
    return told[0][1].split(":")[0], told[1][1].split(":")[0]


@pytest.mark.parametrize("seed", range(4))
def test_kuhn_poker_in_words(seed: int) -> None:
    first, second = cards(seed)
    assert cards(seed) == (first, second), "a seed deals the same cards"
    order = ["jack", "queen", "king"]
    sign = 1.0 if order.index(first) > order.index(second) else -1.0
    told, payoffs = play(kuhn({}), seed, "check", " Bet. ", "CALL")
    assert told == [(0, f"{first}:"), (1, f"{second}: check"), (0, f"{first}: check bet")]
    assert payoffs == [2 * sign, -2 * sign]
    assert play(kuhn({}), seed, "bet", "fold")[1] == [1, -1]
    assert play(kuhn({}), seed, "check", "bet", "fold")[1] == [-1, 1]
    assert play(kuhn({}), seed, "check", "check")[1] == [sign, -sign]
    assert play(kuhn({}), seed, "check")[1] == [0, 0], "cut off"


def test_the_deals_differ() -> None:
    assert len({cards(seed) for seed in range(40)}) == 6


def test_what_it_cannot_read_loses() -> None:
    for reply in ("", "I bet", "call", "anything else"):
        assert play(kuhn({}), 1, reply)[1] == [-2, 2]
    assert play(kuhn({}), 1, "bet", "bet")[1] == [2, -2]


def test_a_matrix_game_of_a_row() -> None:
    row = {"payoffs": [[3, 0], [1, 2]], "actions": ["Left", "Right"]}
    told, payoffs = play(matrix(row), 0, "right", "left")
    assert told == [(0, "first"), (1, "second")]
    assert payoffs == [1, -1]
    for bad in ({}, {"payoffs": [[1]], "actions": "left"}):
        with pytest.raises(InputError, match="needs the columns payoffs and actions"):
            matrix(bad)


def test_a_policy_is_a_strategy() -> None:
    """What a player said and heard before is in its conversation; the rest of its probability is forfeited."""
    asked: list[list[tuple[str, str]]] = []

    def probability(talk: Any, replies: Any) -> list[float]:
        asked.append([(one["role"], one["content"]) for one in talk])
        return [0.5, 0.25]

    system = {"role": "system", "content": "Play."}
    found = strategy_of(kuhn_poker(), probability, [system])
    assert len(asked) == len(found) == 12
    assert found["jack:"].tolist() == [0.5, 0.25, 0.25]
    own = [("system", "Play."), ("user", "jack:"), ("assistant", "check"), ("user", "jack: check bet")]
    assert own in asked
    assert [("system", "Play."), ("user", "king: bet")] in asked
    game = with_forfeits(matrix_game([[1, -1], [-1, 1]]))
    half = strategy_of(matrix_game([[1, -1], [-1, 1]]), lambda talk, replies: [0.25, 0.25])
    # The first forfeits 1/2 of the time; of what is left the second forfeits 1/2.
    assert expected_payoffs(game, half).tolist() == [-0.25, 0.25]
    assert np.allclose([p.sum() for p in half.values()], 1)
