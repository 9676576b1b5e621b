"""Interfaces of the driver: what programs meet with and fail by, and what it asks of engines."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeGuard

from jaxrl_llm.sampling.requests import Completion, Request
from jaxrl_llm.sampling.stats import Stats
from jaxrl_llm.utils.errors import InputError


class Meeting(NamedTuple):
    """What the programs of a step brought to a meeting."""

    place: int  # of the program's own value
    values: list[Any]  # JSON values, in the order in which the step draws its prompts
    decision: Any = None  # what follows from the values, see `Tools.meet`


Decide = Callable[[list[Any]], Any]
FAILED = "failed"  # key of the answer of an external call that failed


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
