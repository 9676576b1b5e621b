"""Completions that begin with given tokens, over an engine that decodes nothing."""

from __future__ import annotations

from typing import Any

import fake_engine
import numpy as np
import pytest
from fake_engine import LIMIT, Ran, Words, begin, length_of, resumed
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from jaxrl_llm.algorithms.guidance.a2fm_apo import adaptive_factors, mode_of, tagged
from jaxrl_llm.rollouts.guidance.prefixes import prefix_length, prefixed_groups, reset_lengths, reset_to_data
from jaxrl_llm.rollouts.programs import group
from jaxrl_llm.rollouts.registry import rollout_by_name
from jaxrl_llm.rollouts.runtime.admission import Rule
from jaxrl_llm.rollouts.runtime.collate import dataset_rows, to_batch
from jaxrl_llm.sampling.sampler import SamplingConfig
from jaxrl_llm.utils.errors import InputError

RESPONSE = list(range(50, 60))
ROW = {"response": " ".join(map(str, RESPONSE)), "trace": " ".join(map(str, RESPONSE)), "none": ""}
few = settings(max_examples=40, deadline=None, derandomize=True, database=None)


def episodes_of(rollout: Any, samples: int = 4, prompt: int = 3, **options: Any) -> list[Any]:
    (one,) = Ran(begin([prompt], samples), Rule(), rollout, **{"row": ROW, **options}).found.groups
    assert not one.failed
    return one.episodes


def tokens(episodes: list[Any]) -> list[list[int]]:
    return [episode.own.token.tolist() for episode in episodes]


def test_samples_begin_with_the_response_and_are_masked_there() -> None:
    episodes = episodes_of(reset_to_data(), samples=8)
    lengths = [int(episode.info["prefix"]) for episode in episodes]
    assert len(set(lengths)) > 1, "each sample draws its own"
    for episode, h in zip(episodes, lengths, strict=True):
        assert 1 <= h <= len(RESPONSE) - 1
        assert episode.own.token[:h].tolist() == RESPONSE[:h]
        assert episode.actions.tolist() == [False] * h + [True] * (episode.size - h)
        assert episode.size <= LIMIT, "given tokens count towards the limit"
        assert episode.reward == episode.size, "rewards, here the number of tokens, are those of the whole response"


@pytest.mark.parametrize("rollout", [reset_to_data(share=0.0), reset_to_data("none"), prefixed_groups("none")])
def test_without_a_response_it_is_a_group(rollout: Any) -> None:
    plain = episodes_of(group())
    episodes = episodes_of(rollout)
    assert tokens(episodes) == tokens(plain)
    assert [e.sample for e in episodes] == [e.sample for e in plain]
    assert [e.truncated for e in episodes] == [e.truncated for e in plain]
    assert all(e.actions.all() and e.info["prefix"] == 0 and e.part == 0 for e in episodes)


@few
@drawn(st.integers(0, 99), st.integers(0, 6), st.floats(0, 1))
def test_lengths_of_resets(seed: int, length: int, share: float) -> None:
    found = reset_lengths(np.random.default_rng(seed), 50, length, share)
    assert len(found) == 50
    assert all(h == 0 or 1 <= h <= length - 1 for h in found)
    if length < 2 or share == 0:
        assert not any(found)
    if share == 1 and length >= 2:
        assert set(found) == set(range(1, length)), "all of them, in fifty draws of at most five"


@few
@drawn(st.integers(0, 99), st.integers(1, 40), st.integers(1, 40))
def test_lengths_of_prefixes(seed: int, length: int, limit: int) -> None:
    found = prefix_length(np.random.default_rng(seed), length, limit, 0.4, 0.8)
    assert 0 <= found < min(length, limit)
    assert found == 0 if min(length, limit) == 1 else found >= 1
    if limit >= length >= 5:
        assert int(0.4 * length) <= found <= 0.8 * length


def test_prefixed_groups_share_a_context_and_are_groups_of_their_own() -> None:
    ran = Ran(begin([3, 4], 3), Rule(), prefixed_groups(prefixes=2), row=ROW)
    for one in ran.found.groups:
        assert [episode.part for episode in one.episodes] == [0] * 3 + [1] * 3 + [2] * 3
        for number in range(3):
            some = [episode for episode in one.episodes if episode.part == number]
            (h,) = {int(episode.info["prefix"]) for episode in some}
            assert h == 0 if number == 0 else 4 <= h <= 8
            assert {tuple(row[:h]) for row in tokens(some)} == {tuple(RESPONSE[:h])}
        assert len({episode.sample for episode in one.episodes}) == 9, "each with its own noise"
    batch = to_batch(ran.found.groups, SamplingConfig(), 0)
    np.testing.assert_array_equal(batch.group, np.repeat(np.arange(6), 3))
    np.testing.assert_array_equal(batch.prompt_id, np.repeat([3, 4], 9))
    np.testing.assert_array_equal(batch.info["part"], np.tile(np.repeat([0, 1, 2], 3), 2))
    assert len(dataset_rows(ran.found.groups)) == 6, "a row of the data set for each group of the batch"


