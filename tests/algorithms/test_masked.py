"""NLPO against a loop in double precision; its mask is tested in tests/sampling/test_hooks.py."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from batches import loss_of, prepared, random_batch

from jaxrl_llm.advantages.kl_rewards import kl_reward, stepwise_kl
from jaxrl_llm.algorithms import get
from jaxrl_llm.algorithms.policy_loss.nlpo import nlpo
from jaxrl_llm.utils.errors import InputError

GIVEN = {"kl_coefficient": 0.2, "kl_target": 0.3, "kl_rate": 0.5, "gamma": 0.9, "lam": 0.8, "value_coefficient": 0.6}


def test_nlpo_is_its_loop() -> None:
    """Two batches: the reward has the divergence without the mask, the ratio is of masked log-probabilities."""
    random = np.random.default_rng(4)
    algorithm, beta = nlpo(clip_low=0.1, clip_high=0.15, whiten=False, entropy_coefficient=0.05, **GIVEN), 0.2
    state = algorithm.transform.init()
    for seed in (1, 2):
        values = random.normal(size=(11, 6))
        batch, logp = random_batch(seed, values=values)
        mask = np.asarray(batch.action_mask)
        raw = np.asarray(batch.behaviour_logp, np.float64) - 0.5 * random.uniform(size=(11, 6))
        batch = batch.replace(untruncated_logp=raw.astype(np.float32))
        new, entropy = random.normal(size=(11, 6)), random.uniform(size=(11, 6))
        old, reference = (np.asarray(x, np.float64) for x in (batch.behaviour_logp, batch.reference_logp))
        policy = critic = 0.0
        A = np.zeros((11, 6))
        for i in range(11):
            running = after = 0.0
            places = list(np.flatnonzero(mask[i]))
            for t in reversed(places):
                r = -beta * (raw[i, t] - reference[i, t]) + (float(batch.reward[i]) if t == places[-1] else 0.0)
                running = r + 0.9 * after - values[i, t] + 0.9 * 0.8 * running
                after, A[i, t] = values[i, t], running
                rho = np.exp(logp[i, t] - old[i, t])
                policy -= min(rho * A[i, t], min(max(rho, 0.9), 1.15) * A[i, t]) / mask.sum()
                critic += 0.5 * (new[i, t] - (A[i, t] + values[i, t])) ** 2 / mask.sum()
        after_state, ready = algorithm.transform.apply(state, batch)
        np.testing.assert_allclose(ready.advantages, A, rtol=1e-4, atol=1e-5)
        expected = policy + 0.6 * critic - 0.05 * entropy[mask].mean()
        constant = dataclasses.replace(
            algorithm, transform=nlpo(whiten=False, **{**GIVEN, "kl_coefficient": beta, "kl_target": None}).transform
        )
        np.testing.assert_allclose(loss_of(constant, batch, logp, entropy, values=new), expected, rtol=1e-4)
        divergence = (raw - reference)[mask].mean()
        beta *= 1 + 0.5 * min(max(divergence / 0.3 - 1, -0.2), 0.2)
        state = after_state
    assert float(np.asarray(state[0])) == pytest.approx(beta, rel=1e-5)


def test_without_a_mask_it_is_ppo() -> None:
    batch, logp = random_batch(3, values=np.random.default_rng(0).normal(size=(11, 6)))
    same = {"value_clip": 0.2, "gamma": 1.0, "kl_coefficient": 0.05, "kl_target": None}
    values = np.zeros((11, 6))
    assert loss_of(nlpo(**same), batch, logp, values=values) == loss_of(get("ppo"), batch, logp, values=values)


def test_the_controller_worked_example() -> None:
    """KL 0.3 with target 0.1: the error is clipped to 0.2, and the coefficient grows from 0.1 to 0.102."""
    batch, _ = random_batch(0)
    batch = batch.replace(untruncated_logp=batch.reference_logp + 0.3)
    one = stepwise_kl(of="untruncated")
    state, found = one.apply(one.init(), batch)
    assert float(found.controls["kl_coefficient"]) == pytest.approx(0.1)
    assert float(state) == pytest.approx(0.102)
    # Where a batch has no other, the log-probabilities of the behaviour policy are the untruncated ones.
    batch = batch.replace(untruncated_logp=None)
    apart, same = (prepared(dataclasses.replace(get("ppo"), transform=kl_reward(0.1, of=of)), batch) for of in
                   ("untruncated", "behaviour"))  # fmt: skip
    np.testing.assert_array_equal(apart.token_rewards, same.token_rewards)


def test_its_mask() -> None:
    rollout = nlpo(mask_top_p=0.8, mask_min_keep=3, mask_every=2).rollout
    assert rollout is not None
    assert repr(rollout) == "hooked(group(), lagged_nucleus(0.8, 3, 2))"
    assert rollout.hook is not None
    assert rollout.hook.other is not None
    with pytest.raises(InputError, match="top_p"):
        nlpo(mask_top_p=0.0)
