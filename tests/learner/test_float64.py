"""In float64 nothing hides in rounding: fused, packed and sliced, the gradient is the plain formula's to 13 digits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TODAY, quick_compiles
from heavy import few

from jaxrl_llm import load_policy
from jaxrl_llm.core.trajectory import PolicyOutputs, Trajectories, with_totals
from jaxrl_llm.core.transform import Objective
from jaxrl_llm.in_jax.steps import draw_steps
from jaxrl_llm.learner.microbatches import plan_steps
from jaxrl_llm.learner.update import gradient
from jaxrl_llm.models.packing import shared_prompts
from jaxrl_llm.objectives import clip, entropy, policy_gradient, sequence_mean, sequence_ratio, token_mean, token_ratio
from jaxrl_llm.utils.errors import InputError

FAMILIES = ("llama", "llama31_rope", "qwen2", "qwen3", "gemma2", "gemma3", "mixtral", "qwen3_moe")
# The surrogate by token and by sequence, in one pass and composed, and one with an entropy bonus.
OBJECTIVES = {
    "grpo": policy_gradient(token_ratio(), clip(0.2, 0.2), sequence_mean()),
    "gspo": policy_gradient(sequence_ratio(), clip(3e-4, 4e-4), sequence_mean(), kernel=None),
    "entropy": policy_gradient(token_ratio(), clip(0.2, 0.28), token_mean()) - 0.1 * entropy(),
}
GROUPS, GROUP_SIZE, PROMPT, LONGEST = 4, 2, 9, 20


@pytest.fixture(autouse=True)
def _wide() -> Iterator[None]:
    with quick_compiles(), jax.enable_x64(True):  # many programs, each run once
        yield


def model(vectors: Any, family: str) -> tuple[Any, Any]:
    """Policy and parameters, in float64."""
    policy, params, _ = load_policy(vectors(family).folder, dtype=jnp.float64)
    return dataclasses.replace(policy, remat=False), params


def uneven(vocabulary: int = 250) -> Trajectories:
    """Prompts of 3 to 9 tokens, each with 2 completions of 1 to 20."""
    random, N, L = np.random.default_rng(0), GROUPS * GROUP_SIZE, PROMPT + LONGEST
    owner = np.arange(N) // GROUP_SIZE
    start = random.integers(3, PROMPT + 1, GROUPS)[owner]
    end, place = start + random.integers(1, LONGEST + 1, N), np.arange(L)
    action = (place >= start[:, None]) & (place < end[:, None])
    prompts = random.integers(1, vocabulary, (GROUPS, L))[owner]
    tokens = np.where(place < start[:, None], prompts, random.integers(1, vocabulary, (N, L)))
    return Trajectories(
        tokens=jnp.asarray(tokens, jnp.int32), token_mask=jnp.asarray(place < end[:, None]),
        action_mask=jnp.asarray(action),
        behaviour_logp=jnp.asarray(np.where(action, random.normal(-5.5, 0.3, (N, L)), 0)),
        policy_step=jnp.zeros((N, L), jnp.int32), turn=jnp.asarray(np.where(action, 0, -1)), group=jnp.asarray(owner),
        prompt_id=jnp.asarray(owner), truncated=jnp.zeros(N, bool), temperature=jnp.ones(N),
        advantages=jnp.asarray(np.where(action, random.normal(size=(N, 1)), 0)),
    )  # fmt: skip


def plain_loss(policy: Any, objective: Objective, params: Any, batch: Trajectories) -> jax.Array:
    """Through whole logits and their log-softmax, a row for each sequence."""
    logp = jax.nn.log_softmax(policy.logits(params, batch.tokens, batch.token_mask))[:, :-1]
    chosen = jnp.take_along_axis(logp, batch.tokens[:, 1:, None], axis=2)[..., 0]
    entropies = -jnp.sum(jnp.exp(logp) * logp, axis=-1)
    outputs = (jnp.where(batch.action_mask, jnp.pad(x, ((0, 0), (1, 0))), 0) for x in (chosen, entropies))
    return objective.function(PolicyOutputs(*outputs), with_totals(batch))[0]


def agree(found: Any, expected: Any, bound: float = 1e-13) -> None:
    """Every parameter of every layer, by the norm of the difference."""
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        assert x.dtype == jnp.float64
        axes = tuple(range("layers" in jax.tree_util.keystr(path), x.ndim))
        off, size = (np.sqrt(np.sum(np.square(z), axis=axes)) for z in (np.asarray(x - y), np.asarray(y)))
        np.testing.assert_array_less(off, bound * size + 1e-18, err_msg=jax.tree_util.keystr(path))


CASES = [("gemma2", "entropy")]
MORE = [*(("llama", name) for name in OBJECTIVES), *((family, "entropy") for family in (*FAMILIES[1:], *TODAY))]
CASES += [pytest.param(*case, marks=pytest.mark.heavy) for case in MORE if case not in CASES]


@pytest.mark.heavy
@pytest.mark.parametrize(("family", "name"), CASES)
def test_fused_packed_and_sliced_are_the_plain_formula(family: str, name: str, vectors: Any) -> None:
    (policy, params), batch, objective = model(vectors, family), uneven(), OBJECTIVES[name]
    expected = jax.jit(jax.grad(plain_loss, argnums=2), static_argnums=(0, 1))(policy, objective, params, batch)
    thorough = (family, name) == ("llama", "entropy")
    for micro_batches in (1, 2, 4) if thorough else (2,):
        slices = plan_steps(batch, micro_batches=micro_batches, runs=policy.config.recurrent).slices
        found = jax.jit(gradient, static_argnums=(0, 1))(policy, objective, params, batch, slices)[0]
        agree(found, expected, 1e-10 if policy.config.recurrent else 1e-13)
    if thorough:
        grad_fn, key = jax.jit(gradient, static_argnums=(0, 1)), jax.random.key(0)
        sizes = {"group_size": GROUP_SIZE, "prompt_length": PROMPT, "completion_length": LONGEST}
        for packing in (None, partial(shared_prompts, **sizes)):
            for parts in (1, 4):
                drawn = draw_steps(key, batch, minibatches=parts, group_size=GROUP_SIZE, packing=packing)
                agree(grad_fn(policy, objective, params, batch, drawn.slices)[0], expected)


@pytest.mark.heavy
@pytest.mark.parametrize("name", few(OBJECTIVES, ["grpo"]))
def test_the_gradient_is_the_finite_difference(name: str, vectors: Any) -> None:
    """Along three random directions of all parameters, by central differences of five points."""
    (policy, params), batch, objective = model(vectors, "llama"), uneven(), OBJECTIVES[name]
    slices = plan_steps(batch, micro_batches=2).slices
    found, metrics = jax.jit(gradient, static_argnums=(0, 1))(policy, objective, params, batch, slices)
    loss = jax.jit(plain_loss, static_argnums=(0, 1))
    np.testing.assert_allclose(metrics["loss"], loss(policy, objective, params, batch), rtol=1e-13)
    h = 1e-6  # so little that no ratio passes a bound of its clip range
    for seed in range(3):
        keys = jax.random.split(jax.random.key(seed), len(jax.tree.leaves(params)))
        keys = jax.tree.unflatten(jax.tree.structure(params), list(keys))
        way = jax.tree.map(lambda p, key: jax.random.normal(key, p.shape, p.dtype) * jnp.std(p), params, keys)
        points = (jax.tree.map(lambda p, w, x=x: p + x * h * w, params, way) for x in (-2, -1, 1, 2))
        before2, before, after, after2 = (float(loss(policy, objective, point, batch)) for point in points)
        slope = (8 * (after - before) - (after2 - before2)) / (12 * h)
        inner = sum(float(jnp.vdot(g, w)) for g, w in zip(*map(jax.tree.leaves, (found, way)), strict=True))
        np.testing.assert_allclose(inner, slope, rtol=1e-7)


def test_float64_must_be_enabled_first(vectors: Any) -> None:
    folder = vectors("llama").folder
    with jax.enable_x64(False), pytest.raises(InputError, match="jax_enable_x64"):
        load_policy(folder, dtype=jnp.float64)
