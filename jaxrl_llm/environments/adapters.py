"""Environments of other libraries, unchanged: told apart by their methods, none of the libraries is imported.

- Classes of TRL's `environment_factory`: `reset(**row) -> str or None`, every other public method a tool, and perhaps
  `get_reward()`. One of the tools may be called `step`.
- Gymnasium on texts: `reset(seed=) -> (observation, info)`, `step(text) -> (observation, reward, terminated, truncated,
  info)`; also `step` with four values, (observation, reward, done, info). `reset` may have `**kwargs`.
- TextArena: `reset(num_players=, seed=)`, `get_observation() -> (player, text)`, `step(text) -> (done, info)`,
  `close() -> rewards by player`.
- TextWorld: `reset() -> state`, `step(text) -> (state, score, done)`; states have `feedback`, scores are sums.
"""

from __future__ import annotations

import ast
import copy
import inspect
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any, Self

from jaxrl_llm.core.arguments.checks import checked
from jaxrl_llm.core.arguments.ranges import Count, Seconds
from jaxrl_llm.data.chat.calls import Reply
from jaxrl_llm.environments.copies import deep_copy
from jaxrl_llm.environments.protocol import Environment, MakeEnvironment, Observation, finite, yes_or_no
from jaxrl_llm.environments.tools.base import SECONDS, Tool, Toolbox, result_text
from jaxrl_llm.utils.errors import InputError, require_choice, shown
from jaxrl_llm.utils.threads import called, in_thread

Factory = Callable[..., Any]


@checked
def environments(
    factory: Factory | Mapping[str, Factory],
    tools: tuple[Tool, ...] = (),
    seconds: Seconds = SECONDS,
    players: Count = 1,
) -> MakeEnvironment:
    """What makes a row's environment, as `rollouts.agents.agent` takes it.

    factory: a class or function without arguments, or one that takes the row, as its first argument or as one that is
    called row; or several by name, of which the row's column `environment` names one. tools: that the policy may call
    beside the environment's own, for classes of TRL's kind. seconds: of a call. players: of TextArena's games.
    """

    def make(row: Mapping[str, Any]) -> Environment:
        made = factory
        if isinstance(made, Mapping):
            name = str(row.get("environment"))
            require_choice("environment", name, made)
            made = made[name]
        return adapted(_made(made, row), tools, seconds, players)

    return make


def adapted(world: Any, tools: tuple[Tool, ...] = (), seconds: float = SECONDS, players: int = 1) -> Environment:
    """An environment of any of these libraries as one of the protocol.

    InputError for what has no `reset`, for tools beside an environment of another kind than TRL's, and for another
    number of players than that of an environment that is no game of TextArena's kind.
    """
    if not callable(getattr(world, "reset", None)):
        raise InputError(f"an environment needs a method reset, but {shown(world)} has none")
    step = getattr(world, "step", None)
    if tools and callable(step) and (hasattr(world, "tools") or not _of_trl(world)):
        names = ", ".join(getattr(tool, "__name__", shown(tool)) for tool in tools)
        raise InputError(
            f"the tools {names} cannot be added to {type(world).__name__}, which has a step that replies go to: leave "
            "them out, or give an environment whose methods are tools"
        )
    own = callable(step) and hasattr(world, "tools")
    arena = not own and callable(step) and callable(getattr(world, "get_observation", None))
    play = getattr(world, "players", 1) if own else 1
    if players != play and not arena:
        raise InputError(
            f"players is {players}, but {type(world).__name__} is for {play}: games of several are of TextArena's "
            "kind, or those of the protocol whose attribute players says so"
        )
    if own:
        return world
    if arena:
        return OfTextArena(world, players)
    if callable(step) and not _of_trl(world):
        return OfSteps(world)
    return OfMethods(world, tools, seconds)


