"""Balanced experts: loads and the auxiliary loss by loops, in any packing and micro-batches; biases by hand."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm import algorithms, sample
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.core.transform import Objective
from jaxrl_llm.learner.microbatches import plan_steps
from jaxrl_llm.learner.router_balance import RouterBalance, balance_loss, check_balance
from jaxrl_llm.learner.train_state import init_state
from jaxrl_llm.learner.update import gradient, update
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.layers.moe import Load, expert_mlp
from jaxrl_llm.models.outputs import Wanted, policy_outputs
from jaxrl_llm.utils.errors import InputError

PROMPTS = [[5, 6, 7, 8, 9, 10], [11, 12, 13]]
LOAD = Wanted(("router_load",))
D, E, K = 8, 6, 2
CONFIG = ModelConfig(
    family="mixtral", vocab_size=32, hidden_size=D, intermediate_size=4, num_layers=1, num_heads=2, num_kv_heads=1,
    head_dim=4, norm_epsilon=1e-5, tie_embeddings=False, num_experts=E, experts_per_token=K,
)  # fmt: skip
SIGMOID = dataclasses.replace(
    CONFIG, router_sigmoid=True, router_correction=True, router_groups=3, router_chosen_groups=2
)
nothing = Objective(lambda outputs, batch: (jnp.float32(0), {}))
pytestmark = pytest.mark.usefixtures("quickly")
gradient_of = jax.jit(gradient, static_argnums=(0, 1), static_argnames=("balance",))


def draw(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def loss_by_loop(scores: list[np.ndarray], experts: list[np.ndarray], counted: list[bool]) -> float:
    """E sum_e f_e P_e of one layer, in float64, a token at a time."""
    f, p, tokens = np.zeros(E), np.zeros(E), sum(counted)
    for s, chosen, counts in zip(scores, experts, counted, strict=True):
        if counts:
            for e in chosen:
                f[e] += 1 / tokens
            p += s / s.sum() / tokens
    return E * float(sum(f[e] * p[e] for e in range(E)))


@pytest.mark.parametrize("config", [CONFIG, SIGMOID], ids=["softmax", "sigmoid"])
@pytest.mark.parametrize("given", [False, True])
def test_the_loss_of_a_layer_by_loop_in_float64(config: ModelConfig, given: bool) -> None:
    """Tokens that do not count change nothing; experts may be given."""
    N, L = 3, 5
    x, counted = draw(0, N, L, D), np.random.default_rng(1).random((N, L)) < 0.7
    layer = {"router": draw(2, D, E), "gate": draw(3, E, D, 4), "up": draw(4, E, D, 4), "down": draw(5, E, 4, D)}
    layer["router_correction"] = draw(6, E) if config.router_correction else np.zeros(E)
    own = np.random.default_rng(7).integers(0, E, (N, L, K)) if given else None
    with jax.enable_x64(True):
        _, load = expert_mlp(
            jnp.asarray(x), jax.tree.map(jnp.asarray, layer), config, lambda gate, up: gate * up,
            experts=None if own is None else jnp.asarray(own), counted=jnp.asarray(counted),
        )  # fmt: skip
        found = float(balance_loss(*(jax.tree.map(lambda y: y[None], load),) * 2, config))
    scores, chosen = [], []
    for n, t in itertools.product(range(N), range(L)):
        logits = x[n, t] @ layer["router"]
        score = 1 / (1 + np.exp(-logits)) if config.router_sigmoid else np.exp(logits) / np.exp(logits).sum()
        ranked = score + layer["router_correction"]
        if config.router_groups > 1:
            groups = ranked.reshape(3, 2).sum(axis=1)
            ranked = np.where(np.repeat(groups >= np.sort(groups)[1], 2), ranked, -np.inf)
        scores.append(score)
        chosen.append(np.argsort(-ranked)[:K] if own is None else own[n, t])
    assert found == pytest.approx(loss_by_loop(scores, chosen, counted.reshape(-1).tolist()), rel=1e-10)


@pytest.mark.parametrize("taken", [K, 1])
def test_bounds(taken: int) -> None:
    """k where all experts do as much, E / k times that where the same k do all with all of the scores."""
    alike = Load(jnp.full((1, E), 10 * K / E), jnp.full((1, E), 10 / E))
    assert float(balance_loss(alike, alike, CONFIG)) == pytest.approx(K)
    few = Load(*(jnp.asarray([[10.0 * k] * K + [0.0] * (E - K)]) for k in (1, 1 / K)))
    assert float(balance_loss(few, few, CONFIG)) == pytest.approx(E)


def batch_of(model: Any, **changes: Any) -> Trajectories:
    asked: dict[str, Any] = {"group_size": 4, "max_new_tokens": 9, "stop_token_ids": [], "record_experts": True}
    found = sample(model.policy, model.params, PROMPTS, jax.random.key(0), **asked | changes)
    return jax.tree.map(np.asarray, found.replace(advantages=np.ones(found.tokens.shape, np.float32)))


def load_of(model: Any, batch: Trajectories, packing: Any = None) -> Load:
    found = jax.jit(policy_outputs, static_argnums=(0, 4))(model.policy, model.params, batch, packing, LOAD)
    return jax.tree.map(np.asarray, (found.extras or {})["router_load"])


@pytest.mark.heavy
@pytest.mark.parametrize("family", ["mixtral", "glm4_moe"])
def test_real_tokens_count_once(family: str, vectors: Any) -> None:
    """Of rows as they are, the recorded experts of all real tokens; packed, a shared prompt counts as one, and a row's
    last token, from which nothing is drawn, is not seen."""
    model = vectors(family)
    batch, G = batch_of(model), 4
    real = np.asarray(batch.token_mask)
    real = real & (np.cumsum(real, axis=1) < real.sum(axis=1, keepdims=True))
    seen = batch.replace(experts=None, token_mask=real, action_mask=np.asarray(batch.action_mask) & real)
    config = model.policy.config
    whole = load_of(model, seen)
    recorded = jax.jit(policy_outputs, static_argnums=(0, 4))(
        model.policy, model.params, seen, None, Wanted(("experts",))
    ).extras["experts"]  # type: ignore[index]
    for layer in range(config.num_layers):
        own = np.asarray(recorded)[real][:, layer]
        expected = [np.sum(own == e) for e in range(config.num_experts)]
        np.testing.assert_array_equal(whole.chosen[layer], expected)
    routed = [config.of_layer(i).num_experts > 0 for i in range(config.num_layers)]
    np.testing.assert_allclose(whole.probability.sum(axis=1), real.sum() * np.array(routed), rtol=1e-5)
    steps = plan_steps(batch)
    packed = load_of(model, batch.replace(experts=None), jax.tree.map(lambda x: x[0], steps.slices.packing))
    prompts = sum(map(len, PROMPTS))
    for row, prompt in zip(range(0, len(real), G), PROMPTS, strict=True):
        one = seen.replace(token_mask=np.zeros_like(real), action_mask=np.zeros_like(real))
        one.token_mask[row, np.flatnonzero(real[row])[: len(prompt)]] = True
        alone = load_of(model, one)
        whole = jax.tree.map(lambda a, b: a - (G - 1) * b, whole, alone)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), packed, whole)
    assert packed.chosen.sum() == (real.sum() - (G - 1) * prompts) * config.experts_per_token * sum(routed)


@pytest.mark.heavy
@pytest.mark.parametrize("family", ["mixtral", pytest.param("glm4_moe", marks=pytest.mark.heavy)])
def test_micro_batches_give_the_gradient_of_the_whole(family: str, vectors: Any) -> None:
    model, balance = vectors(family), RouterBalance(0.5)
    batch = batch_of(model)
    found = []
    for parts in (1, 2):
        slices = jax.tree.map(lambda x: x[0], plan_steps(batch, micro_batches=parts).in_order)
        found.append(gradient_of(model.policy, nothing, model.params, batch, slices, balance=balance))
    (whole, metrics), (cut, others) = found
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(whole))
    assert largest > 1e-4
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * largest), whole, cut)
    for name in ("loss", "router/aux_loss"):
        assert float(metrics[name]) == pytest.approx(float(others[name]), rel=1e-5)
    assert float(metrics["loss"]) == pytest.approx(0.5 * float(metrics["router/aux_loss"]), rel=1e-6)
    jax.tree.map(np.testing.assert_array_equal, metrics["router_load"].chosen, others["router_load"].chosen)


@pytest.mark.heavy
def test_the_gradient_of_a_router_by_finite_differences(vectors: Any) -> None:
    """In float64, at a step that flips no choice."""
    model = vectors("mixtral")
    policy = dataclasses.replace(model.policy, dtype=jnp.float64)
    batch = batch_of(model, group_size=2, max_new_tokens=4).replace(experts=None)
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), model.params)
        grads, _ = gradient_of(policy, nothing, params, batch, balance=RouterBalance(1.0))
        direction = jnp.asarray(draw(0, *params["layers"]["router"].shape))

        def at(step: float) -> float:
            layers = {**params["layers"], "router": params["layers"]["router"] + step * direction}
            return float(
                gradient_of(policy, nothing, {**params, "layers": layers}, batch, balance=RouterBalance(1.0))[1]["loss"]
            )

        expected = (at(1e-6) - at(-1e-6)) / 2e-6
        found = float(jnp.sum(grads["layers"]["router"] * direction))
    assert found == pytest.approx(expected, rel=1e-5)
    assert abs(found) > 1e-4


@pytest.mark.heavy
def test_training_on_it_alone_balances_the_experts(vectors: Any) -> None:
    """Against it first, so that there is something to balance."""
    model, optimizer = vectors("mixtral"), optax.sgd(0.1)
    batch, losses = batch_of(model).replace(experts=None), []
    state, steps = init_state(jax.tree.map(jnp.array, model.params), optimizer), plan_steps(batch)
    for coefficient in [-1.0] * 5 + [1.0] * 15:
        state, metrics = update(
            model.policy, nothing, optimizer, state, batch, steps, balance=RouterBalance(coefficient)
        )
        losses.append((float(metrics["router/aux_loss"]), float(metrics["router/largest_share"])))
    k, E = model.policy.config.experts_per_token, model.policy.config.num_experts
    (first, _), (worst, most), (last, least) = losses[0], losses[5], losses[-1]
    assert worst > first
    assert last - k < 0.1 * (worst - k)
    assert 1 / E <= least < most <= 1 / k


@pytest.mark.heavy
@pytest.mark.parametrize("stacked", [True, pytest.param(False, marks=pytest.mark.heavy)])
def test_steps_of_correction_biases(stacked: bool, vectors: Any) -> None:
    """By hand from the recorded loads, a sign for each expert of each layer with experts; all else stays."""
    from jaxrl_llm.models.stacks import layer_of, unstack

    model, optimizer, speed = vectors("glm4_moe"), optax.sgd(0.0), 0.01
    config = model.policy.config
    batch = batch_of(model).replace(experts=None)
    chosen = load_of(model, batch).chosen
    params = model.params if stacked else unstack(model.params, config)
    state = init_state(jax.tree.map(jnp.array, params), optimizer)
    after, metrics = update(model.policy, nothing, optimizer, state, batch, balance=RouterBalance(0, speed))
    assert "router/aux_loss" not in metrics
    routed, shares = 0, []
    for number in range(config.num_layers):
        before = layer_of(model.params["layers"], config, number)
        now = layer_of(after.params["layers"], config, number) if stacked else after.params["layers"][number]
        for name, x in before.items():
            expected = np.asarray(x, np.float64)
            if name == "router_correction":
                routed += 1
                mean = chosen[number].mean()
                shares.append(chosen[number].max() / chosen[number].sum())
                signs = [(c < mean) * 1.0 - (c > mean) for c in chosen[number]]
                assert any(signs)
                expected = expected + speed * np.array(signs)
            np.testing.assert_allclose(now[name], expected, atol=1e-7)
    assert routed == sum(config.of_layer(i).num_experts > 0 for i in range(config.num_layers)) > 0
    assert float(metrics["router/largest_share"]) == pytest.approx(max(shares))


@pytest.mark.heavy
def test_the_critics_warm_up_leaves_the_policy_alone(vectors: Any) -> None:
    model, optimizer = vectors("mixtral"), optax.sgd(0.1)
    state = init_state(jax.tree.map(jnp.array, model.params), optimizer)
    batch = batch_of(model, group_size=2, max_new_tokens=4).replace(experts=None)
    after, metrics = update(
        model.policy, nothing, optimizer, state, batch, only="final_norm", balance=RouterBalance(1.0)
    )
    assert "router/aux_loss" not in metrics
    np.testing.assert_array_equal(after.params["layers"]["router"], model.params["layers"]["router"])


def test_what_has_nothing_to_balance_is_refused(vectors: Any) -> None:
    dense, softmax = (vectors(name).policy.config for name in ("llama_tied", "mixtral"))
    for balance, config, frozen, said in (
        (RouterBalance(0.1), dense, False, "router_aux_coefficient is 0.1, but the model is no mixture of experts"),
        (RouterBalance(0, 0.1), dense, False, "router_bias_speed is 0.1, but the model is no mixture of experts"),
        (RouterBalance(0, 0.1), softmax, False, "routers of mixtral have no correction biases"),
        (RouterBalance(0, 0.1), vectors("glm4_moe").policy.config, True, "the correction biases are frozen"),
    ):
        with pytest.raises(InputError, match=said):
            check_balance(balance, config, frozen)
    check_balance(RouterBalance(0.1), softmax, frozen=True)


@pytest.mark.heavy
def test_an_algorithm_with_it_is_the_sum(vectors: Any) -> None:
    model = vectors("mixtral")
    batch = batch_of(model).replace(experts=None)
    batch = batch.replace(old_logp=batch.behaviour_logp)
    objective = algorithms.get("dr_grpo").objective
    each = [
        gradient_of(model.policy, one, model.params, batch, balance=balance)[0]
        for one, balance in (
            (objective, None), (nothing, RouterBalance(0.3)), (objective, RouterBalance(0.3)),
        )
    ]  # fmt: skip
    jax.tree.map(lambda a, b, c: np.testing.assert_allclose(a + b, c, atol=1e-6), *each)
