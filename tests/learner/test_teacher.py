"""What a teacher says of a row's tokens after another prompt, against whole logits of rows written out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.core.reference import Mixture
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.learner.inputs import provide
from jaxrl_llm.learner.microbatches import plan_steps
from jaxrl_llm.models import load_policy
from jaxrl_llm.models.outputs import Wanted, policy_outputs
from jaxrl_llm.utils.errors import InputError

MODEL = Path(__file__).resolve().parents[1] / "vectors" / "llama_tied"
PROMPTS, OWN, OTHERS = [3, 3, 5, 4], [4, 2, 3, 4], [6, 0, 2, 9]  # tokens
NEEDS = frozenset({"top_tokens:6", "top_logp:6", "teacher_logp", "teacher_entropy"})


def made() -> tuple[Trajectories, list[list[int]], list[list[int]]]:
    """A batch, and the prompts and completions of its rows under the teacher; [] where there is none."""
    random, L = np.random.default_rng(0), 9
    tokens, mask, action = np.zeros((4, L), np.int32), np.zeros((4, L), bool), np.zeros((4, L), bool)
    teacher, others, owns = np.full((4, 16), -1.0, np.float32), [], []
    for i, (prompt, own, other) in enumerate(zip(PROMPTS, OWN, OTHERS, strict=True)):
        size = prompt + own
        tokens[i, :size] = random.integers(3, 200, size)
        mask[i, :size], action[i, prompt:size] = True, True
        owns.append(tokens[i, prompt:size].tolist())
        others.append(random.integers(3, 200, other).tolist())
        if other:
            teacher[i, : other + own] = [*others[-1], *owns[-1]]
    rows: Any = np.arange(4, dtype=np.int32)
    zeros = np.zeros((4, L), np.float32)
    batch = Trajectories(
        tokens=tokens, token_mask=mask, action_mask=action, behaviour_logp=zeros, policy_step=zeros.astype(np.int32),
        turn=np.where(action, 0, -1).astype(np.int32), group=rows // 2, prompt_id=rows, truncated=rows < 0,
        temperature=np.full(4, 0.8, np.float32), info={"teacher_tokens": teacher},
    )  # fmt: skip
    return jax.tree.map(jnp.asarray, batch), others, owns


def log_probabilities(policy: Any, params: Any, ids: list[int]) -> np.ndarray:
    z = np.asarray(policy.logits(params, jnp.asarray([ids], jnp.int32)), np.float64)[0] / 0.8
    return z - z.max(-1, keepdims=True) - np.log(np.exp(z - z.max(-1, keepdims=True)).sum(-1, keepdims=True))


@pytest.mark.heavy
def test_a_teacher_reads_the_same_tokens_after_another_prompt() -> None:
    policy, params, _ = load_policy(MODEL)
    reference = jax.tree.map(lambda x: 0.9 * x, params)
    batch, others, owns = made()
    found = provide(policy, NEEDS, params, reference, batch)
    top, old, teacher, entropy = (
        np.asarray(found.info[name]) for name in ("top_tokens", "top_logp", "teacher_logp", "teacher_entropy")
    )
    action = np.asarray(batch.action_mask)
    for i, (other, own) in enumerate(zip(others, owns, strict=True)):
        here = log_probabilities(policy, params, [*np.asarray(batch.tokens)[i, : PROMPTS[i]].tolist(), *own])
        here = here[PROMPTS[i] - 1 : -1]
        best = np.argsort(-here, axis=1, kind="stable")[:, :6]
        np.testing.assert_array_equal(top[i, action[i]], best)
        np.testing.assert_allclose(old[i, action[i]], np.take_along_axis(here, best, 1), atol=2e-5)
        if not other:
            assert not teacher[i].any()
            assert not entropy[i].any()
            continue
        there = log_probabilities(policy, reference, [*other, *own])[len(other) - 1 : -1]
        np.testing.assert_allclose(teacher[i, action[i]], np.take_along_axis(there, best, 1), atol=2e-5)
        np.testing.assert_allclose(entropy[i, action[i]], -(np.exp(there) * there).sum(1), atol=2e-5)
    assert not teacher[~action].any()
    steps = plan_steps(jax.tree.map(np.asarray, batch), micro_batches=2)
    sliced = provide(policy, NEEDS, params, reference, batch, steps)
    for name in ("teacher_logp", "teacher_entropy", "top_logp"):
        np.testing.assert_allclose(sliced.info[name], found.info[name], atol=2e-5)


@pytest.mark.heavy
def test_in_a_batch_without_prompts_the_policy_is_its_own_teacher() -> None:
    policy, params, _ = load_policy(MODEL)
    found = provide(policy, NEEDS, params, params, made()[0].replace(info=None))
    np.testing.assert_array_equal(found.info["teacher_logp"], found.info["top_logp"])


@pytest.mark.heavy
def test_what_is_differentiated_is_of_the_same_tokens() -> None:
    policy, params, _ = load_policy(MODEL)
    batch = made()[0]
    found = provide(policy, NEEDS, params, params, batch)
    wanted = Wanted(("top_logp",), top=6)
    now = policy_outputs(policy, params, found, None, wanted)
    np.testing.assert_allclose(now.extras["top_logp"], found.info["top_logp"], atol=2e-5)
    where, random = np.asarray(batch.action_mask)[..., None], np.random.default_rng(1)
    weight = jnp.asarray(where * random.normal(size=(4, 9, 6)), jnp.float32)
    direction = jax.tree.map(lambda x: jnp.asarray(random.normal(size=x.shape), x.dtype), params)

    def total(params: Any) -> jax.Array:
        return jnp.sum(weight * policy_outputs(policy, params, found, None, wanted).extras["top_logp"])

    def dense(params: Any) -> jax.Array:
        logp = jax.nn.log_softmax(policy.logits(params, batch.tokens, batch.token_mask) / 0.8, axis=-1)
        logp = jnp.concatenate([logp[:, :1], logp[:, :-1]], axis=1)
        return jnp.sum(weight * jnp.take_along_axis(logp, found.info["top_tokens"].astype(jnp.int32), axis=2))

    def along(f: Any) -> float:
        return float(jax.tree.reduce(jnp.add, jax.tree.map(jnp.vdot, jax.grad(f)(params), direction)))

    assert along(total) == pytest.approx(along(dense), rel=1e-3)


def test_a_teacher_is_one_reference_policy() -> None:
    policy, params, _ = load_policy(MODEL)
    batch = made()[0]
    with pytest.raises(InputError, match="a teacher is one reference policy"):
        provide(policy, NEEDS, params, Mixture((params,), (1.0,)), batch)
    with pytest.raises(InputError, match="needs a reference policy"):
        provide(policy, NEEDS, params, None, batch)
