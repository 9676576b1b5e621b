"""Routing replay: a mixture of experts sees tokens with given experts, which its router goes on to weigh."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.learner.microbatches import plan_steps
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.layers.moe import NOT_RECORDED, expert_mlp, index_dtype
from jaxrl_llm.models.layers.routing import check_experts, of_all_rows, routing_of
from jaxrl_llm.models.outputs import Wanted, policy_outputs
from jaxrl_llm.models.policy import Policy, init_params
from jaxrl_llm.utils.errors import InputError

CONFIG = ModelConfig(
    family="mixtral", vocab_size=32, hidden_size=8, intermediate_size=12, num_layers=2, num_heads=2, num_kv_heads=1,
    head_dim=4, norm_epsilon=1e-5, tie_embeddings=False, window_of_layer=(0, 0), rope_of_layer=(0, 0), query_scale=0.5,
    num_experts=5, experts_per_token=2,
)  # fmt: skip
T, D, E, F = 7, 8, 5, 12


def silu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def draw(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


LAYER = {"router": draw(1, D, E), "gate": draw(2, E, D, F), "up": draw(3, E, D, F), "down": draw(4, E, F, D)}
X, COTANGENT = draw(0, 1, T, D), draw(5, 1, T, D)
GIVEN = np.asarray([[(t, (t + 1 + t % 3) % E) for t in np.arange(T) % E]])  # seldom the router's choice


def by_loop(router: np.ndarray, experts: np.ndarray, normalise: bool) -> float:
    """The sum of COTANGENT times the outputs of X, in float64, a token and an expert at a time."""
    total = 0.0
    for t in range(T):
        x, logits = X[0, t].astype(np.float64), X[0, t].astype(np.float64) @ router
        probability = np.exp(logits) / np.exp(logits).sum()
        weights = probability[experts[0, t]]
        for weight, e in zip(weights / (weights.sum() if normalise else 1.0), experts[0, t], strict=True):
            gate = x @ LAYER["gate"][e]
            y = (gate / (1 + np.exp(-gate)) * (x @ LAYER["up"][e])) @ LAYER["down"][e]
            total += weight * float(y @ COTANGENT[0, t])
    return total


@pytest.mark.parametrize("normalise", [False, True])
def test_given_experts_by_loop_with_the_routers_gradient(normalise: bool) -> None:
    config = dataclasses.replace(CONFIG, normalise_router=normalise)

    def value(router: Any) -> jax.Array:
        out = expert_mlp(jnp.asarray(X), {**LAYER, "router": router}, config, silu, experts=jnp.asarray(GIVEN))
        return jnp.sum(out * COTANGENT)

    found, slope = jax.value_and_grad(value)(jnp.asarray(LAYER["router"]))
    router = LAYER["router"].astype(np.float64)
    assert float(found) == pytest.approx(by_loop(router, GIVEN, normalise), rel=1e-4)
    expected = np.zeros_like(router)
    for place in np.ndindex(*router.shape):
        step = np.zeros_like(router)
        step[place] = 1e-5
        expected[place] = (by_loop(router + step, GIVEN, normalise) - by_loop(router - step, GIVEN, normalise)) / 2e-5
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(slope, expected, rtol=1e-3, atol=1e-3)


def test_the_routers_own_choice_changes_nothing() -> None:
    """Bit for bit, forward and backward, where it is given and where nothing is."""
    layer = jax.tree.map(jnp.asarray, LAYER)
    _, own = expert_mlp(jnp.asarray(X), layer, CONFIG, silu, record=True)
    assert own.dtype == index_dtype(CONFIG) == jnp.int8
    assert own.shape == (1, T, 2)
    probability = np.asarray(jax.nn.softmax(X @ LAYER["router"]))
    assert own.tolist() == np.argsort(-probability, axis=-1, kind="stable")[..., :2].tolist()
    half = jnp.where(jnp.arange(T)[:, None] < 3, own, NOT_RECORDED)

    @jax.jit
    def slopes(experts: jax.Array | None) -> Any:
        def value(layer: Any) -> jax.Array:
            return jnp.sum(expert_mlp(jnp.asarray(X), layer, CONFIG, silu, experts=experts) * COTANGENT)

        return jax.value_and_grad(value)(layer)

    plain = slopes(None)
    for given in (own, half):
        assert jax.tree.all(jax.tree.map(np.array_equal, slopes(given), plain))
    assert not np.array_equal(slopes(jnp.asarray(GIVEN))[0], plain[0])


def test_more_than_128_experts_take_two_bytes() -> None:
    assert index_dtype(dataclasses.replace(CONFIG, num_experts=128)) == jnp.int8
    assert index_dtype(dataclasses.replace(CONFIG, num_experts=129)) == jnp.int16


def batch_of(tokens: np.ndarray, prompt: int) -> Trajectories:
    N, L = tokens.shape
    rows, zeros = np.arange(N, dtype=np.int32), np.zeros((N, L), np.int32)
    fields: dict[str, Any] = {
        "tokens": tokens.astype(np.int32), "token_mask": np.ones((N, L), bool),
        "action_mask": np.broadcast_to(np.arange(L) >= prompt, (N, L)), "behaviour_logp": zeros.astype(np.float32),
        "policy_step": zeros, "turn": zeros, "group": rows // 2, "prompt_id": rows // 2, "truncated": rows < 0,
    }  # fmt: skip
    return Trajectories(**fields)


@pytest.fixture(scope="module")
def model() -> tuple[Policy, Any, Trajectories]:
    """A policy, and two groups of two rows, which share their prompts, and two of which also the first action."""
    policy, random = Policy(CONFIG, remat=True), np.random.default_rng(0)
    tokens = random.integers(0, 32, (4, 9))
    tokens[1, :5], tokens[3, :4] = tokens[0, :5], tokens[2, :4]
    return policy, init_params(jax.random.key(0), CONFIG, scale=0.5), batch_of(tokens, 4)


@pytest.mark.heavy
def test_packed_rows_replay_and_record_as_whole_ones(model: Any) -> None:
    policy, params, batch = model
    slices = plan_steps(batch).slices
    packing = jax.tree.map(lambda x: x[0], slices.packing)
    find = jax.jit(policy_outputs, static_argnums=(0, 4))
    experts = Wanted(names=("experts",))
    plain, packed = (find(policy, params, batch, how, experts) for how in (None, packing))
    own, last = np.asarray(plain.extras["experts"]), np.arange(9)[:, None, None] == 8
    assert own.shape == (4, 9, 2, 2)
    assert (own >= 0).all()
    expected = np.where(last, NOT_RECORDED, own)  # a row's last token is not computed
    np.testing.assert_array_equal(packed.extras["experts"], expected)
    given = (own + 1) % 5
    given[1, :5], given[3, :4] = given[0, :5], given[2, :4]
    with_given = batch.replace(experts=given)
    replayed = [find(policy, params, with_given, how, experts) for how in (None, packing)]
    for found in replayed:
        np.testing.assert_array_equal(np.where(last, given, found.extras["experts"]), given)
        np.testing.assert_allclose(found.logp, replayed[0].logp, atol=1e-5)
    assert np.abs(np.asarray(replayed[0].logp - plain.logp)).max() > 0.01
    again = find(policy, params, batch.replace(experts=own), packing, experts)
    np.testing.assert_array_equal(again.logp, packed.logp)


def test_the_whole_model_is_smooth_in_its_routers(model: Any) -> None:
    """The gradient of the log-probability by central differences, with experts that the routers would not choose."""
    policy, params, batch = model
    given = np.random.default_rng(1).permuted(np.tile(np.arange(5), (4, 9, 2, 1)), axis=-1)[..., :2]
    batch = jax.tree.map(jnp.asarray, batch.replace(experts=given))

    def value(router: jax.Array) -> jax.Array:
        return jnp.sum(policy_outputs(policy, {**params, "layers": {**params["layers"], "router": router}}, batch).logp)

    router, direction = params["layers"]["router"], jnp.asarray(draw(7, *params["layers"]["router"].shape))
    slope = float(jnp.vdot(jax.jit(jax.grad(value))(router), direction))
    there = jax.jit(value)
    expected = float(there(router + 0.003 * direction) - there(router - 0.003 * direction)) / 0.006
    assert abs(expected) > 0.05
    assert slope == pytest.approx(expected, rel=2e-2)


def test_experts_of_shared_tokens_reach_all_rows() -> None:
    tokens = np.asarray([[1, 2, 3, 4], [1, 2, 5, 4], [1, 2, 3, 6], [7, 2, 3, 4]])
    random = np.random.default_rng(0)
    recorded = random.random((4, 4)) < 0.5
    of_prefix: dict[tuple[int, ...], list[int]] = {}
    found, expected = np.full((4, 4, 1, 2), NOT_RECORDED, np.int8), np.full((4, 4, 1, 2), NOT_RECORDED, np.int8)
    for row, column in np.ndindex(4, 4):
        if recorded[row, column]:
            prefix = tuple(tokens[row, : column + 1].tolist())
            found[row, column, 0] = of_prefix.setdefault(prefix, random.integers(0, 100, 2).tolist())
    for row, column in np.ndindex(4, 4):
        expected[row, column, 0] = of_prefix.get(tuple(tokens[row, : column + 1].tolist()), [NOT_RECORDED] * 2)
    assert (expected != found).any()
    np.testing.assert_array_equal(of_all_rows(jnp.asarray(found), batch_of(tokens, 1)), expected)


def test_what_does_not_fit_is_refused(model: Any) -> None:
    policy, _, batch = model
    dense = Policy(dataclasses.replace(CONFIG, num_experts=0, experts_per_token=0))
    other = batch.replace(experts=np.zeros((4, 9, 3, 2), np.int8))
    with pytest.raises(InputError, match="2 experts of each token in 3 layers, but the policy has 2 in 2"):
        check_experts(policy, other)
    with pytest.raises(InputError, match="no mixture of experts"):
        check_experts(dense, other)
    with pytest.raises(InputError, match="the batch lacks: sample with record_experts=True"):
        routing_of("rollout", policy, batch)
    assert routing_of("rollout", dense, batch) == "none"
    assert routing_of("rollout", policy, other) == "rollout"
    assert routing_of("recompute", policy, batch) == "recompute"
    assert routing_of("none", policy, batch) == "none"
