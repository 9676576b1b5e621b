"""What a policy says of sampled tokens: equal to the softmax of its logits, on every path, in bounded memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import optimised
from conftest import COMPLETION, FAMILIES, MODES
from heavy import few

from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.models import init_params
from jaxrl_llm.models.outputs import policy_outputs
from jaxrl_llm.models.policy import Policy

N, L = 4, 24
TWO_FAMILIES = ("gemma2", "qwen3_moe")  # soft caps and sliding windows; a router
EVERY_MODE = [(family, mode) for family in FAMILIES for mode in MODES]
FAMILIES_AND_MODES = few(EVERY_MODE, [("gemma2", "plain"), ("qwen3_moe", "together")], unpack=True)


def multi_turn_batch(seed: int = 0, temperature: Any = (0.7, 0.7, 1.3, 1.3)) -> Trajectories:
    """Two groups of two rows: environment tokens between actions, unequal lengths, one row without actions."""
    random = np.random.default_rng(seed)
    prompt, end = [6, 6, 9, 9], [24, 19, 20, 15]
    tokens = random.integers(0, 256, (N, L))
    tokens[1, :6], tokens[3, :9] = tokens[0, :6], tokens[2, :9]
    place = np.arange(L)[None]
    real = place < np.asarray(end)[:, None]
    action = real & (place >= np.asarray(prompt)[:, None]) & (random.random((N, L)) < 0.6)
    action[[0, 1, 3], [6, 6, 9]] = True
    action[2] = False  # the first row of its group
    return Trajectories(
        tokens=jnp.asarray(np.where(real, tokens, 0), jnp.int32),
        token_mask=jnp.asarray(real),
        action_mask=jnp.asarray(action),
        behaviour_logp=jnp.zeros((N, L)),
        policy_step=jnp.zeros((N, L), jnp.int32),
        turn=jnp.where(action, 0, -1),
        group=jnp.asarray([0, 0, 1, 1]),
        prompt_id=jnp.asarray([0, 0, 1, 1]),
        truncated=jnp.zeros(N, bool),
        temperature=jnp.asarray(temperature, jnp.float32),
    )


def by_logits(vectors: Any, batch: Trajectories) -> tuple[np.ndarray, np.ndarray]:
    """Log-probability and entropy of each action from all logits, in float64, one position at a time."""
    logits = np.asarray(vectors.policy.logits(vectors.params, batch.tokens, batch.token_mask), np.float64)
    tokens, action = np.asarray(batch.tokens), np.asarray(batch.action_mask)
    logp, entropy = np.zeros(tokens.shape), np.zeros(tokens.shape)
    for row, place in zip(*np.nonzero(action), strict=True):
        z = logits[row, place - 1] / float(batch.temperature[row])
        z = z - z.max()
        p = np.exp(z) / np.exp(z).sum()
        logp[row, place] = np.log(p[tokens[row, place]])
        entropy[row, place] = -(p * np.log(p)).sum()
    return logp, entropy


def relative(found: Any, expected: Any) -> float:
    """The largest difference, as a fraction of the largest number, over the worst of the leaves."""

    def of_leaf(a: Any, b: Any) -> float:
        return float(np.abs(np.asarray(a) - np.asarray(b)).max() / max(np.abs(np.asarray(b)).max(), 1e-12))

    return max(jax.tree.leaves(jax.tree.map(of_leaf, found, expected)))


@pytest.mark.heavy
@pytest.mark.parametrize("family", few(FAMILIES, TWO_FAMILIES))
def test_plain_and_shared_prompts_equal_the_softmax(
    family: str, vectors: Any, probe: Any, share: Any, left_padded: Any
) -> None:
    model, batch = vectors(family), multi_turn_batch()
    random = np.random.default_rng(1)
    weights = (random.normal(size=(N, L)), random.normal(size=(N, L)))
    plain = probe(model, batch, weights=weights)
    shared = probe(model, batch, share(batch), weights)
    logp, entropy = by_logits(model, batch)
    action = np.asarray(batch.action_mask)
    assert logp[action].max() < -0.01
    for found in (plain, shared):
        np.testing.assert_allclose(found.logp, logp, atol=3e-5)
        np.testing.assert_allclose(found.entropy, entropy, atol=3e-5)
        assert not found.logp[~action].any()
        assert not found.entropy[~action].any()
    assert relative(shared.gradient, plain.gradient) < 1e-5
    moved = left_padded(batch)
    assert not np.asarray(moved.token_mask)[1, 0]
    left = probe(model, moved)
    np.testing.assert_allclose(left.logp[np.asarray(moved.action_mask)], logp[action], atol=3e-5)
    np.testing.assert_allclose(left.entropy[np.asarray(moved.action_mask)], entropy[action], atol=3e-5)


def test_gradient_by_finite_differences(vectors: Any, probe: Any) -> None:
    """Along the gradient, the value changes by the gradient's squared length."""
    model, batch = vectors("gemma2"), multi_turn_batch()
    random = np.random.default_rng(2)
    weights = (random.normal(size=(N, L)), random.normal(size=(N, L)))
    gradient = probe(model, batch, weights=weights).gradient
    squared = sum(float((np.asarray(g, np.float64) ** 2).sum()) for g in jax.tree.leaves(gradient))
    step = 1e-3 / np.sqrt(squared)

    def value(sign: float) -> float:
        params = jax.tree.map(lambda p, g: p + sign * step * g, model.params, gradient)
        found = probe(model._replace(params=params), batch)
        return float((weights[0] * found.logp + weights[1] * found.entropy).sum())

    assert (value(1) - value(-1)) / (2 * step) == pytest.approx(squared, rel=0.01)


