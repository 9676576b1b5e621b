"""ICPO and AMPO: worked examples, loops, and what is left without guided rows."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from batches import advantages, gradient_of, loss_of, outputs_of, prepared, random_batch
from reward_loops import assert_like_loop, group_scores, rows_of

from jaxrl_llm.algorithms.group_relative import grpo
from jaxrl_llm.algorithms.guided import ampo_multi_guidance, icpo_in_context

BATCH, LOGP = random_batch(11)
GROUP, REWARD = np.asarray(BATCH.group), np.asarray(BATCH.reward, np.float64)
N = len(GROUP)
MASK = np.asarray(BATCH.action_mask)


def test_icpo_worked_example() -> None:
    batch = rows_of([1, 0, 0, 0, 1, 0, 0, 1], info={"guided": np.arange(8) == 7})
    found = prepared(icpo_in_context(epsilon=0.0), batch)
    assert float(found.reward[7]) == 2.0
    expected = [0.661438, *[-0.661438] * 3, 0.661438, *[-0.661438] * 2, 1.984313]
    np.testing.assert_allclose(found.advantages[:8, 0], expected, rtol=0, atol=1.5e-6)


def test_icpo_against_a_loop() -> None:
    helped = np.isin(np.arange(N), [0, 1, 5, 6, 10])
    kept = ~(helped & (REWARD < 1))
    assert 0 < kept.sum() < N
    assert (helped & kept).any()
    r = np.where(kept, REWARD + 0.75 * (helped & kept), np.nan)
    batch = BATCH.with_info(guided=jnp.asarray(helped))
    method = icpo_in_context(bonus=0.75)
    options = {"dual": 3.0, "kl": 0.001, "weights": kept, "guided": helped}
    assert_like_loop(method, batch, LOGP, group_scores(r, GROUP), **options)
    unrejected = group_scores(REWARD + 0.75 * (helped & kept), GROUP)
    np.testing.assert_allclose(
        advantages(icpo_in_context(bonus=0.75, reject=False), batch), unrejected[:, None] * MASK, atol=1e-5
    )


def test_the_bonus_decays_over_the_run() -> None:
    method = icpo_in_context(total_steps=4)
    batch = BATCH.with_info(guided=jnp.ones(N, bool))
    best, state = [], method.transform.init()
    for _ in range(6):
        state, ready = method.transform.apply(state, batch)
        best.append(float(np.nanmax(ready.reward)))
    assert best == [2.0, 1.75, 1.5, 1.25, 1.0, 1.0]


def test_ampo_worked_example() -> None:
    batch = rows_of(np.zeros(8), info={"guided": np.arange(8) < 2})
    found = advantages(ampo_multi_guidance(), batch)
    np.testing.assert_allclose(found[:8, 0], [0.75] * 2 + [-0.25] * 6, atol=1e-6)
    # One sequence of a teacher and one of the policy's own, with given advantages.
    logp = np.zeros((11, 6))
    logp[0, :3], logp[1, :2] = np.log([0.05, 0.5, 0.9]), np.log(0.5)
    pair = rows_of([1, 0], [3, 2], logp[:2], info={"guided": np.array([True, False])})
    pair = pair.replace(advantages=jnp.asarray([0.75, -0.25, *[0] * 9])[:, None] * pair.action_mask)
    for over, expected in (("sequences", -0.131250), ("batch", -0.262500)):
        objective = ampo_multi_guidance(over=over, entropy_coefficient=0.0, max_length=4).objective
        assert abs(float(objective(outputs_of(logp), pair)[0]) - expected) < 1e-6


def test_ampo_against_a_loop() -> None:
    reward = np.where(GROUP == 1, 0.0, REWARD)  # of this group, the policy solves nothing by itself
    helped = np.isin(np.arange(N), [0, 5, 6])
    shown = helped & (GROUP == 1)
    assert (reward[(GROUP == 0) & ~helped] == 1).any()
    left_out = helped & (GROUP != 1)
    r = np.where(left_out, np.nan, np.where(shown, 1.0, reward))
    batch = BATCH.replace(reward=jnp.asarray(reward, jnp.float32)).with_info(guided=jnp.asarray(helped[:, None] & MASK))
    method = ampo_multi_guidance(max_length=6, entropy_coefficient=0.0)
    options = {"dual": 10.0, "weights": ~left_out, "guided": shown, "average": "constant", "length": 6.0}
    assert_like_loop(method, batch, LOGP, group_scores(r, GROUP, scale=False), **options)
    entropy = np.full(MASK.shape, 2.0)
    bonus = loss_of(method, batch, LOGP) - loss_of(ampo_multi_guidance(max_length=6), batch, LOGP, entropy)
    assert abs(bonus - 0.002) < 1e-6


def test_without_guided_rows_they_are_methods_of_the_policys_own() -> None:
    np.testing.assert_allclose(advantages(icpo_in_context(), BATCH), advantages(grpo(), BATCH), atol=1e-6)
    expected = -advantages(grpo(), BATCH) / MASK.sum()
    found = gradient_of(icpo_in_context(kl_coefficient=0.0), BATCH, BATCH.behaviour_logp)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    expected = -advantages(grpo(scale="none"), BATCH) / (N * 6)
    found = gradient_of(ampo_multi_guidance(max_length=6), BATCH, BATCH.behaviour_logp)
    np.testing.assert_allclose(found, expected, atol=1e-6)
