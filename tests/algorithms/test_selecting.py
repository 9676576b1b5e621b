"""Methods that select rows and tokens, against worked examples and slow loops."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from batches import batch_of, outputs_of, prepared, random_batch
from token_loops import agrees, doubles, group_scores

from jaxrl_llm.algorithms.exploration.d3s import d3s
from jaxrl_llm.algorithms.judged.brpo import brpo
from jaxrl_llm.algorithms.preferences.pf_ppo import pf_ppo

pytestmark = pytest.mark.heavy

close = np.testing.assert_allclose


def test_d3s_against_a_loop() -> None:
    batch, logp = random_batch(0)
    reward = np.random.default_rng(0).normal(size=11)  # no ties
    batch = batch.replace(reward=jnp.float32(reward))
    mask, H = np.asarray(batch.action_mask), doubles(batch.entropy)
    A = group_scores(reward, batch.group)
    for step, rows, share in ((0, 5, 0.3), (50, 7, 0.5)):
        best = max(itertools.combinations(range(11), rows), key=lambda S: np.var([A[i] for i in S]))
        places = [(abs(A[i]) * H[i, t], i, t) for i in best for t in np.flatnonzero(mask[i])]
        weights = np.zeros(logp.shape)
        for _, i, t in sorted(places, reverse=True)[: int(np.ceil(share * len(places) - 1e-9))]:
            weights[i, t] = 1
        algorithm = d3s(rows_first=0.4, rows_last=0.8, tokens_first=0.3, tokens_last=0.7)
        state = ((), jnp.int32(step), jnp.int32(step)) if step else None
        agrees(algorithm, batch, logp, A[:, None] + 0 * logp, weights, state)


def test_d3s_of_everything_is_the_plain_loss() -> None:
    batch, logp = random_batch(1)
    A = group_scores(batch.reward, batch.group)[:, None] + 0 * logp
    agrees(d3s(1.0, 1.0, 1.0, 1.0), batch, logp, A)


@pytest.mark.parametrize("count_reference", [True, False])
def test_brpo_against_a_loop(count_reference: bool) -> None:
    batch, logp = random_batch(2)
    algorithm = brpo(count_reference=count_reference)
    found = np.asarray(prepared(algorithm, batch).advantages)[:, 0]
    reward, group = np.asarray(batch.reward), np.asarray(batch.group)
    A, weights = np.zeros(11), np.ones((11, 1))
    for g in range(3):
        rows = [i for i in range(11) if group[i] == g]
        (reference,) = [i for i in rows if found[i] == 0]
        for i in rows:
            A[i] = 0 if i == reference else 1 if reward[i] > reward[reference] else -1
        if abs(sum(A[i] for i in rows)) / len(rows) > 0.6:
            weights[rows] = 0
        elif not count_reference:
            weights[reference] = 0
    agrees(algorithm, batch, logp, A[:, None] + 0 * logp, weights)


def test_another_update_draws_other_references() -> None:
    batch = batch_of(np.ones((16, 1)), np.arange(16.0), -np.arange(16.0)[:, None] / 9)
    drawn = {int(np.argmin(np.abs(prepared(brpo(), batch, jnp.int32(k)).advantages[:, 0]))) for k in range(8)}
    assert len(drawn) > 3
    # The outlier rule: 15 wins or losses of 16 drop the group.
    for k in range(8):
        ready = prepared(brpo(), batch, jnp.int32(k))
        total = abs(float(ready.advantages.sum())) / 16
        assert bool(ready.loss_weights.any()) == (total <= 0.6)


@pytest.mark.parametrize("scheme", ["best_random", "best_worst", "best", "power", "max_min"])
def test_pf_ppo_counts_what_it_draws(scheme: str) -> None:
    batch, logp = random_batch(3)
    reward = np.array([0.1, 0.9, -0.5, 0.4, 0.2, 0.7, 0.3, -0.1, 0.5, 0.6, 0.8])
    values = np.random.default_rng(0).normal(size=logp.shape)
    batch = batch.replace(reward=jnp.float32(reward), values=jnp.float32(values))
    group, mask = np.asarray(batch.group), np.asarray(batch.action_mask)
    p = np.zeros(11)
    for g in range(3) if scheme.startswith("best") else [0]:
        rows = [i for i in range(11) if group[i] == g] if scheme.startswith("best") else list(range(11))
        order = sorted(rows, key=lambda i: -reward[i])
        for i in rows:
            n, first, last = len(rows), i == order[0], i == order[-1]
            one = {"best": first, "best_worst": (first + last) / 2, "max_min": (first + last) / 2}
            one["best_random"] = 0.5 if first else 0.5 / (n - 1)
            one["power"] = abs(reward[i]) ** 2 / sum(reward**2)
            p[i] = n * one[scheme]
    algorithm = pf_ppo(scheme, kl_coefficient=0.0)
    steps = [prepared(algorithm, batch, (algorithm.transform.init()[0], jnp.int32(k))) for k in range(4)]
    for ready in steps:
        counts = np.asarray(ready.loss_weights).max(axis=1)
        assert counts.sum() == pytest.approx(11)
        assert (np.abs(counts - p) < 1 + 1e-4).all()
        close(np.asarray(ready.loss_weights), counts[:, None] * mask)
    uniform = prepared(pf_ppo("uniform", kl_coefficient=0.0), batch)
    close(np.asarray(uniform.loss_weights), mask)
    close(steps[0].advantages, uniform.advantages)
    loss = algorithm.objective(outputs_of(logp, values=jnp.float32(values)), steps[0])[0]
    assert np.isfinite(float(loss))
    assert "values" in algorithm.needs
