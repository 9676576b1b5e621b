"""Critics: what their parameters are, and the values they give to hidden states."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import load_reward_model
from jaxrl_llm.models import ModelConfig, Policy, init_params
from jaxrl_llm.models.checks import check_params
from jaxrl_llm.models.critic import Critic, critic_of, init_critic, start_as_reward_model, values_of
from jaxrl_llm.models.policy import Params
from jaxrl_llm.models.scores import token_scores
from jaxrl_llm.models.stacks import unstack
from jaxrl_llm.utils.errors import InputError

D = 8
CONFIG = ModelConfig(
    family="qwen2", vocab_size=11, hidden_size=D, intermediate_size=16, num_layers=2, num_heads=2, num_kv_heads=1,
    head_dim=4, norm_epsilon=1e-6, tie_embeddings=False, rope_of_layer=(0, 0), window_of_layer=(0, 0), query_scale=0.5,
)  # fmt: skip
POLICY = Policy(CONFIG)
PARAMS = init_params(jax.random.key(0), CONFIG)
STATES = jax.random.normal(jax.random.key(1), (3, 5, D))


def with_random_head(params: Params, seed: int = 0) -> Params:
    """The same with a head whose last layer is not zero."""
    random, head = np.random.default_rng(seed), params["critic"]["head"]
    filled = {name: jnp.asarray(random.normal(size=x.shape), jnp.float32) for name, x in head.items()}
    return {**params, "critic": {**params["critic"], "head": filled}}


@pytest.mark.parametrize("critic", [Critic(), Critic("shared"), Critic("shared", hidden=7), Critic("tower", 2, 4)])
def test_values_start_at_zero(critic: Critic) -> None:
    params = init_critic(jax.random.key(2), POLICY, PARAMS, critic)
    found = values_of(critic, params, STATES)
    assert found.shape == ((3, 5) if critic.heads == 1 else (3, 5, 2))
    assert found.dtype == jnp.float32
    assert (np.asarray(found) == 0).all()
    assert set(params) == {*PARAMS, "critic"}
    assert ("tower" in params["critic"]) == (critic.kind == "tower")
    assert hash(critic) == hash(Critic(critic.kind, critic.heads, critic.hidden))


def test_the_tower_starts_as_a_copy_of_the_policy() -> None:
    params = init_critic(jax.random.key(2), POLICY, PARAMS, Critic("tower"))
    tower = params["critic"]["tower"]
    assert "unembed" not in tower
    for name in ("embed", "final_norm"):
        np.testing.assert_array_equal(tower[name], PARAMS[name])
        assert tower[name] is not PARAMS[name]
    tokens, real = jnp.asarray([[1, 5, 2, 3]]), jnp.ones((1, 4), jnp.int32)
    place = jnp.arange(4)[None]
    expected, _ = POLICY.forward(PARAMS, tokens, place, real)
    np.testing.assert_allclose(POLICY.forward(tower, tokens, place, real)[0], expected, atol=1e-6)
    unrolled = init_critic(jax.random.key(2), POLICY, unstack(PARAMS, POLICY.config), Critic("tower"))
    np.testing.assert_allclose(POLICY.forward(unrolled["critic"]["tower"], tokens, place, real)[0], expected, atol=1e-5)


def test_a_linear_head_and_an_mlp_by_numpy() -> None:
    x = np.asarray(STATES, np.float64)
    linear = with_random_head(init_critic(jax.random.key(2), POLICY, PARAMS, Critic("shared", heads=2)))
    head = {name: np.asarray(w, np.float64) for name, w in linear["critic"]["head"].items()}
    expected = x @ head["weight"] + head["bias"]
    np.testing.assert_allclose(values_of(Critic("shared", heads=2), linear, STATES), expected, atol=1e-5)
    mlp = with_random_head(init_critic(jax.random.key(2), POLICY, PARAMS, Critic("shared", hidden=7)))
    head = {name: np.asarray(w, np.float64) for name, w in mlp["critic"]["head"].items()}
    y = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    y = (y * head["norm"] + head["norm_bias"]) @ head["up"] + head["up_bias"]
    y = 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
    expected = (y @ head["weight"] + head["bias"])[..., 0]
    np.testing.assert_allclose(values_of(Critic("shared", hidden=7), mlp, STATES), expected, atol=1e-4)


def test_a_detached_critic_does_not_move_the_policy() -> None:
    for critic, moves in (
        (Critic("shared"), True),
        (Critic("shared", detach=True), False),
        (Critic(detach=True), True),
    ):
        params = with_random_head(init_critic(jax.random.key(2), POLICY, PARAMS, critic))
        by_states = jax.grad(lambda x, critic=critic, params=params: values_of(critic, params, x).sum())(STATES)
        assert bool(np.asarray(by_states).any()) == moves
        by_head = jax.grad(lambda p, critic=critic: values_of(critic, p, STATES).sum())(params)["critic"]["head"]
        assert np.asarray(by_head["weight"]).any()


def test_a_new_critic_learns_at_once() -> None:
    """A zero last layer has a gradient, even where it stops that of the layers before."""
    for critic in (Critic("shared"), Critic("shared", hidden=7)):
        params = init_critic(jax.random.key(2), POLICY, PARAMS, critic)
        slope = jax.grad(lambda p, critic=critic: ((values_of(critic, p, STATES) - 1) ** 2).mean())(params)
        assert np.asarray(slope["critic"]["head"]["weight"]).any()


def test_a_critic_by_likelihood_starts_as_the_whole_policy() -> None:
    params = init_critic(jax.random.key(2), POLICY, PARAMS, Critic("likelihood"))
    assert set(params["critic"]) == {"tower"}
    assert jax.tree.structure(params["critic"]["tower"]) == jax.tree.structure(PARAMS)
    for own, copied in zip(jax.tree.leaves(PARAMS), jax.tree.leaves(params["critic"]["tower"]), strict=True):
        np.testing.assert_array_equal(own, copied)
        assert own is not copied
    check_params(dataclasses.replace(POLICY, critic=Critic("likelihood")), params, needs_critic=True)
    tower = {name: x for name, x in PARAMS.items() if name != "unembed"}
    with pytest.raises(InputError, match="lack critic/tower/unembed"):
        check_params(dataclasses.replace(POLICY, critic=Critic("likelihood")), {**PARAMS, "critic": {"tower": tower}})


def test_needs_say_which_critic_a_method_has() -> None:
    assert critic_of({"old_logp"}) is None
    assert critic_of({"values:3"}, "shared") == Critic("shared", 3)
    assert critic_of({"values", "old_logp"}) == Critic()
    assert critic_of({"implicit_logp", "old_logp"}, "shared") == Critic("likelihood")
    with pytest.raises(InputError, match="this one needs both"):
        critic_of({"implicit_logp", "values:2"})


def test_bad_critics_are_refused() -> None:
    for bad in ({"kind": "twoer"}, {"heads": 0}, {"hidden": -1}):
        with pytest.raises(InputError, match="critic"):
            Critic(**bad)


def test_a_critic_starts_as_a_reward_model(vectors: Any) -> None:
    reward, weights, _ = load_reward_model(Path(__file__).parents[1] / "reward_models" / "llama_1")
    config = dataclasses.replace(reward.config, score=None)
    policy = Policy(config, critic=Critic())
    params = start_as_reward_model(policy, init_params(jax.random.key(0), config), reward, weights)
    check_params(policy, params, needs_critic=True)
    tokens = jnp.asarray([[3, 1, 4, 1, 5, 9, 2, 6]])
    ones = jnp.ones_like(tokens)
    states, _ = policy.forward(params["critic"]["tower"], tokens, jnp.cumsum(ones, axis=1) - 1, ones)
    values = values_of(policy.critic, params, states)
    np.testing.assert_allclose(values, token_scores(reward, weights, tokens)[..., 0], rtol=1e-5, atol=1e-5)

    def refused(message: str, other: Policy) -> None:
        with pytest.raises(InputError, match=message):
            start_as_reward_model(other, params, reward, weights)

    refused("a tower with a linear head", dataclasses.replace(policy, critic=Critic("shared")))
    refused("a tower with a linear head", dataclasses.replace(policy, critic=Critic(hidden=4)))
    refused("has 2 values and is a llama model", dataclasses.replace(policy, critic=Critic(heads=2)))
    refused("of the policy's size: the parameter", dataclasses.replace(vectors("llama").policy, critic=Critic()))
