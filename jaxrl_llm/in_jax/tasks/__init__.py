"""Tasks whose prompts and rewards are JAX functions, so that a whole training run is one compiled program.

The best expected reward is known for each. They are small, and say whether a method learns at all, how fast and how
steadily; not how it will do on language.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxrl_llm.in_jax.tasks.environment import environment_task
from jaxrl_llm.in_jax.tasks.maze import maze
from jaxrl_llm.in_jax.tasks.open_ended import brackets, correct_and_short
from jaxrl_llm.in_jax.tasks.preferences import preferences
from jaxrl_llm.in_jax.tasks.sequences import addition, long_tail, noisy_copying, noisy_verifier, sequence_lock, sorting
from jaxrl_llm.in_jax.tasks.task import Environment, Task
from jaxrl_llm.in_jax.tasks.text_maze import text_maze
from jaxrl_llm.in_jax.tasks.tools import search, tool_first
from jaxrl_llm.utils.errors import InputError, unknown

TASKS: dict[str, Callable[..., Task]] = {
    "addition": addition,
    "sequence_lock": sequence_lock,
    "sorting": sorting,
    "noisy_copying": noisy_copying,
    "brackets": brackets,
    "maze": maze,
    "correct_and_short": correct_and_short,
    "long_tail": long_tail,
    "noisy_verifier": noisy_verifier,
    "preferences": preferences,
    "text_maze": text_maze,
    "tool_first": tool_first,
    "search": search,
}

__all__ = [
    "TASKS",
    "Environment",
    "Task",
    "addition",
    "brackets",
    "correct_and_short",
    "environment_task",
    "get_task",
    "long_tail",
    "maze",
    "noisy_copying",
    "noisy_verifier",
    "preferences",
    "search",
    "sequence_lock",
    "sorting",
    "text_maze",
    "tool_first",
]


def get_task(name: str, **options: Any) -> Task:
    """A task by its name. InputError for an unknown name or option."""
    if not isinstance(name, str) or name not in TASKS:
        raise unknown("task", name, TASKS)
    try:
        return TASKS[name](**options)
    except TypeError:
        raise InputError(f"the task {name!r} does not have all of the options {', '.join(options)}") from None
