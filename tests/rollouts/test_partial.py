"""Partial rollouts over a generator that decodes nothing: no sample is lost, doubled, overtaken or left for ever."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.errors import InputError
from jaxrl_llm.rollouts import partial
from jaxrl_llm.rollouts.partial import Enough, Group, Partial, Pool, Sample
from jaxrl_llm.sampling import engine
from jaxrl_llm.sampling.draw import Settings, seed_of
from jaxrl_llm.sampling.requests import NO_TOKENS, Completion, Request, Stats, Tokens
from jaxrl_llm.sampling.weights import take_weights

LIMIT = 64
WANTED = 4
SAMPLES = 3


def length_of(prompt_id: int, sample: int) -> int:
    """Tokens after which a sample ends: half have up to 4, the longest would have more than LIMIT."""
    uniform = np.random.default_rng([7, prompt_id, sample]).uniform()
    return math.ceil(2 / (1 - uniform))  # Pareto with exponent 1


def token_of(prompt_id: int, sample: int, place: int) -> int:
    return 1000 * prompt_id + 100 * sample + place


def tokens_of(prompt_id: int, sample: int, first: int, last: int, step: int) -> Tokens:
    """Tokens first ... last - 1 of a sample; all that is known of a token follows from its id."""
    ids = np.asarray([token_of(prompt_id, sample, place) for place in range(first, last)], np.int32)
    known = [(-ids / scale).astype(np.float32) for scale in (3, 5, 7, 11)]
    return Tokens(ids, *known, np.full(len(ids), step, np.int32))


class Fake:
    """Completes requests as the engine does, a token a tick in each of `slots` rows, and counts."""

    def __init__(self, slots: int, step: int = 0) -> None:
        self.slots, self.step = slots, step
        self.calls = 0

    def __call__(self, requests: Sequence[Request], enough: Enough) -> Iterator[Completion]:
        self.calls += 1
        waiting, rows, stopping = list(range(len(requests))), dict[int, Tokens](), False
        while not stopping and (waiting or rows):
            while waiting and len(rows) < self.slots:
                number = waiting.pop(0)
                rows[number] = requests[number].begun
            for number, tokens in list(rows.items()):
                asked, size = requests[number], tokens.size
                new = tokens_of(asked.prompt_id, asked.sample, size, size + 1, self.step)
                rows[number] = tokens = tokens.followed_by(new)
                ended = tokens.size == length_of(asked.prompt_id, asked.sample)
                if ended or tokens.size >= asked.limit or tokens.size == asked.pause_at:
                    del rows[number]
                    completion = Completion(number, tokens, ended, asked.limit)
                    stopping |= enough(completion)
                    yield completion
        for number, tokens in [*rows.items(), *((number, requests[number].begun) for number in waiting)]:
            yield Completion(number, tokens, False, requests[number].limit)


class Step(NamedTuple):
    complete: Pool
    pool: Pool
    flight: Pool
    calls: int


def job(strategy: Partial, steps: int, slots: int, drain: bool = False) -> list[Step]:
    """Steps over prompts 0, 1, 2 ...; with `drain`, more of them without new prompts until the pool is empty."""
    pool, following, out = (), 0, []
    while len(out) < steps or (drain and pool):
        step = len(out)
        new = strategy.in_flight(WANTED) - len(pool) if step < steps else 0
        prompts = [([prompt_id, 1], prompt_id) for prompt_id in range(following, following + new)]
        following += new
        flight = (*pool, *partial.begin(prompts, SAMPLES, step))
        fake = Fake(slots, step)
        complete, pool = partial.advance(flight, WANTED, LIMIT, fake, segment_tokens=strategy.segment_tokens)
        out.append(Step(complete, pool, flight, fake.calls))
    return out


def ids(groups: Pool) -> list[int]:
    return [group.prompt_id for group in groups]


strategies = st.builds(Partial, st.sampled_from([1.0, 1.3, 2.0, 3.5]), st.sampled_from([0, 1, 5, 16, 64]))


@settings(max_examples=25, deadline=None)
@given(strategy=strategies, slots=st.integers(1, 50), steps=st.integers(1, 12))
def test_all_that_is_begun_is_trained_once_or_in_the_pool(strategy: Partial, slots: int, steps: int) -> None:
    done = job(strategy, steps, slots, drain=True)
    trained: list[int] = []
    for step, (complete, pool, flight, _) in enumerate(done):
        assert 1 <= len(complete) <= WANTED
        if not strategy.segment_tokens and step < steps:
            assert len(complete) == WANTED
        assert sorted(ids(complete) + ids(pool)) == ids(flight), "a group was lost or doubled"
        assert ids(pool) == sorted(ids(pool)), "the pool is not in the order in which its groups were begun"
        assert ids(complete) == sorted(ids(complete))
        assert len(pool) < strategy.in_flight(WANTED), "the pool grows"
        trained += ids(complete)
        ready = [group.prompt_id for group in flight if not group.unfinished(LIMIT)][:WANTED]
        assert set(ready) <= set(ids(complete)), "complete groups of the pool come first"
    assert sorted(trained) == list(range(len(trained)))
    assert done[-1].pool == ()


@settings(max_examples=15, deadline=None)
@given(strategy=strategies, slots=st.integers(1, 50))
def test_tokens_are_what_was_sampled_and_when(strategy: Partial, slots: int) -> None:
    """However often a sample was resumed, it has each of its tokens once, in order, with all that was known of it."""
    for step, (complete, _, _, _) in enumerate(job(strategy, 8, slots)):
        for group in complete:
            for number, (tokens, ended) in enumerate(group.samples):
                length = length_of(group.prompt_id, number)
                expected = tokens_of(group.prompt_id, number, 0, min(length, LIMIT), 0)
                assert ended == (length <= LIMIT)
                for name in ("token", "logp", "entropy", "floor", "whole_logp"):
                    np.testing.assert_array_equal(getattr(tokens, name), getattr(expected, name))
                assert (np.diff(tokens.policy_step) >= 0).all()
                assert group.first_step <= tokens.policy_step[0] <= tokens.policy_step[-1] <= step


def test_the_longest_do_not_hold_up_a_step() -> None:
    """The heavy tail: tokens are older than the step that trains on them, and no group waits for more than a few."""
    steps = job(Partial(2.0), 40, slots=12)
    ages = [
        step - group.first_step for step, (complete, _, _, _) in enumerate(steps) for group in complete
    ]  # fmt: skip
    assert max(ages) >= 2
    stale = [
        (step - sample.tokens.policy_step > 0).mean()
        for step, (complete, _, _, _) in enumerate(steps)
        for group in complete
        for sample in group.samples
    ]
    assert np.mean(stale) > 0.05
    # Oldest first: whoever is at the front of the queue has a row, and ends within LIMIT ticks.
    assert max(ages) <= 8


def test_a_step_stops_when_enough_groups_are_complete() -> None:
    """With one row, so that no two completions end at once: no group beyond the wanted ones is complete."""
    for complete, pool, _, _ in job(Partial(2.0), 10, slots=1):
        assert len(complete) == WANTED
        assert len(pool) == WANTED
        assert all(group.unfinished(LIMIT) for group in pool)


def test_without_oversampling_nothing_is_left() -> None:
    for step, (complete, pool, flight, calls) in enumerate(job(Partial(), 5, slots=4)):
        assert (pool, ids(complete), calls) == ((), ids(flight), 1)
        assert all((sample.tokens.policy_step == step).all() for group in complete for sample in group.samples)


@pytest.mark.parametrize("segment", [5, 16, 30])
def test_segments_bound_the_new_tokens_of_a_step(segment: int) -> None:
    """With as many times the groups as there are segments, steps are full once the first ones have come through."""
    segments = math.ceil(LIMIT / segment)
    steps = job(Partial(float(segments), segment), segments + 12, slots=1000)
    for step, (complete, pool, flight, calls) in enumerate(steps):
        before = {group.prompt_id: group for group in flight}
        for group in (*complete, *pool):
            for old, new in zip(before[group.prompt_id].samples, group.samples, strict=True):
                assert new.tokens.size - old.tokens.size <= segment * calls
                if step and not old.ended and old.tokens.size < LIMIT:
                    whole = new.ended or new.tokens.size == LIMIT
                    assert whole or new.tokens.size - old.tokens.size == segment, "all have their whole segment"
        assert all(step - group.first_step < segments for group in pool if group.unfinished(LIMIT))
        if step >= segments - 1:
            assert len(complete) == WANTED
    assert {calls for *_, calls in steps[1:]} == {1}


def test_a_step_goes_on_until_a_group_is_complete() -> None:
    """Two groups of samples longer than one segment: 4 segments of 16 until all have 64."""
    long = [prompt for prompt in range(4000) if min(length_of(prompt, s) for s in range(2)) > 48][:2]
    flight = partial.begin([([9], prompt) for prompt in long], 2, 0)
    fake = Fake(100)
    complete, pool = partial.advance(flight, 2, LIMIT, fake, segment_tokens=16)
    assert fake.calls == 4
    assert ids(complete) == long
    assert pool == ()
    assert all(sample.tokens.size > 48 for group in complete for sample in group.samples)


def test_complete_groups_beyond_what_is_wanted_come_first_next() -> None:
    done = Group((1,), 0, 0, (Sample(tokens_of(0, 0, 0, 3, 0), True),))
    flight = tuple(done._replace(prompt_id=i) for i in range(3))
    told: list[int] = []
    fake = Fake(1)
    complete, pool = partial.advance(flight, 2, LIMIT, fake, on_group=lambda number, group: told.append(number))
    assert (ids(complete), ids(pool), fake.calls, told) == ([0, 1], [2], 0, [0, 1])
    young = partial.begin([([1], 3), ([1], 4)], 1, 1)
    complete, pool = partial.advance((*young, *pool), 1, LIMIT, fake)
    assert (ids(complete), ids(pool), fake.calls) == ([2], [3, 4], 0)


@pytest.mark.parametrize("segment", [0, 16])
def test_each_trained_group_is_told_once_and_whole(segment: int) -> None:
    flight = partial.begin([([1], prompt) for prompt in range(12)], SAMPLES, 0)
    told: dict[int, Group] = {}

    def tell(number: int, group: Group) -> None:
        assert number not in told
        told[number] = group

    complete, _ = partial.advance(flight, WANTED, LIMIT, Fake(8), segment_tokens=segment, on_group=tell)
    assert tuple(told[number] for number in sorted(told)) == complete


@pytest.mark.parametrize("segment", [0, 1, 5, 16, 64])
def test_windows_of_all_that_is_in_flight(segment: int) -> None:
    """Every completion that is not done has one segment more, however long the others are, until each is whole."""
    strategy, pool, following, done, waited = Partial(1.0, segment, True), (), 0, dict[int, Group](), 0
    for step in range(100):
        new = range(following, following + (strategy.in_flight(WANTED) - len(pool) if step < 5 else 0))
        following += len(new)
        before = (*pool, *partial.begin([([i, 1], i) for i in new], SAMPLES, step))
        fake = Fake(7, step)
        after = partial.advance_all(before, LIMIT, fake, segment)
        assert ids(after) == ids(before)
        assert fake.calls == (1 if before else 0)
        for one, other in zip(before, after, strict=True):
            for number, (old, now) in enumerate(zip(one.samples, other.samples, strict=True)):
                whole = min(length_of(one.prompt_id, number), LIMIT)
                assert now.tokens.size == (min(whole, old.tokens.size + segment) if segment else whole)
                assert (now.tokens.policy_step == step).sum() == now.tokens.size - old.tokens.size
                waited += old.tokens.size == whole
        pool = tuple(group for group in after if group.unfinished(LIMIT))
        done |= {group.prompt_id: group for group in after if not group.unfinished(LIMIT)}
        if step >= 5 and not pool:
            break
    assert sorted(done) == list(range(following))
    assert (waited > 0) == (0 < segment < LIMIT), "a completion that is done waits for the others of its prompt"
    for group in done.values():
        for number, (tokens, _) in enumerate(group.samples):
            whole = min(length_of(group.prompt_id, number), LIMIT)
            assert tokens.token.tolist() == [token_of(group.prompt_id, number, place) for place in range(whole)]


def test_a_generator_that_loses_a_sample_of_a_window_is_caught() -> None:
    flight = partial.begin([([1], prompt) for prompt in range(2)], 2, 0)
    with pytest.raises(InputError, match="did not give back 1 of 4 requests"):
        partial.advance_all(flight, LIMIT, lambda requests, enough: list(Fake(4)(requests, enough))[:-1], 5)


def test_requests_go_on_where_samples_are() -> None:
    short, none = tokens_of(5, 0, 0, 3, 2), NO_TOKENS
    first = Group((8, 9), 5, 2, (Sample(short), Sample(short, True), Sample(none)))
    full = Sample(tokens_of(5, 0, 0, LIMIT, 2))
    flight = (first, first._replace(samples=(full, Sample(none), Sample(none))))
    requests, places = partial.requests_for(flight, LIMIT, segment_tokens=10)
    assert places == [(0, 0), (0, 2), (1, 1), (1, 2)]
    assert [(r.prompt, r.prompt_id, r.limit) for r in requests] == [((8, 9), 5, LIMIT)] * 4
    assert [r.sample for r in requests] == [0, 2, 4, 5], "a prompt that is in flight twice has other randomness"
    assert [(r.begun.size, r.pause_at) for r in requests] == [(3, 13), (0, 10), (0, 10), (0, 10)]
    assert {r.pause_at for r in partial.requests_for(flight, LIMIT)[0]} == {None}


def test_a_generator_that_loses_or_doubles_a_sample_is_caught() -> None:
    flight = partial.begin([([1], prompt) for prompt in range(2)], 2, 0)

    def losing(requests: Sequence[Request], enough: Enough) -> Iterator[Completion]:
        yield from list(Fake(4)(requests, enough))[:-1]

    def doubling(requests: Sequence[Request], enough: Enough) -> Iterator[Completion]:
        found = list(Fake(4)(requests, enough))
        yield from [*found, found[0]]

    with pytest.raises(InputError, match="did not give back 1 of 4 requests"):
        partial.advance(flight, 2, LIMIT, losing)
    with pytest.raises(InputError, match=r"gave request \d twice"):
        partial.advance(flight, 2, LIMIT, doubling)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"oversample": 0.9}, "oversample is 0.9, but must be at least 1"),
     ({"oversample": math.inf}, "finite"), ({"oversample": math.nan}, "finite"),
     ({"segment_tokens": -1}, "segment_tokens is -1"),
     ({"oversample": 1.5, "train_unfinished": True}, "oversample is 1.5, but each step trains on all")],
)  # fmt: skip
def test_numbers_out_of_range(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Partial(**wrong)


def test_groups_in_flight() -> None:
    assert [Partial(x).in_flight(8) for x in (1.0, 1.2, 2.0)] == [8, 10, 16]
    assert Partial(1.1).in_flight(10) == 11


@pytest.mark.parametrize("pool", [(), job(Partial(2.0), 3, slots=5)[-1].pool, partial.begin([([3, 4], 1)], 2, 0)])
def test_a_pool_comes_back_from_arrays(pool: Pool) -> None:
    arrays = partial.to_arrays(pool)
    back = partial.from_arrays(arrays)
    assert jax.tree.structure(back) == jax.tree.structure(pool)
    for x, y in zip(jax.tree.leaves(back), jax.tree.leaves(pool), strict=True):
        assert np.asarray(x).dtype == np.asarray(y).dtype
        np.testing.assert_array_equal(x, y)
    for name, x in partial.to_arrays(back).items():
        assert x.tobytes() == arrays[name].tobytes()
    assert partial.from_arrays({}) == ()


@pytest.mark.heavy
def test_rows_stay_busy_under_a_heavy_tail(vectors: Any) -> None:
    """The engine itself, over samples that end at given lengths: live row-steps of all row-steps, counted."""
    model = vectors("llama_tied")
    rng = np.random.default_rng(0)
    lengths = np.minimum(np.exp(rng.normal(math.log(8), 0.9, (400, 2))).astype(int) + 1, 96)
    sampling = Settings(seed_of(jax.random.key(0)), jnp.float32(1), None, None, jnp.asarray([-1], jnp.int32))
    weights = take_weights(model.policy, model.params)

    def occupancy(strategy: Partial, steps: int) -> float:
        pool, following, runs = (), 0, list[Stats]()
        for step in range(steps):
            prompts = [([5, i % 250, 7], i) for i in range(following, following + strategy.in_flight(8) - len(pool))]
            following += len(prompts)

            def generate(requests: Sequence[Request], enough: Enough, step: int = step) -> Iterator[Completion]:
                runs.append(Stats())
                length = [int(lengths[r.prompt_id, r.sample]) for r in requests]
                asked = [replace(r, pause_at=n) for r, n in zip(requests, length, strict=True)]

                def ends(c: Completion) -> Completion:
                    return replace(c, ended=c.tokens.size == length[c.index])

                for completion in engine.stream(
                    model.policy, weights, asked, sampling, slots=8, chunk=4, policy_step=step, stats=runs[-1],
                    enough=lambda c: enough(ends(c)),
                ):  # fmt: skip
                    yield ends(completion)

            complete, pool = partial.advance((*pool, *partial.begin(prompts, 2, step)), 8, 96, generate)
            for group in complete:
                assert [s.tokens.size for s in group.samples] == lengths[group.prompt_id].tolist()
        return sum(run.live for run in runs) / sum(run.rows * run.steps for run in runs)

    assert occupancy(Partial(2.0), 6) >= 0.9
    assert occupancy(Partial(), 6) < 0.8
