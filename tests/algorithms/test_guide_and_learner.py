"""Losses of responses that a learner and a guide wrote, by loops in double precision."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_actor_critic
from batches import loss_of, outputs_of, prepared
from test_actor_critic import check, critic_batch, gae_loop, whiten_loop

from jaxrl_llm.algorithms.classic.ppo import ppo
from jaxrl_llm.algorithms.guidance.rlgf import rlgf
from jaxrl_llm.utils.errors import InputError

SWITCH = np.array([-1, 0, 1, 2, 3, -1, 2, 5, 0, 1, 4], float)


def test_rlgf_by_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that the guide began (-1) train both; of the others the learner's tokens the policy, the rest the critic."""

    def switched(**fields: Any) -> Any:
        batch, logp, V = critic_batch(**fields)
        return batch.with_info(switch=jnp.asarray(SWITCH, jnp.float32)), logp, V

    monkeypatch.setattr(test_actor_critic, "critic_batch", switched)
    batch, _, _ = switched()
    mask, score = np.asarray(batch.action_mask), np.asarray(batch.reward, np.float64)
    behaviour, old, reference, before = (
        np.asarray(x, np.float64)
        for x in (batch.behaviour_logp, batch.old_logp, batch.reference_logp, batch.values)
    )  # fmt: skip

    def loop(logp: Any, V: Any) -> float:
        scored = np.flatnonzero(~np.isnan(score))
        rows = {i: test_actor_critic.Row(mask[i], score[i], {}) for i in scored}
        for i, row in rows.items():
            r = (-0.05 * (old[i] - reference[i]))[mask[i]]
            r[-1] += score[i]
            row.A = gae_loop(list(r), list(before[i][mask[i]]), 1.0, 0.95)
            row.R = np.asarray(row.A) + before[i][mask[i]]
        whiten_loop(list(rows.values()))
        policy, value = [], []
        for i, row in rows.items():
            for k, t in enumerate(np.flatnonzero(mask[i])):
                if SWITCH[i] < 0 or k < SWITCH[i]:
                    rho, A = np.exp(logp[i, t] - behaviour[i, t]), row.A[k]
                    policy.append(max(-A * rho, -A * np.clip(rho, 0.8, 1.2)))
                if SWITCH[i] < 0 or k >= SWITCH[i]:
                    near = np.clip(V[i, t], before[i, t] - 0.2, before[i, t] + 0.2)
                    value.append(0.5 * max((V[i, t] - row.R[k]) ** 2, (near - row.R[k]) ** 2))
        return float(np.mean(policy) + np.mean(value))

    check(rlgf(), loop)


def test_without_a_switch_it_is_ppo() -> None:
    batch, logp, V = critic_batch()
    batch = batch.replace(old_logp=batch.behaviour_logp)
    found = loss_of(rlgf(), batch, logp, values=jnp.asarray(V, jnp.float32))
    assert found == pytest.approx(loss_of(ppo(), batch, logp, values=jnp.asarray(V, jnp.float32)), rel=1e-6)


def test_each_policy_of_lols_has_a_critic_of_its_own() -> None:
    """Rows that the learner completes have the loss of PPO++ and the first head, others AggreVaTeD's and the second.

    Each kind of iteration against a method of one head, which sees this head's values only.
    """
    switched = jnp.asarray(SWITCH, jnp.float32)
    for rows, head in ((SWITCH < 0, 0), (SWITCH >= 0, 1)):
        batch, logp, V = critic_batch()
        keep = jnp.asarray(rows)[:, None] & batch.action_mask
        batch = batch.with_info(switch=switched).replace(action_mask=keep, old_logp=batch.behaviour_logp)
        other = np.random.default_rng(head).normal(size=V.shape)
        before, now = (np.stack([x, other] if head == 0 else [other, x], -1) for x in (np.asarray(batch.values), V))
        two = batch.replace(values=jnp.asarray(before, jnp.float32))
        found = loss_of(rlgf("either", guide="reference"), two, logp, values=jnp.asarray(now, jnp.float32))
        assert found == pytest.approx(loss_of(rlgf(), batch, logp, values=jnp.asarray(V, jnp.float32)), rel=1e-6)


def test_no_head_of_lols_learns_from_the_others_rows() -> None:
    """Of a batch of both kinds of rows: the gradient of a head is 0 on the other's, and not on its own."""
    batch, logp, V = critic_batch()
    batch = batch.with_info(switch=jnp.asarray(SWITCH, jnp.float32)).replace(old_logp=batch.behaviour_logp)
    algorithm = rlgf("either", guide="reference", value_clip=None)
    assert "values:2" in algorithm.needs
    assert "values" not in algorithm.needs
    batch = batch.replace(values=jnp.stack([batch.values, -batch.values], -1))
    ready = prepared(algorithm, batch)
    np.testing.assert_array_equal(ready.values, batch.values)
    values = jnp.asarray(np.stack([V, 1 - V], -1), jnp.float32)
    slope = np.asarray(jax.grad(lambda v: algorithm.objective(outputs_of(logp, values=v), ready)[0])(values))
    learners = SWITCH < 0
    assert (slope[learners, :, 1] == 0).all()
    assert (slope[~learners, :, 0] == 0).all()
    index, scored = np.asarray(batch.action_index), ~np.isnan(np.asarray(batch.reward))
    for row in np.flatnonzero(scored):
        head, first = (0, 0) if learners[row] else (1, SWITCH[row])
        np.testing.assert_array_equal(slope[row, :, head] != 0, index[row] >= first)


def test_a_guide_that_is_a_model_takes_the_place_of_the_reference() -> None:
    rule = rlgf(guide="reference", guide_model="runs/a").reference
    assert rule is not None
    assert rule.models == ("runs/a",)
    assert rule.init({"w": 1}, [{"w": 2}]) == {"w": 2}
    with pytest.raises(InputError, match="guide_model is given, but guide is None: give guide reference"):
        rlgf(guide_model="runs/a")
