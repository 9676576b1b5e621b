"""Programs of trees over an engine that decodes nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import fake_engine
import numpy as np
import pytest
from fake_engine import LIMIT, Ran, begin, length_of, tokens_with_ties
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.core.rollout import Rollout
from jaxrl_llm.rewards.scoring import Scored, concatenate_groups
from jaxrl_llm.rollouts import lookahead
from jaxrl_llm.rollouts.episode import Episode, Segment
from jaxrl_llm.rollouts.lookahead import near_ties
from jaxrl_llm.rollouts.program_host import Draws
from jaxrl_llm.rollouts.runtime.admission import Rule
from jaxrl_llm.rollouts.runtime.collate import to_batch
from jaxrl_llm.rollouts.runtime.group_run import Group
from jaxrl_llm.rollouts.trees import budgeted_tree, by_prefix, entropy_forks, most_uncertain, repeats, tree, valued
from jaxrl_llm.sampling.requests import Tokens
from jaxrl_llm.sampling.sampler import SamplingConfig
from jaxrl_llm.utils.errors import InputError


def one(ran: Ran) -> Group:
    (found,) = ran.found.groups
    assert not found.failed
    return found


def nodes_of(episode: Episode) -> list[float]:
    nodes: Any = episode.info["node"]
    assert len(nodes) == episode.size
    return list(nodes)


def assert_a_tree(episodes: list[Episode]) -> None:
    """Tokens are of one node just where all tokens up to them are the same ones."""
    owner: dict[float, tuple[int, ...]] = {}
    for episode in episodes:
        nodes, tokens = nodes_of(episode), episode.own.token.tolist()
        starts = [t for t in range(len(nodes)) if t == 0 or nodes[t] != nodes[t - 1]]
        assert len({nodes[t] for t in starts}) == len(starts), "a node is one run of tokens"
        for t, end in zip(starts, [*starts[1:], len(nodes)], strict=True):
            assert owner.setdefault(nodes[t], tuple(tokens[:end])) == tuple(tokens[:end])


def distinct(episodes: list[Episode]) -> int:
    return len({(node, t) for episode in episodes for t, node in enumerate(nodes_of(episode))})


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """No completion ends."""
    monkeypatch.setattr(fake_engine, "length_of", lambda prompt, sample: 10**6)


@pytest.mark.usefixtures("endless")
def test_a_tree_forks_where_it_says() -> None:
    ran = Ran(begin([3], 4), Rule(), tree(0, 5, branches=3), limit=12)
    episodes = one(ran).episodes
    assert len(episodes) == len({tuple(e.own.token) for e in episodes}) == 9
    assert [e.sample for e in episodes] == list(range(9))
    assert len({tuple(e.own.token[:5]) for e in episodes}) == 3
    assert_a_tree(episodes)
    drawn = sum(min(r.pause_at or r.limit, r.limit) - r.begun.size for r in ran.requests)
    assert drawn == distinct(episodes) == 3 * 5 + 9 * 7, "the engine draws each token once"
    assert all(e.truncated for e in episodes)


@pytest.mark.usefixtures("endless")
def test_a_group_has_as_many_trees_as_its_samples_have_leaves() -> None:
    episodes = one(Ran(begin([3], 9), Rule(), tree(4, 6), limit=8)).episodes
    assert len(episodes) == 8
    assert_a_tree(episodes)
    assert len({nodes_of(e)[0] for e in episodes}) == 2


@given(st.integers(0, 40), st.lists(st.integers(0, 30), min_size=1, max_size=3, unique=True), st.integers(2, 3))
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
def test_trees_of_completions_that_end_sample_each_token_once(prompt: int, places: list[int], branches: int) -> None:
    ran = Ran(begin([prompt], 4), Rule(), tree(*sorted(places), branches=branches), limit=32)
    episodes = one(ran).episodes
    assert_a_tree(episodes)
    assert 1 <= len(episodes) <= max(4, branches ** len(places))
    assert len({tuple(e.own.token[: t + 1]) for e in episodes for t in range(e.size)}) == distinct(episodes)


@given(st.integers(0, 60), st.integers(1, 12), st.integers(1, 9), st.integers(1, 3))
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
def test_a_budgeted_tree_has_just_its_leaves(prompt: int, samples: int, segment: int, branches: int) -> None:
    rollout = budgeted_tree(segment, depth=4, first_most=5, branches=branches)
    episodes = one(Ran(begin([prompt], samples), Rule(), rollout)).episodes
    assert len(episodes) == samples
    assert_a_tree(episodes)
    again = one(Ran(begin([prompt], samples), Rule(), rollout, slots=2)).episodes
    assert [e.tokens for e in again] == [e.tokens for e in episodes], "whatever the engine does first"
    for episode in episodes:
        assert episode.size <= min(4 * segment, LIMIT)
        assert episode.ended or episode.truncated


def test_a_path_that_repeats_itself_or_has_an_answer_is_complete() -> None:
    def of(ids: list[int]) -> Episode:
        zeros = np.zeros(len(ids), np.float32)
        return Episode((1,)) + Segment(Tokens(np.asarray(ids, np.int32), zeros, zeros, zeros, zeros, zeros), True)

    assert repeats(of([9, *[1, 2, 3] * 6]), 18)
    assert not repeats(of(list(range(18))), 18)
    assert not repeats(of([1] * 8), 8), "too short to say"


def test_forks_are_at_the_tokens_of_highest_entropy() -> None:
    rollout = entropy_forks(trees=2, forks=2, branches=2)
    prompt = next(p for p in range(900) if all(length_of(p, s) >= 3 for s in (0, 5)))
    found = one(Ran(begin([prompt], 4), Rule(), rollout)).episodes
    assert len(found) == 10
    assert_a_tree(found)
    for trunk, leaves in ((found[0], found[1:5]), (found[5], found[6:])):
        places = most_uncertain(trunk, 2)
        assert trunk.own.entropy[places].min() >= np.delete(trunk.own.entropy, places).max(initial=-np.inf)
        for place, leaf in zip([places[0], places[0], places[1], places[1]], leaves, strict=True):
            assert leaf.own.token[:place].tolist() == trunk.own.token[:place].tolist()
            assert leaf.own.token[place] != trunk.own.token[place]


def test_nodes_by_common_tokens() -> None:
    same = by_prefix([Episode((1,)), Episode((1,))])
    assert [e.info["node"] for e in same] == [[], []]


@pytest.mark.usefixtures("endless")
def test_values_of_states_are_means_of_fresh_completions(monkeypatch: pytest.MonkeyPatch) -> None:
    def tokens(prompt: int, sample: int, first: int, last: int, step: int) -> Tokens:
        ids = np.asarray([fake_engine.token_of(prompt, sample, place) for place in range(first, last)], np.int32)
        p = np.where(np.arange(first, last) % 2, 0.5, 0.95).astype(np.float32)  # every second token is uncertain
        return Tokens(ids, np.log(p), *[np.zeros(len(ids), np.float32)] * 3, np.full(len(ids), step, np.int32))

    monkeypatch.setattr(fake_engine, "tokens_of", tokens)

    async def score(task: Any, episodes: Any) -> Any:
        return [e.scored(float(sum(e.own.token) % 7 == 0)) for e in episodes]

    monkeypatch.setattr(fake_engine, "score", score)
    group = one(Ran(begin([3], 2), Rule(), valued(3, "uncertain", every=2), limit=10))
    found = group.episodes
    assert len(found) == 2
    states = [0, 5, 9]  # the uncertain ones are 1, 3, 5, 7, 9
    number = 2
    for i, episode in enumerate(found):
        assert [t for t in range(10) if t == 0 or nodes_of(episode)[t] != nodes_of(episode)[t - 1]] == states
        value: Any = episode.info["state_value"]
        for place in states[i > 0 :]:  # the prompt's value is that of both
            rewards = []
            for k in range(3):
                rest = [fake_engine.token_of(3, number + k, t) for t in range(place, 10)]
                rewards.append(float((episode.own.token[:place].sum() + sum(rest)) % 7 == 0))
            number += 3
            assert value[place] == pytest.approx(np.mean(rewards))
    assert found[0].info["state_value"][0] == found[1].info["state_value"][0]  # type: ignore[index]
    batch = to_batch([group], SamplingConfig(), 0)
    info: Any = batch.info
    assert info["node"].shape == batch.tokens.shape
    np.testing.assert_array_equal(np.isnan(info["node"]), ~np.asarray(batch.action_mask))


@pytest.mark.usefixtures("endless")
def test_values_of_the_reference_are_drawn_by_it_and_nothing_else_is() -> None:
    own, other = (Ran(begin([3], 2), Rule(), valued(3, "lines", of=of), limit=6) for of in ("policy", "reference"))
    assert own.draws == [Draws()]
    assert other.draws == [Draws(), Draws(None, True)], "the policy's own engine is the first"
    assert [r.sample for r in other.engines[0].requests] == [0, 1], "what is trained on"
    assert [r.sample for r in other.engines[1].requests] == [2, 3, 4]
    for one_of, same in zip(one(own).episodes, one(other).episodes, strict=True):
        assert one_of.tokens == same.tokens
        assert one_of.info == same.info, "the fake engines draw the same"
    rollout = replace(valued(3, of="reference"), demands=replace(valued(3, of="reference").demands, reference=False))
    (failed,) = Ran(begin([3], 2), Rule(), rollout).found.groups
    assert failed.failed, "it must be declared"
    assert [episode.size for episode in failed.episodes] == [64, 64]
    with pytest.raises(InputError, match="unknown of of valued 'teacher'"):
        valued(of="teacher")  # type: ignore[arg-type]


@pytest.mark.usefixtures("endless")
@pytest.mark.parametrize(("same", "leaves"), [(False, 4), (True, 0)])
def test_branches_begin_at_near_ties_and_are_dropped_where_alike(
    same: bool, leaves: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ties = {2: (0.45, 0.35), 6: (0.45, 0.4), 9: (0.1, 0.1)}
    monkeypatch.setattr(fake_engine, "tokens_of", tokens_with_ties(ties, same))
    rollout = near_ties(windows=(4,), until=8, share_steps=(0,), shares=(0.75,))
    found = one(Ran(begin([3], 6), Rule(), rollout, limit=12)).episodes
    assert len(found) == 6
    tokens = [e.own.token.tolist() for e in found]
    shared = [sum(row[:2] == other[:2] for other in tokens) for row in tokens]
    if same:
        assert len({tuple(row[:2]) for row in tokens}) == 1
        assert len({tuple(row) for row in tokens}) == 6, "all are samples of their own"
    else:
        assert_a_tree(found)
        assert shared == [4] * 4 + [1, 1], "round(0.75 * 6) are a tree"
        assert sum(row[:6] == tokens[0][:6] for row in tokens) == 2
        assert sorted(row[2] for row in tokens[:4]) == [3002, 3002, 9002, 9002], "the second most probable token"
        # The branch at 2 drew neither of the two at 6: what branches there begins with the most probable one.
        assert sorted(row[6] for row in tokens[:4])[::3] == [3006, 9006]
        by_token = {row[6]: e.own.logp[6] for row, e in zip(tokens[:4], found, strict=False)}
        np.testing.assert_allclose(by_token[9006], np.log(0.4), rtol=1e-6)
    late = one(Ran(begin([3], 6), Rule(), near_ties(share_steps=(5,), shares=(1.0,)), limit=12)).episodes
    assert [e.sample for e in late] == list(range(6)), "before the first step of the schedule it is a group"


@pytest.mark.usefixtures("endless")
def test_a_greedy_tree_is_sampled_behind_its_trunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """With windows of 4, the fork at 6 looks past the trunk of 8 tokens, the one at 2 does not."""
    monkeypatch.setattr(fake_engine, "tokens_of", tokens_with_ties({2: (0.45, 0.35), 6: (0.45, 0.4)}))
    rollout = near_ties(windows=(4,), until=8, share_steps=(0,), shares=(0.5,), greedy=True)
    ran = Ran(begin([3], 6), Rule(), rollout, limit=12)
    assert sorted(ran.draws, key=str) == [Draws(0.0), Draws()]
    of = {draws.temperature: engine.requests for draws, engine in zip(ran.draws, ran.engines, strict=True)}
    greedy, sampled = of[0.0], of[None]
    assert sorted((r.begun.size, r.pause_at) for r in greedy) == [(0, 8), (3, 6), (6, 8), (7, 8)]
    independent = [r for r in sampled if r.begun.size == 0]
    assert len(independent) == 3
    later = sorted((r.begun.size, r.pause_at or 12) for r in sampled if r.begun.size)
    assert later == [(8, 10), (8, 12), (8, 12), (10, 12)], "the rest of each, and of the lookahead from 6"
    found = one(ran).episodes
    assert_a_tree(found)
    assert sum(e.own.token[:2].tolist() == found[0].own.token[:2].tolist() for e in found) == 3


def test_measures_of_similarity() -> None:
    a, b = [1, 2, 3, 4, 5], [9, 2, 3, 4, 5]
    assert lookahead.edit_distance(a, b) == 1
    assert lookahead.edit_distance([1, 2, 3], [2, 3]) == 1
    assert lookahead.longest_end([1, 2, 3], [2, 3, 9]) == 2
    assert lookahead.longest_end([2, 3, 9], [1, 2, 3]) == 0
    assert lookahead.common_subsequence([1, 2, 3, 4], [2, 9, 4, 1]) == 2
    assert lookahead.too_similar(a, b, 0.4, None, None)
    assert not lookahead.too_similar(a, [6, 7, 8, 9, 5], 0.4, 0.5, 0.5)
    assert lookahead.too_similar(a, b, None, 0.5, None)
    assert lookahead.too_similar(a, b, None, None, 0.5)


def test_what_cannot_be_a_tree_is_refused() -> None:
    for wrong in ((), (5, 3), (-1,), (2, 2)):
        with pytest.raises(InputError, match="a tree forks at"):
            tree(*wrong)
    with pytest.raises(InputError, match="branches of tree is 1"):
        tree(4, branches=1)
    with pytest.raises(InputError, match="use at most 65536"):
        tree(*range(20))
    with pytest.raises(InputError, match="windows are"):
        near_ties(windows=(3, 2))
    with pytest.raises(InputError, match="share_steps"):
        near_ties(shares=(1.0,))
    with pytest.raises(InputError, match="unknown cut"):
        valued(cut="here")  # type: ignore[arg-type]
    (found,) = Ran(begin([3], 2), Rule(), tree(64), limit=8).found.groups
    assert found.failed, "no fork is within the limit"


def test_a_rollout_prints_as_its_code() -> None:
    for made in (tree(0, 30, branches=6), budgeted_tree(16), entropy_forks(2), valued(3, "lines"), near_ties()):
        assert isinstance(eval(repr(made)), Rollout)


@given(st.integers(0, 200), st.integers(2, 6), st.integers(1, 5), st.integers(0, 4))
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
def test_a_tree_that_is_cut_at_any_step_goes_on_the_same(prompt: int, samples: int, tokens: int, which: int) -> None:
    """Each step ends after a few tokens, and the next one reruns the program from its log."""
    rollout = (
        tree(2, 5), budgeted_tree(3, depth=5, first_most=4), entropy_forks(2), valued(2, every=1),
        near_ties(0.0, 1.0, windows=(2, 3), share_steps=(0,), shares=(1.0,)),
    )[which]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        if which == 4:
            patch.setattr(fake_engine, "tokens_of", tokens_with_ties(dict.fromkeys(range(20), (0.5, 0.4))))
        whole = one(Ran(begin([prompt], samples), Rule(), rollout, limit=20)).episodes
        flight = begin([prompt], samples)
        for _ in range(400):
            ran = Ran(flight, Rule(None, tokens), rollout, limit=20)
            if ran.complete:
                break
            flight = ran.pool
        again = one(ran).episodes
    assert [e.tokens for e in again] == [e.tokens for e in whole]
    for name in ("node", "state_value"):
        for a, b in zip(again, whole, strict=True):
            assert a.info.get(name) == b.info.get(name)


@pytest.mark.usefixtures("endless")
def test_numbers_of_tokens_stay_at_their_tokens() -> None:
    """In a batch, and where groups of different widths come together; other lists keep their length."""
    parts = []
    for limit in (6, 40):
        group = one(Ran(begin([3], 2), Rule(), tree(2), limit=limit))
        tests = [episode.with_info(tests=[1.0] * limit) for episode in group.episodes]
        batch = to_batch([group._replace(episodes=tests)], SamplingConfig(), 0)
        info: Any = batch.info
        assert info["tests"].shape == (2, limit), "a need of another shape"
        del info["tests"]
        mask = np.asarray(batch.action_mask)
        for row, episode in enumerate(group.episodes):
            np.testing.assert_array_equal(info["node"][row][mask[row]], nodes_of(episode))
        parts.append(Scored(batch.replace(reward=np.zeros(2, np.float32)), ["", ""], {}))
    assert parts[0].batch.tokens.shape[1] < parts[1].batch.tokens.shape[1]
    whole: Any = concatenate_groups(parts).batch
    assert whole.info["node"].shape == whole.tokens.shape
    assert not np.isnan(whole.info["node"][np.asarray(whole.action_mask)]).any()
