"""GDPO, DVAO and VeRPO: worked examples, loops, and limiting cases."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from batches import advantages, gradient_of, random_batch
from reward_loops import assert_like_loop, assert_on_policy, group_scores, rows_of

from jaxrl_llm.algorithms.classic.gdpo import gdpo
from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.rewards.dvao import dvao
from jaxrl_llm.algorithms.rewards.verpo import verpo
from jaxrl_llm.utils.errors import InputError

pytestmark = pytest.mark.heavy

BATCH, LOGP = random_batch(3)
GROUP = np.asarray(BATCH.group)
N = len(GROUP)
RANDOM = np.random.default_rng(5)
PARTS = {"form": RANDOM.integers(0, 2, N).astype(float), "right": np.asarray(BATCH.reward), "style": RANDOM.random(N)}
MANY = BATCH.replace(rewards={name: jnp.asarray(x, jnp.float32) for name, x in PARTS.items()})
WEIGHTS, W = "form=0.5,style=2", np.array([0.5, 1.0, 2.0])


def parts_of(rewards: Any, lengths: Any = 2, group: Any = 0) -> Any:
    """A batch with the components [N, K]."""
    rewards = np.asarray(rewards, np.float64)
    return rows_of(rewards.sum(1), lengths, group=group, rewards={f"r{k}": x for k, x in enumerate(rewards.T)})


GDPO = [[1, 1], [1, 0], [0, 1], [0, 0], [1, 0], [1, 0], [1, 0], [0, 0]]
PAIR = np.repeat([0, 1], 4)


def test_gdpo_worked_example() -> None:
    batch = parts_of(GDPO, [4, 2, 3, 1, 5, 1, 2, 2], PAIR)
    near = {"rtol": 0, "atol": 1.5e-6}
    expected = [1.527404, 0, 0, -1.527404, 0.440912, 0.440912, 0.440912, -1.322735]
    np.testing.assert_allclose(advantages(gdpo(), batch)[:8, 0], expected, **near)
    sums = [1.731751, 0, 0, -1.731751, 0.499900, 0.499900, 0.499900, -1.499700]
    np.testing.assert_allclose(advantages(gdpo(normalise="none"), batch)[:8, 0], sums, **near)
    tokens = [1.401006, -0.305182, -0.305182, -2.011369, 0.187352, 0.187352, 0.187352, -1.782783]
    found = advantages(gdpo(normalise="tokens", epsilon=1e-6, batch_epsilon=1e-8), batch)
    np.testing.assert_allclose(found[:8, 0], tokens, **near)
    assert (found[3, 1:] == 0).all()
    np.testing.assert_array_equal(advantages(gdpo(preset="code"), batch), found)


def test_dvao_worked_example() -> None:
    batch = parts_of([[1, 1], [0, 1], [0, 0], [1, 1]])
    found = advantages(dvao("r0=0.5,r1=0.5", epsilon=0.0), batch)[:4, 0]
    np.testing.assert_allclose(found, [0.803848, -0.267949, -1.339746, 0.803848], atol=1.5e-6)
    combined = [0.904534, -0.301511, -1.507557, 0.904534]
    assert (np.abs(found) <= np.abs(combined)).all()
    constant = parts_of([[1, 1], [0, 1], [0, 1], [1, 1]])
    np.testing.assert_allclose(advantages(dvao(epsilon=0.0), constant)[:4, 0], [1, -1, -1, 1], atol=1e-6)


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        ([1, 1, 1, 0], [-0.048524, -0.103107, 0.200155, -0.048524]),
        ([1, 1, 1, 1], [0.823758, -0.348758, -0.179677, -0.295323]),
    ],
)
def test_verpo_worked_example(first: Any, expected: Any) -> None:
    tests = np.array([first, [1, 1, 0, 0], [1, 0, 1, 1], [1, 1, 1, 0]], np.float64)
    batch = rows_of(tests.all(1), info={"tests": tests})
    np.testing.assert_allclose(advantages(verpo(), batch)[:4, 1], expected, atol=1.5e-6)
    as_parts = rows_of(tests.all(1), rewards={f"t{j}": tests[:, j] for j in range(4)})
    np.testing.assert_allclose(advantages(verpo(), as_parts)[:4, 0], expected, atol=1.5e-6)


def test_gdpo_against_a_loop() -> None:
    s = sum(w * group_scores(x, GROUP, epsilon=1e-4) for w, x in zip(W, PARTS.values(), strict=True))
    A = (s - s.mean()) / (s.std(ddof=1) + 0.3)
    assert_like_loop(gdpo(WEIGHTS, batch_epsilon=0.3), MANY, LOGP, A, average="sequences")
    A = (s - s.mean()) / (s.std(ddof=1) + 1e-4)
    method = gdpo(WEIGHTS, kl_coefficient=0.04, average="token")
    assert_like_loop(method, MANY, LOGP, A, kl=0.04, average="tokens")
    whitened = by_length(s, 0.3)[:, None] * np.asarray(BATCH.action_mask)
    found = advantages(gdpo(WEIGHTS, "tokens", batch_epsilon=0.3), MANY)
    np.testing.assert_allclose(found, whitened, rtol=1e-4, atol=1e-5)


def by_length(s: np.ndarray, epsilon: float) -> np.ndarray:
    """s standardised over the batch, each row as often as it has tokens."""
    lengths = np.asarray(BATCH.lengths)
    mean = (s * lengths).sum() / lengths.sum()
    variance = (lengths * (s - mean) ** 2).sum() / (lengths.sum() - 1)
    return (s - mean) / np.sqrt(variance + epsilon)


def test_dvao_against_a_loop() -> None:
    A = np.zeros(N)
    for g in set(GROUP.tolist()):
        rows = np.flatnonzero(g == GROUP)
        spread = sum(w * x[rows].std() for w, x in zip(W, PARTS.values(), strict=True))
        for i in rows:
            A[i] = sum(w * (x[i] - x[rows].mean()) for w, x in zip(W, PARTS.values(), strict=True)) / (spread + 1e-6)
    assert_like_loop(dvao(WEIGHTS), MANY, LOGP, A, kl=0.04, average="sequences")


def verpo_loop(passed: Any, turn: Any, mask: Any, group: Any) -> np.ndarray:
    """Advantages of tokens; passed [N, K, U], NaN where there is no such test."""
    out = np.zeros(mask.shape)
    for g in set(group.tolist()):
        rows = [i for i in range(len(group)) if group[i] == g]
        tries = {i: sorted({int(k) for k in turn[i][mask[i]]}) for i in rows}
        M = sum(len(x) for x in tries.values())
        tests = [j for j in range(passed.shape[2]) if not np.isnan(passed[rows[0], 0, j])]
        rho = {j: sum(passed[i, k, j] for i in rows for k in tries[i]) / M for j in tests}
        crowd = {j: sum(np.exp(-((rho[j] - rho[k]) ** 2) / (2 * 0.1**2)) for k in tests) for j in tests}
        R = {(i, k): sum(np.exp(-2 * rho[j]) / (crowd[j] + 1e-6) * passed[i, k, j] for j in tests)
             for i in rows for k in tries[i]}  # fmt: skip
        S = {i: 0.95 ** len(tries[i]) * all(passed[i, tries[i][-1], j] == 1 for j in tests) for i in rows}
        for i in rows:
            for t in np.flatnonzero(mask[i]):
                part = R[i, turn[i, t]] - sum(R.values()) / M
                out[i, t] = S[i] - sum(S.values()) / len(rows) + 0.5 * part
    return out


def test_verpo_against_a_loop() -> None:
    mask = np.asarray(BATCH.action_mask)
    turn = np.where(mask, np.minimum(np.arange(6) // 2, 2), -1)
    passed = RANDOM.integers(0, 2, (N, 3, 5)).astype(float)
    passed[:3, :, :] = 1.0  # some succeed
    passed[GROUP == 1, :, 3:] = np.nan
    batch = BATCH.replace(turn=jnp.asarray(turn), info={"tests": jnp.asarray(passed, jnp.float32)})
    assert_like_loop(verpo(), batch, LOGP, verpo_loop(passed, turn, mask, GROUP))
    assert_on_policy(verpo(), batch)


def test_one_reward_is_grpo() -> None:
    expected = gradient_of(grpo(epsilon=1e-4, kl_coefficient=0.0), BATCH, LOGP)
    np.testing.assert_allclose(gradient_of(gdpo(), BATCH, LOGP), expected, atol=1e-7)
    expected = gradient_of(grpo(ddof=0), BATCH, LOGP)
    np.testing.assert_allclose(gradient_of(dvao(), BATCH, LOGP), expected, atol=1e-7)


def test_the_verl_code_of_gdpo_whitens_a_single_reward_too() -> None:
    s = group_scores(BATCH.reward, GROUP, epsilon=1e-6)
    assert abs((s * np.asarray(BATCH.lengths)).sum()) > 0.5  # so that weighing by length changes it
    found = advantages(gdpo(normalise="tokens", epsilon=1e-6, batch_epsilon=1e-8), BATCH)
    np.testing.assert_allclose(found, by_length(s, 1e-8)[:, None] * np.asarray(BATCH.action_mask), rtol=1e-4, atol=1e-5)


def test_without_partial_credit_verpo_rewards_success_alone() -> None:
    expected = 0.95 * advantages(grpo(scale="none"), BATCH)
    np.testing.assert_allclose(advantages(verpo(partial=0.0), BATCH), expected, atol=1e-6)


def test_rows_without_a_score_take_no_part() -> None:
    reward = np.asarray(BATCH.reward).copy()
    reward[[0, 5]] = np.nan
    spoilt = MANY.replace(reward=jnp.asarray(reward))
    empty = MANY.replace(action_mask=MANY.action_mask.at[jnp.array([0, 5])].set(False), reward=jnp.asarray(reward))
    apart = empty.replace(group=empty.group.at[jnp.array([0, 5])].set(99))
    for algorithm in (gdpo(), gdpo(normalise="tokens"), dvao(), verpo()):
        found = advantages(algorithm, spoilt)
        assert (found[[0, 5]] == 0).all()
        np.testing.assert_allclose(found, advantages(algorithm, apart), atol=1e-6)


def test_bad_weights_are_refused() -> None:
    with pytest.raises(InputError, match="did you mean 'style'"):
        advantages(gdpo("stile=2"), MANY)
    for bad in ("style", "style=much", "=2"):
        with pytest.raises(InputError, match="NAME=NUMBER"):
            advantages(gdpo(bad), MANY)
    with pytest.raises(InputError, match="normalise of gdpo"):
        gdpo(normalise="rows")
