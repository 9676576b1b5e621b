"""The numbers on which the noise of samples is keyed, where several groups of one prompt are in flight at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from jaxrl_llm.core.rollout import Task


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
    members: SampleNumbers | None = None  # the same among the samples of all prompts

    def of(self, number: int) -> int:
        """The number of the program's sample `number`, at least 0, among all samples of the prompt.

        >>> [SampleNumbers(first=2, own=2, extra=5, stride=2).of(number) for number in range(4)]
        [2, 3, 5, 7]
        """
        return self.first + number if number < self.own else self.extra + self.stride * (number - self.own)

    def member(self, number: int) -> int:
        """The number of the program's sample `number` among the samples of all groups in flight."""
        return number if self.members is None else self.members.of(number)


def sample_numbers(tasks: Sequence[Task]) -> list[SampleNumbers]:
    """The numbers of each group in flight, in their order; they depend on nothing but prompts and counts of samples."""
    samples = [task.samples for task in tasks]
    of_prompts, of_all = _numbers([task.prompt_id for task in tasks], samples), _numbers([0] * len(tasks), samples)
    return [own._replace(members=among) for own, among in zip(of_prompts, of_all, strict=True)]


def _numbers(keys: Sequence[int], samples: Sequence[int]) -> list[SampleNumbers]:
    """The numbers of groups with so many samples, where none is given twice to groups of one key."""
    groups, total = Counter(keys), Counter[int]()
    for key, count in zip(keys, samples, strict=True):
        total[key] += count
    place, first, out = Counter[int](), Counter[int](), []
    for key, count in zip(keys, samples, strict=True):
        out.append(SampleNumbers(first[key], count, total[key] + place[key], groups[key]))
        place[key] += 1
        first[key] += count
    return out