def _made(factory: Factory, row: Mapping[str, Any]) -> Any:
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # some compiled callables have no signature
        return factory()
    needed = [p for p in parameters.values() if p.default is p.empty]
    if any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in needed):
        return factory(dict(row))
    return factory(row=dict(row)) if "row" in parameters else factory()


def _of_trl(world: Any) -> bool:
    """Whether `step`, if there is one, is a tool: TRL passes all columns of the row to `reset`.

    Gymnasium's classes may take further arguments too: they have spaces, a seed or options to `reset` with, or a `step`
    that returns several values.
    """
    if hasattr(world, "action_space") or hasattr(world, "observation_space"):
        return False
    if callable(getattr(world, "get_reward", None)):
        return True
    parameters = inspect.signature(world.reset).parameters
    takes_columns = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return takes_columns and not parameters.keys() & {"seed", "options"} and not _returns_several(world.step)


def _returns_several(method: Callable[..., Any]) -> bool:
    """Whether the source of a method has a return of 3 to 5 values."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(method))))
    except (OSError, TypeError, SyntaxError):  # defined in a shell, compiled, or part of a line
        return False
    found = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)]
    return any(isinstance(value, ast.Tuple) and 3 <= len(value.elts) <= 5 for value in found)


def _user(text: Any) -> list[dict[str, str]]:
    return [{"role": "user", "content": result_text(text, sys.maxsize)}]  # what is too long is cut for all environments


class _Adapter:
    """An object of another library as an environment."""

    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(self, world: Any) -> None:
        self._world = world

    @property
    def wrapped(self) -> Any:
        """The adapted object."""
        return self._world

    def copy(self) -> Self:
        """By the object's own `copy`, else a deep one; see `copies.deep_copy`."""
        other = copy.copy(self)
        own = getattr(type(self._world), "copy", None)
        other._world = deep_copy(self._world) if own is None else self._world.copy()
        return other


class OfMethods(_Adapter):
    """A class of TRL's kind. The episode is over when the policy replies without a call."""

    def __init__(self, world: Any, tools: tuple[Tool, ...] = (), seconds: float = SECONDS) -> None:
        super().__init__(world)
        self._box = Toolbox([*tools, *_public(world)], seconds)
        self.tools = self._box.schemas

    @property
    def gives_reward(self) -> bool:
        """Whether it has a reward; else the run's other rewards judge its episodes."""
        return callable(getattr(self._world, "get_reward", None))

    async def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """The text of `reset`, if it gives one, comes after the prompt. It gets the row, and a seed if it asks."""
        parameters = inspect.signature(self._world.reset).parameters
        columns = {**({"seed": seed} if "seed" in parameters else {}), **row}
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            columns = {name: value for name, value in columns.items() if name in parameters}
        text = await called(partial(self._world.reset, **columns))
        if isinstance(text, tuple):
            raise InputError(
                f"reset of {type(self._world).__name__} returns {shown(text)}, as Gymnasium's (observation, info), but "
                "its methods are taken for tools: give it a step that returns (observation, reward, terminated, "
                "truncated, info), or let reset return the text alone"
            )
        said = "" if text is None else _told(text, "reset")
        return Observation(_user(said) if said else ())

    async def step(self, reply: Reply) -> Observation:
        """The results of the calls."""
        return await self._box.answer(reply)

    def copy(self) -> Self:
        """A deep copy of the object, and copies of what other tools keep; see `copies.deep_copy`, `Toolbox.copy`."""
        other = copy.copy(self)
        other._world = deep_copy(self._world)  # a method `copy` would be a tool
        other._box = self._box.copy(_public(other._world))
        return other

    async def close(self) -> float | None:
        """`get_reward()`, if there is one. What the tools keep is closed. RuntimeError where that gives no number."""
        await in_thread(self._box.close)
        if not self.gives_reward:
            return None
        return finite(await called(self._world.get_reward), "get_reward()")


def _public(world: Any) -> list[Callable[..., Any]]:
    names = [name for name, _ in inspect.getmembers(type(world), inspect.isfunction)]
    return [getattr(world, name) for name in names if name not in ("reset", "get_reward") and name[0] != "_"]


