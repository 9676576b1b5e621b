"""The bound on staleness: for all orders in which groups become complete, each step is full and no group too old."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm.rollouts.asynchronous.staleness import SPARE, WAIT, Ahead, Waiting, adjusted, in_flight, taken
from jaxrl_llm.rollouts.runtime.replay_log import GroupKey

STEPS = 9


@given(
    pick=st.randoms(use_true_random=False), wanted=st.integers(1, 3), bound=st.integers(1, 4),
    replaced=st.floats(0, 0.9), slow=st.integers(0, 3),
)  # fmt: skip
def test_every_step_is_full_and_no_group_is_too_old(
    pick: random.Random, wanted: int, bound: int, replaced: float, slow: int
) -> None:
    """Groups become complete in any order, so many as a step needs at least; some are replaced by new ones.

    How far the sampler is ahead changes at random.

    slow: of the first groups, which are complete only when nothing else is left that could be.
    """
    waiting, place, chunk, learned = list[Waiting](), 0, 0, 0

    def come(count: int, step: int) -> None:
        nonlocal place
        for _ in range(count):
            waiting.append(Waiting(GroupKey(place, step, 0), place))
            place += 1

    for step in range(STEPS):
        here = max(in_flight(step, pick.randint(1, bound), wanted, STEPS), len(waiting))
        come(here - len(waiting), step)
        count = wanted
        while count:
            assert len(waiting) == here - (wanted - count)
            while (keys := taken(waiting, step, bound, count, wanted)) is None:
                running = [i for i, one in enumerate(waiting) if one.ended is None]
                fast = [i for i in running if waiting[i].place >= slow]
                chunk += pick.random() < 0.7
                chosen = pick.choice(fast or running)
                waiting[chosen] = waiting[chosen]._replace(ended=chunk)
            assert len(set(keys)) == count
            assert all(step - key.first_step <= bound for key in keys)
            ended = {one.key: one.ended for one in waiting}
            assert all(ended[key] is not None for key in keys)
            waiting[:] = [one for one in waiting if one.key not in keys]
            lost = sum(pick.random() < replaced for _ in keys)
            learned += count - lost
            come(lost, step)
            count = lost
    assert learned == wanted * STEPS
    assert not waiting


def test_it_takes_what_is_complete_first_where_older_groups_have_time() -> None:
    """Three groups of step 0 must be taken by step 2, and a step takes one: not more than one newer one comes first."""
    old = [Waiting(GroupKey(i, 0, 0), i) for i in range(2)]
    new = Waiting(GroupKey(2, 1, 0), 2, ended=5)
    assert taken([old[0], new], 1, 2, 1, later=1) == [new.key]
    assert taken([*old, new], 1, 2, 1, later=1) is None
    old[1] = old[1]._replace(ended=9)
    assert taken([*old, new], 1, 2, 1, later=1) == [old[1].key]


@given(
    bound=st.integers(1, 4), wanted=st.integers(1, 3),
    steps=st.lists(st.tuples(st.integers(0, 12), st.floats(0, 1)), max_size=30),
)  # fmt: skip
def test_how_far_the_sampler_is_ahead(bound: int, wanted: int, steps: list[tuple[int, float]]) -> None:
    """From 1 to the bound; one more after a wait alone, and one less after two steps in a row with groups to spare."""
    ahead, spares = Ahead(), 0
    for complete, waited in steps:
        before, ahead = ahead, adjusted(ahead, bound, complete, wanted, waited)
        assert 1 <= ahead.steps <= bound
        spares = spares + 1 if complete >= 2 * wanted and waited <= WAIT else 0
        if waited > WAIT:
            assert ahead.steps == min(before.steps + 1, bound)
        elif spares == SPARE:
            assert ahead.steps == max(before.steps - 1, 1)
            spares = 0
        else:
            assert ahead.steps == before.steps
