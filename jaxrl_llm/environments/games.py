"""Games of several players in words, whose solutions are known: matrix games, Kuhn poker and advice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.core.arguments.checks import expect
from jaxrl_llm.data.chat.calls import Message, Reply
from jaxrl_llm.environments.protocol import Observation
from jaxrl_llm.games import Node, advice_game, kuhn_poker, matrix_game, with_forfeits
from jaxrl_llm.games.extensive import CHANCE, END
from jaxrl_llm.utils.errors import InputError, shown


class TextGame:
    """A game of `jaxrl_llm.games` as an environment of two or more players, for `--players`.

    Whoever is to move is told the name of its information set, and replies with the name of an action; case, spaces and
    a full stop do not matter. Any other reply forfeits the game: the player gets the smallest of its payoffs, and the
    others the largest of theirs (`games.with_forfeits`). Chance is drawn from the episode's seed, so that the games of
    a group have the same cards. The final rewards are the payoffs. InputError for what is no game.
    """

    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(self, game: Node) -> None:
        expect("the game", game, Node)
        self.node = with_forfeits(game)
        self.players = _players(game)

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """What the first player knows."""
        self.random = np.random.default_rng(seed)
        return self._at(self.node)

    def step(self, reply: Reply) -> Observation:
        """What the next player knows, after a reply."""
        said = str(reply.message.get("content") or "").strip().rstrip(".").lower()
        actions = self.node.actions[:-1]
        return self._at(self.node.children[actions.index(said) if said in actions else -1])

    def close(self) -> list[float]:
        """The payoffs, 0 of a game that was cut off."""
        return list(self.node.payoffs) if self.node.player == END else [0.0] * self.players

    def _at(self, node: Node) -> Observation:
        while node.player == CHANCE:
            node = node.children[int(self.random.choice(len(node.children), p=node.chance))]
        self.node = node
        if node.player == END:
            return Observation(done=True)
        return Observation([_said(node.information)], state=node.information, player=node.player)


def _said(text: str) -> Message:
    return {"role": "user", "content": text}


def _players(game: Node) -> int:
    while game.player != END:
        game = game.children[0]
    return len(game.payoffs)


def kuhn(row: Mapping[str, Any]) -> TextGame:
    """Kuhn poker, `games.kuhn_poker`: `--environment jaxrl_llm.environments.games:kuhn --players 2`."""
    return TextGame(kuhn_poker())


def advice(row: Mapping[str, Any]) -> TextGame:
    """A walker and an adviser who may be an enemy, `games.advice_game`, as often as the row's column "enemies" says."""
    return TextGame(advice_game(float(row.get("enemies", 0.5))))


def matrix(row: Mapping[str, Any]) -> TextGame:
    """The zero-sum matrix game of a row with "payoffs", the first player's, and "actions", their names."""
    payoffs, actions = row.get("payoffs"), row.get("actions")
    if payoffs is None or not isinstance(actions, list | tuple):
        raise InputError(f"a matrix game needs the columns payoffs and actions, but actions has {shown(actions)}")
    return TextGame(matrix_game(payoffs, names=[str(one).lower() for one in actions]))


Exact = Callable[[Sequence[Message], Sequence[str]], Sequence[float]]
"""(the conversation of a player, replies) -> the probability of each."""


def strategy_of(game: Node, probability: Exact, prompt: Sequence[Message] = ()) -> dict[str, np.ndarray[Any, Any]]:
    """The strategy of a policy in `with_forfeits(game)`, from its probabilities of the actions' names as replies.

    prompt: messages before the first observation. Every information set is asked after the one conversation in which
    its player replied with the actions that lead there; what is left of 1 is forfeited.
    """
    found: dict[str, np.ndarray[Any, Any]] = {}

    def visit(node: Node, talks: Mapping[int, Sequence[Message]]) -> None:
        talk = talks.get(node.player, prompt)
        if node.player >= 0:
            talk = [*talk, _said(node.information)]
            if node.information not in found:
                each = np.asarray(probability(talk, node.actions), np.float64)
                found[node.information] = np.append(each, max(0.0, 1 - each.sum()))
        for action, child in zip(node.actions, node.children, strict=True):
            visit(child, {**talks, node.player: [*talk, {"role": "assistant", "content": action}]})

    visit(game, {})
    return found
