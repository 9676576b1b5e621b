"""The numbers on which the noise of samples is keyed, where several groups of one prompt are in flight at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from jaxrl_llm.rollouts.program_host import Task


class SampleNumbers(NamedTuple):
    """Maps the sample numbers of a group's program to numbers that no other group of its prompt in flight has.

    The first `own` come after those of the groups before it. A program may draw more (a second stage, a hint, branches
    of a tree), how many nobody knows beforehand: these follow the first of all groups, each group with every
    `stride`-th number. A group that is alone with its prompt keeps its numbers.
    """

    first: int = 0
    own: int = 0
    extra: int = 0
    stride: int = 1

    def of(self, number: int) -> int:
        """The number of the program's sample `number`, at least 0, among all samples of the prompt.

        >>> [SampleNumbers(first=2, own=2, extra=5, stride=2).of(number) for number in range(4)]
        [2, 3, 5, 7]
        """
        return self.first + number if number < self.own else self.extra + self.stride * (number - self.own)


def sample_numbers(tasks: Sequence[Task]) -> list[SampleNumbers]:
    """The numbers of each group in flight, in their order; they depend on nothing but prompts and counts of samples."""
    groups = Counter(task.prompt_id for task in tasks)
    total = Counter[int]()
    for task in tasks:
        total[task.prompt_id] += task.samples
    place, first, out = Counter[int](), Counter[int](), []
    for task in tasks:
        i = task.prompt_id
        out.append(SampleNumbers(first[i], task.samples, total[i] + place[i], groups[i]))
        place[i] += 1
        first[i] += task.samples
    return out
