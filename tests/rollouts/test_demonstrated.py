"""Demonstrations as episodes: alone, beside samples, and before them."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from fake_engine import Ran, begin

from jaxrl_llm.algorithms.policy_loss.ppo_max import with_demonstration
from jaxrl_llm.rollouts.guidance.responses import demonstrated, demonstrated_before
from jaxrl_llm.rollouts.programs import group
from jaxrl_llm.rollouts.registry import rollout_by_name
from jaxrl_llm.rollouts.runtime.admission import Rule
from jaxrl_llm.utils.errors import InputError

ROW = {"solution": "11 12 13"}


def test_nothing_is_sampled_for_a_demonstration() -> None:
    ran = Ran(begin([3, 5], 4, 2), Rule(), demonstrated("solution"), row=ROW, step=2)
    assert ran.engines == []
    for one, prompt in zip(ran.found.groups, (3, 5), strict=True):
        (episode,) = one.episodes
        assert episode.tokens == (prompt, 1, 11, 12, 13)
        assert episode.actions.all()
        assert episode.ended
        assert not episode.truncated
        assert episode.info == {"demonstrated": 1.0}
        assert episode.own.policy_step.tolist() == [2, 2, 2]
        assert not episode.own.logp.any()


def test_a_long_text_is_cut_and_said_to_be() -> None:
    (one,) = Ran(begin([3], 4), Rule(), demonstrated("solution"), row=ROW, limit=2).found.groups
    assert one.episodes[0].own.token.tolist() == [11, 12]
    assert one.episodes[0].truncated


def test_a_demonstration_beside_the_samples_changes_none_of_them() -> None:
    plain = Ran(begin([3], 4), Rule(), group(), row=ROW).found.groups[0]
    both = Ran(begin([3], 4), Rule(), with_demonstration(group(), "solution"), row=ROW).found.groups[0]
    assert [one.tokens for one in both.episodes[:4]] == [one.tokens for one in plain.episodes]
    assert [one.info["demonstrated"] for one in both.episodes] == [0.0] * 4 + [1.0]


def test_demonstrations_before_samples() -> None:
    rollout = demonstrated_before(3, "solution")
    counts = [
        len(Ran(begin([3], 4, step), Rule(), rollout, row=ROW, step=step).found.groups[0].episodes)
        for step in (0, 2, 3, 9)
    ]
    assert counts == [1, 1, 4, 4]
    assert np.all(
        [
            one.info["demonstrated"] == 0
            for one in Ran(begin([3], 4), Rule(), demonstrated_before(0, "solution"), row=ROW).found.groups[0].episodes
        ]
    )


def test_a_row_without_a_text_fails_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        (one,) = Ran(begin([3], 4), Rule(), demonstrated("hint"), row=ROW).found.groups
    assert one.failed
    assert "prompt 3 has no text or messages in the column 'hint'" in caplog.text


def test_by_name() -> None:
    assert rollout_by_name("demonstrated(solution)").columns == ("solution",)
    assert rollout_by_name("demonstrated_before(5, solution)").name == "demonstrated_before(5, solution)"
    with pytest.raises(InputError, match="step of demonstrated_before is -1"):
        demonstrated_before(-1)
