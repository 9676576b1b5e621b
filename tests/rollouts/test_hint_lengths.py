"""Hints as long as the plain samples fail, over an engine that decodes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from fake_engine import LIMIT, Ran, begin, right_samples
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.guidance.prefixes import failure_rate, hint_ratio, hinted_by_failures
from jaxrl_llm.rollouts.registry import rollout_by_name
from jaxrl_llm.rollouts.runtime.admission import Rule
from jaxrl_llm.rollouts.runtime.collate import to_batch
from jaxrl_llm.sampling.sampler import SamplingConfig
from jaxrl_llm.utils.errors import InputError

SOLUTION = list(range(50, 60))
ROW = {"solution": " ".join(map(str, SOLUTION)), "none": ""}
few = settings(max_examples=40, deadline=None, derandomize=True, database=None)


@pytest.fixture
def right(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Sample numbers whose reward is 1; others have 0."""
    return right_samples(monkeypatch)


def groups_of(rollout: Any, prompts: Sequence[int] = (3,), samples: int = 4, **options: Any) -> list[Any]:
    found = Ran(begin(prompts, samples), Rule(), rollout, **{"row": ROW, **options}).found.groups
    assert not any(one.failed for one in found)
    return found


def test_three_failures_of_four_show_seven_tokens_of_ten(right: set[int]) -> None:
    """The card's example: D_N = 0.75, w = 0.7."""
    right |= {2, 5}
    (one,) = groups_of(hinted_by_failures(hinted=2))
    plain, helped = one.episodes[:4], one.episodes[4:]
    assert [e.reward for e in plain] == [0, 0, 1, 0]
    assert [e.reward for e in helped] == [0, 1]
    assert len(helped) == 2
    for episode in helped:
        assert episode.own.token[:7].tolist() == SOLUTION[:7]
        assert episode.actions.all(), "the hint is trained on"
        assert (episode.own.logp[:7] == 0).all()
        assert 7 < episode.size <= LIMIT
        assert set(episode.turns.tolist()) == {0}
    assert [e.info["hint_tokens"] for e in one.episodes] == [0] * 4 + [7] * 2
    assert [e.info["guided"] for e in one.episodes] == [0] * 4 + [1] * 2
    batch = to_batch([one], SamplingConfig(), 0)
    assert np.asarray(batch.group).tolist() == [0] * 6, "one group"
    assert np.asarray(batch.info["hint_tokens"]).tolist() == [0] * 4 + [7] * 2


def test_where_all_succeed_or_no_solution_is_known_there_is_no_hint(right: set[int]) -> None:
    (failed,) = groups_of(hinted_by_failures("none"))
    assert [e.info["unhinted"] for e in failed.episodes] == [1] * 4
    right |= set(range(4))
    (solved,) = groups_of(hinted_by_failures())
    assert [e.info["unhinted"] for e in solved.episodes] == [0] * 4
    assert all(e.info["hint_tokens"] == 0 for e in (*failed.episodes, *solved.episodes))


def test_the_limit_counts_hints_and_leaves_a_token(right: set[int]) -> None:
    (one,) = groups_of(hinted_by_failures(high=1.0), limit=6)
    assert [e.size for e in one.episodes[4:]] == [6] * 4
    assert [e.info["hint_tokens"] for e in one.episodes[4:]] == [5] * 4
    (none,) = groups_of(hinted_by_failures(low=0.0, high=0.05))
    assert len(none.episodes) == 4, "a hint of less than a token is none"


def test_the_noise_is_one_number_for_a_group(right: set[int]) -> None:
    found = groups_of(hinted_by_failures(low=0.5, high=0.5, noise=0.2), tuple(range(2, 14)))
    lengths = [{e.info["hint_tokens"] for e in one.episodes[4:]} for one in found]
    assert all(len(some) == 1 for some in lengths)
    assert len(set.union(*lengths)) > 2
    again = groups_of(hinted_by_failures(low=0.5, high=0.5, noise=0.2), tuple(range(2, 14)))
    assert [{e.info["hint_tokens"] for e in one.episodes[4:]} for one in again] == lengths


@few
@drawn(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.floats(-1, 1))
def test_ratios_rise_with_failures_within_bounds(failure: float, low: float, high: float, noise: float) -> None:
    low, high = sorted((low, high))
    assert 0 <= hint_ratio(failure, low, high, noise) <= 1
    assert hint_ratio(0.0, low, high, noise) == 0
    assert hint_ratio(1.0, low, high) == pytest.approx(high)
    if failure > 0:
        assert hint_ratio(failure, low, high) <= hint_ratio(1.0, low, high) + 1e-12


def test_unscored_samples_say_nothing() -> None:
    one = Episode((1,))
    assert failure_rate([one.scored(1.0), one.scored(0.0), one.scored(float("nan")), one]) == 0.5
    assert failure_rate([one]) == 0
    assert failure_rate([one.scored(3.0)]) == 0
    assert failure_rate([one.scored(-3.0)]) == 1


def test_names_and_refusals() -> None:
    assert rollout_by_name("hinted_by_failures(known, 2, .2, 0.8)").columns == ("known",)
    with pytest.raises(InputError, match="give low, then high"):
        hinted_by_failures(low=0.8, high=0.4)
    with pytest.raises(InputError, match="hinted of hinted_by_failures is 0"):
        hinted_by_failures(hinted=0)
