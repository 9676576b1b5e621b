"""The programs of the library, and that of the documentation, over an engine that decodes nothing."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_engine import LIMIT, Ran, begin, length_of
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.core.rollout import Rollout
from jaxrl_llm.rollouts.columns import info_columns
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.guidance.repair import hinted
from jaxrl_llm.rollouts.programs import conversation, down_sampled, forked, group, most_varied, with_greedy_baseline
from jaxrl_llm.rollouts.runtime.admission import Rule
from jaxrl_llm.utils.errors import InputError

PAGE = Path(__file__).resolve().parents[2] / "docs/rollouts.md"
# A prompt none of whose samples ends before it forks, or before 12 tokens.
LEAST = [6, 3, 5, 3, 7, 7]
LONG = next(p for p in range(9000) if all(length_of(p, s) >= least for s, least in enumerate(LEAST)))


def test_a_group_is_independent_samples() -> None:
    (one,) = Ran(begin([3], 4), Rule(), group()).found.groups
    assert [episode.sample for episode in one.episodes] == [0, 1, 2, 3]
    assert [episode.size for episode in one.episodes] == [min(length_of(3, i), LIMIT) for i in range(4)]


def test_the_greedy_baseline_is_a_sample_beside_the_group() -> None:
    ran = Ran(begin([3], 2), Rule(), with_greedy_baseline(group()))
    (one,) = ran.found.groups
    assert len(ran.engines) == 2, "one for greedy tokens"
    # The reward of the tests is the number of tokens; the fake's greedy sample is its sample 0.
    assert [episode.info["greedy_reward"] for episode in one.episodes] == [min(length_of(3, 0), LIMIT)] * 2
    assert [episode.reward for episode in one.episodes] == [None, None], "the group itself is scored with the batch"


@pytest.mark.parametrize(
    ("above", "row", "guided"), [(0.0, {"hint": "7 8"}, 0.0), (1e9, {"hint": "7 8"}, 1.0), (1e9, {}, 0.0)]
)
def test_a_hint_comes_where_all_fail(above: float, row: dict[str, Any], guided: float) -> None:
    (one,) = Ran(begin([5], 3), Rule(), hinted(above=above), row=row).found.groups
    assert [episode.info["guided"] for episode in one.episodes] == [guided] * 3
    assert {episode.prompt for episode in one.episodes} == {(5, 1, len("Hint:"), 7, 8) if guided else (5, 1)}
    assert [episode.sample for episode in one.episodes] == ([3, 4, 5] if guided else [0, 1, 2])
    assert all(episode.reward is not None for episode in one.episodes)


def test_the_most_varied_of_more_samples_are_trained_on() -> None:
    (one,) = Ran(begin([3], 3), Rule(), down_sampled(4)).found.groups
    sizes = [min(length_of(3, i), LIMIT) for i in range(12)]  # which are the rewards
    best = max(np.var(chosen) for chosen in itertools.combinations(sizes, 3))
    assert [episode.reward for episode in one.episodes] == [sizes[episode.sample] for episode in one.episodes]
    assert np.var([episode.size for episode in one.episodes]) == pytest.approx(best)
    assert len({episode.sample for episode in one.episodes}) == 3


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, -2.0]), min_size=1, max_size=8), st.integers(1, 8))
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_no_other_rewards_vary_more(rewards: list[float], keep: int) -> None:
    chosen = most_varied(rewards, keep)
    assert len(set(chosen)) == len(chosen) == min(keep, len(rewards))
    best = max(np.var(some) for some in itertools.combinations(rewards, len(chosen)))
    assert np.var([rewards[i] for i in chosen]) == pytest.approx(best, abs=1e-9)


def test_rewards_that_are_missing_are_taken_last() -> None:
    assert most_varied([None, 1.0, math.nan, 0.0], 2) == [1, 3]
    assert most_varied([None, 1.0, math.nan, 0.0], 3) == [0, 1, 3]
    assert most_varied([None, None], 1) == [0]
    with pytest.raises(InputError, match="times of down_sampled is 1, but must be at least 2"):
        down_sampled(1)


def test_forks_share_their_beginning() -> None:
    """Two trunks of four leaves: pairs part at 5 tokens, single leaves at 9."""
    ran = Ran(begin([LONG], 6), Rule(), forked(5, 9), limit=12)
    (one,) = ran.found.groups
    tokens = [episode.own.token.tolist() for episode in one.episodes]
    assert [episode.sample for episode in one.episodes] == [0, 1, 2, 3, 4, 5]
    assert len({tuple(row[:5]) for row in tokens[:4]}) == len({tuple(row[:5]) for row in tokens[4:]}) == 1
    assert len({tuple(row[:9]) for row in tokens[:4]}) == 2
    assert len({tuple(row) for row in tokens}) == 6
    sampled = sum(min(request.pause_at or request.limit, request.limit) - request.given for request in ran.requests)
    assert sampled == (5 + 2 * 4 + 4 * 3) + (5 + 2 * 7), "what is shared is sampled once"


def test_a_completion_that_ends_before_its_fork_is_all_its_leaves() -> None:
    short = next(prompt for prompt in range(100) if length_of(prompt, 0) < 5)
    (one,) = Ran(begin([short], 2), Rule(), forked(10)).found.groups
    assert one.episodes[0] == one.episodes[1]


class Counts:
    """An environment that is done after two steps."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.steps = 0

    def step(self, text: str) -> tuple[str, bool]:
        self.steps += 1
        return f"{len(text.split())} 9", self.steps == 2


def test_a_conversation_has_turns_until_it_is_done() -> None:
    (one,) = Ran(begin([5], 2), Rule(), conversation(Counts, turns=5)).found.groups
    for episode in one.episodes:
        if episode.truncated:
            continue
        assert episode.turns.max() == 1
        first = int((episode.turns == 0).sum())
        assert episode.own.token[first : first + 2].tolist() == [first, 9], "the observation follows the first turn"
        assert (episode.turns[first : first + 2] == -1).all()
        assert (episode.actions == (episode.turns >= 0)).all()
    assert any(not episode.truncated for episode in one.episodes)


def test_the_program_of_the_page() -> None:
    (source,) = re.findall(r"```python\n(from asyncio.*?)```", PAGE.read_text(), flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(source, str(PAGE), "exec"), names)
    (one,) = Ran(begin([5], 3), Rule(), Rollout(names["pairs"], "pairs"), limit=300).found.groups
    assert not one.failed
    assert {int(episode.turns.max()) for episode in one.episodes} == {1}


def test_a_rollout_is_of_a_program() -> None:
    with pytest.raises(InputError, match="a rollout's program is 3, but must be an async function"):
        Rollout(3)  # type: ignore[arg-type]


def test_what_a_rollout_says_of_its_episodes_becomes_columns() -> None:
    """Numbers, or lists of one length, such as the results of tests; NaN where an episode has no such entry."""
    episodes = [
        Episode((1,)).with_info(guided=1.0, tests=[1.0, 0.0]),
        Episode((2,)),
        Episode((3,)).with_info(guided=0.0),
    ]
    found = info_columns(episodes)
    np.testing.assert_array_equal(found["guided"], np.float32([1, np.nan, 0]))
    np.testing.assert_array_equal(found["tests"], np.float32([[1, 0], [np.nan, np.nan], [np.nan, np.nan]]))
    assert info_columns([Episode((1,))]) == {}
    with pytest.raises(InputError, match="the rollout gives info 'tests' in several shapes"):
        info_columns([Episode((1,)).with_info(tests=[1.0]), Episode((2,)).with_info(tests=[1.0, 0.0])])
