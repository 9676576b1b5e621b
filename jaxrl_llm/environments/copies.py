"""Copies of environments in the middle of an episode, for forks and for restarts from a turn.

An environment is copied by its own method `copy`, or deeply where it holds plain Python data alone. Where neither
works, as with a session or a server, a fresh one gets the same replies, and must answer as the first one did.

Many environments draw from Python's and NumPy's global generators. Episodes run side by side in one process, whose
state they would share, so that what one draws would depend on the order of threads. The functions of both modules
therefore look up the episode that calls them: within `Generators.within` they draw from its own generators, in its
threads and coroutines too, and elsewhere from the process's, as ever.
"""

from __future__ import annotations

import copy
import functools
import inspect
import io
import json
import os
import pickle
import random
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import FunctionType
from typing import Any

import numpy as np

from jaxrl_llm.environments.protocol import Environment, MakeEnvironment, Observation
from jaxrl_llm.utils.errors import InputError, error_line, shown
from jaxrl_llm.utils.threads import called

_EPISODE: ContextVar[Generators | None] = ContextVar("_EPISODE", default=None)


class Generators:
    """The global generators as the methods of one episode's environment find them, from a seed on."""

    def __init__(self, seed: int) -> None:
        """seed: 0 to 2^32 - 1."""
        self.python, self.numpy = random.Random(seed), np.random.RandomState(seed)

    def copy(self) -> Generators:
        """Generators in the same state."""
        return copy.deepcopy(self)

    @contextmanager
    def within(self) -> Iterator[None]:
        """Within this context, `random` and `numpy.random` draw from these."""
        token = _EPISODE.set(self)
        try:
            yield
        finally:
            _EPISODE.reset(token)


