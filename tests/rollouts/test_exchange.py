"""Rounds on several hosts: the same groups, tokens and pool as on one."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from fake_engine import Ran, begin
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_hosts import on_hosts

from jaxrl_llm.distributed.hosts import ALONE, Hosts
from jaxrl_llm.rewards.scoring import Scored
from jaxrl_llm.rollouts.runtime.admission import Collected, Rule, admit_first
from jaxrl_llm.rollouts.runtime.collate import to_batch
from jaxrl_llm.rollouts.runtime.multihost_gather import admit_on, combined_stats, of_all_hosts
from jaxrl_llm.rollouts.runtime.replay_log import Pool
from jaxrl_llm.sampling.sampler import SamplingConfig
from jaxrl_llm.sampling.stats import Stats

batch_of = partial(to_batch, sampling=SamplingConfig(), step=0)


def scored(found: Collected) -> Scored | None:
    """A reward for each episode that is its own, and a text."""
    if not found.groups:
        return None
    batch = batch_of(found.groups)
    reward: Any = np.asarray(batch.tokens).sum(axis=1).astype(np.float32)
    rewards: Any = {"sum": reward, "half": reward / 2}
    return Scored(batch.replace(reward=reward, rewards=rewards), [str(x) for x in reward], {"sum": 1, "half": 0})


def a_round(flight: Pool, rule: Rule, hosts: Hosts = ALONE) -> tuple[Collected, Scored | None]:
    places = hosts.share(range(len(flight)))
    admit = admit_first if hosts.count == 1 else admit_on(hosts, places)
    found = Ran(tuple(flight[place] for place in places), rule, admit=admit).found
    return (found, scored(found)) if hosts.count == 1 else of_all_hosts(hosts, places, found, scored(found), batch_of)


rules = st.one_of(st.just(Rule()), st.builds(Rule, st.sampled_from([1, 3, 6]), st.sampled_from([0, 4, 16])))


@settings(max_examples=30, deadline=None)
@given(count=st.integers(2, 4), groups=st.integers(1, 9), rule=rules)
def test_all_hosts_have_what_one_would_have(count: int, groups: int, rule: Rule) -> None:
    flight = begin(range(groups), 2)
    alone, whole = a_round(flight, rule)
    for found, both in on_hosts(count, partial(a_round, flight, rule)):
        assert [one.task.prompt_id for one in found.groups] == [one.task.prompt_id for one in alone.groups]
        assert [log.prompt_id for log in found.left] == [log.prompt_id for log in alone.left]
        assert (found.places, found.left_places) == (alone.places, alone.left_places)
        for log, other in zip(found.left, alone.left, strict=True):
            assert log.drawn.keys() == other.drawn.keys()
            for call, answer in log.drawn.items():
                np.testing.assert_array_equal(answer.tokens.token, other.drawn[call].tokens.token)
        assert both is not None
        assert whole is not None
        assert both.texts == whole.texts
        for name, x in vars(whole.batch).items():
            y = getattr(both.batch, name)
            assert (x is None) == (y is None), name
            if name == "rewards":
                assert all((x[key] == y[key]).all() for key in x)
            elif x is not None:
                np.testing.assert_array_equal(x, y, err_msg=name)
        assert both.failures["sum"] == min(count, len({place % count for place in alone.places}))


def test_windows_need_no_exchange_while_they_are_sampled() -> None:
    rule = Rule(None, 8, train_unfinished=True)
    flight = begin(range(5), 2)
    alone, _ = a_round(flight, rule)
    for found, _ in on_hosts(2, partial(a_round, flight, rule)):
        assert [one.unfinished for one in found.groups] == [one.unfinished for one in alone.groups]
        assert [log.prompt_id for log in found.left] == [log.prompt_id for log in alone.left]


def test_counts_of_engines_side_by_side() -> None:
    """Tokens add up, the time is that of the slowest, and a host without an engine in a segment adds nothing."""
    one = Stats(rows=4, steps=10, live=30, tokens=34, seconds=2.0, first_token=0.5)
    two = Stats(rows=4, steps=20, live=50, tokens=54, seconds=3.0, first_token=0.2)
    first, second = combined_stats([[one, one], [two], []])
    assert (first.rows, first.steps, first.tokens, first.seconds, first.first_token) == (8, 20, 88, 3.0, 0.5)
    assert first.occupancy == pytest.approx(80 / 160)
    assert (second.tokens, second.seconds) == (34, 2.0)