@pytest.mark.parametrize("rollout", [reset_to_data(), prefixed_groups(), tagged("7 7,8")])
def test_a_resumed_program_draws_the_same(rollout: Any) -> None:
    """Stopped after a segment and resumed in a later step, as against run at once."""
    flight, options = begin([2, 3], 5), {"row": ROW, "limit": 20}
    done = resumed(flight, rollout, **options)
    for one in Ran(flight, Rule(), rollout, **options).found.groups:
        assert tokens(done[one.task.prompt_id]) == tokens(one.episodes)
        assert [e.reward for e in done[one.task.prompt_id]] == [e.reward for e in one.episodes]


def test_of_several_responses_one_is_drawn() -> None:
    row = {"response": ["61 62 63 64", "71 72 73 74"]}
    first = {row[0] for row in tokens(episodes_of(reset_to_data(), samples=16, row=row))}
    assert first == {61, 71}


def test_modes() -> None:
    tags = ("<a>", "<b>")
    assert [mode_of(t, tags) for t in ("<a>x", " <b> y", "x<a>", "<a><b>", "<a>..<a>", "")] == [0, 1, -1, -1, -1, -1]


def test_the_factors_of_the_paper_by_hand() -> None:
    """Two forced samples of each of three modes and three free ones, whose rewards then give the figure's baseline."""
    right, modes = [1, 0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 2, 2, 1, 2, 0]
    forced = [True] * 6 + [False] * 3
    assert adaptive_factors(right, modes, forced, 2.0, 0.5, "first") == [1.0] * 6 + [0.75, 0.75, 1.0]
    assert adaptive_factors(right, modes, forced, 2.0, 0.5, "all") == [1.0] * 9, "p is 1/3: not easy"
    expected = [1.0] * 6 + [1 - (1 / 3) ** 2] * 2 + [1.0]
    assert adaptive_factors(right, modes, forced, 2.0, 0.3, "all") == pytest.approx(expected)
    assert adaptive_factors([1, 1], [1, 0], [False, False], 2.0, 0.5, "first") == [1, 1], "no forced sample: not easy"


class Tags(Words):
    """Token 7 is "<a>", 8 and the first of sample 4 of prompt 3 are "<b>", and all others are words."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [{"<a>": 7, "<b>": 8}[text]]

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        return " ".join({7: "<a>", 8: "<b>", 3400: "<b>"}.get(token, "w") for token in ids)


def test_tags_are_given_and_free_samples_write_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_engine, "Words", Tags)
    rollout = tagged("<a>,<b>", forced=2, success=0.0)
    assert rollout.demands.min_samples == 5
    episodes = episodes_of(rollout, samples=6)
    assert [episode.info["mode"] for episode in episodes] == [0, 0, 1, 1, 1, -1]
    assert [episode.info["prefix"] for episode in episodes] == [1, 1, 1, 1, 0, 0]
    assert [row[0] for row in tokens(episodes)[:4]] == [7, 7, 8, 8]
    assert all(episode.actions[int(episode.info["prefix"]) :].all() for episode in episodes)
    # Every forced sample has a reward above 0, so p = 1: the free one in mode 1 gets nothing for an easy question.
    assert [episode.info["adaptive"] for episode in episodes] == [1, 1, 1, 1, 0, 1]
    assert [episode.reward for episode in episodes] == [*(e.size for e in episodes[:4]), 0, 0], "no tag: no reward"
    hard = episodes_of(tagged("<a>,<b>", forced=2, success=1e9), samples=6)
    assert [episode.reward for episode in hard] == [*(e.size for e in hard[:5]), 0]


def test_rollouts_have_names() -> None:
    """With numbers and texts as arguments."""
    assert rollout_by_name("reset_to_data(response, 0.5)").name == "reset_to_data(response, 0.5)"
    assert rollout_by_name("prefixed_groups(trace, .4, 0.8, 2)").columns == ("trace",)
    assert rollout_by_name("two_policies").demands.variable_size is False
    assert rollout_by_name("recycled(1)").demands.variable_size is True
    assert rollout_by_name("with_predictions(4)").demands.variable_size is True
    assert rollout_by_name("with_candidates(answers)").columns == ("answers",)


def test_wrong_settings_and_data_are_named() -> None:
    with pytest.raises(InputError, match="tags is 'a', but must be at least two different tags"):
        tagged("a")
    with pytest.raises(InputError, match="share of reset_to_data is 2, but must be at least 0 and at most 1"):
        reset_to_data(share=2)
    with pytest.raises(InputError, match=r"prefixes are of 0.8 to 0.4 of a trace: give low, then high"):
        prefixed_groups(low=0.8, high=0.4)
    (one,) = Ran(begin([3], 2), Rule(), reset_to_data(), row={"response": 5}).found.groups
    assert one.failed
    assert length_of(3, 0) > 0
