"""ICPO and AMPO: worked examples, loops, and the special case without guided rows."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from batches import advantages, finite_differences, gradient_of, loss_of, outputs_of, prepared, random_batch
from reward_loops import assert_like_loop, group_scores, rows_of

from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.guidance.ampo_multi_guidance import ampo_multi_guidance
from jaxrl_llm.algorithms.guidance.icpo_in_context import icpo_in_context

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
    found = advantages(ampo_multi_guidance(scale="none"), batch)
    np.testing.assert_allclose(found[:8, 0], [0.75] * 2 + [-0.25] * 6, atol=1e-6)
    # One sequence of a teacher and one of the policy's own, with given advantages.
    logp = np.zeros((11, 6))
    logp[0, :3], logp[1, :2] = np.log([0.05, 0.5, 0.9]), np.log(0.5)
    pair = rows_of([1, 0], [3, 2], logp[:2], info={"guided": np.array([True, False])})
    pair = pair.replace(advantages=jnp.asarray([0.75, -0.25, *[0] * 9])[:, None] * pair.action_mask)
    # By kinds: the mean of f(p) over the teacher's three tokens, and that of -A over the other two.
    by_kinds = -0.75 * (1 / 3 + 5 / 6 + 0.9) / 3 + 0.25
    for over, expected in (("kinds", by_kinds), ("batch", -0.262500)):
        objective = ampo_multi_guidance(over=over, max_length=4).objective
        ready = objective.refreshed(outputs_of(logp), pair)
        assert abs(float(objective(outputs_of(logp), ready)[0]) - expected) < 1e-6


@pytest.mark.parametrize("choice", ["paper", "code"])
def test_ampo_against_a_loop(choice: str) -> None:
    reward = np.where(GROUP == 1, 0.0, REWARD)  # of this group, the policy solves nothing by itself
    helped = np.isin(np.arange(N), [0, 5, 6])
    shown = helped & (GROUP == 1)
    assert (reward[(GROUP == 0) & ~helped] == 1).any()
    left_out = helped & (GROUP != 1)
    r = np.where(left_out, np.nan, np.where(shown, 1.0, reward))
    batch = BATCH.replace(reward=jnp.asarray(reward, jnp.float32)).with_info(guided=jnp.asarray(helped[:, None] & MASK))
    method = ampo_multi_guidance(max_length=6, preset=choice)
    A, old = group_scores(r, GROUP, scale=choice == "paper"), np.asarray(BATCH.behaviour_logp, np.float64)
    np.testing.assert_allclose(advantages(method, batch), A[:, None] * MASK, rtol=2e-5, atol=3e-6)

    def loop(logp: np.ndarray) -> float:
        taught, own, tokens = [], [], 0
        for i in range(N):
            if left_out[i]:
                continue
            x, y = logp[i][MASK[i]], old[i][MASK[i]]
            if shown[i]:
                f = np.exp(x) / (np.exp(x) + 0.1) * A[i]
                taught.append(f.mean() if choice == "paper" else f.sum())
                continue
            rho = np.exp(x - y)
            terms = np.minimum(rho * A[i], np.clip(rho, 0.8, 1.2) * A[i])
            own.append((np.maximum(terms, 10 * A[i]) if choice == "code" and A[i] < 0 else terms).sum())
            tokens += len(x)
        return -sum(taught) / len(taught) - sum(own) / tokens if choice == "paper" else -(sum(taught) + sum(own)) / 6

    assert abs(loss_of(method, batch, LOGP) - loop(LOGP)) < 2e-6
    np.testing.assert_allclose(gradient_of(method, batch, LOGP), finite_differences(loop, LOGP), atol=2e-6)
    bonus = loop(LOGP) - loss_of(method, batch, LOGP, np.full(MASK.shape, 2.0))
    assert abs(bonus - (0.002 if choice == "code" else 0.0)) < 2e-6


def test_without_guided_rows_they_are_methods_of_the_policys_own() -> None:
    np.testing.assert_allclose(advantages(icpo_in_context(), BATCH), advantages(grpo(), BATCH), atol=1e-6)
    expected = -advantages(grpo(), BATCH) / MASK.sum()
    found = gradient_of(icpo_in_context(kl_coefficient=0.0), BATCH, BATCH.behaviour_logp)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    expected = -advantages(grpo(), BATCH) / MASK.sum()
    found = gradient_of(ampo_multi_guidance(), BATCH, BATCH.behaviour_logp)
    np.testing.assert_allclose(found, expected, atol=1e-6)
