"""Group-relative methods with a regulariser, against their worked examples and loops in double precision."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import batch_of, outputs_of, prepared, random_batch
from method_step import arrays, assert_matches_loop, learn

from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.regularisation.epo import epo
from jaxrl_llm.algorithms.regularisation.llds import llds
from jaxrl_llm.algorithms.regularisation.ulorl import ulorl
from jaxrl_llm.core.transform import control
from jaxrl_llm.utils.errors import InputError

pytestmark = pytest.mark.heavy

BATCH, LOGP = random_batch(1)
X = arrays(BATCH)
TURN = np.where(X.mask, np.arange(X.mask.shape[1]) // 2, -1)
TURNS = BATCH.replace(turn=jnp.asarray(TURN, jnp.int32))


def grpo_loop(logp: np.ndarray, kl: float = 0.0) -> float:
    """GRPO as a mean over the tokens of the batch."""
    A, total = X.advantages(), 0.0
    for i, t in X.tokens():
        rho, l = np.exp(logp[i, t] - X.behaviour[i, t]), logp[i, t] - X.reference[i, t]
        total -= min(rho * A[i, 0], min(max(rho, 0.8), 1.2) * A[i, 0]) - kl * (np.exp(-l) - 1 + l)
    return total / len(X.tokens())


@pytest.mark.parametrize(
    ("turn", "k", "extra"),
    [
        ([[0, 0, 0], [0, 0, 0]], 0, -0.000650),
        ([[0, 0, 0], [0, 0, 0]], 25, -0.000632),
        ([[0, 0, 1], [0, 0, 0]], 0, -0.00075),
    ],
)
def test_epo_worked_example(turn: list[list[int]], k: int, extra: float) -> None:
    H = np.array([[0.1, 0.5, 1.5], [0.3, 0.9, 0.6]])
    batch = batch_of(np.ones((2, 3)), np.ones(2), -np.ones((2, 3)), entropy=H).replace(turn=jnp.asarray(turn))
    method = epo(corridor_low=0.5, corridor_high=1.5, total_steps=100, decay=2.0, kl_coefficient=0.0)
    state = method.transform.init()
    feedback = {"updates": jnp.float32(1), "entropy": jnp.float32(0.6)}
    apply = jax.jit(method.transform.apply)
    for _ in range(k):
        state, _ = apply(state, batch.replace(feedback=feedback))
    ready = method.transform.apply(state, batch)[1]
    value = float(method.objective(outputs_of(-np.ones((2, 3)), H), ready)[0])
    assert value == pytest.approx(extra, abs=1e-6)


def test_epo_by_loop() -> None:
    method = epo(entropy_coefficient=0.1, smoothing=0.5, corridor_low=0.8, corridor_high=1.1, total_steps=10, decay=2.0)
    state = method.transform.init()
    for mean in (0.6, 1.0):
        feedback = {"updates": jnp.float32(1), "entropy": jnp.float32(mean)}
        state, ready = method.transform.apply(state, TURNS.replace(feedback=feedback))
    weight = 0.5 * (1 + np.exp(-2.0 * 2 / 5))
    assert float(control(ready, "corridor")) == pytest.approx(weight, rel=1e-6)

    def bonus(H: np.ndarray) -> float:
        rows = []
        for i in range(len(H)):
            turns = []
            for turn in sorted(set(TURN[i]) - {-1}):
                h = H[i][TURN[i] == turn]
                outside = np.maximum(0, 0.8 * 0.8 - h) + np.maximum(0, h - 1.1 * 0.8)
                turns.append(np.mean(h - weight * outside))
            rows.append(np.mean(turns))
        return float(np.mean(rows))

    def loss(logp: np.ndarray, H: np.ndarray = X.entropy) -> float:
        return grpo_loop(logp, 0.01) - 0.1 * bonus(H)

    def whole(outputs: object) -> jax.Array:
        return method.objective(outputs, ready)[0]  # type: ignore[arg-type]

    value, by = jax.jit(jax.value_and_grad(whole))(outputs_of(LOGP, X.entropy))
    assert float(value) == pytest.approx(loss(LOGP), abs=2e-6)
    step = 1e-6 * np.random.default_rng(0).normal(size=LOGP.shape) * X.mask
    change = loss(LOGP, X.entropy + step) - loss(LOGP, X.entropy - step)
    assert float((np.asarray(by.entropy) * step).sum()) == pytest.approx(change / 2, rel=1e-3)


def test_llds_worked_example() -> None:
    old = np.array([[-1, -0.5, -2, -0.3], [-1, -1, -1, -1]])
    logp = np.array([[-1.2, -0.4, -2.3, -0.2], [-1.5, -1, -1, -1]])
    other = logp.copy()
    other[0, 1] = -0.2
    batch = batch_of(np.ones((2, 4)), [1.0, 0], old).replace(turn=jnp.asarray([[0, 0, 1, 1]] * 2))
    for gate, at, expected in [
        ("turn", logp, 0.0125), ("sequence", logp, 0.0125), ("turn", other, 0.0075), ("sequence", other, 0.0125)
    ]:  # fmt: skip
        found = learn(llds(gate=gate, penalty_over="all"), batch, at)
        assert 0.2 * found.metrics["likelihood/fallen"] == pytest.approx(expected, abs=1e-6)
        # Half of the tokens belong to the response with A >= 0, so the paper's mean is twice the code's.
        of_nonnegative = llds(gate=gate).objective(outputs_of(at), prepared(llds(gate=gate), batch))[1]
        assert 0.2 * float(of_nonnegative["likelihood/fallen"]) == pytest.approx(2 * expected, abs=1e-6)


@pytest.mark.parametrize("over", ["nonnegative", "all"])
def test_llds_by_loop(over: str) -> None:
    found = learn(llds(coefficient=0.5, final=0.3, penalty_over=over, kl_coefficient=0.001), TURNS, LOGP)
    A = X.advantages()
    tokens = X.mask.sum() if over == "all" else (X.mask & (A >= 0)).sum()
    assert (X.mask & (A >= 0)).sum() < X.mask.sum()

    def loss(logp: np.ndarray) -> float:
        total = 0.0
        for i, t in X.tokens():
            mine = TURN[i] == TURN[i, t]
            fall = (X.old - logp)[i]
            if A[i, 0] >= 0 and fall[mine].sum() > 0:
                total += max(0, fall[t]) * (0.3 if TURN[i, t] == TURN[i].max() else 1.0)
        return grpo_loop(logp, 0.001) + 0.5 * total / tokens

    assert_matches_loop(found, loss, LOGP)
    method = llds(penalty_over=over)
    at_start = method.objective(outputs_of(X.old), prepared(method, TURNS))[1]
    assert float(at_start["likelihood/fallen"]) == 0, "no drop yet"
    assert method.needs == {"turns", "old_logp"}, "no KL: no reference policy"


def test_ulorl_worked_example() -> None:
    p = np.array([[0.995, 0.5, 0.999], [0.9, 0.995, 0.3]])
    for H, expected in [(0.15, 0.333333), (0.25, 0.0)]:
        batch = batch_of(np.ones((2, 3)), [1.0, 0], np.log(p), entropy=np.full((2, 3), H))
        assert learn(ulorl(), batch, np.log(p)).loss == pytest.approx(expected, abs=3e-6)


@pytest.mark.parametrize("sampling", ["POIS", "SAIS"])
def test_ulorl_by_loop(sampling: str) -> None:
    reward = np.where(X.group == 2, 1.0, X.reward)
    batch = BATCH.replace(reward=jnp.asarray(reward, jnp.float32))
    found = learn(ulorl(tau=0.5, sigma=0.8, sampling=sampling), batch, LOGP)
    A = X.advantages("std", 0)
    before = X.old if sampling == "POIS" else X.behaviour
    H = (X.entropy * X.mask).sum(1) / X.mask.sum(1)
    spared = (np.exp(X.behaviour) >= 0.5) & ((H < 0.8) & (reward == 1))[:, None] & X.mask
    informative = [(i, t) for i, t in X.tokens() if X.group[i] != 2]
    assert any(spared[place] for place in informative)

    def loss(logp: np.ndarray) -> float:
        total = 0.0
        for i, t in informative:
            rho, a = np.exp(logp[i, t] - before[i, t]), A[i, 0] * (not spared[i, t])
            total -= min(rho * a, min(max(rho, 0.8), 1.2) * a)
        return total / len(informative)

    assert_matches_loop(found, loss, LOGP)
    assert ulorl(sampling=sampling).needs == ({"old_logp"} if sampling == "POIS" else set())


def test_without_their_regulariser_they_are_grpo() -> None:
    expected = learn(grpo(kl_coefficient=0.0, average="token"), TURNS, LOGP).gradient
    found = learn(llds(coefficient=0.0), TURNS, LOGP).gradient
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-8)
    assert float(control(prepared(epo(), BATCH), "corridor")) == 0, "no history, no corridor"


def test_bad_choices_are_refused() -> None:
    with pytest.raises(InputError, match="unknown gate"):
        llds(gate="word")
    with pytest.raises(InputError, match="unknown penalty_over"):
        llds(penalty_over="negative")
    with pytest.raises(InputError, match="unknown sampling"):
        ulorl(sampling="OIS")
