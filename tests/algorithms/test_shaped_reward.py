"""FAPO, HBPO, the unlikeliness reward, VITAL's DGRPO and ADORA: worked examples, loops and limits."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from batches import advantages, gradient_of, prepared, random_batch
from reward_loops import assert_like_loop, assert_on_policy, group_scores, rows_of

from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.credit.adora import adora
from jaxrl_llm.algorithms.rewards.dgrpo_vital import dgrpo_vital
from jaxrl_llm.algorithms.rewards.fapo import fapo
from jaxrl_llm.algorithms.rewards.hbpo import hbpo
from jaxrl_llm.algorithms.rewards.unlikeliness_reward import unlikeliness_reward
from jaxrl_llm.utils.errors import InputError

pytestmark = pytest.mark.heavy

BATCH, LOGP = random_batch(7)
GROUP, REWARD = np.asarray(BATCH.group), np.asarray(BATCH.reward, np.float64)
N, LENGTHS = len(GROUP), np.asarray(BATCH.lengths)
NEAR = {"rtol": 0, "atol": 1.5e-6}


@pytest.mark.parametrize(
    ("sound", "flawed", "expected"),
    [
        (2, 2, [1.410189, 0.282038, -0.846113]),
        (3, 2, [1.080122, 0, -1.080122]),
        (4, 2, [0.846113, -0.282038, -1.410189]),
    ],
)
def test_fapo_worked_example(sound: int, flawed: int, expected: Any) -> None:
    wrong = 8 - sound - flawed
    reward = np.repeat([1.0, 1.0, 0.0], [sound, flawed, wrong])
    marked = np.repeat([False, True, True], [sound, flawed, wrong])  # a wrong answer is wrong, flawed or not
    expected = np.repeat(expected, [sound, flawed, wrong])
    found = advantages(fapo(), rows_of(reward, info={"flawed": marked}))
    np.testing.assert_allclose(found[:8, 0], expected, **NEAR)
    by_component = rows_of(reward, rewards={"sound": np.where(marked, 0.0, np.nan), "right": reward})
    np.testing.assert_allclose(advantages(fapo(), by_component)[:8, 0], expected, **NEAR)


def test_fapo_against_a_loop() -> None:
    flawed = np.arange(N) % 3 == 0
    r = np.array([-1.0 if REWARD[i] < 0.5 else (0.0 if flawed[i] else 1.0) for i in range(N)])
    r += np.clip((3 - LENGTHS) / 3, -1, 0)
    batch = BATCH.with_info(flawed=jnp.asarray(flawed))
    assert_like_loop(fapo(max_length=6), batch, LOGP, group_scores(r, GROUP), high=0.28, dual=10.0)
    assert_on_policy(fapo(max_length=6), batch)
    # Without flawed answers and with no cost of length, correct and wrong are all there is.
    np.testing.assert_allclose(advantages(fapo(), BATCH), advantages(grpo(), BATCH), atol=2e-6)


def test_hbpo_worked_example() -> None:
    batch = rows_of([1, 1, 1, 0], [300, 900, 400, 4094], info={"budget": np.array([512.0, 512, 2560, 2560])})
    found = prepared(hbpo(), batch)
    np.testing.assert_allclose(found.reward[:4], [3.923141, 3.669378, 2.222281, 0], **NEAR)
    np.testing.assert_allclose(found.advantages[:4, 0], [0.689839, 0.548796, -1.239764, -2.474915], rtol=0, atol=3e-6)
    only = advantages(hbpo(intra_coefficient=0.0), batch)[:4, 0]
    np.testing.assert_allclose(only, [0.816720, 0.675678, -0.128623, -1.363774], rtol=0, atol=3e-6)


def test_hbpo_against_a_loop() -> None:
    budget = np.where(np.arange(N) % 2 == 0, 2.0, 4.0)
    level = 4 * np.cos(np.pi * budget / 12)
    R = np.zeros(N)
    for i in range(N):
        n, b = LENGTHS[i], budget[i]
        over = 4 * np.cos(np.pi * n / 12) - abs(n - b) / 6
        R[i] = 0.0 if REWARD[i] < 0.5 else (over if n > b else level[i])
    A = group_scores(R, GROUP)
    for i in range(N):
        mates = [j for j in range(N) if GROUP[j] == GROUP[i] and budget[j] == budget[i]]
        A[i] += sum(R[j] for j in mates) / len(mates) - level[i]
    batch = BATCH.with_info(budget=jnp.asarray(budget, jnp.float32))
    assert_like_loop(hbpo(max_length=6), batch, LOGP, A, high=0.28, dual=3.0)
    assert_on_policy(hbpo(max_length=6), batch)


def test_hbpo_without_budgets_has_one() -> None:
    told = BATCH.with_info(budget=jnp.full(N, 3.0))
    np.testing.assert_allclose(advantages(hbpo(max_length=6), BATCH), advantages(hbpo(max_length=6), told), atol=1e-6)
    alone = rows_of([1.0])
    assert (advantages(hbpo(), alone) == 0).all()


def test_unlikeliness_worked_example() -> None:
    s = np.array([-0.5, -2.0, -1.0, -1.5])[:, None] * np.ones((4, 2))
    batch = rows_of([1, 1, 0, 1], 2, behaviour=s)
    found = prepared(unlikeliness_reward(), batch)
    np.testing.assert_allclose(found.reward[:4], [0.75, 0.9375, 0, 0.875], **NEAR)
    np.testing.assert_allclose(found.advantages[:4, 0], [0.251935, 0.683823, -1.475619, 0.539861], **NEAR)
    code = advantages(unlikeliness_reward(ranks="code"), batch)[:4, 0]
    np.testing.assert_allclose(code, [0.268866, 0.672165, -1.478762, 0.537732], **NEAR)


def test_unlikeliness_against_a_loop() -> None:
    reward = np.where(GROUP == 1, 1.0, REWARD)  # a group of equal rewards is left out
    behaviour = np.asarray(BATCH.behaviour_logp, np.float64)
    s = behaviour.sum(1) / LENGTHS
    r = np.zeros(N)
    for i in range(N):
        mates = [j for j in range(N) if GROUP[j] == GROUP[i]]
        rank = sum(s[j] > s[i] for j in mates)
        r[i] = reward[i] * (1 - 0.25 * (len(mates) - rank) / len(mates))
    batch = BATCH.replace(reward=jnp.asarray(reward, jnp.float32))
    options = {"kl": 0.1, "weights": np.where(GROUP == 1, 0, 1)}
    assert_like_loop(unlikeliness_reward(), batch, LOGP, group_scores(r, GROUP), **options)
    assert_on_policy(unlikeliness_reward(kl_coefficient=0.0), batch)
    plain = advantages(unlikeliness_reward(coefficient=0.0), BATCH)
    np.testing.assert_allclose(plain, advantages(grpo(), BATCH), atol=1e-6)


def test_dgrpo_worked_example() -> None:
    batch = rows_of([0.2, 0.45, 0.7], rewards={"iou": np.array([0.2, 0.45, 0.7])})
    method = dgrpo_vital("iou", low=0.1, high=0.6, scale="none")
    S = np.array([0.2, 0.7, 1.0])
    np.testing.assert_allclose(advantages(method, batch)[:3, 0], S - S.mean(), **NEAR)
    with_bonus = batch.replace(reward=batch.reward + 1)
    found = prepared(method, with_bonus)
    np.testing.assert_allclose(found.reward[:3], [0.82, 1.161667, 1.366667], **NEAR)
    with pytest.raises(InputError, match="did you mean 'iou'"):
        advantages(dgrpo_vital("iuo"), batch)


def test_dgrpo_pays_for_a_call_that_worked() -> None:
    """In the worked example all bonuses are 1; here those of tools are 0.5, for the second and third episode."""
    info = {"calls": np.array([2.0, 2, 1, 0]), "failed_calls": np.array([2.0, 1, 0, 0])}
    batch = rows_of([1.0, 1.0, 0.5, 1.0], info=info)
    w = np.clip(2 - 4.5 / 4, 0, 1) * 0.5 + 0.5
    np.testing.assert_allclose(prepared(dgrpo_vital(), batch).reward[:4], w * np.array([1, 1.5, 1, 1]), **NEAR)
    found = prepared(dgrpo_vital(tool_bonus=0.0), batch).reward[:4]
    np.testing.assert_allclose(found, np.array([1, 1, 0.5, 1]), **NEAR)


def test_dgrpo_against_a_loop() -> None:
    reward = REWARD + np.where(GROUP == 0, 1.0, 0.5)
    batch = BATCH.replace(reward=jnp.asarray(reward, jnp.float32))
    w = np.zeros(N)
    for g in range(3):
        w[g == GROUP] = np.clip(2 - reward[g == GROUP].mean(), 0, 1) * 0.5 + 0.5
    assert w.min() < 0.9
    options = {"kl": 0.04, "average": "sequences"}
    assert_like_loop(dgrpo_vital(), batch, LOGP, group_scores(w * reward, GROUP), **options)
    expected = w[:, None] * advantages(grpo(), batch)
    np.testing.assert_allclose(advantages(dgrpo_vital(weigh="advantage"), batch), expected, atol=2e-6)
    np.testing.assert_allclose(advantages(dgrpo_vital(), batch), advantages(grpo(), batch), atol=1e-5)


@pytest.mark.parametrize(
    ("lengths", "edges", "factor"),
    [
        ([500, 300, 400, 200], "strict", 1.0),
        ([250, 300, 400, 200], "strict", 0.1),
        ([250, 4094, 4094, 200], "strict", 1.0),
        ([250, 4094, 4094, 200], "lenient", 0.1),
    ],
)
def test_adora_worked_example(lengths: Any, edges: str, factor: float) -> None:
    found = advantages(adora(edges=edges, max_length=4094), rows_of([1, 0, 0, 1], lengths))
    np.testing.assert_allclose(found[:4, 0], factor * 0.866024 * np.array([1, -1, -1, 1]), **NEAR)


@pytest.mark.parametrize("rule", ["length", "difficulty", "or", "and"])
def test_adora_against_a_loop(rule: str) -> None:
    cut_off = np.arange(N) % 4 == 1
    w = np.zeros(N)
    for i in range(N):
        mates = [j for j in range(N) if GROUP[j] == GROUP[i]]
        longest = max(LENGTHS[j] for j in mates if REWARD[j] > 0.5)
        wrong = [LENGTHS[j] for j in mates if REWARD[j] < 0.5 and not cut_off[j] and LENGTHS[j] < 6]
        length = not wrong or longest > sum(wrong) / len(wrong)
        hard = sum(REWARD[j] > 0.5 for j in mates) / len(mates) <= 0.5
        good = {"length": length, "difficulty": hard, "or": length or hard, "and": length and hard}[rule]
        w[i] = 2.0 if good else 0.3
    batch = BATCH.replace(truncated=jnp.asarray(cut_off))
    method = adora(rule, 2.0, 0.3, max_length=6)
    A = w * group_scores(REWARD, GROUP)
    if rule == "length":
        assert_like_loop(method, batch, LOGP, A, kl=0.001)
    np.testing.assert_allclose(advantages(method, batch).max(1), np.maximum(A, 0), atol=1e-5)


def test_adora_with_equal_weights_is_grpo() -> None:
    expected = gradient_of(grpo(kl_coefficient=0.001, average="token"), BATCH, LOGP)
    np.testing.assert_allclose(gradient_of(adora(other_weight=1.0), BATCH, LOGP), expected, atol=1e-7)