def test_rows_without_actions_count_for_nothing(vectors: Any, probe: Any, share: Any) -> None:
    batch = multi_turn_batch()
    batch = batch.replace(action_mask=jnp.zeros_like(batch.action_mask))
    for packing in (None, share(batch)):
        found = probe(vectors("gemma2"), batch, packing, (np.ones((N, L)), np.ones((N, L))))
        assert not found.logp.any()
        assert not found.entropy.any()
        assert all(not np.asarray(g).any() for g in jax.tree.leaves(found.gradient))


@pytest.mark.heavy
def test_a_group_shares_its_prompt_where_a_first_row_has_no_actions(vectors: Any, probe: Any, share: Any) -> None:
    """The prompt ends at the group's first action, not at that of its first row."""
    batch = multi_turn_batch(seed=5)
    later = np.asarray(batch.action_mask).copy()
    later[0, 6:12] = False  # forced tokens come before this row's first action
    batch = batch.replace(action_mask=jnp.asarray(later))
    model = vectors("qwen3_moe")
    np.testing.assert_allclose(probe(model, batch, share(batch)).logp, probe(model, batch).logp, atol=2e-5)


@pytest.mark.parametrize("family", TWO_FAMILIES)
def test_temperature_and_softcap_matter(family: str, vectors: Any, probe: Any) -> None:
    model, batch = vectors(family), multi_turn_batch()
    one = batch.replace(temperature=jnp.ones(N))
    assert np.abs(probe(model, batch).logp - probe(model, one).logp).max() > 0.1
    assert one.support_floor is None
    for same in (one, batch.replace(temperature=None)):
        found = policy_outputs(model.policy, model.params, same)
        np.testing.assert_allclose(np.asarray(found.logp), probe(model, one).logp, atol=2e-5)
    if family == "gemma2":
        assert model.policy.config.logit_softcap > 0
        bare = dataclasses.replace(model.policy, config=dataclasses.replace(model.policy.config, logit_softcap=0.0))
        uncapped = policy_outputs(bare, model.params, one)
        assert np.abs(np.asarray(uncapped.logp) - probe(model, one).logp).max() > 1e-3


