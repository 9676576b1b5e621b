"""No two samples of a prompt in flight have the same noise, however many their programs draw."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from fake_engine import Ran, begin
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm.core.rollout import Demands, Rollout, Task
from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.guidance.repair import hinted
from jaxrl_llm.rollouts.programs import group
from jaxrl_llm.rollouts.runtime.admission import Rule
from jaxrl_llm.rollouts.runtime.sample_numbers import sample_numbers
from jaxrl_llm.rollouts.trees import tree


async def _twice_as_many(tools: Tools, task: Task) -> list[Episode]:
    """As a second stage does: more samples than the task has, after the first are there."""
    first = [await tools.sample(task.prompt, number=i) for i in range(task.samples)]
    return first + [await tools.sample(task.prompt, number=task.samples + i) for i in range(task.samples)]


def task(prompt: int, samples: int) -> Task:
    return Task({}, (prompt, 1), prompt, samples, 8)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5)), max_size=9))
def test_numbers_are_distinct_and_the_first_as_if_there_were_no_more(groups: list[tuple[int, int]]) -> None:
    numbers = sample_numbers([task(*one) for one in groups])
    found, before = Counter[tuple[int, int]](), Counter[int]()
    for (prompt, samples), one in zip(groups, numbers, strict=True):
        found.update((prompt, one.of(number)) for number in range(40))
        assert [one.of(i) for i in range(samples)] == [before[prompt] + i for i in range(samples)]
        before[prompt] += samples
        if [prompt for prompt, _ in groups].count(prompt) == 1:
            assert [one.of(number) for number in range(40)] == list(range(40))
    assert set(found.values()) <= {1}


@pytest.mark.parametrize(
    "rollout",
    [group(), Rollout(_twice_as_many, demands=Demands(variable_size=True)), hinted("hint", above=1e9), tree(2, 4)],
    ids=lambda one: one.name,
)
def test_no_two_tokens_of_a_prompt_have_the_same_noise(rollout: Rollout) -> None:
    """Three groups of prompt 1 and one of prompt 2: every token drawn has a key (prompt, sample, place) of its own, the
    same with few slots, where groups wait, as with many."""
    flight, row = begin([1, 1, 2, 1], 4), {"hint": "3 4"}

    def keys(slots: int) -> list[tuple[int, int, int]]:
        ran = Ran(flight, Rule(), rollout, slots=slots, row=row)
        assert not any(one.failed for one in ran.found.groups)
        return sorted((one.prompt_id, one.sample, one.begun.size) for one in ran.requests)

    found: Any = keys(1000)
    assert len(set(found)) == len(found) >= 16
    assert keys(2) == found
