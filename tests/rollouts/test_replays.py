"""Stores and replays against slow loops over lists of rows, and what no sequence of steps may break."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_rows import REPLAYS, all_facts, facts, run, scored_of, some_steps

from jaxrl_llm.algorithms.replay.a2pr import best_of_prompt
from jaxrl_llm.algorithms.replay.spear import call_reward, own_good_rows, with_call_reward
from jaxrl_llm.algorithms.replay.vspo_prs import group_value, valued_groups
from jaxrl_llm.algorithms.replay.wmar_reservoir_replay import recent_and_reservoir
from jaxrl_llm.core.source import Replay, Step
from jaxrl_llm.replay import base, buffers, into_groups
from jaxrl_llm.rollouts.runtime.source_setup import ExperienceState, loaded, saved
from jaxrl_llm.rollouts.runtime.sources import with_replay
from jaxrl_llm.sampling.speculative.drafts import Drafts
from jaxrl_llm.utils.errors import InputError

EVERY = {**REPLAYS, "valued_groups": valued_groups()}
EMPTY = {
    "whole_groups": base.whole_groups(groups=0),
    "no share": base.whole_groups(0.0),
    "recent_and_reservoir": recent_and_reservoir(1.0, 0, 0),
    "own_good_rows": own_good_rows(0),
    "refilled": base.refilled(0),
    "swapped_successes": into_groups.swapped_successes(each=0),
    "best_of_prompt": best_of_prompt(0),
}
every = pytest.mark.parametrize("replay", EVERY.values(), ids=EVERY)


def test_rows_come_back_as_they_were() -> None:
    one, two = scored_of([[1, 0], [0.5]], [3, 1], 0), scored_of([[1.0, 1.0]], [2], 1)
    store = buffers.join(buffers.to_rows(one), buffers.to_rows(two))
    found = buffers.to_scored(buffers.take(store, [4, 1, 1, 0]), np.arange(4), 3, {})
    assert all_facts(found) == [facts(two, 1), facts(one, 1), facts(one, 1), facts(one, 0)]
    lengths = [int(x.batch.token_mask[i].sum()) for x, i in ((two, 1), (one, 1), (one, 0))]
    assert found.batch.tokens.shape == (4, max(lengths))
    assert found.batch.turn[~found.batch.token_mask].tolist() == [-1] * int((~found.batch.token_mask).sum())


@every
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), size=st.integers(1, 4))
def test_what_every_replay_keeps(replay: Replay, seed: int, size: int) -> None:
    """Every row is one that was sampled, groups are of one prompt, numbers consecutive, and inputs are unchanged."""
    steps = some_steps(6, seed, size=size)
    before = [all_facts(scored) for scored in steps]
    found, state = run(replay, steps)
    assert before == [all_facts(scored) for scored in steps]
    for step, (scored, mixed) in enumerate(zip(steps, found, strict=True)):
        b: Any = mixed.batch
        past = b.info["replayed"] > 0
        own, known = before[step], [fact for facts in before[: step + 1] for fact in facts]
        for i, fact in enumerate(all_facts(mixed)):
            assert fact in (known if past[i] else own)
        assert len(mixed.texts) == len(b.tokens)
        assert sorted(set(b.group.tolist())) == list(range(b.group.max() + 1)) == sorted(np.unique(b.group))
        assert (np.diff(b.group) >= 0).all()
        assert all(len(set(b.prompt_id[b.group == g])) == 1 for g in set(b.group.tolist()))
        assert set(b.info) >= replay.provides
        assert len(b.group) <= replay.grown(len(scored.texts)) + 4 * size  # groups of other sizes
        first = [int(np.flatnonzero(scored.batch.group == g)[0]) for g in np.unique(scored.batch.group)]
        if replay not in (EVERY["valued_groups"], EVERY["refilled"]):
            assert [int(b.prompt_id[b.group == g][0]) for g in range(len(first))] == scored.batch.prompt_id[
                first
            ].tolist()
    assert all(isinstance(x, np.ndarray) for x in state.values())
    assert all(np.isfinite(x) for x in replay.metrics(state).values())


@every
def test_a_replay_goes_on_from_its_arrays(replay: Replay) -> None:
    steps = some_steps(7)
    whole, _ = run(replay, steps)
    _, state = run(replay, steps[:3])
    again = loaded(*saved(ExperienceState(0, state, (), Drafts()))).replay
    rest, _ = run(replay, steps[3:], again, 3)
    for a, b in zip(whole[3:], rest, strict=True):
        assert all_facts(a) == all_facts(b)
        assert a.batch.group.tolist() == b.batch.group.tolist()


@pytest.mark.parametrize("replay", EMPTY.values(), ids=EMPTY)
def test_a_store_of_size_0_is_none(replay: Replay) -> None:
    steps = some_steps(5)
    found, _ = run(replay, steps)
    for scored, mixed in zip(steps, found, strict=True):
        assert all_facts(scored) == all_facts(mixed)
        assert scored.batch.group.tolist() == mixed.batch.group.tolist()
        assert not mixed.batch.info["replayed"].any()


def test_windows_are_refused() -> None:
    scored = scored_of([[1, 0]], [0], 0)
    windowed = scored._replace(batch=scored.batch.with_info(window=scored.batch.action_mask))
    with pytest.raises(InputError, match="trains on unfinished ones"):
        best_of_prompt().mix({}, windowed, 0, 0)


def test_fading_weights_of_the_worked_example() -> None:
    w = base.fading_weights(np.arange(10, 15))
    np.testing.assert_allclose(w, [0.272905, 0.807569, 0.987136, 0.999743, 0.999998], atol=1e-6)
    np.testing.assert_allclose(w / w.sum(), [0.067097, 0.198549, 0.242697, 0.245797, 0.245860], atol=1e-6)
    w = base.fading_weights(np.arange(5), 70, 30, 0.02)
    np.testing.assert_allclose(w / w.sum(), [0.000720, 0.002882, 0.006498, 0.089278, 0.900621], atol=1e-6)
    assert base.fading_weights(np.array([4, 4, 9])).tolist() == base.fading_weights(np.array([0, 0, 1])).tolist()


def test_faded_draws_follow_the_weights() -> None:
    steps, random = np.array([0, 1, 2, 3, 4]), np.random.default_rng(0)
    drawn = np.bincount(base.faded()(steps, 200_000, random), minlength=5) / 200_000
    np.testing.assert_allclose(drawn, [0.067097, 0.198549, 0.242697, 0.245797, 0.245860], atol=4e-3)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_whole_groups_against_a_list(seed: int) -> None:
    """Replayed groups are whole groups of the newest 5 with different rewards, none twice."""
    steps, stored = some_steps(6, seed), list[list[Any]]()
    for scored, mixed in zip(steps, run(EVERY["whole_groups"], steps)[0], strict=True):
        b: Any = mixed.batch
        fact, past = all_facts(mixed), b.info["replayed"] > 0
        again = [[fact[i] for i in np.flatnonzero(b.group == g)] for g in np.unique(b.group[past])]
        assert len(again) == min(3, len(stored)) == len({group[0][0] for group in again})
        assert all(group in stored for group in again)
        own: Any = scored.batch
        for g in np.unique(own.group):
            rows = np.flatnonzero(own.group == g)
            if np.ptp(own.reward[rows]) > 0:
                stored.append([facts(scored, i) for i in rows])
        stored = stored[-5:]


def test_old_groups_leave_and_replay_ends() -> None:
    steps = [scored_of([[1, 0]], [step], step) for step in range(6)]
    for step, mixed in enumerate(run(base.whole_groups(times=9, max_age=2), steps)[0]):
        again = mixed.batch.prompt_id[mixed.batch.info["replayed"] > 0]
        assert sorted(set(again.tolist())) == list(range(max(step - 2, 0), step))
    ended = run(base.whole_groups(times=9, until=3), steps)[0]
    assert [bool(x.batch.info["replayed"].any()) for x in ended] == [False, True, True, False, False, False]


def test_groups_of_equal_rewards_are_kept_where_asked_but_none_without_a_score() -> None:
    steps = [scored_of([[1.0, 1.0], [0.0, 1.0], [np.nan, np.nan]], [2, 3, 4], step) for step in range(2)]
    for equal, kept in ((False, {3}), (True, {2, 3})):
        found, state = run(base.whole_groups(1.0, equal=equal), steps)
        assert set(state["row:prompt_id"].tolist()) == kept
        again = found[1].batch.info["replayed"].sum() / 2
        assert again == len(kept), "at most as many as groups with a score"


def test_the_reservoir_is_a_uniform_sample() -> None:
    """Of 20 rows in 4 steps, each is kept with probability 5/20."""
    steps = [scored_of([[1.0, 0.0, 1.0, 0.0, 1.0]], [step], step) for step in range(4)]
    replay, counts = recent_and_reservoir(1.0, 3, 5), dict[str, int]()
    for seed in range(300):
        state: Any = {}
        for step, scored in enumerate(steps):
            _, state = replay.mix(state, scored, step, 1000 * seed + step)
        parts = {name: buffers.part_of(state, name) for name in ("recent", "reservoir")}
        texts = {k: buffers.to_scored(x, np.arange(buffers.count(x)), 0, {}).texts for k, x in parts.items()}
        assert texts["recent"] == steps[-1].texts[-3:]
        assert len(texts["reservoir"]) == 5
        for text in texts["reservoir"]:
            counts[text] = counts.get(text, 0) + 1
    np.testing.assert_allclose([n / 300 for n in counts.values()], 0.25, atol=0.09)
    assert len(counts) == 20


def test_halves_of_single_rows_with_their_groups_advantages() -> None:
    steps = [scored_of([[1.0, 0.0, 0.0, 0.0]], [7], 0), scored_of([[1.0, 1.0, 1.0, 1.0]], [8], 1)]
    (_, mixed), _ = run(recent_and_reservoir(1.0, 2, 4), steps)
    b: Any = mixed.batch
    past = b.info["replayed"] > 0
    assert past.tolist() == [False] * 4 + [True] * 4
    assert b.group.tolist() == [0, 0, 0, 0, 1, 2, 3, 4]
    want = {1.0: 0.75 / 0.5, 0.0: -0.25 / 0.5}
    np.testing.assert_allclose(b.info["replay_advantage"][4:], [want[float(r)] for r in b.reward[4:]], rtol=1e-4)
    assert not b.info["replay_advantage"][:4].any()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_swapped_successes_against_a_loop(seed: int) -> None:
    steps, buffer = some_steps(8, seed), dict[int, list[Any]]()
    for scored, mixed in zip(steps, run(EVERY["swapped_successes"], steps)[0], strict=True):
        own, b = scored.batch, mixed.batch
        assert b.group.tolist() == own.group.tolist()
        expected = all_facts(scored)
        found = sorted(all_facts(mixed), key=str)
        for g in np.unique(own.group):
            rows = np.flatnonzero(own.group == g)
            options = buffer.get(int(own.prompt_id[rows[0]]), [])
            e = own.reward[rows]
            here = [facts(mixed, i) for i in np.flatnonzero(b.group == g)]
            if np.std(e) < 0.05 and np.mean(e) < 0.2 and options:
                (new,) = (fact for fact in here if fact not in [expected[i] for i in rows])
                assert new in options
                expected[rows[0]] = new
        assert found == sorted(expected, key=str)
        for i, fact in enumerate(all_facts(scored)):
            if own.reward[i] > 0.1:
                one = buffer.setdefault(int(own.prompt_id[i]), [])
                one.append(fact)
                del one[:-2]


def in_episodes(scored: Any, episodes: list[int]) -> Any:
    """The rows as those of these episodes of their groups."""
    return scored._replace(batch=scored.batch.with_info(episode=np.asarray(episodes, np.float32)))


def test_samples_of_several_rows_are_swapped_whole() -> None:
    """A success of two rows takes the place of a failure of two, and its number; the other failure stays."""
    first = in_episodes(scored_of([[1.0, 0.0, 1.0, 0.0], [0.0]], [5, 6], 0), [2, 1, 2, 1, 0])
    later = in_episodes(scored_of([[0.0], [0.0, 0.0, 0.0]], [6, 5], 1), [0, 3, 3, 0])
    assert into_groups.samples_of(first.batch).tolist() == [0, 1, 0, 1, 2]
    _, state = into_groups.swapped_successes().mix({}, first, 0, 0)
    assert buffers.count(state) == 2
    for place, left, number in (("first", [later.texts[3]], 3.0), ("added", later.texts[1:], 4.0)):
        swap = into_groups.swapped_successes(place=place)
        mixed, _ = swap.mix(state, later, 1, 7)
        b: Any = mixed.batch
        assert mixed.texts == [later.texts[0], *left, first.texts[0], first.texts[2]]
        assert b.group.tolist() == [0] + [1] * (len(left) + 2)
        assert b.info["episode"].tolist()[-2:] == [number] * 2
        assert b.info["replayed"].tolist() == [0.0] * (len(left) + 1) + [1.0, 1.0]
        assert len(mixed.texts) <= swap.grown(4)


def test_the_store_of_a_prompt_counts_samples() -> None:
    """Of three successes of one, two and one rows, the newest two stay."""
    swap, state = into_groups.swapped_successes(each=2), {}
    texts = list[str]()
    for step, episodes in enumerate(([0], [4, 4], [1])):
        scored = in_episodes(scored_of([[1.0] * len(episodes)], [3], step), episodes)
        texts += scored.texts
        _, state = swap.mix(state, scored, step, 0)
    assert buffers.to_scored(state, np.arange(3), 0, {}).texts == texts[1:]


def test_calls_of_tools_are_rewarded_less_and_less() -> None:
    """The card's mu at steps 0, 50 and 100 of 100, and the bound of ten calls."""
    calls = np.array([0.0, 1, 10, 30])
    for step, mu in ((0, 1.0), (50, 0.5), (100, 0.0), (101, 0.0)):
        np.testing.assert_allclose(call_reward(calls, step, 0.1, 100), mu * np.array([0, 0.1, 1, 1]), atol=1e-12)
    scored = scored_of([[1.0, 0.0, 0.0]], [3], 0)
    called = scored._replace(batch=scored.batch.with_info(calls=np.array([2.0, 0, 3], np.float32)))
    replay = with_call_reward(own_good_rows(4), 0.1, 100)
    mixed, state = replay.mix({}, called, 50, 0)
    np.testing.assert_allclose(mixed.batch.reward, [1.1, 0.0, 0.15], rtol=1e-6)
    np.testing.assert_allclose(buffers.part_of(state, "rows")["row:reward"], [1.1], rtol=1e-6)
    assert all_facts(replay.mix({}, scored, 50, 0)[0]) == all_facts(scored)


