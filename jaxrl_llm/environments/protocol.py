"""The protocol of environments: messages in, messages out.

An environment is any object with `reset`, `step` and `tools`, and perhaps `close` and `copy`. The classes of TRL,
Gymnasium, TextArena and TextWorld become such objects in `jaxrl_llm.environments.adapters`.
"""

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from jaxrl_llm.data.chat.calls import Message
from jaxrl_llm.utils.errors import shown


@dataclass(frozen=True)
class Observation:
    """What an environment answers. All values must be representable in JSON."""

    messages: Sequence[Message] = ()
    """What the conversation gets: user messages, or results of tools. Ignored if `done`."""
    reward: float = 0.0
    """Of the turn before."""
    done: bool = False
    """Whether the episode is over."""
    truncated: bool = False
    """Whether it was cut off, as by a limit of steps, and did not end by itself."""
    state: str | None = None
    """Names the state that the policy is in now, equal for equal states. None: the messages name it."""
    info: Mapping[str, float] = field(default_factory=dict)
    """Numbers of the turn, such as an invalid action, which are summed over the episode."""
    player: int = 0
    """Who is to reply, in a game of several players: numbers from 0."""
    whole: bool = False
    """Whether the messages are the whole conversation, its prompt included, and not what it gets. It goes on where they
    begin with what was said, and else in a new row."""
    also: Sequence[Sequence[Message]] = ()
    """With `whole`, other conversations that are to be answered too: `step` then gets a list of replies, in order."""

    @property
    def conversations(self) -> list[Sequence[Message]]:
        """The messages of each conversation that is to be answered."""
        return [self.messages, *self.also]

    def as_json(self) -> dict[str, Any]:
        """For the log of a program, from which `Observation(**value)` restores it."""
        return {name: value for name, value in asdict(self).items() if name != "also" or value}


def finite(value: Any, name: str) -> float:
    """A number of that name which an environment gave. RuntimeError for NaN, infinities and what is no number.

    >>> finite(True, "its reward")
    1.0
    """
    try:
        found = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not math.isfinite(found):
        raise RuntimeError(f"{name} is {shown(value)}, but must be a finite number")
    return found


def yes_or_no(value: Any, name: str) -> bool:
    """A yes or no of that name which an environment gave. RuntimeError for anything but booleans, 0 and 1.

    >>> yes_or_no(0, "done"), yes_or_no(True, "done")
    (False, True)
    """
    one = getattr(value, "item", lambda: value)() if getattr(value, "shape", None) == () else value
    if not isinstance(one, int) or one not in (0, 1):
        raise RuntimeError(f"{name} is {shown(value)}, but must be true or false")
    return bool(one)


Final = float | None | Sequence[float | None]


class Environment(Protocol):
    """One episode at a time. Methods may be async; plain ones run in threads.

    It may have `copy() -> Environment`: another in the same state, random generators included, that shares nothing with
    it, or `copies.NotCopiedError` where that cannot be. Others are copied as `copies.Replayable` describes. And
    `expect(seen: Observation)`, told before `reset` or `step` what it returned when the same was played before, to wait
    for the same: for answers that also depend on when something happens, such as calls that come at once.
    """

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """JSON schemas of the tools; () for none."""

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation | Awaitable[Observation]:
        """Begin an episode. row: of the data set. seed: for environments that draw; all samples of a group have one.

        Returns messages that come after those of the row's prompt.
        """

    def step(self, reply: Any) -> Observation | Awaitable[Observation]:
        """Answer a reply of the policy, a `Reply`; a list of them where several were asked for, `Observation.also`."""

    def close(self) -> Final | Awaitable[Final]:
        """End the episode. Returns (or awaits) its final reward, beside those of its turns, or None for none.

        Of a game of several players it is a list with the reward of each.
        """


MakeEnvironment = Callable[[Mapping[str, Any]], Environment]
"""Makes the environment of an episode from the row of the data set."""
