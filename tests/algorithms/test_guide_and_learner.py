"""Losses of responses that a learner and a guide wrote, by loops in double precision."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import test_actor_critic
from batches import loss_of
from test_actor_critic import check, critic_batch, gae_loop, whiten_loop

from jaxrl_llm.algorithms.classic.ppo import ppo
from jaxrl_llm.algorithms.guidance.rlgf import rlgf

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
