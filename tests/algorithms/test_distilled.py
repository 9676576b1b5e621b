"""Methods that learn from a teacher, against all logits of both and against loops in double precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import random_batch
from method_step import arrays, assert_matches_loop, learn

from jaxrl_llm import algorithms
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.learner.inputs import provide
from jaxrl_llm.learner.teacher import FrozenPolicy, with_head
from jaxrl_llm.learner.update import gradient
from jaxrl_llm.models import load_policy
from jaxrl_llm.objectives.distillation.divergences import generalised_jsd, top_k_divergence
from jaxrl_llm.objectives.distillation.teachers import distillation
from jaxrl_llm.utils.errors import InputError

MODELS = Path(__file__).resolve().parents[1] / "vectors"
PROMPTS, OWN, OTHERS, WIDTH, HEAT = [3, 2], [3, 4], [5, 0], 8, 0.8

BATCH, LOGP = random_batch(9)
X = arrays(BATCH)
RANDOM = np.random.default_rng(5)
TAUGHT = np.minimum(X.behaviour + RANDOM.normal(size=X.mask.shape), 0)
DIVERGENCE = RANDOM.uniform(0, 1, X.mask.shape).astype(np.float32)
WITH_TEACHER = BATCH.with_info(teacher_token_logp=jnp.asarray(TAUGHT, jnp.float32))


def made(teacher_prompts: bool = False) -> tuple[Trajectories, list[list[int]]]:
    """Two ragged rows; and what the teacher reads before the completion of each, [] for nothing."""
    random, N = np.random.default_rng(0), len(PROMPTS)
    tokens, mask, action = np.zeros((N, WIDTH), np.int32), np.zeros((N, WIDTH), bool), np.zeros((N, WIDTH), bool)
    others, teacher = [], np.full((N, 12), -1.0, np.float32)
    for i, (prompt, own, other) in enumerate(zip(PROMPTS, OWN, OTHERS, strict=True)):
        tokens[i, : prompt + own] = random.integers(3, 200, prompt + own)
        mask[i, : prompt + own], action[i, prompt : prompt + own] = True, True
        before = random.integers(3, 200, other) if teacher_prompts else tokens[i, :prompt]
        others.append(before.tolist())
        if len(before):
            teacher[i, : len(before) + own] = [*before, *tokens[i, prompt : prompt + own]]
    rows: Any = np.arange(N, dtype=np.int32)
    zeros = np.zeros((N, WIDTH), np.float32)
    batch = Trajectories(
        tokens=tokens, token_mask=mask, action_mask=action, behaviour_logp=zeros, policy_step=zeros.astype(np.int32),
        turn=np.where(action, 0, -1).astype(np.int32), group=rows, prompt_id=rows, truncated=rows < 0,
        temperature=np.full(N, HEAT, np.float32), info={"teacher_tokens": teacher} if teacher_prompts else None,
    )  # fmt: skip
    return jax.tree.map(jnp.asarray, batch), others


def dense(divergence: Any, policy: Any, params: Any, teacher: FrozenPolicy, batch: Trajectories, others: Any) -> Any:
    """The token mean of a divergence of all logits, row by row."""
    total = jnp.zeros(())
    for i, (prompt, own) in enumerate(zip(PROMPTS, OWN, strict=True)):
        if not others[i]:
            continue
        ids = batch.tokens[i, : prompt + own]
        read = jnp.concatenate([jnp.asarray(others[i], jnp.int32), ids[prompt:]])
        s = policy.logits(params, ids[None])[0, prompt - 1 : -1] / HEAT
        t = teacher.policy.logits(teacher.params, read[None])[0, len(others[i]) - 1 : -1] / HEAT
        total += jnp.sum(divergence(jax.nn.log_softmax(s), jax.nn.log_softmax(t)))
    return total / sum(OWN)


def assert_is_dense(objective: Any, divergence: Any, name: str, teacher_prompts: bool = False) -> None:
    policy, params, _ = load_policy(MODELS / "llama_tied", remat=False)
    other, weights, _ = load_policy(MODELS / name, remat=False)
    teacher = FrozenPolicy(other, weights)
    batch, others = made(teacher_prompts)
    filled = provide(policy, objective.needs, params, None, batch, teacher=teacher)
    learning, frozen = with_head(policy, objective.needs, None, teacher, None)
    found, metrics = gradient(learning, objective, params, filled, None, frozen)
    loss = jax.value_and_grad(lambda params: dense(divergence, policy, params, teacher, batch, others))
    expected, by = loss(params)
    np.testing.assert_allclose(metrics["loss"], expected, rtol=2e-5)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(by), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=3e-6)


@pytest.mark.heavy
@pytest.mark.parametrize("beta", [0, 0.3, 1])
def test_gkd_is_its_loop(beta: float) -> None:
    """The teacher is of another architecture, with a soft cap of its logits."""
    method = algorithms.get("gkd", beta=beta)
    assert_is_dense(method.objective, lambda s, t: generalised_jsd(s, jax.lax.stop_gradient(t), beta), "gemma2")


@pytest.mark.heavy
@pytest.mark.parametrize(("beta", "support"), [(0, None), (1, None), (0.5, None), (0.5, "teacher")])
def test_on_top_tokens(beta: float, support: Any) -> None:
    method = algorithms.get("gkd", beta=beta, top_k=4, support=support)
    assert_is_dense(method.objective, lambda s, t: top_k_divergence(s, t, 4, beta, support=support), "qwen2")


@pytest.mark.heavy
def test_sdft_is_its_loop() -> None:
    """Its teacher reads another prompt, and a row without one has no divergence."""
    assert_is_dense(
        algorithms.get("sdft").objective, lambda s, t: generalised_jsd(s, jax.lax.stop_gradient(t), 1), "llama", True
    )


def iw_opd(logp: np.ndarray, gamma: float) -> float:
    total = 0.0
    for i in range(len(X.mask)):
        a = {t: TAUGHT[i, t] - X.behaviour[i, t] for t in np.flatnonzero(X.mask[i])}
        size = sum(map(abs, a.values()))
        for t in a:
            before = sum(abs(a[u]) for u in a if u < t)
            total -= (1 + gamma * (1 - before / size)) * a[t] * logp[i, t]
    return total / X.mask.sum()


@pytest.mark.parametrize("gamma", [0.0, 0.7])
def test_iw_opd_is_its_loop(gamma: float) -> None:
    found = learn(algorithms.get("iw_opd", gamma=gamma), WITH_TEACHER, LOGP)
    assert_matches_loop(found, lambda logp: iw_opd(logp, gamma), LOGP)
    expected = np.mean([(X.behaviour - TAUGHT)[place] for place in X.tokens()])
    assert found.metrics["teacher/log_ratio"] == pytest.approx(expected, rel=1e-5)


def minillm(logp: np.ndarray, gamma: float, normalised: bool) -> float:
    total = 0.0
    for i in range(len(X.mask)):
        places = np.flatnonzero(X.mask[i])
        for t in places:
            weights = {u: gamma ** (u - t) for u in places if u >= t}
            A = sum(w * (TAUGHT[i, u] - X.behaviour[i, u]) for u, w in weights.items())
            A /= sum(weights.values()) if normalised else 1
            rho = np.exp(logp[i, t] - X.behaviour[i, t])
            total += DIVERGENCE[i, t] - min(rho * A, min(max(rho, 0.8), 1.2) * A)
    return total / X.mask.sum()


@pytest.mark.parametrize("options", [{}, {"gamma": 0.6, "length_normalised": False}])
def test_minillm_is_its_loop(options: dict[str, Any]) -> None:
    """The number of the positions between two tokens counts, not that of the actions."""
    found = learn(algorithms.get("minillm", **options), WITH_TEACHER, LOGP, teacher_divergence=DIVERGENCE)
    given = options.get("gamma", 1.0), options.get("length_normalised", True)
    assert_matches_loop(found, lambda logp: minillm(logp, *given), LOGP)
    assert found.metrics["distillation"] == pytest.approx(DIVERGENCE[X.mask].mean(), rel=1e-5)


def test_it_adds_to_any_objective() -> None:
    grpo = algorithms.get("grpo")
    both = grpo.objective + 0.1 * distillation(1.0, 8, support="student")
    assert both.needs == grpo.objective.needs | {"top_tokens:8", "top_logp:8", "teacher_logp"}


def test_bad_numbers_are_refused() -> None:
    for options, said in (({"beta": 1.5}, "beta"), ({"top_k": -1}, "top_k"), ({"support": "both"}, "support")):
        with pytest.raises(InputError, match=said):
            algorithms.get("gkd", **options)
