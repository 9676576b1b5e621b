"""The work that every column of the update benchmark does, with the standard library only.

So all columns have the same tokens, advantages, questions and rewards.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from rollout_worker import random_prompts

LEARNING_RATE = 1e-5
BETAS = (0.9, 0.999)
CLIP = 0.2
MAX_GRAD_NORM = 1.0


class Work(NamedTuple):
    """A scored batch: rows of prompt ids, of completion ids, and an advantage for each row."""

    prompts: list[list[int]]
    completions: list[list[int]]
    advantages: list[float]


def random_work(batch: int, prompt: int, new: int, vocabulary: int, group: int = 1) -> Work:
    """`batch` random rows of prompt + new tokens; `group` next to each other share a prompt. Advantages are normal."""
    prompts = [ids for ids in random_prompts(batch // group, prompt, vocabulary) for _ in range(group)]
    number = random.Random(2)
    advantages = [number.gauss(0, 1) for _ in range(batch)]
    return Work(prompts, random_prompts(batch, new, vocabulary, seed=1), advantages)


def questions(count: int) -> list[str]:
    """`count` sums of two numbers of two digits."""
    number = random.Random(3)
    return [f"What is {number.randrange(10, 100)} + {number.randrange(10, 100)}?" for _ in range(count)]


def variety(completion: Sequence[Any]) -> float:
    """The reward: distinct characters (or token ids) / length, 0 to 1; 0 for nothing."""
    return len(set(completion)) / max(len(completion), 1)
