"""Teachers' prompts of failed samples, over an engine that decodes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fake_engine import Ran, begin, right_samples

from jaxrl_llm.algorithms.guidance.srpo_sample_routing import with_right_siblings
from jaxrl_llm.rollouts.guidance.repair import succeeds
from jaxrl_llm.rollouts.runtime.admission import Rule
from jaxrl_llm.rollouts.runtime.collate import to_batch
from jaxrl_llm.sampling.sampler import SamplingConfig

ROW = {"feedback": "7 8"}


@pytest.fixture
def right(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Sample numbers whose reward is 1; others have 0."""
    return right_samples(monkeypatch)


def run(column: str | None = None, samples: int = 5, **options: Any) -> Any:
    rollout = with_right_siblings(succeeds(0.5), column, text="{}")
    (one,) = Ran(begin([3], samples), Rule(), rollout, row=ROW, **options).found.groups
    assert not one.failed
    return one


def test_failures_read_a_sibling_that_succeeded(right: set[int]) -> None:
    right |= {1, 4}
    one = run()
    solutions = [tuple(one.episodes[i].own.token.tolist()) for i in (1, 4)]
    for number, episode in enumerate(one.episodes):
        if number in right:
            assert episode.teacher_prompt == ()
        else:
            assert episode.teacher_prompt in [(*episode.prompt, *solution) for solution in solutions]
        assert episode.info["taught"] == (number not in right)
        assert episode.actions.all()
    batch = to_batch([one], SamplingConfig(), 0)
    tokens = np.asarray(batch.info["teacher_tokens"])
    for episode, row in zip(one.episodes, tokens, strict=True):
        whole = [*episode.teacher_prompt, *episode.own.token.tolist()] if episode.teacher_prompt else []
        assert row[: len(whole)].tolist() == whole
        assert (row[len(whole) :] == -1).all()


def test_where_all_fail_the_column_teaches_if_there_is_one(right: set[int]) -> None:
    assert [e.teacher_prompt for e in run().episodes] == [()] * 5
    assert [e.teacher_prompt[-2:] for e in run("feedback").episodes] == [(7, 8)] * 5
    right |= set(range(5))
    assert [e.teacher_prompt for e in run("feedback").episodes] == [()] * 5


def test_a_batch_without_teachers_has_the_entry(right: set[int]) -> None:
    found = np.asarray(to_batch([run()], SamplingConfig(), 0).info["teacher_tokens"])
    assert found.shape[0] == 5
    assert (found == -1).all()
