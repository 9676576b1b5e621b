"""Methods of pairs and verdicts of a data set, against loops in double precision, and whole steps against TRL's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import batch_of, random_batch
from method_step import arrays, assert_matches_loop, learn

from jaxrl_llm import algorithms
from jaxrl_llm.algorithms.preferences.dpo import dpo
from jaxrl_llm.algorithms.preferences.kto import kto
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.trajectory import map_rows
from jaxrl_llm.core.transform import chain
from jaxrl_llm.objectives.preference.losses import bco_pair, sigmoid, weighted_losses
from jaxrl_llm.utils.errors import InputError

BATCH, LOGP = random_batch(5, (2, 2, 2))
X = arrays(BATCH)
CHOSEN, REJECTED = np.flatnonzero(X.reward == 1), np.flatnonzero(X.reward == 0)
LENGTH = X.mask.sum(1)


def softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(0, x)


def sums(logp: np.ndarray, against: bool = True) -> np.ndarray:
    return ((logp - (X.reference if against else 0)) * X.mask).sum(1)


def nll(logp: np.ndarray) -> float:
    return float(-(logp * X.mask)[CHOSEN].sum() / LENGTH[CHOSEN].sum())


def gap(values: np.ndarray) -> np.ndarray:
    return values[CHOSEN] - values[REJECTED]


def check(method: Algorithm, loss: Callable[[np.ndarray], float]) -> None:
    assert_matches_loop(learn(method, BATCH, LOGP), loss, LOGP)


def test_dpo_by_loop() -> None:
    check(dpo(beta=0.4), lambda x: float(softplus(-0.4 * gap(sums(x))).mean()))
    check(dpo(likelihood=0.7), lambda x: float(softplus(-0.1 * gap(sums(x))).mean()) + 0.7 * nll(x))
    check(
        dpo("nca_pair", beta=0.3),
        lambda x: float(
            np.mean([
                softplus(-0.3 * w) + softplus(0.3 * w) / 2 + softplus(0.3 * l) / 2
                for w, l in zip(sums(x)[CHOSEN], sums(x)[REJECTED], strict=True)
            ])
        ),
    )  # fmt: skip
    shorter = np.minimum(LENGTH[CHOSEN], LENGTH[REJECTED])[X.group.astype(int)]
    weight = np.where(np.arange(X.mask.shape[1]) < shorter[:, None], 1.0, 0.5) * X.mask

    def desensitised(x: np.ndarray) -> float:
        return float(softplus(-0.1 * gap(((x - X.reference) * weight).sum(1))).mean())

    check(dpo(beyond=0.5), desensitised)
    mixed = weighted_losses((sigmoid, 0.8), (bco_pair, 0.2))

    def by_hand(x: np.ndarray) -> float:
        u = 0.1 * sums(x)
        return float(0.8 * softplus(-gap(u)).mean() + 0.2 * (softplus(-u[CHOSEN]) + softplus(u[REJECTED])).mean())

    check(dpo(mixed), by_hand)


def test_ipo_by_loop() -> None:
    method = algorithms.get("ipo", beta=0.2)
    check(method, lambda x: float(((gap(sums(x) / LENGTH) - 2.5) ** 2).mean()))


def test_simpo_by_loop() -> None:
    def loss(x: np.ndarray) -> float:
        return float(softplus(-(2.5 * gap(sums(x, against=False) / LENGTH) - 1.375)).mean()) + 0.5 * nll(x)

    check(algorithms.get("simpo", likelihood=0.5), loss)


def test_orpo_by_loop() -> None:
    def loss(x: np.ndarray) -> float:
        a = sums(x, against=False) / LENGTH
        return float(0.1 * softplus(-gap(a - np.log1p(-np.exp(a)))).mean()) + nll(x)

    check(algorithms.get("orpo"), loss)


def test_cpo_by_loop() -> None:
    def loss(x: np.ndarray) -> float:
        z = 0.1 * gap(sums(x, against=False))
        return float((0.9 * softplus(-z) + 0.1 * softplus(z)).mean()) + nll(x)

    check(algorithms.get("cpo", label_smoothing=0.1), loss)


def test_kto_by_loop() -> None:
    random = np.random.default_rng(0)
    mask = np.arange(5) < random.integers(2, 6, 8)[:, None]
    logp, reference = (-random.gamma(2.0, 0.5, (8, 5)) for _ in range(2))
    measured = np.tile([0.0, 1.0], 4)
    reward = np.where(measured > 0, np.nan, np.repeat([1, 0, 1, 1], 2))
    batch = batch_of(
        mask, reward, logp, np.repeat(np.arange(4), 2), reference_logp=reference, info={"measured": measured}
    )
    found, own = learn(kto(0.5, 1.3, 0.7), batch, logp), measured == 0
    z = max(((logp - reference) * mask).sum(1)[~own].mean(), 0)
    assert float((found.batch.controls or {})["sequence_kl"]) == pytest.approx(z, rel=1e-5)

    def shifted(z: float) -> Callable[[np.ndarray], float]:
        def loss(x: np.ndarray) -> float:
            u = 0.5 * (((x - reference) * mask).sum(1)[own] - z)
            good = reward[own] > 0.5
            return float(np.where(good, 1.3 / (1 + np.exp(u)), 0.7 / (1 + np.exp(-u))).mean())

        return loss

    trained = map_rows(lambda x: x[own], batch)
    for method, estimate in ((kto(0.5, 1.3, 0.7), z), (kto(0.5, 1.3, 0.7, kl=False), 0.0)):
        whole = shifted(estimate)

        def of_trained(x: np.ndarray, whole: Any = whole) -> float:
            full = logp.copy()
            full[own] = x
            return whole(full)

        objective = Algorithm(chain(), method.objective)  # the update sees the rows that it trains on alone
        given = trained.with_controls(sequence_kl=jnp.float32(z))
        assert_matches_loop(learn(objective, given, logp[own]), of_trained, logp[own])


def test_beta_of_0_is_refused() -> None:
    for name in ("dpo", "ipo", "kto", "orpo", "cpo", "simpo"):
        for beta in (0.0, -0.1):
            with pytest.raises(InputError, match="beta"):
                algorithms.get(name, beta=beta)
    with pytest.raises(InputError, match="unknown loss of pairs 'kto_pair'"):
        algorithms.get("dpo", loss="kto_pair")


STEP = Path(__file__).parents[1] / "preference_vectors" / "step"


def gradient_of_step(method: Algorithm, model: str, other: str, rows: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """The gradients of all parameters by their names in a Hugging Face folder, and the loss, of a step on given rows.

    rows: tokens, token_mask, action_mask, group and reward, and what else a batch has."""
    from jaxrl_llm import load_policy
    from jaxrl_llm.core.trajectory import Trajectories
    from jaxrl_llm.learner.inputs import provide
    from jaxrl_llm.learner.microbatches import plan_steps
    from jaxrl_llm.learner.update import gradient, prepare
    from jaxrl_llm.models.io.huggingface import to_tensors

    policy, params, _ = load_policy(STEP / model)
    _, reference, _ = load_policy(STEP / other)
    answer = rows["action_mask"]
    zeros = np.zeros(answer.shape, np.float32)
    batch: Any = Trajectories(
        behaviour_logp=zeros, policy_step=zeros.astype(np.int32), turn=np.where(answer, 0, -1).astype(np.int32),
        prompt_id=rows["group"], truncated=np.zeros(len(answer), bool), **rows,
    )  # fmt: skip
    measured = (batch.info or {}).get("measured", np.zeros(len(answer)))
    every, steps = plan_steps(batch), plan_steps(batch, rows=np.flatnonzero(measured == 0))
    batch = provide(policy, method.needs, params, reference, jax.tree.map(jnp.asarray, batch), every)
    _, batch = prepare(method.transform, method.transform.init(), batch)
    grads, metrics = gradient(policy, method.objective, params, batch, jax.tree.map(lambda x: x[0], steps.in_order))
    return to_tensors(grads, policy.config), float(metrics["loss"])


def assert_gradients(found: dict[str, Any], expected: dict[str, np.ndarray]) -> None:
    assert set(found) == set(expected)
    scale = max(np.abs(x).max() for x in expected.values())
    for key, x in expected.items():
        np.testing.assert_allclose(np.asarray(found[key]), x, rtol=2e-3, atol=2e-5 * scale, err_msg=key)


# TRL's ORPO is not among them: its likelihood is that of prompt and response, and the paper's that of the response.
@pytest.mark.heavy
@pytest.mark.parametrize("name", ["dpo/sigmoid", "dpo/ipo", "dpo/robust", "simpo", "cpo", "cpo_simpo"])
def test_a_whole_step_of_trl(name: str) -> None:
    """Loss and gradients of all parameters, with chosen and rejected rows behind their prompt once."""
    with np.load(STEP / "vectors.npz") as file:
        ids, real, answer = (file[f"dpo/{key}"] for key in ("input_ids", "attention_mask", "completion_mask"))
        expected = {key.split("/grad/")[1]: file[key] for key in file.files if key.startswith(f"{name}/grad/")}
        loss = float(file[f"{name}/loss"])
    order = np.arange(8).reshape(2, 4).T.reshape(-1)
    kind, _, variant = name.partition("/")
    given: dict[str, Any] = {
        "dpo": {"loss": variant, "label_smoothing": 0.1 if variant == "robust" else None},
        "cpo": {"beta": 0.1, "label_smoothing": 0.1, "likelihood": 1.0},
        "cpo_simpo": {"beta": 2.5, "gamma": 0.5, "likelihood": 1.0},
    }.get(kind, {})  # fmt: skip
    method = algorithms.get("simpo" if kind == "cpo_simpo" else kind, **given)
    rows = {
        "tokens": ids[order].astype(np.int32), "token_mask": real[order] > 0, "action_mask": answer[order] > 0,
        "group": np.repeat(np.arange(4), 2).astype(np.int32), "reward": np.tile([1.0, 0.0], 4).astype(np.float32),
    }  # fmt: skip
    found, value = gradient_of_step(method, "policy", "ref", rows)
    assert value == pytest.approx(loss, rel=2e-5)
    if expected:
        assert_gradients(found, expected)


@pytest.mark.heavy
def test_a_whole_step_of_kto_in_trl() -> None:
    """With completions of other prompts, which estimate a KL above 0."""
    with np.load(STEP / "vectors.npz") as file:
        x = {key.removeprefix("kto_swapped/"): file[key] for key in file.files if key.startswith("kto_swapped/")}
    expected = {key.split("/grad/")[1]: value for key, value in x.items() if "/grad/" in key}
    width = max(x["input_ids"].shape[1], x["KL_input_ids"].shape[1])

    def both(name: str, of: Callable[[np.ndarray], np.ndarray] = lambda a: a > 0) -> np.ndarray:
        """[12, width]: each row, and the one that estimates the KL after it."""
        parts = [np.pad(x[before + name], ((0, 0), (0, width - x[before + name].shape[1]))) for before in ("", "KL_")]
        return of(np.stack(parts, axis=1).reshape(12, width))

    reward = np.stack([x["label"].astype(np.float32), np.full(6, np.nan, np.float32)], axis=1).reshape(-1)
    rows = {
        "tokens": both("input_ids", lambda a: a.astype(np.int32)), "token_mask": both("attention_mask"),
        "action_mask": both("completion_mask"), "group": np.repeat(np.arange(6), 2).astype(np.int32), "reward": reward,
        "info": {"measured": np.isnan(reward).astype(np.float32)},
    }  # fmt: skip
    method = kto(beta=0.1, desirable_weight=1.0, undesirable_weight=1.5)
    found, value = gradient_of_step(method, "ref", "policy", rows)
    assert value == pytest.approx(float(x["kto_w1.0_1.5/loss"]), rel=2e-5)
    assert_gradients(found, expected)
