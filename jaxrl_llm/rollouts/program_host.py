"""Interfaces of the driver: what it gives to a rollout program, and what it asks of engines."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeGuard

from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.runtime.replay_log import Answer, Call
from jaxrl_llm.sampling.requests import NO_TOKENS, Completion, Request, Tokens
from jaxrl_llm.sampling.stats import Stats
from jaxrl_llm.utils.errors import InputError


@dataclass(frozen=True)
class Task:
    """The input of a program: a prompt of the data set, and limits."""

    row: Mapping[str, Any]
    """Row of the data set, whose columns may contain hints, answers or tools."""
    prompt: tuple[int, ...]
    """Token ids of the prompt."""
    prompt_id: int
    """Index of the row."""
    samples: int
    """Number of episodes that the program must return."""
    limit: int
    """Most tokens of a completion."""


class Meeting(NamedTuple):
    """What the programs of a step brought to a meeting."""

    place: int
    """Of the program's own value."""
    values: list[Any]
    """JSON values, in the order in which the step draws its prompts."""
    decision: Any = None
    """What follows from the values, see `Tools.meet`."""


Decide = Callable[[list[Any]], Any]
FAILED = "failed"  # key of the answer of an external call that failed


class ProgramHost(Protocol):
    """What the driver provides to the program of a group."""

    task: Task
    held: dict[str, Any]  # what the program holds, by name
    recorded: dict[str, Any]  # answers of external calls, by name
    step: int
    first_step: int  # training step in which the program first started
    repeat: int  # number of the group among those of its prompt that started in that step

    async def draw(
        self, call: Call, context: Episode, until: int, pause_at: int | None, draws: Draws, fixed: tuple[int, ...] = (),
        begun: Tokens = NO_TOKENS,
    ) -> Answer:  # fmt: skip
        """Tokens of a completion. until: most tokens after the episode's prompt. fixed: see `Request`.

        begun: tokens that it begins with.
        """

    async def scores(self, episodes: Sequence[Episode]) -> list[Episode]:
        """Return the episodes with their rewards."""

    async def answer(self, name: str, call: Callable[[], Awaitable[Any]], again: bool, failing: bool) -> Any:
        """The result of an external call, recorded under its name."""

    def is_resumed(self, value: Any) -> bool:
        """Whether a step before left the program unfinished with this object, as the log knows it."""

    async def meet(self, name: str, value: Any, decide: Decide | None) -> Meeting:
        """What the programs of the step bring to a meeting, recorded under its name."""


class NotDeterministicError(InputError):
    """A program that was rerun from its log made different calls than before."""


class OtherAnswerError(NotDeterministicError):
    """What a program calls, such as an environment, answered otherwise when it was asked again."""


def ends_the_run(error: BaseException | None, strict: bool) -> TypeGuard[NotDeterministicError]:
    """Whether it is more than the failure of a group. strict: whether another answer of an environment is."""
    return isinstance(error, NotDeterministicError) and (strict or not isinstance(error, OtherAnswerError))


class Completes(Protocol):
    """What completes requests while others are decoding: see `engine.Engine`."""

    @property
    def busy(self) -> bool:
        """Whether any request is not completed."""
        ...

    def submit(self, request: Request) -> int:
        """Queue a request. Returns its number, which is the index of its completion."""
        ...

    def step(self, chunk: int) -> list[Completion]:
        """Decode for at most `chunk` steps and return the completions that ended."""
        ...

    def withdraw(self) -> list[Completion]:
        """Return all other requests as unfinished completions."""
        ...


class Draws(NamedTuple):
    """From what an engine draws; a rollout has an engine for each."""

    temperature: float | None = None  # None: the run's, with its truncation; 0: greedy
    reference: bool = False  # from the reference policy, instead of the one that learns
    snapshot: int | None = None  # from the policy in this place of the rollout's league

    @property
    def learns(self) -> bool:
        """Whether it draws from the policy that learns."""
        return not self.reference and self.snapshot is None

    @property
    def trained(self) -> bool:
        """Whether it draws as the run trains: from the policy that learns, at the run's temperature."""
        return self.learns and self.temperature is None


class MakeEngine(Protocol):
    """What makes engines."""

    def __call__(self, requests: Sequence[Request], draws: Draws, stats: Stats, before: Any = None, /) -> Completes:
        """An engine, of which these are the first requests.

        before: an engine of earlier weights, which goes on with these and with its caches; it is what is returned.
        """
        ...
