"""Sequence-level ratios: worked examples, loops in double precision, and cases in which methods are equal."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from batches import LOGP, MASK, advantages, batch_of, gradient_of, loss_of, outputs_of
from ratio_loops import Case, Rows, assert_is_the_loop, case, clipped, mean, sequence_mean, token_mean

from jaxrl_llm.algorithms.classic.gmpo import gmpo
from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.classic.gspo import gspo
from jaxrl_llm.algorithms.policy_loss.gspo_token import gspo_token
from jaxrl_llm.algorithms.policy_loss.luspo import luspo
from jaxrl_llm.algorithms.policy_loss.vespo import vespo
from jaxrl_llm.algorithms.turn_credit.seeupo import seeupo
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.transform import stateless
from jaxrl_llm.utils.errors import InputError

F1 = batch_of()
RAGGED = case(1)
WIDE: dict[str, Any] = {"clip_low": 0.05, "clip_high": 0.07}


def geometric(logp: Rows, other: Rows) -> list[float]:
    return [
        np.exp(mean([x - b for x, b in zip(row, rest, strict=True)])) for row, rest in zip(logp, other, strict=True)
    ]


@pytest.mark.parametrize("method", [gspo, gspo_token])
def test_gspo_worked_example(method: Any) -> None:
    assert loss_of(method(), F1) == pytest.approx(0.028260, abs=1.5e-6)
    assert loss_of(method(clip_low=0.2, clip_high=0.2), F1) == pytest.approx(-0.024516, abs=1.5e-6)


@pytest.mark.parametrize("method", [gspo, gspo_token])
def test_gspo_is_the_loop(method: Any) -> None:
    def loop(logp: Rows, held: Rows) -> float:
        s = geometric(logp, RAGGED.behaviour)
        return -mean([clipped(x, A, 0.05, 0.07) for x, A in zip(s, RAGGED.advantage, strict=True)])

    assert_is_the_loop(method(**WIDE), RAGGED, loop)


@pytest.mark.parametrize(("low", "high", "loss"), [(3e-4, 4e-4, 0.025360), (0.2, 0.2, -0.031196)])
def test_gspo_with_advantages_of_tokens(low: float, high: float, loss: float) -> None:
    factor = np.array([[1, 0.5, 2], [1, 1, 0], [1, 0, 0], [1, 1, 0.5]])
    given = stateless(lambda b: b.replace(advantages=jnp.asarray(0.866024 * np.array([[1], [-1], [-1], [1]]) * factor)))
    algorithm = Algorithm(given, gspo_token(low, high).objective)
    assert loss_of(algorithm, F1) == pytest.approx(loss, abs=1.5e-6)
    # Tokens that are not clipped have the gradient -A s / (N |o|) of their own log-probability.
    s, lengths = np.array([1.105171, 0.860708, 1.051271, 0.920044]), np.array([3, 2, 1, 3])
    cut = (s > 1 + high) & (np.array([1, -1, -1, 1]) > 0) | (s < 1 - low) & (np.array([1, -1, -1, 1]) < 0)
    expected = -0.866024 * np.array([1, -1, -1, 1]) * s / (4 * lengths) * ~cut
    np.testing.assert_allclose(gradient_of(algorithm, F1), expected[:, None] * factor * MASK, atol=1e-6)


def test_on_policy_gspo_has_the_gradient_of_grpo() -> None:
    at = RAGGED.batch.behaviour_logp
    expected = gradient_of(grpo(kl_coefficient=0.0), RAGGED.batch, at)
    for method in (gspo(), gspo_token(), gmpo()):
        np.testing.assert_allclose(gradient_of(method, RAGGED.batch, at), expected, atol=1e-7)


def test_gmpo_worked_example() -> None:
    assert loss_of(gmpo(), F1) == pytest.approx(-0.016672, abs=1.5e-6)


def test_gmpo_is_the_loop() -> None:
    def bounded(d: float, A: float) -> float:
        return np.sign(A) * min(np.sign(A) * d, np.sign(A) * min(max(d, -0.1), 0.12))

    def loop(logp: Rows, held: Rows) -> float:
        out = []
        for row, old, ref, A in zip(logp, RAGGED.behaviour, RAGGED.reference, RAGGED.advantage, strict=True):
            g = np.exp(mean([bounded(x - b, A) for x, b in zip(row, old, strict=True)]))
            out.append(-A * g + 0.1 * mean([np.exp(r - x) - (r - x) - 1 for x, r in zip(row, ref, strict=True)]))
        return mean(out)

    assert_is_the_loop(gmpo(clip_low=0.1, clip_high=0.12, kl_coefficient=0.1), RAGGED, loop)


def luspo_batch() -> Any:
    mask = np.array([[1, 1, 1, 1], [1, 1, 0, 0]], bool)
    A = np.array([[1.0], [-1.0]]) * mask
    return batch_of(mask, [1.0, 0.0], -1.0 * mask, advantages=A), -1.0 * mask + np.array(
        [[0.002, -0.001, 0.004, 0], [0.001, 0, 0, 0]]
    )


def test_luspo_worked_example() -> None:
    batch, logp = luspo_batch()
    found, _ = luspo().objective(outputs_of(logp), batch)
    assert float(found) == pytest.approx(-1.002001, abs=2e-6)
    # The ratio of the first row is 1.001251, within every clip range here; that of the second 1.0005.
    shorter, _ = gspo(2e-3, 2.5e-3).objective(outputs_of(logp), batch)
    assert float(shorter) == pytest.approx(-0.000375, abs=1e-6)


def test_luspo_is_the_loop() -> None:
    def loop(logp: Rows, held: Rows) -> float:
        s = geometric(logp, RAGGED.behaviour)
        rows = zip(s, RAGGED.advantage, logp, strict=True)
        return -mean([len(row) * clipped(x, A, 0.05, 0.07) for x, A, row in rows])

    assert_is_the_loop(luspo(**WIDE), RAGGED, loop)


def test_vespo_worked_example() -> None:
    mask = np.array([[1, 1, 1], [1, 1, 0]], bool)
    old = np.array([[-1, -0.5, -2], [-0.7, -1.2, 0]])
    batch = batch_of(mask, [1.0, 0.0], old, advantages=np.array([[1.0], [-1.0]]) * mask)
    found, metrics = vespo().objective(outputs_of(LOGP[:2]), batch)
    assert float(found) == pytest.approx(0.107848, abs=1e-6)
    assert float(metrics["weight/mean"]) == pytest.approx((3 * 0.637898 + 2 * 0.682743) / 5, abs=1e-6)


@pytest.mark.parametrize("correction", ["none", "truncate", "mask"])
def test_vespo_is_the_loop(correction: str) -> None:
    def u(old: float, behaviour: float) -> float:
        w = np.exp(old - behaviour)
        return max(min(w, 1.04) if correction == "truncate" else w * (w <= 1.04), 1e-8)

    def loop(logp: Rows, held: Rows) -> float:
        total = []
        for row, fixed, old, b, A in zip(logp, held, RAGGED.old, RAGGED.behaviour, RAGGED.advantage, strict=True):
            logs = [x - (y if correction == "none" else z) for x, y, z in zip(fixed, b, old, strict=True)]
            if correction != "none":
                logs += [np.log(u(z, y)) for y, z in zip(b, old, strict=True)]
            W = np.exp(max(sum(logs), np.log(1e-8)))
            power, decay = (2, 3) if A >= 0 else (3, 2)
            total.append([W**power * np.exp(decay * (1 - W)) * A * x for x in row])
        return -token_mean(total)

    assert_is_the_loop(vespo(correction=correction, cap=1.04), RAGGED, loop)
    assert vespo(correction=correction).needs == ({"old_logp"} if correction != "none" else frozenset())


def test_vespo_at_ratio_one_is_the_policy_gradient() -> None:
    found = gradient_of(vespo(), RAGGED.batch, RAGGED.batch.behaviour_logp)
    mask = RAGGED.mask
    expected = -RAGGED.of_every_row(RAGGED.advantage)[:, None] * mask / mask.sum()
    np.testing.assert_allclose(found, expected, atol=1e-7)
    with pytest.raises(InputError, match="correction"):
        vespo(correction="sequence")


def test_seeupo_worked_example() -> None:
    batch = batch_of(np.ones((6, 3)), [1.0, 0, 0, 1, 1, 0], -np.ones((6, 3)), [0, 0, 0, 1, 1, 1])
    expected = np.array([1.290994, -0.645497, -0.645497, 0.645497, 0.645497, -1.290994])
    np.testing.assert_allclose(advantages(seeupo(), batch)[:, 0], expected, atol=1e-6)
    np.testing.assert_allclose(advantages(seeupo(limit=1.0), batch)[:, 0], np.clip(expected, -1, 1), atol=1e-6)
    factor = jnp.array([1.2, 1, 1, 1, 1, 0.8])
    changed = advantages(seeupo(), batch.with_info(turn_factor=factor))
    np.testing.assert_allclose(changed[:, 1], expected * factor, atol=1e-6)


def test_seeupo_is_the_loop_with_two_turns() -> None:
    turn = jnp.where(RAGGED.batch.action_mask, jnp.arange(6) // 2, -1)
    factor = np.linspace(0.8, 1.2, 11)
    info = {"turn_factor": jnp.asarray(factor, jnp.float32)}
    c = Case(RAGGED.batch.replace(turn=turn, info=info), RAGGED.logp)
    mean_, deviation = np.mean(c.centred), np.std(c.centred, ddof=1)
    A = [float(np.clip((x - mean_) / deviation, -3, 3) * m) for x, m in zip(c.centred, factor[c.scored], strict=True)]

    def loop(logp: Rows, held: Rows) -> float:
        rows: Rows = []
        for row, fixed, old, ref, a in zip(logp, held, c.old, c.reference, A, strict=True):
            turns = [list(range(k, min(k + 2, len(row)))) for k in range(0, len(row), 2)]
            s = {t: np.exp(mean([fixed[j] - old[j] for j in ts])) for ts in turns for t in ts}
            rows.append([])
            for t, x in enumerate(row):
                value = clipped(s[t] * np.exp(x - fixed[t]), a, 0.2, 0.2)
                rows[-1].append(-value + 0.002 * (np.exp(ref[t] - x) - (ref[t] - x) - 1))
        return sequence_mean(rows)

    assert_is_the_loop(seeupo(), c, loop)
