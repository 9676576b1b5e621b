"""Methods of pairs that the policy samples itself: loops, worked examples, and the numbers of TRL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import batch_of, random_batch
from method_step import arrays, assert_matches_loop, learn

from jaxrl_llm import algorithms
from jaxrl_llm.algorithms.online_preferences.dpo_online import dpo_online
from jaxrl_llm.algorithms.online_preferences.inpo import inpo
from jaxrl_llm.algorithms.online_preferences.nash_md import geometric_mixture, nash, nash_md
from jaxrl_llm.algorithms.online_preferences.spo_self_play import spo_self_play
from jaxrl_llm.algorithms.online_preferences.sppo import sppo, win_rate_regression
from jaxrl_llm.algorithms.online_preferences.xpo import xpo
from jaxrl_llm.core.hooks import Context
from jaxrl_llm.core.trajectory import PolicyOutputs
from jaxrl_llm.utils.errors import InputError

BATCH, LOGP = random_batch(5, (2, 2, 2))
X = arrays(BATCH)
TRL = Path(__file__).parents[1] / "preference_vectors" / "dropped_by_trl.npz"


def sums(logp: np.ndarray) -> np.ndarray:
    return ((logp - X.reference) * X.mask).sum(1)


def pairs_of(group: np.ndarray, reward: np.ndarray) -> list[tuple[int, int]]:
    found = []
    for g in sorted(set(group)):
        rows = np.flatnonzero(group == g)
        best, worst = rows[np.argmax(reward[rows])], rows[np.argmin(reward[rows])]
        found += [(best, worst)] if reward[best] > reward[worst] else []
    return found


PAIRS = pairs_of(X.group, X.reward)


def test_dpo_online_by_loop() -> None:
    def loss(logp: np.ndarray) -> float:
        u = sums(logp)
        nll = -sum((logp * X.mask)[w].sum() for w, _ in PAIRS) / sum(X.mask[w].sum() for w, _ in PAIRS)
        return float(np.mean([np.logaddexp(0, -0.3 * (u[w] - u[l])) for w, l in PAIRS]) + 0.2 * nll)

    assert_matches_loop(learn(dpo_online(beta=0.3, likelihood=0.2), BATCH, LOGP), loss, LOGP)
    assert dpo_online().reference is None
    moved = dpo_online(reset=2).reference
    assert moved is not None
    assert moved.update is not None
    assert [float(moved.update(0.0, 1.0, jnp.int32(n))) for n in (1, 2)] == [0, 1]
    assert algorithms.get("dpo_online", loss="ipo", beta=0.2).objective is not None


def test_sppo_by_loop_and_worked_example() -> None:
    rate = np.random.default_rng(0).uniform(size=len(X.reward))
    rate[3] = np.nan

    def loss(logp: np.ndarray) -> float:
        return float(np.nanmean((sums(logp) - (rate - 0.5) / 0.2) ** 2))

    batch = BATCH.with_info(win_rate=jnp.asarray(rate, jnp.float32))
    assert_matches_loop(learn(sppo(beta=0.2), batch, LOGP), loss, LOGP, tolerance=1e-5)
    card = batch_of(np.ones((2, 1)), [2.0, -1.0], np.zeros((2, 1)), reference_logp=np.array([[-2.0], [-2.0]]))
    card = card.with_info(win_rate=jnp.asarray([0.776401, 0.223599]))
    outputs = PolicyOutputs(jnp.asarray([[-0.7], [-2.7]]), jnp.zeros((2, 1)))
    assert float(win_rate_regression(1000.0)(outputs, card)[0]) == pytest.approx(75845.719241, rel=1e-5)


def test_inpo_by_loop_and_worked_example() -> None:
    def loss(logp: np.ndarray) -> float:
        u = sums(logp)
        return float(np.mean([(u[w] - u[l] - 1 / (2 * 0.4)) ** 2 for w, l in PAIRS]))

    method = inpo(eta=0.4, share=0.25)
    assert_matches_loop(learn(method, BATCH, LOGP), loss, LOGP, tolerance=1e-5)
    assert method.reference is not None
    assert method.reference.initial_share == 0.25
    # D(pi) = 3, D(ref) = 1, D(pi_t) = 2, tau = eta / 3.
    mixed = np.array([[1 / 3 * 1 + 2 / 3 * 2], [0.0]])
    card = batch_of(np.ones((2, 1)), [1.0, 0.0], np.zeros((2, 1)), reference_logp=mixed)
    found = inpo().objective(PolicyOutputs(jnp.asarray([[3.0], [0.0]]), jnp.zeros((2, 1))), card)[0]
    assert float(found) == pytest.approx(4268.444444, rel=1e-6)


def test_spo_self_play_worked_example() -> None:
    rates = [0.55, 0.35, 0.60]
    batch = batch_of(np.ones((3, 2)), [5.0, 5.0, 5.0], -np.ones((3, 2)), reference_logp=-np.ones((3, 2)))
    found = learn(spo_self_play(), batch.with_info(win_rate=jnp.asarray(rates)), -np.ones((3, 2)))
    expected = np.tile(np.array([[0.05], [-0.15], [0.10]]), (1, 2))
    np.testing.assert_allclose(found.batch.advantages, expected, atol=1e-6)
    np.testing.assert_allclose(found.gradient, -expected / 6, atol=1e-6)


def trl(file: Any, of: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Log-probabilities of tokens, the reference's and the mask, f64[16, 40]; rows from 8 on are the opponents'."""
    mask = file[f"{of}/mask"] > 0
    return np.where(mask, file[f"{of}/token_logps"], 0.0), np.where(mask, file[f"{of}/ref_token_logps"], 0.0), mask


