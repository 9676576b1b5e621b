"""The curriculum of prompts that are not solved: it never draws what it dropped, and its state is all it knows."""

from __future__ import annotations

import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.algorithms.guidance.nurl import all_succeed, solved_prompts
from jaxrl_llm.core.source import Curriculum, Step
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.curriculum.compose import in_epochs
from jaxrl_llm.curriculum.scores import drop_solved
from jaxrl_llm.rewards.scoring import Scored
from jaxrl_llm.rollouts.runtime.source_setup import ExperienceState, loaded, saved
from jaxrl_llm.rollouts.runtime.sources import shuffled_epochs
from jaxrl_llm.sampling.speculative.drafts import Drafts
from jaxrl_llm.utils.errors import InputError

ROWS: list[dict[str, Any]] = [{"prompt": str(i)} for i in range(6)]


def step_of(ids: Any, reward: Any, guided: Any = None, order: Any = None) -> Step:
    """Two samples of each prompt, rewards [n, 2]."""
    prompt, scores = np.repeat(ids, 2), np.ravel(reward).astype(np.float32)
    group = np.repeat(np.arange(len(ids)), 2)
    info = None if guided is None else {"guided": np.ravel(guided).astype(np.float32)}
    order = np.arange(len(prompt)) if order is None else order
    mask: Any = np.ones((len(prompt), 2), bool)
    zeros: Any = np.zeros(mask.shape, np.int32)
    batch = Trajectories(
        tokens=jnp.zeros((len(prompt), 2), jnp.int32), token_mask=mask, action_mask=mask,
        behaviour_logp=jnp.zeros(mask.shape), policy_step=zeros, turn=zeros, group=group[order],
        prompt_id=prompt[order], truncated=mask[:, 0], reward=scores[order],
        info=None if info is None else {"guided": info["guided"][order]}, rewards={"right": 1 - scores[order]},
    )  # fmt: skip
    return Step(Scored(batch, [""] * len(prompt), {}), [], {})


def made(**options: Any) -> Curriculum:
    return in_epochs(drop_solved(measure=all_succeed(), **options))(ROWS, 3)


def restored(state: Any) -> Any:
    """As a checkpoint restores it."""
    kept, arrays = saved(ExperienceState(state, {}, (), Drafts()))
    return loaded(json.loads(json.dumps(kept)), {name: value * 1 for name, value in arrays.items()}).curriculum


def dropped(curriculum: Curriculum, state: Any) -> list[int]:
    assert curriculum.excluded is not None
    return np.flatnonzero(curriculum.excluded(state)).tolist()


@given(st.lists(st.tuples(st.integers(1, 4), st.lists(st.booleans(), min_size=8, max_size=8)), max_size=8))
@settings(max_examples=12, deadline=None, derandomize=True, database=None)
def test_what_is_solved_is_never_drawn_again(history: list[tuple[int, list[bool]]]) -> None:
    curriculum, solved = made(), set[int]()
    state, again = curriculum.init(), curriculum.init()
    for count, right in history:
        if len(solved) == len(ROWS):
            with pytest.raises(InputError, match="the policy solves every prompt"):
                curriculum.select(state, count)
            return
        ids, state = curriculum.select(state, count)
        same, again = curriculum.select(restored(again), count)
        assert ids.tolist() == same.tolist()
        assert len(ids) == count
        assert not solved & set(ids.tolist())
        reward = np.asarray(right[: 2 * count], float).reshape(count, 2)
        before = dropped(curriculum, state)
        order = np.random.default_rng(count).permutation(2 * count)
        after = curriculum.observe(state, step_of(ids, reward))
        assert dropped(curriculum, state) == before, "a state is not changed"
        other = curriculum.observe(state, step_of(ids, reward, order=order))
        assert dropped(curriculum, after) == dropped(curriculum, other), "the order of rows does not matter"
        solved |= {int(i) for i, both in zip(ids, reward, strict=True) if both.all()}
        assert curriculum.metrics(after) == {"curriculum/left_out/solved": len(solved) / len(ROWS)}
        assert set(dropped(curriculum, after)) == solved
        state, again = after, curriculum.observe(again, step_of(ids, reward))


def test_with_nothing_solved_it_is_the_stream() -> None:
    curriculum, stream = made(), shuffled_epochs(ROWS, 3)
    state, other = curriculum.init(), stream.init()
    for count in (4, 3, 7, 0, 2):
        ids, state = curriculum.select(state, count)
        expected, other = stream.select(other, count)
        assert ids.tolist() == expected.tolist()
        state = curriculum.observe(state, step_of(ids, np.zeros((count, 2))))


def test_what_counts_as_solved() -> None:
    one = step_of([4, 2, 1], [[1, 1], [1, 1], [1, 0]], [[0, 0], [0, 1], [0, 0]]).scored.batch
    assert solved_prompts(one, 0.0).tolist() == [4], "with a hint it is not solved"
    assert solved_prompts(one, 1.0).tolist() == []
    assert solved_prompts(one, 0.0, "right").tolist() == []
    late = made(start=1)
    state = late.observe(late.init(), step_of([4], [[1, 1]]))
    assert dropped(late, state) == [], "before its first step"
    assert dropped(late, late.observe(state, step_of([4], [[1, 1]]))) == [4]
