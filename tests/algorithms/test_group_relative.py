"""GRPO's closest variants: worked examples, loops in double precision, and cases in which they are equal."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from batches import LOGP, OLD, advantages, batch_of, gradient_of, loss_of, outputs_of, prepared
from ratio_loops import Case, Rows, advantage, assert_is_the_loop, case, clipped, mean, sequence_mean, token_mean

from jaxrl_llm.algorithms.classic.bnpo import bnpo
from jaxrl_llm.algorithms.classic.dapo import dapo
from jaxrl_llm.algorithms.classic.dr_grpo import dr_grpo
from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.credit.degrpo import degrpo
from jaxrl_llm.algorithms.rewards.baichuan_m2 import baichuan_m2, gated_length_bonus
from jaxrl_llm.core.trajectory import map_rows, with_totals
from jaxrl_llm.utils.errors import InputError

F1 = batch_of(reference_logp=OLD)
RAGGED = case(0)


def gains(c: Case, logp: Rows, A: list[float], low: float, high: float) -> Rows:
    """Clipped values of each token."""
    return [
        [clipped(np.exp(x - b), a, low, high) for x, b in zip(row, old, strict=True)]
        for row, old, a in zip(logp, c.behaviour, A, strict=True)
    ]


def k3(c: Case, logp: Rows) -> Rows:
    return [
        [np.exp(r - x) - (r - x) - 1 for x, r in zip(row, ref, strict=True)]
        for row, ref in zip(logp, c.reference, strict=True)
    ]


@pytest.mark.parametrize(
    ("average", "loss"), [("sequence", 0.014998), ("token", -0.273982), ("sum", -0.616459), ("constant", -0.205486)]
)
def test_grpo_with_other_averages_of_the_worked_example(average: str, loss: float) -> None:
    assert loss_of(grpo(kl_coefficient=0.0, average=average), F1) == pytest.approx(loss, abs=1.5e-6)


def test_grpo_with_one_sample_a_prompt() -> None:
    batch = batch_of(reward=[1.0, 0, np.nan, 3], group=[0, 0, 1, 2])
    alone = advantages(grpo(group_of_one="reward"), batch)
    np.testing.assert_allclose(alone[:, 0], [0.707106, -0.707106, 0, 3], atol=1e-5)
    assert advantages(grpo(), batch)[3, 0] == 0


def test_grpo_with_a_dual_clip_bounds_what_bad_actions_cost() -> None:
    logp = OLD + np.log(10) * (OLD != 0)
    low, high = (loss_of(grpo(kl_coefficient=0.0, dual_clip=c), F1, logp) for c in (3.0, None))
    # Two of four rows have A = -0.866: each of their tokens costs 3 |A| instead of 10 |A|.
    assert high - low == pytest.approx(7 * 0.866024 / 2, rel=1e-5)


def test_dr_grpo_worked_example() -> None:
    np.testing.assert_allclose(advantages(dr_grpo(), F1)[:, 0], [0.5, -0.5, -0.5, 0.5])
    assert loss_of(dr_grpo(max_length=3), F1) == pytest.approx(-0.118638, abs=1e-6)
    assert loss_of(dr_grpo(max_length=1), F1) == pytest.approx(-0.355913, abs=1e-6)
    assert loss_of(dr_grpo(), F1) == pytest.approx(-0.355913 / 3000, rel=1e-5)


def test_dr_grpo_is_the_loop() -> None:
    def loop(logp: Rows, held: Rows) -> float:
        return -mean([sum(row) / 7 for row in gains(RAGGED, logp, RAGGED.centred, 0.2, 0.2)])

    assert_is_the_loop(dr_grpo(max_length=7), RAGGED, loop)


def test_bnpo_worked_example_in_two_slices() -> None:
    ready = with_totals(prepared(bnpo(epsilon=1e-6), F1))
    slices = [(slice(0, 2), -0.197595), (slice(2, 4), -0.369465)]
    for part, loss in slices:
        found, _ = bnpo().objective(outputs_of(LOGP[part]), map_rows(lambda x, part=part: x[part], ready))
        assert 2 * float(found) == pytest.approx(loss, abs=1.5e-6)
    assert sum(loss for _, loss in slices) / 2 == pytest.approx(-0.283530, abs=1e-6)


def test_bnpo_has_the_epsilon_of_trl() -> None:
    np.testing.assert_allclose(np.abs(advantages(bnpo(), F1)[:, 0]), np.full(4, 0.865875), atol=1e-6)


def test_bnpo_in_one_piece_is_the_token_mean_and_row_by_row_the_sequence_mean() -> None:
    whole = loss_of(bnpo(epsilon=1e-6), RAGGED.batch, RAGGED.logp)
    assert whole == pytest.approx(loss_of(dapo(clip_high=0.2, dynamic_sampling=False), RAGGED.batch, RAGGED.logp))

    def loop(logp: Rows, held: Rows) -> float:
        return -token_mean(gains(RAGGED, logp, RAGGED.advantage, 0.2, 0.2))

    assert_is_the_loop(bnpo(epsilon=1e-6), RAGGED, loop)
    ready = with_totals(prepared(bnpo(epsilon=1e-6), F1))
    rows = [
        bnpo().objective(outputs_of(LOGP[i : i + 1]), map_rows(lambda x, i=i: x[i : i + 1], ready))[0] for i in range(4)
    ]
    assert float(sum(rows)) == pytest.approx(0.014998, abs=1.5e-6)


def test_dapo_worked_example() -> None:
    assert loss_of(dapo(), F1) == pytest.approx(-0.289378, abs=1.5e-6)
    assert loss_of(dapo(dual_clip=10.0), F1) == pytest.approx(-0.289378, abs=1.5e-6)
    assert loss_of(dapo(clip_high=0.2), F1) == pytest.approx(-0.273982, abs=1.5e-6)


@pytest.mark.parametrize("average", ["token", "prompt"])
def test_dapo_is_the_loop(average: str) -> None:
    truncated = np.arange(11) == 2
    c = Case(RAGGED.batch.replace(truncated=jnp.asarray(truncated)), RAGGED.logp)
    lengths = np.array([len(row) for row in c.behaviour])
    reward = c.reward + np.clip((6 - 3 - lengths) / 3, -1, 0)

    def loop(logp: Rows, held: Rows) -> float:
        rows = gains(c, logp, advantage(reward, c.group), 0.2, 0.28)
        groups = c.group
        kept = [i for i in range(10) if not truncated[c.scored[i]]]
        if average == "token":
            return -token_mean([rows[i] for i in kept])
        return -mean([token_mean([rows[i] for i in kept if groups[i] == g]) for g in range(3)])

    algorithm = dapo(overlong_buffer=3, max_length=6, overlong_filter=True, average=average)
    assert_is_the_loop(algorithm, c, loop)


def test_dapo_asks_for_more_prompts_by_what_was_right_not_by_how_long_it_was() -> None:
    mask = np.arange(6) < np.array([6, 2, 3, 6, 5, 4])[:, None]
    batch = batch_of(mask, [1.0, 1, 1, -1, -1, 1], -np.ones((6, 6)), [0, 0, 1, 1, 2, 2])
    algorithm = dapo(overlong_buffer=4, max_length=6)
    assert algorithm.curriculum is not None
    assert algorithm.curriculum.rounds == 10
    informative = algorithm.curriculum.informative(batch)
    assert informative.tolist() == [False, False, True, True, True, True]
    ready = prepared(algorithm, batch)
    assert (np.asarray(ready.loss_weights).any(axis=1) == np.asarray(informative)).all()
    named = dapo(accuracy="right").curriculum
    assert named is not None
    scored = batch.replace(rewards={"right": jnp.array([0.0, 1, 1, 1, 0, 0])})
    assert named.informative(scored).tolist() == [True, True, False, False, False, False]
    with pytest.raises(InputError, match="right"):
        named.informative(batch)
    assert dapo(dynamic_sampling=False).curriculum is None


def test_baichuan_m2_worked_example() -> None:
    reward, lengths = np.array([0.9, 0.8, 0.7, 0.6, 0.5]), np.array([1600, 2500, 400, 900, 100])
    group = jnp.zeros(5, jnp.int32)
    bonus = gated_length_bonus(jnp.asarray(reward), jnp.asarray(lengths), group, 4.0, 0.2, 0.5)
    np.testing.assert_allclose(reward + bonus, [1.0, 0.88, 0.9, 0.733333, 0.5], atol=1e-6)
    assert not gated_length_bonus(jnp.asarray(reward), jnp.asarray(lengths), group, 4.0, 0.2, 0.6).any()
    batch = batch_of(np.ones((5, 2)), reward, -np.ones((5, 2)))
    np.testing.assert_allclose(
        advantages(baichuan_m2(threshold=0.6), batch)[:, 0], [0.2, 0.1, 0, -0.1, -0.2], atol=1e-6
    )
    with_bonus = np.array([0.9, 0.8, 0.7, 0.6, 0.5]) + 4 / np.sqrt(2) * np.array([1, 1, 1, 1, 0])
    found = advantages(baichuan_m2(), batch)[:, 0]
    np.testing.assert_allclose(found, with_bonus - with_bonus.mean(), atol=1e-6)


@pytest.mark.parametrize("max_length", [None, 9])
def test_baichuan_m2_is_the_loop(max_length: int | None) -> None:
    reward, groups = RAGGED.reward, RAGGED.group
    lengths = [len(row) for row in RAGGED.behaviour]
    total = reward.copy()
    for i in range(10):
        q = np.quantile(reward[groups == groups[i]], 0.6)
        total[i] += 2 / np.sqrt(lengths[i]) if q > 0.5 and reward[i] >= q else 0.0
    assert (total > reward).any()

    def loop(logp: Rows, held: Rows) -> float:
        A = advantage(total, groups, std=False)
        return -mean([sum(row) / (max_length or max(lengths)) for row in gains(RAGGED, logp, A, 0.2, 0.28)])

    algorithm = baichuan_m2(length_bonus=2.0, quantile=0.6, max_length=max_length)
    assert_is_the_loop(algorithm, RAGGED, loop)


def control_batch() -> Any:
    mask = np.array([[1, 1, 1, 0], [1, 1, 1, 1]], bool)
    logp, A = -0.5 * mask, np.array([[0.25] * 4, [-0.75] * 4])
    return batch_of(mask, [1.0, 0.0], logp, [0, 0], reference_logp=logp, advantages=A), logp


@pytest.mark.parametrize(("average", "loss"), [("token", 0.350250), ("sequence", 0.250250)])
def test_degrpo_worked_example(average: str, loss: float) -> None:
    batch, logp = control_batch()
    found, _ = degrpo(average=average).objective(outputs_of(logp), batch)
    assert float(found) == pytest.approx(loss, abs=1e-6)


@pytest.mark.parametrize("average", ["token", "sequence"])
def test_degrpo_is_the_loop(average: str) -> None:
    def loop(logp: Rows, held: Rows) -> float:
        rows = gains(RAGGED, logp, RAGGED.centred, 0.2, 0.2)
        rest = [row[1:] for row in rows]
        answer = token_mean(rest) if average == "token" else sequence_mean(rest)
        return -0.3 * mean([row[0] for row in rows]) - answer + 0.01 * token_mean(k3(RAGGED, logp))

    assert_is_the_loop(
        degrpo(control_weight=0.3, kl_coefficient=0.01, entropy_coefficient=0.0, average=average), RAGGED, loop
    )


def test_degrpo_by_slices_is_the_whole() -> None:
    algorithm = degrpo(control_weight=0.3, average="token")
    ready = with_totals(prepared(algorithm, RAGGED.batch))
    ready = algorithm.objective.refreshed(outputs_of(RAGGED.logp), ready)
    parts = [
        algorithm.objective.function(outputs_of(RAGGED.logp[i : i + 1]), map_rows(lambda x, i=i: x[i : i + 1], ready))[
            0
        ]
        for i in range(11)
    ]
    assert float(sum(parts)) == pytest.approx(loss_of(algorithm, RAGGED.batch, RAGGED.logp), rel=1e-5)


def test_on_policy_dr_grpo_is_the_policy_gradient() -> None:
    found = gradient_of(dr_grpo(max_length=6), RAGGED.batch, RAGGED.batch.behaviour_logp)
    expected = -RAGGED.of_every_row(RAGGED.centred)[:, None] * RAGGED.mask / (10 * 6)
    np.testing.assert_allclose(found, expected, atol=1e-7)
