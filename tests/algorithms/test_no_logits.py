"""No method builds an array of rows x length x vocabulary, for its needs, credit, loss or gradient."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from heavy import few

from jaxrl_llm import algorithms
from jaxrl_llm.core.needs import OF_TEACHER, fill_in, value_of, values_of
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.learner.inputs import provide
from jaxrl_llm.learner.microbatches import plan_steps
from jaxrl_llm.learner.moments import with_moments
from jaxrl_llm.learner.step import as_sampled
from jaxrl_llm.learner.teacher import with_head
from jaxrl_llm.learner.update import gradient
from jaxrl_llm.models import ModelConfig, Policy, init_params
from jaxrl_llm.models.config import Unmasking
from jaxrl_llm.models.critic import critic_of, init_critic
from jaxrl_llm.models.scores import init_reward_model

N, L, V, D = 8, 64, 30_000, 8
CONFIG = ModelConfig(
    family="llama", vocab_size=V, hidden_size=D, intermediate_size=12, num_layers=2, num_heads=2, num_kv_heads=1,
    head_dim=4, norm_epsilon=1e-5, tie_embeddings=True, rope_of_layer=(0, 0), window_of_layer=(0, 0), query_scale=0.5,
)  # fmt: skip
ALL_LOGITS = N * (L - 4) * V  # of the actions


def batch_of_groups() -> Trajectories:
    place, random = np.arange(L), np.random.default_rng(0)
    action = jnp.broadcast_to(place >= 4, (N, L))
    owner = jnp.arange(N, dtype=jnp.int32) // 4
    tokens = np.where(place < 4, np.arange(N)[:, None] // 4, random.integers(0, V, (N, L)))
    reward = (jnp.arange(N) % 3 == 0).astype(jnp.float32)
    return Trajectories(
        tokens=jnp.asarray(tokens, jnp.int32), token_mask=jnp.ones((N, L), bool), action_mask=action,
        behaviour_logp=jnp.where(action, -9.0, 0.0), policy_step=jnp.zeros((N, L), jnp.int32),
        turn=jnp.where(action, 0, -1), group=owner, prompt_id=owner, truncated=owner < 0, temperature=jnp.ones(N),
        reward=reward, rewards={"right": reward}, entropy=jnp.where(action, 2.0, 0.0),
    )  # fmt: skip


def largest(jaxpr: Any) -> int:
    """The size of the largest array that a program, or one that it calls, computes."""
    sizes = [int(np.prod(v.aval.shape)) for e in jaxpr.eqns for v in e.outvars if hasattr(v.aval, "shape")]
    inner = [
        largest(getattr(parameter, "jaxpr", parameter))
        for e in jaxpr.eqns
        for parameter in jax.tree.leaves(e.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr"))
        if hasattr(getattr(parameter, "jaxpr", parameter), "eqns")
    ]
    return max([*sizes, *inner, 0])


def test_whole_logits_would_be_seen() -> None:
    policy, params, batch = Policy(CONFIG), init_params(jax.random.key(0), CONFIG), batch_of_groups()
    program = jax.make_jaxpr(lambda params: policy.logits(params, batch.tokens))(params)
    assert largest(program.jaxpr) >= ALL_LOGITS


# A transform and an objective see no logits, only what the needs computed from them.
OF_NEEDS = {algorithms.get(name).needs: name for name in sorted(algorithms.names(), reverse=True)}
KINDS = sorted({"grpo", "ppo", *OF_NEEDS.values()})


@pytest.mark.parametrize("name", few(KINDS, ("grpo", "ppo")))
def test_a_whole_iteration_makes_no_array_of_all_logits(name: str) -> None:
    # This one's hidden layer is one of a larger model.
    algorithm = algorithms.get(name, **({"layer": 1} if name == "bupo" else {}))
    unmasks = algorithms.families()[name] == "diffusion"
    config = dataclasses.replace(CONFIG, unmasking=Unmasking(V - 1)) if unmasks else CONFIG
    policy, params = as_sampled(Policy(config), algorithm), init_params(jax.random.key(0), config)
    if (critic := critic_of(algorithm.needs, "shared")) is not None:
        policy = dataclasses.replace(policy, critic=critic)
        params = init_critic(jax.random.key(1), policy, params, critic)
    for labels in values_of(algorithm.needs, "scores"):  # a reward model, which has no logits
        policy, params = init_reward_model(jax.random.key(2), policy, params, tuple(map(str, range(int(labels)))))
    of_teacher = {need for need in algorithm.needs if value_of(need)[0] in OF_TEACHER}  # which is the reference
    batch, _, _ = fill_in(batch_of_groups(), algorithm.needs - of_teacher)
    steps = plan_steps(batch, micro_batches=2)

    def iteration(params: Any, batch: Trajectories) -> Any:
        batch = provide(
            policy, algorithm.needs, params, params, batch, steps=steps, previous=params, target=params.get("critic")
        )
        _, ready = algorithm.transform.apply(algorithm.transform.init(), batch)
        learning, frozen = with_head(policy, algorithm.objective.needs, None, None, params)
        frozen = with_moments(policy, algorithm.objective.needs, frozen, optax.adam(1e-3).init(params))
        return gradient(learning, algorithm.objective, params, ready, steps.slices, frozen)

    assert V * D < ALL_LOGITS / 8
    assert largest(jax.make_jaxpr(iteration)(params, batch).jaxpr) < ALL_LOGITS / 2