def _looking_up(name: str, function: Callable[..., Any], which: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        episode = _EPISODE.get()
        if episode is None:
            return function(*arguments, **options)
        return getattr(getattr(episode, which), name)(*arguments, **options)

    return call


def _install() -> None:
    """Let the functions of `random` and `numpy.random` look up the episode that calls them.

    Once, when this module is imported, so that environments which are loaded later get these functions by name, too.
    """
    for module, which, own in ((random, "python", random._inst), (np.random, "numpy", np.random.mtrand._rand)):
        for name, function in list(vars(module).items()):
            # numpy's `seed` is a function that calls its generator's method.
            if getattr(function, "__self__", None) is own or (module is np.random and name == "seed"):
                setattr(module, name, _looking_up(name, function, which))


_install()


class NotCopiedError(InputError):
    """An environment, or what its tools keep, cannot be copied as it is; its replies can still be replayed."""


class Replayable:
    """An environment, with the replies that it got and what it answered, so that it can be copied.

    It is made from the row at once, as `make` does it. A copy shares nothing with the environment that it was copied
    from: both go on, each with replies of its own, and each must be closed. The same replies get the same answers from
    both, as random generators are copied too: those of the environment, and the process's own as `seed` begins them.
    """

    def __init__(self, make: MakeEnvironment, row: Mapping[str, Any], seed: int = 0) -> None:
        self._make, self._row, self._generators = make, row, Generators(seed)
        with self._generators.within():
            self._world: Environment = make(row)
        self._seed = seed
        self._replies: list[Any] = []
        self._answers: list[str] = []  # to `reset` and to the replies
        self.seen: list[Observation] = []  # those answers, the first of which is that of `reset`

    @property
    def kind(self) -> str:
        """The name of the environment's class."""
        return type(getattr(self._world, "_world", self._world)).__name__

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """See `protocol.Environment`."""
        return self._world.tools

    async def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """See `protocol.Environment`."""
        self._row, self._seed = row, seed
        self._replies, self._answers, self.seen = [], [], []
        with self._generators.within():
            return self._note(await called(self._world.reset, dict(row), seed))

    def expect(self, seen: Observation) -> None:
        """What `reset` or the next `step` returned when the same was played before; see `protocol`."""
        if (told := getattr(self._world, "expect", None)) is not None:
            told(seen)

    async def step(self, reply: Any) -> Observation:
        """See `protocol.Environment`."""
        with self._generators.within():
            seen = self._note(await called(self._world.step, reply))
        self._replies.append(reply)
        return seen

    @property
    def wrapped(self) -> Any:
        """The environment as its user wrote it, without an adapter."""
        return getattr(self._world, "wrapped", self._world)

    async def close(self) -> float | None:
        """See `protocol.Environment`."""
        close = getattr(self._world, "close", None)
        with self._generators.within():
            return None if close is None else await called(close)

    async def copy(self, turns: int | None = None) -> Replayable:
        """The environment as it is now, or as it was after `turns` replies. Not while it answers a reply.

        A copy of an earlier state is always a replay, which asks every tool again. Raises InputError where there are
        not so many replies, and for an environment that cannot be copied and answers a replay otherwise.
        """
        count = len(self._replies) if turns is None else turns
        if not self._answers or not 0 <= count <= len(self._replies):
            raise InputError(
                f"an environment with {len(self._replies)} replies cannot be copied as it was after {shown(turns)}: "
                "give a number of replies that it got since its reset"
            )
        if count == len(self._replies):
            try:
                world = await _as_it_is(self._world)
            except NotCopiedError as error:
                return await self._replayed(count, str(error))
            other = copy.copy(self)
            other._world = world
            other._generators = self._generators.copy()
            other._replies, other._answers = [*self._replies], [*self._answers]
            other.seen = [*self.seen]
            return other
        return await self._replayed(count, "it was asked for as it was before")

    async def _replayed(self, count: int, why: str) -> Replayable:
        other = Replayable(self._make, self._row, self._seed)
        try:
            other.expect(self.seen[0])
            await other.reset(self._row, self._seed)
            self._check_answers(other, why)
            for reply, seen in zip(self._replies[:count], self.seen[1:], strict=False):
                other.expect(seen)
                await other.step(reply)
                self._check_answers(other, why)
        except BaseException as error:
            await other.close()
            if isinstance(error, InputError) or not isinstance(error, Exception):
                raise
            how = f"a replay fails after {len(other._replies)} replies: {error_line(error)}"
            raise self._no_copy(why, how) from error
        return other

    def _check_answers(self, other: Replayable, why: str) -> None:
        at = len(other._answers) - 1
        before, now = self._answers[at], other._answers[at]
        if before != now:
            raise self._no_copy(why, f"a replay answers {shown(now)} and not {shown(before)} after {at} of its replies")

    def _no_copy(self, why: str, how: str) -> InputError:
        return InputError(
            f"the environment {type(self._world).__name__} cannot be copied within an episode: {why}, and {how}. "
            "Give it a method copy(), or let its answers follow from its row, its seed and the replies alone"
        )

    def _note(self, seen: Any) -> Observation:
        if not isinstance(seen, Observation):
            raise RuntimeError(f"it returns {shown(seen)}, but must return an Observation")
        # A copy as text, as messages could be changed later; NaN is equal to itself there.
        self._answers.append(json.dumps(seen.as_json(), sort_keys=True, default=repr))
        self.seen.append(seen)
        return seen


async def _as_it_is(world: Environment) -> Any:
    own = getattr(world, "copy", None)
    if own is None:
        return deep_copy(world)
    if inspect.iscoroutinefunction(own):
        return await own()
    errors: list[NotCopiedError] = []  # what is raised in a thread loses its type

    def tried() -> Any:
        try:
            return own()
        except NotCopiedError as error:
            errors.append(error)

    found = await called(tried)
    if errors:
        raise errors[0]
    return found


def deep_copy(value: Any) -> Any:
    """`copy.deepcopy` of a value that shares nothing with its copy.

    Classes may say by `__deepcopy__` how they are copied. Raises NotCopiedError for what holds a handle of the system,
    a path, a function with variables of its own, or another thing of which a deep copy would be the same.
    """
    try:
        _Walk().dump(value)
        return copy.deepcopy(value)
    except NotCopiedError:
        raise
    except Exception as error:  # as classes raise anything in __reduce__ and __deepcopy__
        raise NotCopiedError(f"{type(value).__name__} holds what has no copy ({error_line(error)[:160]})") from None


class _Nowhere(io.RawIOBase):
    def write(self, data: Any) -> int:
        return len(data)


class _Walk(pickle.Pickler):
    """Visits all that a deep copy copies, and writes nothing."""

    def __init__(self) -> None:
        super().__init__(_Nowhere(), protocol=5)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, FunctionType) and obj.__closure__:
            raise NotCopiedError(f"the function {obj.__qualname__} has variables of its own, which copies would share")
        if isinstance(obj, os.PathLike | weakref.finalize):
            raise NotCopiedError(f"it holds {shown(obj)}, whose copy would be the same")
        if hasattr(type(obj), "__del__"):
            raise NotCopiedError(f"it holds {type(obj).__name__}, which would be ended twice")
        shared = isinstance(obj, FunctionType) or (inspect.isclass(obj) and obj is not str)
        if shared or hasattr(type(obj), "__deepcopy__"):
            return str, ()
        return NotImplemented
