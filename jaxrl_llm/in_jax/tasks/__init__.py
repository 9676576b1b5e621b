"""Tasks whose prompts and rewards are JAX functions, so that a whole training run is one compiled program.

The best expected reward is known for each. They are small, and say whether a method learns at all, how fast and how
steadily; not how it will do on language.
"""

from collections.abc import Callable
from typing import Any

from jaxrl_llm.in_jax.tasks.maze import maze, text_maze
from jaxrl_llm.in_jax.tasks.open_ended import brackets, correct_and_short
from jaxrl_llm.in_jax.tasks.sequences import (
    addition,
    long_tail,
    noisy_copying,
    noisy_verifier,
    preferences,
    sequence_lock,
    sorting,
)
from jaxrl_llm.in_jax.tasks.task import Environment, Task, environment_task
from jaxrl_llm.in_jax.tasks.tools import search, tool_first
from jaxrl_llm.utils.errors import InputError, require_choice

_TASKS: tuple[Callable[..., Task], ...] = (
    addition, sequence_lock, sorting, noisy_copying, brackets, maze, correct_and_short, long_tail, noisy_verifier,
    preferences, text_maze, tool_first, search,
)  # fmt: skip
TASKS = {task.__name__: task for task in _TASKS}

__all__ = [
    "TASKS", "Environment", "Task", "addition", "brackets", "correct_and_short", "environment_task", "get_task",
    "long_tail", "maze", "noisy_copying", "noisy_verifier", "preferences", "search", "sequence_lock", "sorting",
    "text_maze", "tool_first",
]  # fmt: skip


def get_task(name: str, **options: Any) -> Task:
    """A task by its name. InputError for an unknown name or option."""
    require_choice("task", name, TASKS)
    try:
        return TASKS[name](**options)
    except TypeError:
        raise InputError(f"the task {name!r} does not have all of the options {', '.join(options)}") from None
