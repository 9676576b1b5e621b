"""Dyna-GRPO: the worked example, a loop over both kinds of groups, and the limit of GRPO."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from batches import advantages, batch_of, finite_differences, gradient_of, loss_of, prepared, random_batch

from jaxrl_llm.algorithms import get
from jaxrl_llm.utils.errors import InputError

STANDARD, REFINED = [10.0, 0, 0, 10], [10.0, 9.5, 0, 10]


def test_dyna_grpo_worked_example_and_loop() -> None:
    """The card's; then the loss and its gradient of such a group beside an ordinary one, by a loop."""
    mask = np.ones((8, 2), bool)
    marks = np.repeat([0.0, 1.0], 4)
    group = batch_of(mask, STANDARD + REFINED, -np.ones((8, 2)), info={"refined": marks})
    found = advantages(get("dyna_grpo"), group)
    np.testing.assert_array_equal(found[4:, 0], [1, 1, 0, 1])
    weights = np.asarray(prepared(get("dyna_grpo"), group).loss_weights)
    np.testing.assert_array_equal(weights, np.repeat(marks, 2).reshape(8, 2))

    batch, logp = random_batch(5, (8, 4))
    scores = np.array([*STANDARD, *REFINED, 1.0, 0.0, 2.0, 0.0])
    batch = batch.replace(reward=jnp.asarray(scores, jnp.float32))
    batch = batch.with_info(refined=jnp.asarray([*marks, 0, 0, 0, 0]))
    A = np.array([0, 0, 0, 0, 1, 1, 0, 1, *((scores[8:] - scores[8:].mean()) / (scores[8:].std(ddof=1) + 1e-6))])
    mask, old, reference = (
        np.asarray(x, np.float64) for x in (batch.action_mask, batch.old_logp, batch.reference_logp)
    )

    def slow(at: np.ndarray) -> float:
        total, rows = 0.0, range(4, 12)
        for i in rows:
            places = np.flatnonzero(mask[i])
            own = 0.0
            for t in places:
                ratio, l = np.exp(at[i, t] - old[i, t]), at[i, t] - reference[i, t]
                own += min(ratio * A[i], np.clip(ratio, 0.8, 1.2) * A[i]) - 0.1 * (np.exp(-l) - 1 + l)
            total += own / len(places)
        return float(-total / len(rows))

    method = get("dyna_grpo", kl_coefficient=0.1)
    assert loss_of(method, batch, logp) == pytest.approx(slow(logp), abs=1e-5)
    np.testing.assert_allclose(gradient_of(method, batch, logp), finite_differences(slow, logp), atol=1e-5)


def test_without_refined_episodes_it_is_grpo() -> None:
    """Bit by bit; and so is a group of ordinary episodes beside one with refined ones."""
    batch, logp = random_batch(3)
    options: dict[str, Any] = {"kl_coefficient": 0.0}
    none = batch.with_info(refined=jnp.zeros(batch.group.shape))
    for one in (batch, none):
        mine = gradient_of(get("dyna_grpo", revealed="kept", **options), one, logp)
        np.testing.assert_array_equal(mine, gradient_of(get("grpo", **options), batch, logp))
    some = batch.with_info(refined=jnp.where(batch.group == 1, 1.0, 0.0))
    other = np.asarray(batch.group) != 1
    found = advantages(get("dyna_grpo"), some)
    np.testing.assert_array_equal(found[other], advantages(get("grpo"), batch)[other])
    assert set(found[~other].ravel().tolist()) <= {0.0, 1.0}


def test_rows_of_one_episode_count_once_and_unscored_ones_not() -> None:
    """The ordinary mean is 4; the refined episodes have 6 (in three rows), 3 and no score: 6 > max(4, 4.5)."""
    scores = [4.0, 4.0, 6.0, 6.0, 6.0, 3.0, np.nan]
    info = {
        "refined": np.array([0, 0, 1, 1, 1, 1, 1.0]), "episode": np.array([0, 1, 2, 2, 2, 3, 4.0]),
        "first_turn": np.array([0, 0, 0, 1, 2, 0, 0.0]),
    }  # fmt: skip
    batch = batch_of(np.ones((7, 1), bool), scores, -np.ones((7, 1)), info=info)
    np.testing.assert_array_equal(advantages(get("dyna_grpo"), batch)[:, 0], [0, 0, 1, 1, 1, 0, 0])
    # A mean of 6 is not exceeded.
    even = batch.replace(reward=jnp.asarray([4.0, 4, 6, 6, 6, 6, np.nan]))
    assert not advantages(get("dyna_grpo"), even).any()
    # A failure is no success, however bad the others are.
    worse = batch.replace(reward=jnp.asarray([-4.0, -4, 0, 0, 0, -6, np.nan]))
    assert not advantages(get("dyna_grpo"), worse).any()


def test_what_does_not_fit() -> None:
    for options, words in (
        ({"revealed": "some"}, "revealed"),
        ({"depth": 0}, "depth"),
        ({"policy_steps": 0, "simulation_steps": 0}, "one of the phases"),
    ):
        with pytest.raises(InputError, match=words):
            get("dyna_grpo", **options)
