"""Which groups of second prompts a step keeps."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.algorithms.guidance.zppo import superfluous_parts
from jaxrl_llm.core.trajectory import Trajectories


def batch_of(group: np.ndarray, part: np.ndarray, solved: np.ndarray, empty: np.ndarray) -> Trajectories:
    N = len(group)
    zeros = jnp.zeros((N, 1))
    return Trajectories(
        tokens=zeros.astype(int), token_mask=zeros == 0, action_mask=jnp.asarray(~empty[:, None]), behaviour_logp=zeros,
        policy_step=zeros.astype(int), turn=zeros.astype(int), group=jnp.asarray(group), prompt_id=jnp.asarray(group),
        truncated=jnp.zeros(N, bool), info={"part": jnp.asarray(part), "solved": jnp.asarray(solved)},
    )  # fmt: skip


@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.25, 0.5, 2.0]))
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
def test_the_hardest_problems_come_first(seed: int, share: float) -> None:
    """Against a loop over sorted groups; the order of rows and rows without actions change nothing."""
    random = np.random.default_rng(seed)
    groups = [(float(p), float(random.integers(3)) / 4) for p in range(3) for _ in range(4)]  # part, mean reward
    plain = 4
    group = random.permutation(np.repeat(np.arange(13), 2))
    empty = group == 12  # a plain group that fills up the batch
    part, solved = np.array([*(p for p, _ in groups), 0.0])[group], np.array([*(s for _, s in groups), 0.0])[group]
    second = sorted((s, p, g) for g, (p, s) in enumerate(groups) if p > 0)
    dropped = {g for _, _, g in second[int(share * plain) :]}
    found = superfluous_parts(batch_of(group, part, solved, empty), share)
    np.testing.assert_array_equal(found, [g in dropped for g in group])


def test_without_second_prompts_all_rows_stay() -> None:
    zeros = np.zeros(4)
    assert not superfluous_parts(batch_of(np.arange(4), zeros, zeros, zeros > 0), 0.0).any()
    bare = batch_of(np.arange(4), zeros, zeros, zeros > 0).replace(info=None)
    assert not superfluous_parts(bare, 0.0).any()