@pytest.mark.heavy
def test_xpo_is_that_of_trl() -> None:
    """Values and gradients in float64, of sequence sums: one token a row."""
    with np.load(TRL) as file, jax.enable_x64(True):
        cases = [(number, json.loads(one)) for number, one in enumerate(file["cases"]) if "xpo" in one]
        assert len(cases) == 16
        wins = file["xpo_model_wins"]
        for number, case in cases:
            w, l, rw, rl = (
                file[f"{case['set']}/{name}"]
                for name in ("chosen_logps", "rejected_logps", "ref_chosen_logps", "ref_rejected_logps")
            )
            logp, reference = np.concatenate([w, l])[:, None], np.concatenate([rw, rl])[:, None]
            rate = np.where(wins, 1.0, 0.0)
            batch = batch_of(np.ones((16, 1)), np.zeros(16), np.zeros((16, 1)), np.tile(np.arange(8), 2))
            batch = batch.replace(reference_logp=jnp.asarray(reference)).with_info(
                win_rate=jnp.asarray(np.concatenate([rate, 1 - rate])), opponent=jnp.repeat(jnp.arange(2.0), 8)
            )
            method = xpo(case["beta"], case["alpha"], case["loss"].removeprefix("xpo_"))

            def loss(x: Any, method: Any = method, batch: Any = batch) -> Any:
                return method.objective(PolicyOutputs(x, jnp.zeros_like(x)), batch)[0]

            value, by = jax.value_and_grad(loss)(jnp.asarray(logp))
            np.testing.assert_allclose(value, np.mean(file["per_pair"][number]), rtol=1e-9)
            expected = np.concatenate([file["grad_chosen"][number], file["grad_rejected"][number]])
            np.testing.assert_allclose(by[:, 0], expected, rtol=1e-6, atol=1e-12)
    with pytest.raises(InputError, match="loss"):
        xpo(loss="hinge")  # type: ignore[arg-type]


def test_nash_md_is_that_of_trl() -> None:
    with np.load(TRL) as file, jax.enable_x64(True):
        for of in ("s0", "s1"):
            logp, reference, mask = (x[:8] for x in trl(file, of))
            batch = batch_of(mask, np.zeros(8), np.zeros(mask.shape), np.arange(8))
            batch = batch.replace(reference_logp=jnp.asarray(reference)).with_info(
                win_rate=jnp.asarray(file["nash_probability"])
            )
            for beta in (0.1, 0.5):
                objective = nash(beta)

                def loss(x: Any, objective: Any = objective, batch: Any = batch) -> Any:
                    return objective(PolicyOutputs(x, jnp.zeros_like(x)), batch)[0]

                value, by = jax.value_and_grad(loss)(jnp.asarray(logp))
                np.testing.assert_allclose(value, file[f"{of}/nash_md/beta{beta}/loss"], rtol=1e-6)
                expected = file[f"{of}/nash_md/beta{beta}/grad_tokens"] * mask
                np.testing.assert_allclose(by, expected, rtol=1e-6, atol=1e-9)


def test_nash_md_worked_example() -> None:
    """P = .689974, token logp [-1, -2, -2], reference [-1.2, -2.1, -2.2]: loss .869872; of sequences 2.5 for .8."""
    batch = batch_of(np.ones((1, 3)), [0.0], np.zeros((1, 3)), reference_logp=np.array([[-1.2, -2.1, -2.2]]))
    batch = batch.with_info(win_rate=jnp.asarray([0.689974]))
    outputs = PolicyOutputs(jnp.asarray([[-1.0, -2.0, -2.0]]), jnp.zeros((1, 3)))
    assert float(nash_md().objective(outputs, batch)[0]) == pytest.approx(0.869872, abs=1e-5)
    assert float(nash_md(whole=True).objective(outputs, batch)[0]) == pytest.approx(0.869872 - 0.1 * 1.7, abs=1e-5)
    hook = geometric_mixture(0.5)
    mixed = hook.apply(
        jnp.log(jnp.asarray([[0.7, 0.2, 0.1]])), {}, Context(other=jnp.log(jnp.asarray([[0.2, 0.5, 0.3]])))
    )
    np.testing.assert_allclose(np.exp(mixed[0]), [0.433263, 0.366174, 0.200562], atol=1e-6)
    padded = jnp.asarray([[0.0, -jnp.inf]])
    assert hook.apply(padded, {}, Context(other=padded)).tolist() == [[0.0, -np.inf]]
