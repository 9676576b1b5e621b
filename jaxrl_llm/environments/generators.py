"""Random numbers of environments that draw from Python's and NumPy's global generators: generators for each episode.

Many environments call `random.choice` or `numpy.random.rand`. Their episodes run side by side in one process, whose
state they would share, so that what one draws would depend on the order of threads. The functions of both modules
therefore look up the episode that calls them: within `Generators.within` they draw from its own generators, in its
threads and coroutines too, and elsewhere from the process's, as ever.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np

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

    Once, when this module is imported, so that environments which are loaded later get these functions also where they
    import them by name.
    """
    for module, which, own in ((random, "python", random._inst), (np.random, "numpy", np.random.mtrand._rand)):
        for name, function in list(vars(module).items()):
            # numpy's `seed` is a function that calls its generator's method.
            if getattr(function, "__self__", None) is own or (module is np.random and name == "seed"):
                setattr(module, name, _looking_up(name, function, which))


_install()