class OfSteps(_Adapter):
    """An environment with `step`, of Gymnasium's kind or TextWorld's. A reply's text is its action."""

    _score = 0.0

    async def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Begin an episode, with the seed if the environment takes one."""
        parameters = inspect.signature(self._world.reset).parameters
        seeded = "seed" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        if not seeded and callable(getattr(self._world, "seed", None)):
            await called(self._world.seed, seed)
        found = await called(partial(self._world.reset, **({"seed": seed} if seeded else {})))
        return Observation(_user(_told(found[0] if isinstance(found, tuple) else found, "reset")))

    async def step(self, reply: Reply) -> Observation:
        """Act with the reply's text."""
        found = await called(self._world.step, str(reply.message["content"]))
        if not isinstance(found, tuple) or not 3 <= len(found) <= 5:
            raise InputError(f"an environment's step returns 3, 4 or 5 values, but this one's {shown(found)}")
        if len(found) == 3:  # scores of TextWorld are sums
            reward, self._score = float(found[1] or 0) - self._score, float(found[1] or 0)
        else:  # some give None for a turn that has no reward
            reward = 0.0 if found[1] is None else float(found[1])
        done, cut = (
            yes_or_no(found[2], "done of its step"),
            len(found) == 5 and yes_or_no(found[3], "truncated of its step"),
        )
        return Observation(_user("" if done else _told(found[0], "step")), reward, done, cut)

    async def close(self) -> None:
        """Close the environment."""
        if callable(getattr(self._world, "close", None)):
            await called(self._world.close)


def _told(observation: Any, method: str) -> str:
    """An observation that a policy can read: a text or a number. RuntimeError for None, arrays, dicts and others."""
    feedback = getattr(observation, "feedback", None)  # of TextWorld's states
    said = observation if feedback is None else feedback
    if not isinstance(said, str | bytes | Real) and getattr(said, "shape", None) != ():
        raise RuntimeError(f"its {method} observes {shown(said)}, but a policy reads text: return a text or a number")
    return result_text(said, sys.maxsize).strip()


class OfTextArena(_Adapter):
    """A game of TextArena. Its rewards come when it is closed.

    Where a game gives a player all that was said so far, as its wrapper for language models does, the player gets what
    is new; where it gives messages, a player's own ones are left out, since they are its replies.
    """

    def __init__(self, world: Any, players: int = 1) -> None:
        super().__init__(world)
        self.players, self._done, self._told = players, False, dict[int, str]()

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Begin a game with the seed."""
        self._world.reset(num_players=self.players, seed=seed)
        return self._seen()

    def step(self, reply: Reply) -> Observation:
        """Act with the reply's text, as the player who was observed last."""
        self._done, _ = self._world.step(str(reply.message["content"]))
        return Observation(done=True) if self._done else self._seen()

    def _seen(self) -> Observation:
        player, said = self._world.get_observation()
        if isinstance(said, str):
            before, self._told[player] = self._told.get(player, ""), said
            text = (said.removeprefix(before) if said != before else said).strip("\n")
        else:
            told = [(sender, text) for sender, text, *_ in said if sender != player]
            text = "\n".join(str(text) if sender < 0 else f"[Player {sender}] {text}" for sender, text in told)
        return Observation(_user(text), player=int(player))

    def copy(self) -> OfTextArena:
        """The game in its state; see `copies.deep_copy`."""
        other = super().copy()
        other._told = dict(self._told)
        return other

    def close(self) -> float | list[float | None] | None:
        """The game's reward, if it is over; of several players, that of each."""
        if not self._done:
            return None
        rewards = self._world.close()
        found = rewards[0] if isinstance(rewards, tuple) else rewards  # some versions return (rewards, info)
        if self.players == 1:
            return float(found[0]) if found else None
        return [float(found[player]) if player in found else None for player in range(self.players)] if found else None
