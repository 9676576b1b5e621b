"""The driver over an engine that decodes nothing: no sample is lost, doubled, overtaken or left for ever."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
import weakref
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from fake_engine import LIMIT, Ran, begin, length_of, token_of, tokens_of
from heavy import few
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.core.rollout import Rollout, Task
from jaxrl_llm.core.rules import Partial
from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.rollouts.episode import Episode, checksum
from jaxrl_llm.rollouts.program_host import NotDeterministicError
from jaxrl_llm.rollouts.runtime.admission import Rule
from jaxrl_llm.rollouts.runtime.group_run import Group
from jaxrl_llm.rollouts.runtime.replay_log import CallKey, GroupLog, PartialSample, Pool, from_arrays, to_arrays
from jaxrl_llm.utils.errors import InputError

WANTED = 4
SAMPLES = 3


class Step(NamedTuple):
    groups: list[Group]
    pool: Pool
    flight: Pool


def ids(pool: Pool) -> list[int]:
    return [log.prompt_id for log in pool]


def unfinished(log: GroupLog) -> int:
    """Samples of a log that neither ended nor have LIMIT tokens."""
    return log.samples - sum(answer.ended or answer.tokens.size >= LIMIT for answer in log.drawn.values())


def job(strategy: Partial, steps: int, slots: int, drain: bool = False) -> list[Step]:
    """Steps over prompts 0, 1, 2 ...; with `drain`, more of them without new prompts until the pool is empty."""
    pool, following, out = Pool(), 0, list[Step]()
    while len(out) < steps or (drain and pool):
        step = len(out)
        new = strategy.in_flight(WANTED) - len(pool) if step < steps else 0
        flight = (*pool, *begin(range(following, following + new), SAMPLES, step))
        following += new
        ran = Ran(flight, Rule(WANTED, strategy.segment_tokens), slots=slots, step=step)
        pool = ran.pool
        out.append(Step(ran.found.groups, pool, flight))
    return out


strategies = st.builds(Partial, st.sampled_from([1.0, 1.3, 2.0, 3.5]), st.sampled_from([0, 1, 5, 16, 64]))


@settings(max_examples=10, deadline=None)
@given(strategy=strategies, slots=st.integers(1, 50), steps=st.integers(1, 12))
def test_all_that_is_begun_is_trained_once_or_in_the_pool(strategy: Partial, slots: int, steps: int) -> None:
    trained: list[int] = []
    done = job(strategy, steps, slots, drain=True)
    for step, (groups, pool, flight) in enumerate(done):
        complete = [one.task.prompt_id for one in groups]
        assert 1 <= len(complete) <= WANTED
        if not strategy.segment_tokens and step < steps:
            assert len(complete) == WANTED
        assert sorted(complete + ids(pool)) == ids(flight), "a group was lost or doubled"
        assert ids(pool) == sorted(ids(pool)), "the pool is not in the order in which its groups were begun"
        assert complete == sorted(complete)
        assert len(pool) < strategy.in_flight(WANTED), "the pool grows"
        ready = [log.prompt_id for log in flight if not unfinished(log)][:WANTED]
        assert set(ready) <= set(complete), "complete groups of the pool come first"
        trained += complete
    assert sorted(trained) == list(range(len(trained)))
    assert done[-1].pool == ()


@pytest.mark.heavy
@settings(max_examples=15, deadline=None)
@given(strategy=strategies, slots=st.integers(1, 50))
def test_tokens_are_what_was_sampled_and_when(strategy: Partial, slots: int) -> None:
    """However often a sample was resumed, it has each of its tokens once, in order, with all that was known of it."""
    for step, (groups, _, flight) in enumerate(job(strategy, 8, slots)):
        first = {log.prompt_id: log.first_step for log in flight}
        for one in groups:
            for number, episode in enumerate(one.episodes):
                length, tokens = length_of(one.task.prompt_id, number), episode.own
                expected = tokens_of(one.task.prompt_id, number, 0, min(length, LIMIT), 0)
                assert (episode.ended, episode.truncated) == (length <= LIMIT, length > LIMIT)
                for name in ("token", "logp", "entropy", "floor", "untruncated_logp"):
                    np.testing.assert_array_equal(getattr(tokens, name), getattr(expected, name))
                assert (np.diff(tokens.policy_step) >= 0).all()
                assert first[one.task.prompt_id] <= tokens.policy_step[0] <= tokens.policy_step[-1] <= step


def test_the_longest_do_not_hold_up_a_step() -> None:
    """The heavy tail: tokens are older than the step that trains on them, and no group waits for more than a few."""
    ages, stale = [], []
    for step, (groups, _, flight) in enumerate(job(Partial(2.0), 40, slots=12)):
        first = {log.prompt_id: log.first_step for log in flight}
        ages += [step - first[one.task.prompt_id] for one in groups]
        stale += [(step - e.own.policy_step > 0).mean() for one in groups for e in one.episodes]
    assert 2 <= max(ages) <= 8  # oldest first: whoever is at the front of the queue ends within LIMIT ticks
    assert np.mean(stale) > 0.05


def test_a_step_stops_when_enough_groups_are_complete() -> None:
    """With one row, so that no two completions end at once: no group beyond the wanted ones is complete."""
    for groups, pool, _ in job(Partial(2.0), 10, slots=1):
        assert len(groups) == len(pool) == WANTED
        assert all(unfinished(log) for log in pool)


def test_without_oversampling_nothing_is_left() -> None:
    for step, (groups, pool, flight) in enumerate(job(Partial(), 5, slots=4)):
        assert (pool, [one.task.prompt_id for one in groups]) == ((), ids(flight))
        assert all((episode.own.policy_step == step).all() for one in groups for episode in one.episodes)


@pytest.mark.parametrize("segment", few([5, 16, 30], [16]))
def test_segments_bound_the_new_tokens_of_a_step(segment: int) -> None:
    """With as many times the groups as there are segments, steps are full once the first ones have come through."""
    segments = math.ceil(LIMIT / segment)
    steps = job(Partial(float(segments), segment), segments + 12, slots=1000)
    for step, (groups, pool, flight) in enumerate(steps):
        before = {(log.prompt_id, call.number): a for log in flight for call, a in log.drawn.items()}
        after = {(log.prompt_id, call.number): a.tokens.size for log in pool for call, a in log.drawn.items()}
        after |= {(one.task.prompt_id, i): e.size for one in groups for i, e in enumerate(one.episodes)}
        for (prompt, number), size in after.items():
            old = before.get((prompt, number), PartialSample())
            whole = size == min(length_of(prompt, number), LIMIT)
            assert whole or size - old.tokens.size == segment or not step, "all have their whole segment"
            assert size - old.tokens.size <= segment or not step
        if step >= segments - 1:
            assert len(groups) == WANTED


def test_a_step_goes_on_until_a_group_is_complete() -> None:
    """Two groups of samples longer than one segment: four segments of 16 until all have 64."""
    long = [prompt for prompt in range(4000) if min(length_of(prompt, s) for s in range(2)) > 48][:2]
    ran = Ran(begin(long, 2), Rule(2, 16))
    assert (ran.complete, ran.pool) == (long, ())
    assert all(episode.size > 48 for one in ran.found.groups for episode in one.episodes)
    assert len(ran.requests) == 2 * 2 * 4


def test_complete_groups_beyond_what_is_wanted_come_first_next() -> None:
    call = CallKey(0, 0, checksum((1,)))
    flight = tuple(GroupLog((1,), i, 1, 0, {call: PartialSample(tokens_of(i, 0, 0, 3, 0), True)}) for i in range(3))
    told: list[int] = []
    ran = Ran(flight, Rule(2), on_group=lambda place, one: told.append(place))
    assert (ran.complete, ids(ran.pool), ran.engines, told) == ([0, 1], [2], [], [0, 1])
    ran = Ran((*begin([3, 4], 1, 1), *ran.pool), Rule(1))
    assert (ran.complete, ids(ran.pool), ran.engines) == ([2], [3, 4], [])


@pytest.mark.parametrize("segment", [0, 16])
def test_each_trained_group_is_told_once_and_whole(segment: int) -> None:
    told: dict[int, Group] = {}

    def tell(place: int, one: Group) -> None:
        assert place not in told
        told[place] = one

    ran = Ran(begin(range(12), SAMPLES), Rule(WANTED, segment), slots=8, on_group=tell)
    assert [told[place].task for place in sorted(told)] == [one.task for one in ran.found.groups]
    for one in told.values():
        assert not any(one.unfinished)
        assert len(one.episodes) == SAMPLES


@pytest.mark.parametrize("segment", [1, 5, 16, 64])
def test_windows_of_all_that_is_in_flight(segment: int) -> None:
    """Every completion that is not done has one segment more, however long the others are, until each is whole."""
    pool, following, done, sizes = Pool(), 0, dict[int, Group](), dict[tuple[int, int], int]()
    for step in range(100):
        new = range(following, following + (WANTED - len(pool) if step < 5 else 0))
        following += len(new)
        flight = (*pool, *begin(new, SAMPLES, step))
        ran = Ran(flight, Rule(None, segment, train_unfinished=True), slots=7, step=step)
        assert ran.complete == ids(flight), "the step trains on all"
        for one in ran.found.groups:
            for number, episode in enumerate(one.episodes):
                key = (one.task.prompt_id, number)
                whole = min(length_of(*key), LIMIT)
                assert episode.size == min(whole, sizes.get(key, 0) + segment)
                assert (episode.own.policy_step == step).sum() == episode.size - sizes.get(key, 0)
                assert one.unfinished[number] == (episode.size < whole)
                sizes[key] = episode.size
        pool = ran.pool
        done |= {one.task.prompt_id: one for one in ran.found.groups if not any(one.unfinished)}
        if step >= 5 and not pool:
            break
    assert sorted(done) == list(range(following))
    for prompt, one in done.items():
        for number, episode in enumerate(one.episodes):
            whole = min(length_of(prompt, number), LIMIT)
            assert episode.own.token.tolist() == [token_of(prompt, number, place) for place in range(whole)]


def test_requests_go_on_where_samples_are() -> None:
    """A prompt that is in flight twice has other randomness; a sample that is begun keeps its tokens."""
    begun = {CallKey(0, 0, checksum((8, 9))): PartialSample(tokens_of(5, 0, 0, 1, 2), False)}
    flight = (GroupLog((8, 9), 5, 3, 2, begun), GroupLog((8, 9), 5, 2, 2))
    requests = Ran(flight, Rule(2, 10)).engines[0].requests[:5]
    assert [(r.prompt, r.prompt_id, r.limit) for r in requests] == [((8, 9), 5, LIMIT)] * 5
    assert [r.sample for r in requests] == [0, 1, 2, 3, 4]
    assert [(r.begun.size, r.pause_at) for r in requests] == [(1, 11)] + [(0, 10)] * 4


@pytest.mark.parametrize("pool", [(), job(Partial(2.0), 3, slots=5)[-1].pool, begin([1], 2)])
def test_a_pool_comes_back_from_arrays(pool: Pool) -> None:
    pool = tuple(log._replace(recorded={"scores": [[0.5, {"even": 0.25}]], "1/1": "text"}) for log in pool)
    arrays = to_arrays(pool)
    back = from_arrays(arrays)
    assert [log._replace(drawn={}) for log in back] == [log._replace(drawn={}) for log in pool]
    for one, other in zip(back, pool, strict=True):
        assert list(one.drawn) == sorted(other.drawn)
        for x, y in zip(one.drawn.values(), other.drawn.values(), strict=True):
            assert x.ended == y.ended
            assert x.tokens.experts is y.tokens.experts is x.before is y.before is x.tokens.thoughts is None
            assert x.tokens.ranked is y.tokens.ranked is None
            for a, b in zip(x.tokens, y.tokens, strict=True):
                if b is not None:
                    assert a.dtype == b.dtype
                    np.testing.assert_array_equal(a, b)
    assert {name: x.tobytes() for name, x in to_arrays(back).items()} == {n: x.tobytes() for n, x in arrays.items()}
    assert from_arrays({}) == ()


async def _raises(tools: Tools, task: Task) -> list[Episode]:
    episodes = [await tools.sample(task.prompt, number=i) for i in range(task.samples)]
    if task.prompt_id == 1:
        raise RuntimeError("a broken tool")
    return episodes


async def _leaves(tools: Tools, task: Task) -> list[Episode]:
    episodes = [await tools.sample(task.prompt, number=i) for i in range(task.samples)]
    if task.prompt_id == 1:
        raise SystemExit(3)
    return episodes


async def _cancels(tools: Tools, task: Task) -> list[Episode]:
    async def one(number: int) -> Episode:
        if (task.prompt_id, number) == (1, 1):
            raise asyncio.CancelledError("by itself")
        return await tools.sample(task.prompt, number=number)

    return list(await asyncio.gather(*map(one, range(task.samples))))


async def _sleeps(tools: Tools, task: Task) -> list[Episode]:
    episodes = [await tools.sample(task.prompt, number=i) for i in range(task.samples)]
    if task.prompt_id == 1:
        await asyncio.sleep(3600)
    return episodes


async def _hangs(tools: Tools, task: Task) -> list[Episode]:
    episodes = [await tools.sample(task.prompt, number=i) for i in range(task.samples)]
    if task.prompt_id == 1:
        await tools.call(threading.Event().wait, name="a tool")
    return episodes


async def _too_few(tools: Tools, task: Task) -> list[Episode]:
    return [await tools.sample(task.prompt, number=i) for i in range(task.samples - (task.prompt_id == 1))]


async def _twice(tools: Tools, task: Task) -> list[Episode]:
    return [await tools.sample(task.prompt, number=i * (task.prompt_id != 1)) for i in range(task.samples)]


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (_raises, "a broken tool"),
        (_leaves, "SystemExit: 3"),
        (_cancels, "CancelledError"),
        (_sleeps, "waited for more than 0.2 s"),
        (_hangs, "'a tool' did not answer within 0.2 s"),
        (_too_few, "must return 2 episodes, but returned 1"),
        (_twice, "asks twice for sample 0 at token 0"),
    ],
)
def test_a_program_that_fails_ends_its_group_and_not_the_run(program: Any, said: str, caplog: Any) -> None:
    ran = Ran(begin(range(3), 2), Rule(), Rollout(program, "faulty"), time_limit=0.2)
    assert [one.failed for one in ran.found.groups] == [False, True, False]
    assert said in caplog.text
    assert "faulty failed on prompt 1" in caplog.text
    assert len(ran.found.groups[1].episodes) == 2, "a failed group keeps its size"


def test_a_program_that_does_not_follow_its_log_is_named() -> None:
    calls: list[int] = []

    async def program(tools: Tools, task: Task) -> list[Episode]:
        calls.append(1)
        return [await tools.sample((*task.prompt, len(calls)), number=0)]

    rollout = Rollout(program, "by the clock")
    long = next(prompt for prompt in range(1000) if length_of(prompt, 0) > 20)
    ran = Ran(begin([long], 1), Rule(None, 4, train_unfinished=True), rollout)
    with pytest.raises(NotDeterministicError, match=rf"by the clock is not deterministic.*prompt {long}.*other tokens"):
        Ran(ran.pool, Rule(1), rollout)


def test_what_a_program_was_answered_is_not_asked_again() -> None:
    asked: list[str] = []

    def judge(text: str) -> str:
        asked.append(text)
        return text.upper()

    async def program(tools: Tools, task: Task) -> list[Episode]:
        verdict = await tools.call(judge, f"prompt {task.prompt_id}", name="verdict")
        assert verdict == f"PROMPT {task.prompt_id}"
        return [await tools.sample(task.prompt, number=0)]

    long = [prompt for prompt in range(4000) if length_of(prompt, 0) > 40][:1]
    rule, rollout = Rule(None, 8, train_unfinished=True), Rollout(program, "judged")
    ran = Ran(begin(long, 1), rule, rollout)
    for _ in range(3):
        ran = Ran(from_arrays(to_arrays(ran.pool)), rule, rollout)
    assert ran.found.groups[0].episodes[0].size == 32
    assert len(asked) == 1


def test_a_call_that_is_made_again_must_answer_alike() -> None:
    """The steps of an environment that is not held are taken again, so that it is where it was."""
    answers = iter(["a", "a", "b"])

    async def program(tools: Tools, task: Task) -> list[Episode]:
        await tools.call(lambda: next(answers), name="step", again=True)
        return [await tools.sample(task.prompt, number=0)]

    long = [prompt for prompt in range(4000) if length_of(prompt, 0) > 40][:1]
    rule, rollout = Rule(None, 8, train_unfinished=True), Rollout(program, "a changing world")
    ran = Ran(begin(long, 1), rule, rollout)
    ran = Ran(ran.pool, rule, rollout)
    assert ran.found.groups[0].episodes[0].size == 16
    with pytest.raises(NotDeterministicError, match=r"a changing world.*'step' returns another answer"):
        Ran(ran.pool, rule, rollout, strict=True)


def test_an_episode_as_long_as_the_context_is_truncated() -> None:
    async def program(tools: Tools, task: Task) -> list[Episode]:
        episode = await tools.sample(task.prompt, number=0)
        return [await tools.sample(episode + tools.given("7 7 7"))]

    prompt = next(prompt for prompt in range(1000) if length_of(prompt, 0) > 30)
    (one,) = Ran(begin([prompt], 1), Rule(), Rollout(program, "long"), limit=20, context=24).found.groups
    assert one.episodes[0].truncated
    assert len(one.episodes[0].tokens) <= 25
    assert not one.failed


def test_it_runs_inside_of_a_running_event_loop() -> None:
    """As in a notebook."""

    async def cell() -> list[int]:
        return Ran(begin(range(3), 2), Rule()).complete

    assert asyncio.run(cell()) == [0, 1, 2]


def test_weights_are_let_go_of_without_a_look_for_cycles() -> None:
    """Else those of many steps are there at once: what holds the groups, which refer to each other, is freed late."""
    made: list[weakref.ref[Any]] = []

    def with_weights(make: Any, admit: Any, run: Any) -> Any:
        maker = partial(make)
        made.append(weakref.ref(maker))
        return run(maker, admit)

    gc.disable()
    try:
        ran = Ran(begin(range(3), 2), Rule(2), within=with_weights)
        assert len(ran.pool) == 1
        assert made[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"oversample": 0.9}, "oversample of Partial is 0.9, but must be at least 1"),
     ({"oversample": math.inf}, "finite"), ({"oversample": math.nan}, "finite"),
     ({"segment_tokens": -1}, "segment_tokens of Partial is -1"),
     ({"oversample": 1.5, "train_unfinished": True}, "oversample is 1.5, but must be 1 with train_unfinished")],
)  # fmt: skip
def test_numbers_out_of_range(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Partial(**wrong)


def test_groups_in_flight() -> None:
    assert [Partial(x).in_flight(8) for x in (1.0, 1.2, 2.0)] == [8, 10, 16]
    assert Partial(1.1).in_flight(10) == 11
