"""Games of several players in words, whose solutions are known: matrix games, Kuhn poker, advice, and talk."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.core.arguments.checks import expect
from jaxrl_llm.data.chat.calls import Message, Reply
from jaxrl_llm.environments.protocol import Observation
from jaxrl_llm.games import Node, advice_game, kuhn_poker, matrix_game, with_forfeits
from jaxrl_llm.games.extensive import ADVISER, CHANCE, END, nodes
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
        self.players = len(next(node.payoffs for node in nodes(game) if node.player == END))

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """What the first player knows."""
        self.random = np.random.default_rng(seed)
        return self._at(self.node)

    def step(self, reply: Reply) -> Observation:
        """What the next player knows, after a reply."""
        return self._at(self.node.children[action_in(reply_text(reply), self.node.actions[:-1])])

    def close(self) -> list[float]:
        """The payoffs, 0 of a game that was cut off."""
        return list(self.node.payoffs) if self.node.player == END else [0.0] * self.players

    def _at(self, node: Node) -> Observation:
        while node.player == CHANCE:
            node = node.children[int(self.random.choice(len(node.children), p=node.chance))]
        self.node = node
        if node.player == END:
            return Observation(done=True)
        text = self._told(node.information)
        return Observation([_said(text)], state=text, player=node.player)

    def _told(self, information: str) -> str:
        return information


def reply_text(reply: Reply) -> str:
    """What a reply says, without spaces around it."""
    return str(reply.message.get("content") or "").strip()


def action_in(text: str, actions: Sequence[str]) -> int:
    """The place of the action that a text names, -1 where it names none; case, spaces and a full stop do not matter."""
    said = text.strip().rstrip(".").lower()
    return actions.index(said) if said in actions else -1


Sayings = Callable[[int], Sequence[str]]
"""(player) -> the names of what that player can say, as `sayings` makes them."""
SAYING = re.compile(r"<([0-9]+)\.([0-9]+)>")


def sayings(player: int, count: int) -> tuple[str, ...]:
    """The names of `count` things that a player can say, which stand for them in information sets.

    >>> sayings(1, 2)
    ('<1.0>', '<1.1>')
    """
    return tuple(f"<{player}.{number}>" for number in range(count))


class TalkGame(TextGame):
    """A game in which players also talk: where they do, they reply with any text, which others are then told.

    build: a function (sayings) -> the game, in which the actions of a player who talks are `sayings(player)`, and what
    they lead to differs only in these names within the information sets of those who hear them. A player talks once
    at most, and all talk before they hear each other. Otherwise as `TextGame`: a reply is the name of an action.
    """

    def __init__(self, build: Callable[[Sayings], Node]) -> None:
        self.build, self.said = build, dict[str, str]()
        super().__init__(build(lambda player: sayings(player, 1)))

    def step(self, reply: Reply) -> Observation:
        """What the next player knows, after a reply."""
        if SAYING.fullmatch(name := self.node.actions[0]) is None:
            return super().step(reply)
        self.said[name] = reply_text(reply)
        return self._at(self.node.children[0])

    def _told(self, information: str) -> str:
        return with_sayings(information, self.said)


def with_sayings(information: str, said: Mapping[str, str]) -> str:
    """The name of an information set, or a message, with texts in place of the names of `sayings`.

    >>> with_sayings("the adviser says <1.0>", {"<1.0>": "Go left."})
    'the adviser says Go left.'
    """
    return SAYING.sub(lambda name: said.get(name[0], name[0]), information)


def _said(text: str) -> Message:
    return {"role": "user", "content": text}


def kuhn(row: Mapping[str, Any]) -> TextGame:
    """Kuhn poker, `games.kuhn_poker`: `--environment jaxrl_llm.environments.games:kuhn --players 2`."""
    return TextGame(kuhn_poker())


def advice(row: Mapping[str, Any]) -> TextGame:
    """A walker and an adviser who may be an enemy, `games.advice_game`, as often as the row's column "enemies" says."""
    return TextGame(advice_game(float(row.get("enemies", 0.5))))


def spoken_advice(row: Mapping[str, Any]) -> TalkGame:
    """`advice`, where the adviser says what it likes."""
    enemies = float(row.get("enemies", 0.5))
    return TalkGame(lambda sayings: advice_game(enemies, sayings(ADVISER)))


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
    actions, found = {node.information: node.actions for node in nodes(game) if node.player >= 0}, {}
    for name, talk in conversations(game, prompt).items():
        each = np.asarray(probability(talk, actions[name]), np.float64)
        found[name] = np.append(each, max(0.0, 1 - each.sum()))
    return found


def conversations(game: Node, prompt: Sequence[Message] = ()) -> dict[str, list[Message]]:
    """For each information set what its player was told and replied, the names of actions, until it is to move there.

    prompt: messages before the first observation. Of several ways to a set the first in the order of the tree.
    """
    found: dict[str, list[Message]] = {}

    def visit(node: Node, talks: Mapping[int, Sequence[Message]]) -> None:
        talk = talks.get(node.player, prompt)
        if node.player >= 0:
            talk = found.setdefault(node.information, [*talk, _said(node.information)])
        for action, child in zip(node.actions, node.children, strict=True):
            visit(child, {**talks, node.player: [*talk, {"role": "assistant", "content": action}]})

    visit(game, {})
    return found