def test_the_best_earlier_answer_joins_its_group() -> None:
    steps = [
        scored_of([[0.2, 0.7, 0.7]], [5], 0), scored_of([[0.1], [0.9]], [4, 5], 1),
        scored_of([[0.3], [0.0]], [5, 4], 2), scored_of([[0.3]], [4], 3),
    ]  # fmt: skip
    found, _ = run(best_of_prompt(), steps)
    past = [[(x.texts[i], int(x.batch.group[i])) for i in np.flatnonzero(x.batch.info["replayed"])] for x in found]
    assert past == [
        [], [(steps[0].texts[2], 1)], [(steps[1].texts[1], 0), (steps[1].texts[0], 1)], [(steps[1].texts[0], 0)]
    ]  # fmt: skip


def test_rows_without_a_signal_are_replaced_by_their_advantage() -> None:
    """Of 1, 0, 0, 0 the right answer has three times the advantage of a wrong one, so it is drawn half of the time."""
    steps = [scored_of([[1.0, 0.0, 0.0, 0.0]], [7], 0), scored_of([[0.0], [1.0, 0.0]], [8, 9], 1)]
    drawn = []
    _, state = base.refilled().mix({}, steps[0], 0, 0)
    for seed in range(600):
        mixed, _ = base.refilled().mix(state, steps[1], 1, seed)
        b: Any = mixed.batch
        assert b.prompt_id.tolist() == [9, 9, 7]
        assert b.info["replay_advantage"][2] == pytest.approx(1.5 if b.reward[2] else -0.5, rel=1e-4)
        drawn.append(float(b.reward[2]))
    assert np.mean(drawn) == pytest.approx(0.5, abs=0.08)
    few, _ = base.refilled().mix(state, scored_of([[0.0] * 5, [1.0] * 3], [8, 9], 1), 1, 0)
    assert few.batch.info["replayed"].tolist() == [0.0] * 5 + [1.0] * 3  # four stored rows replace three, not five


