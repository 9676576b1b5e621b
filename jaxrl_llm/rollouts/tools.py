"""What a rollout program may do: sample from the engine, have episodes scored, call what is outside."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from jaxrl_llm.errors import InputError, shown
from jaxrl_llm.rollouts.episode import Episode, Segment, checksum, given
from jaxrl_llm.rollouts.log import Answer, Call


@dataclass(frozen=True)
class Task:
    """What a program is given: a prompt of the data set, and how to sample."""

    row: Mapping[str, Any]
    """Its row of the data set: columns may hold hints, answers, tools."""
    prompt: tuple[int, ...]
    """Token ids of the prompt."""
    prompt_id: int
    """Number of the row."""
    samples: int
    """Episodes that the group shall have."""
    limit: int
    """Tokens of a completion at most."""


class ProgramHost(Protocol):
    """What the driver does for the programs of a group."""

    task: Task
    step: int

    async def draw(self, call: Call, context: Episode, until: int, pause_at: int | None, greedy: bool) -> Answer:
        """Tokens of a completion; `until`: own tokens of the episode at most."""

    async def scores(self, episodes: Sequence[Episode]) -> list[Episode]:
        """The episodes with their rewards."""

    async def answer(self, name: str, call: Callable[[], Awaitable[Any]], again: bool) -> Any:
        """What a call outside of the engine answers, remembered by its name."""


async def in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function gives, run in a thread of its own, which nobody waits for when it hangs."""
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[Any] = loop.create_future()

    def tell(set_it: Callable[[Any], None], value: Any) -> None:
        if not answered.done():
            set_it(value)

    def work() -> None:
        outcome: tuple[Callable[[Any], None], Any]
        try:
            outcome = answered.set_result, function(*arguments)
        except BaseException as error:
            outcome = answered.set_exception, RuntimeError(f"{type(error).__name__}: {error}")
        with contextlib.suppress(RuntimeError):  # nobody waits any more, the loop is closed
            loop.call_soon_threadsafe(tell, *outcome)

    threading.Thread(target=work, daemon=True, name="rollout call").start()
    return await answered


class NotDeterministicError(InputError):
    """A program that was run again from its log asked for something else than before."""


class Tools:
    """The tools of one group's program. Every answer is remembered, so that the program can be run again."""

    def __init__(self, host: ProgramHost, tokenizer: Any, context: int = 0) -> None:
        self._host, self.tokenizer, self._context = host, tokenizer, context

    async def sample(
        self,
        context: Episode | Sequence[int],
        *,
        number: int | None = None,
        limit: int | None = None,
        pause_at: int | None = None,
        greedy: bool = False,
    ) -> Episode:
        """Continue an episode, or a prompt's token ids, by a sampled completion, and return the longer episode.

        number: of the sample within the group, from 0. With the prompt and the place in the episode it names the
        randomness: two samples of one context need different numbers. An episode keeps its own by default.
        limit: new tokens at most; the task's by default. An episode that reaches it, or the end of the model's context,
        is `truncated`. pause_at: new tokens after which the call returns an episode that is not finished, to be forked
        or continued. greedy: take the likeliest tokens.

        Raises InputError for another context, a number or limit out of its range, and where a program asks twice for
        the same sample.
        """
        episode = self._episode(context, number)
        limit = self._host.task.limit if limit is None else limit
        if not isinstance(limit, int) or limit < 1:
            raise InputError(f"limit is {shown(limit)}, but must be a whole number of tokens, at least 1")
        if pause_at is not None and (not isinstance(pause_at, int) or pause_at < 1):
            raise InputError(f"pause_at is {shown(pause_at)}, but must be a whole number of tokens, at least 1")
        place = episode.size
        until = place + limit
        if self._context:
            until = min(until, self._context - len(episode.prompt))
        if until <= place:  # the context is full
            return replace(episode, truncated=True)
        stop = None if pause_at is None or place + pause_at >= until else place + pause_at
        call = Call(episode.sample if not greedy else -1 - episode.sample, place, checksum(episode.tokens))
        answer = await self._host.draw(call, episode, until, stop, greedy)
        longer = episode + Segment(answer.tokens, True)
        cut_short = stop is None and not answer.ended
        return replace(longer, ended=answer.ended, truncated=cut_short)

    def _episode(self, context: Episode | Sequence[int], number: int | None) -> Episode:
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 2**20):
            raise InputError(f"number is {shown(number)}, but must be a whole number from 0 to 2^20 - 1")
        if isinstance(context, Episode):
            return context if number is None else replace(context, sample=number)
        if isinstance(context, str) or not isinstance(context, Sequence) or not len(context):
            raise InputError(f"tools.sample continues an episode or token ids, but found {shown(context)}")
        return Episode(tuple(map(int, context)), self._host.task.prompt_id, 0 if number is None else number)

    async def score(self, episodes: Sequence[Episode]) -> list[Episode]:
        """The episodes with their rewards, by the run's reward functions, which see all of them in one call."""
        if isinstance(episodes, Episode) or not all(isinstance(episode, Episode) for episode in episodes):
            raise InputError(f"tools.score takes a list of episodes, but found {shown(episodes)}")
        return await self._host.scores(list(episodes))

    async def call(self, function: Callable[..., Any], *arguments: Any, name: str, again: bool = False) -> Any:
        """What a function outside of the engine answers: a tool, a judge, a step of an environment.

        A plain function runs in a thread, an async one where it is. The answer, which JSON must be able to hold, is
        remembered under the name, unlike all others of the group, and given back when the program is run again.
        again: call the function even then, because it has a state of its own, such as an environment's; an answer that
        is not the remembered one raises NotDeterministicError.
        """

        async def run() -> Any:
            if inspect.iscoroutinefunction(function):
                return await function(*arguments)
            return await in_thread(function, *arguments)

        return await self._host.answer(name, run, again)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens at its ends."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def given(self, text: str) -> Segment:
        """A segment of a text that is given: conditioned on, masked out of the loss."""
        return given(self.encode(text), self._host.step)