@pytest.mark.heavy
@pytest.mark.parametrize("family, mode", FAMILIES_AND_MODES)
def test_the_ratio_is_one_before_the_first_step(
    family: str, mode: str, vectors: Any, rollouts: Any, probe: Any, left_padded: Any
) -> None:
    model, batch = vectors(family), rollouts(family, mode)
    assert batch.tokens.shape == (N, L)
    for rows in (batch, left_padded(batch)):
        action = np.asarray(rows.action_mask)
        assert action.sum() == 4 * 16
        found = probe(model, rows)
        assert np.abs(found.logp - np.asarray(rows.behaviour_logp))[action].max() < 1e-4
        assert np.abs(found.entropy - np.asarray(rows.entropy))[action].max() < 1e-4


@pytest.mark.heavy
@pytest.mark.parametrize("family", TWO_FAMILIES)
@pytest.mark.parametrize("sampled", few(["temperature", "together"], ["together"]))
def test_the_ratio_is_one_with_shared_prompts(
    family: str, sampled: str, vectors: Any, rollouts: Any, probe: Any, share: Any
) -> None:
    batch = rollouts(family, sampled)
    found = probe(vectors(family), batch, share(batch))
    assert np.abs(found.logp - np.asarray(batch.behaviour_logp)).max() < 1e-4
    assert np.abs(found.entropy - np.asarray(batch.entropy)).max() < 1e-4


def test_unfiltered_rollouts_disagree_with_filtered_ones(vectors: Any, rollouts: Any, probe: Any) -> None:
    """The floor does something: without it, a truncated distribution's log-probabilities are not found."""
    batch = rollouts("llama", "top_k")
    found = probe(vectors("llama"), batch.replace(support_floor=None))
    assert np.abs(found.logp - np.asarray(batch.behaviour_logp)).max() > 0.05


def arrays_of(jaxpr: Any) -> list[Any]:
    """The types of all values computed in a program and in the programs that it calls."""
    found = []
    for equation in jaxpr.eqns:
        found += [v.aval for v in equation.outvars]
        for parameter in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                found += arrays_of(inner)
    return found


def shapes_of(policy: Policy, seed: int = 0) -> Any:
    return jax.eval_shape(lambda: init_params(jax.random.key(seed), policy.config))


@pytest.mark.parametrize("shared", [False, True])
def test_no_array_of_all_logits(shared: bool, vectors: Any, share: Any) -> None:
    vocabulary = 20_000
    base = vectors("gemma2").policy
    policy = dataclasses.replace(base, config=dataclasses.replace(base.config, vocab_size=vocabulary))
    batch = multi_turn_batch()
    width = COMPLETION if shared else L
    limit = N * width * vocabulary

    def loss(params: Any) -> jax.Array:
        outputs = policy_outputs(policy, params, batch, share(batch) if shared else None)
        return outputs.logp.sum() + outputs.entropy.sum()

    def naive(params: Any) -> jax.Array:
        return jax.nn.log_softmax(policy.logits(params, batch.tokens, batch.token_mask)).sum()

    def largest(f: Any) -> int:
        program = jax.make_jaxpr(jax.grad(f))(shapes_of(policy))
        return max(int(np.prod(aval.shape)) for aval in arrays_of(program.jaxpr) if hasattr(aval, "shape"))

    assert vocabulary * policy.config.hidden_size < limit  # the gradient of the unembedding is not the largest by right
    assert largest(naive) >= N * L * vocabulary
    assert largest(loss) < limit


@optimised
def test_memory_of_a_gradient(vectors: Any) -> None:
    """Temporaries stay under half of one [N, L, V] array, of which a plain softmax keeps several."""
    rows, length, vocabulary = 8, 128, 49_152
    base = vectors("llama_tied").policy
    policy = dataclasses.replace(base, config=dataclasses.replace(base.config, vocab_size=vocabulary))
    whole = multi_turn_batch()
    batch = jax.tree.map(lambda x: jnp.zeros((rows, length)[: x.ndim], x.dtype), whole)

    def loss(params: Any, batch: Trajectories) -> jax.Array:
        return policy_outputs(policy, params, batch).logp.sum()

    compiled = jax.jit(jax.grad(loss)).lower(shapes_of(policy), batch).compile()
    memory = compiled.memory_analysis()
    if memory is None:
        pytest.skip("this backend does not say what memory a program takes")
    assert memory.temp_size_in_bytes < rows * length * vocabulary * 4 / 2