def test_hosts_that_see_the_same_batch_mix_alike() -> None:
    """Through the step of a source, from the step's key."""
    prompts: Any = SimpleNamespace(rows=[{"prompt": str(number)} for number in range(5)])

    def on_host(replay: Replay) -> list[Any]:
        state, out = replay.init(), list[Any]()
        for step, scored in enumerate(some_steps(5, 11)):
            ids = scored.batch.prompt_id[np.unique(scored.batch.group, return_index=True)[1]]
            given = Step(scored, [prompts.rows[i] for i in ids], {"rollout/steps": 1.0})
            key = jax.random.fold_in(jax.random.key(4), step)
            found, state = with_replay(replay, state, given, key, step, prompts)
            b: Any = found.scored.batch
            _, first = np.unique(b.group, return_index=True)
            assert [row["prompt"] for row in found.rows] == [str(i) for i in b.prompt_id[first]]
            assert found.sampled is scored
            assert found.metrics["rollout/steps"] == 1
            assert found.metrics["replay/share"] == pytest.approx(b.info["replayed"].mean())
            out.append((all_facts(found.scored), b.group.tolist(), found.metrics))
        return out

    for replay in EVERY.values():
        assert on_host(replay) == on_host(replay)


def test_own_good_rows_fire_above_the_running_median() -> None:
    """Group means 0.25, 0.75, 0.5, 0.6 have the median 0.55: r = 1 has 0.45, and r = 0.5 is not replayed."""
    first = scored_of([[0.5, 0.0, 0.25, 0.25], [1.0, 0.5], [1.0, 0.0], [1.0, 0.2]], [0, 1, 2, 3], 0)
    replay = own_good_rows(size=2, baselines=4, surplus=1.0)
    (_, mixed), state = run(replay, [first, scored_of([[0.0, 0.0]], [9], 1)])
    b: Any = mixed.batch
    past = b.info["replayed"] > 0
    assert past.sum() == 2
    np.testing.assert_allclose(b.reward[past], 1.0)
    np.testing.assert_allclose(b.info["replay_advantage"][past], 0.45, rtol=1e-5)
    assert buffers.count(buffers.part_of(state, "rows")) == 0
    np.testing.assert_allclose(state["means"], [0.75, 0.5, 0.6, 0.0])


