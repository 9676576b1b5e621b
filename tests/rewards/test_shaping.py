"""The soft overlong penalty."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.rewards.transforms import overlong_penalty, soft_overlong_penalty
from jaxrl_llm.utils.errors import InputError


def batch_of(lengths: list[int], reward: Any, width: int = 12) -> Trajectories:
    """Rows of a prompt of two tokens, then completions of the given lengths."""
    N = len(lengths)
    place = np.arange(width)
    mask = jnp.asarray((place >= 2) & (place < 2 + np.array(lengths)[:, None]))
    zeros, row = jnp.zeros((N, width), jnp.int32), jnp.zeros(N, jnp.int32)
    reward = None if reward is None else jnp.asarray(reward, jnp.float32)
    return Trajectories(
        zeros, zeros == 0, mask, jnp.zeros((N, width)), zeros, zeros, row, row, jnp.zeros(N, bool), reward=reward
    )


def test_values_of_the_paper() -> None:
    # 20480 tokens at most of which the last 4096 are punished.
    lengths = jnp.array([0, 100, 16384, 17408, 18432, 20479, 20480, 30000])
    np.testing.assert_allclose(
        overlong_penalty(lengths, 20480, 4096), [0, 0, 0, -0.25, -0.5, -4095 / 4096, -1, -1], rtol=1e-6
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(length=st.integers(0, 300), most=st.integers(1, 200), share=st.floats(0.01, 1))
def test_it_is_the_equation_of_three_cases(length: int, most: int, share: float) -> None:
    buffer = max(1, int(most * share))
    if length <= most - buffer:
        expected = 0.0
    elif length <= most:
        expected = ((most - buffer) - length) / buffer
    else:
        expected = -1.0
    assert float(overlong_penalty(jnp.array(length), most, buffer)) == pytest.approx(expected, abs=1e-6)


def test_the_transform_adds_it_to_the_reward() -> None:
    transform = soft_overlong_penalty(max_tokens=10, buffer=4)
    batch = batch_of([0, 6, 7, 10], [1.0, 1.0, 0.5, 0.0])
    state, shaped = jax.jit(transform.apply)(transform.init(), batch)
    assert state == ()
    np.testing.assert_allclose(shaped.reward, [1, 1, 0.25, -1])
    assert batch.reward.tolist() == [1, 1, 0.5, 0], "the batch that went in is as it was"


def test_what_was_not_scored_stays_so() -> None:
    _, shaped = soft_overlong_penalty(10, 4).apply((), batch_of([10, 1], [np.nan, 1.0]))
    assert np.isnan(shaped.reward[0])
    assert float(shaped.reward[1]) == 1


@pytest.mark.parametrize(("most", "buffer"), [(10, 0), (10, -1), (10, 11)])
def test_a_buffer_out_of_range_is_refused(most: int, buffer: int) -> None:
    with pytest.raises(InputError, match=rf"buffer.* is {buffer}, but must be"):
        soft_overlong_penalty(most, buffer)


def test_a_batch_without_rewards_is_refused() -> None:
    with pytest.raises(InputError, match="no rewards"):
        soft_overlong_penalty(10, 4).apply((), batch_of([1], None))
