"""Curricula in epochs: what they draw is the shuffled stream without what rules leave out."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from choosing import Ran, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.core.source import MakeCurriculum
from jaxrl_llm.curriculum.budgets import by_failure, divide
from jaxrl_llm.curriculum.compose import in_epochs
from jaxrl_llm.curriculum.scores import drop_solved, least_tried
from jaxrl_llm.rollouts.runtime.source_setup import ExperienceState, loaded, saved
from jaxrl_llm.rollouts.runtime.sources import shuffled_epochs
from jaxrl_llm.sampling.speculative.drafts import Drafts
from jaxrl_llm.utils.errors import InputError

ROWS = rows_of(7)


@pytest.mark.heavy
@given(st.integers(0, 99), st.integers(1, 9), st.integers(0, 7), st.booleans())
@settings(max_examples=8, deadline=None, derandomize=True, database=None)
def test_it_is_the_stream_without_what_was_solved(seed: int, count: int, hard: int, at_end: bool) -> None:
    """Prompts from `hard` on are solved each time; where all are, all come back."""
    ran = Ran(
        in_epochs(drop_solved(), at_end=at_end, restart=True), ROWS, lambda i, step: float(i >= hard), 12,
        prompts=count, seed=seed,
    )  # fmt: skip
    plain = shuffled_epochs(ROWS, seed)
    place, drawn, out, solved, restarts = plain.init(), 0, set[int](), set[int](), 0
    for ids in ran.ids:
        expected = list[int]()
        while len(expected) < count:
            if not at_end or drawn % 7 == 0:
                restarts += len(solved) == 7
                solved = set() if len(solved) == 7 else solved
                out = set(solved)
            (one,), place = plain.select(place, 1)
            drawn += 1
            expected += [int(one)] if int(one) not in out else []
        assert ids == expected
        solved |= {i for i in ids if i >= hard}
    assert ran.metrics["curriculum/restarts"] == restarts
    assert ran.metrics["curriculum/left_out/solved"] == len(out if at_end else solved) / 7


@pytest.mark.parametrize(
    "make", [in_epochs(divide(by_failure), drop_solved(back=3)), in_epochs(drop_solved(0.5), at_end=True, restart=True)]
)
def test_a_resumed_run_draws_the_same(make: MakeCurriculum) -> None:
    options: Any = {"prompts": 3}
    whole, half = (Ran(make, ROWS, lambda i, step: i / 6, steps, **options) for steps in (12, 5))
    kept, arrays = saved(ExperienceState(half.state, {}, (), Drafts()))
    state = loaded(json.loads(json.dumps(kept)), arrays).curriculum
    rest = Ran(make, ROWS, lambda i, step: i / 6, 7, state=state, begin=5, **options)
    assert half.ids + rest.ids == whole.ids
    assert half.counts + rest.counts == whole.counts
    assert rest.metrics == whole.metrics
    with pytest.raises(InputError, match="state is of 7 prompts, but the set has 6"):
        make(ROWS[:6], 0).select(state, 0)
    with pytest.raises(InputError, match="cannot resume the prompt stream: rows was 7, and is now 8"):
        make(rows_of(8), 0).select(state, 0)


def test_samples_can_be_divided_but_not_prompts_scored() -> None:
    ran = Ran(in_epochs(divide(by_failure)), ROWS, lambda i, step: float(i % 2), 14, prompts=3)
    late = {
        i: n for ids, counts in zip(ran.ids[8:], ran.counts[8:], strict=True) for i, n in zip(ids, counts, strict=True)
    }
    assert np.mean([late[i] for i in late if i % 2 == 0]) > np.mean([late[i] for i in late if i % 2])
    with pytest.raises(InputError, match="leave out rules that score prompts"):
        in_epochs(least_tried())(ROWS, 0)