def test_values_of_groups_in_the_worked_example() -> None:
    rewards = [[1.0, 0, 0, 0, 0], [1.0, 1, 1, 1, 0], [1.0, 1, 0, 0, 0], [1.0] * 5]
    value = [float(group_value(np.mean([r], 1), np.std([r], 1))[0]) for r in rewards]
    np.testing.assert_allclose(value, [0.32, 0.08, 0.293939, 0.0], atol=1e-6)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_copies_replace_groups_without_a_signal(seed: int) -> None:
    (scored,) = some_steps(1, seed, groups=4, size=4)
    (mixed,), _ = run(valued_groups(2.0), [scored])
    own, b = scored.batch, mixed.batch
    spread = [float(np.ptp(own.reward[own.group == g])) for g in range(4)]
    if not any(spread):
        assert all_facts(mixed) == all_facts(scored)
        assert (b.info["copy_weight"] == 1).all()
        return
    assert len(np.unique(b.group)) == 4
    assert all(np.ptp(b.reward[b.group == g]) > 0 for g in range(4))
    for prompt in np.unique(b.prompt_id):
        groups = np.unique(b.group[b.prompt_id == prompt])
        weight = np.unique(b.info["copy_weight"][b.prompt_id == prompt])
        np.testing.assert_allclose(weight, min(len(groups), 2) / len(groups), rtol=1e-6)
        assert ((b.info["replayed"] > 0)[b.prompt_id == prompt].mean() * len(groups)).round() == len(groups) - 1


def test_an_unknown_outcome_is_refused() -> None:
    with pytest.raises(InputError, match="unknown reward 'rihgt': did you mean 'right'"):
        into_groups.swapped_successes(component="rihgt").mix({}, scored_of([[1, 0]], [0], 0), 0, 0)
