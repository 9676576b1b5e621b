"""Routing replay in updates (2512.01374): ratios start at 1 where a router's choice flips, and routers still learn."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from heavy import few

from jaxrl_llm import algorithms, sample
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.distributed import make_mesh
from jaxrl_llm.learner.inputs import provide
from jaxrl_llm.learner.setup import start
from jaxrl_llm.learner.step import LearnedBatch, Learner, learn_batch
from jaxrl_llm.learner.update import update
from jaxrl_llm.models.outputs import Wanted, policy_outputs
from jaxrl_llm.utils.errors import InputError

PROMPTS = [[5, 6, 7, 8, 9, 10], [11, 12, 13]]
OPTIMIZER = optax.sgd(0.3)
outputs = jax.jit(policy_outputs, static_argnums=(0, 4))


def sampled(model: Any, params: Any = None, policy: Any = None, **changes: Any) -> Trajectories:
    """A scored batch of 2 x 8 completions with the experts of its tokens."""
    asked: dict[str, Any] = {"group_size": 8, "max_new_tokens": 24, "stop_token_ids": [], "record_experts": True}
    batch = sample(
        policy or model.policy,
        model.params if params is None else params,
        PROMPTS,
        jax.random.key(0),
        **asked | changes,
    )
    reward: Any = (np.asarray(batch.tokens).sum(axis=1) % 3).astype(np.float32)
    return jax.tree.map(np.asarray, batch.replace(reward=reward, rewards={"probe": reward}))


def with_router(params: Any, router: Any) -> Any:
    return {**params, "layers": {**params["layers"], "router": router}}


def nearly_tied(params: Any) -> tuple[Any, Any]:
    """Parameters whose routers cannot tell experts 0 and 1, and the same but for a rounding of one router."""
    router = np.array(params["layers"]["router"])
    router[..., 1] = router[..., 0]
    other = router.copy()
    other[..., 1] *= 1 + 1e-6
    return with_router(params, jnp.asarray(router)), with_router(params, jnp.asarray(other))


def off_by(model: Any, params: Any, batch: Trajectories, policy: Any = None) -> np.ndarray:
    """|pi / pi_behaviour - 1| of every action."""
    found = np.asarray(outputs(policy or model.policy, params, batch, None, Wanted()).logp)
    return np.abs(np.exp(found - batch.behaviour_logp) - 1)[np.asarray(batch.action_mask)]


@pytest.mark.heavy
@pytest.mark.parametrize("family", few(["mixtral", "qwen3_moe"], ["mixtral"]))
def test_the_ratio_is_one_where_a_choice_flips_by_rounding(family: str, vectors: Any) -> None:
    model = vectors(family)
    params, of_sampler = nearly_tied(model.params)
    batch = sampled(model, of_sampler)
    own = np.asarray(
        outputs(model.policy, params, batch.replace(experts=None), None, Wanted(("experts",))).extras["experts"]
    )
    flipped = np.any(np.sort(own) != np.sort(batch.experts), axis=(2, 3))[np.asarray(batch.experts)[..., 0, 0] >= 0]
    assert flipped.mean() > 0.05, "some tokens would go through other experts"
    assert off_by(model, params, batch.replace(experts=None)).max() > 0.1
    assert off_by(model, params, batch).max() < 1e-4


@pytest.mark.heavy
@pytest.mark.parametrize("how", few(["int8", "bfloat16"], ["int8"]))
def test_a_rounded_sampler_is_closer_with_its_routing(how: str, vectors: Any) -> None:
    """What is left is what rounded weights compute with the same experts."""
    model = vectors("mixtral")
    rounded: dict[str, Any] = {"weight_dtype": "int8"}
    if how == "bfloat16":
        rounded = {"policy": dataclasses.replace(model.policy, dtype=jnp.bfloat16)}
    batch = sampled(model, **rounded, group_size=16)
    plain, replayed = off_by(model, model.params, batch.replace(experts=None)), off_by(model, model.params, batch)
    assert replayed.mean() < 0.8 * plain.mean()
    assert replayed.max() < plain.max() / 4


def learned(model: Any, batch: Trajectories, routing: str, name: str = "minirl", params: Any = None) -> LearnedBatch:
    """One iteration of two gradient steps."""
    algorithm = dataclasses.replace(algorithms.get(name), routing=routing)  # type: ignore[arg-type]
    mesh, params = make_mesh(1), jax.tree.map(jnp.array, model.params if params is None else params)
    learner = Learner(model.policy, algorithm, OPTIMIZER, mesh, minibatches=2)
    state, memory = start(model.policy, algorithm, OPTIMIZER, params, None, mesh)
    return learn_batch(learner, state, memory, batch)


def same(a: Any, b: Any) -> bool:
    return bool(jax.tree.all(jax.tree.map(np.array_equal, a, b)))


@pytest.mark.heavy
def test_minirl_replays_the_rollout(vectors: Any) -> None:
    """R3: also pi_old's pass, so that its ratio to the sampler is 1; the routers learn."""
    model = vectors("mixtral")
    params, of_sampler = nearly_tied(model.params)
    batch = sampled(model, of_sampler)
    with_it, without = (
        learned(model, batch.replace(experts=e), r, params=params)
        for e, r in ((batch.experts, "rollout"), (None, "none"))
    )
    assert float(with_it.metrics["mismatch"]) < 1e-5 < 1e-3 < float(without.metrics["mismatch"])
    ratio = np.exp(np.asarray(with_it.batch.old_logp) - batch.behaviour_logp)[np.asarray(batch.action_mask)]
    assert np.abs(ratio - 1).max() < 1e-4
    moved = np.abs(np.asarray(with_it.state.params["layers"]["router"] - params["layers"]["router"]))
    assert (moved.max(axis=(1, 2)) > 1e-5).all()
    with pytest.raises(InputError, match="the batch lacks: sample with record_experts=True"):
        learned(model, batch.replace(experts=None), "rollout")


@pytest.mark.heavy
def test_the_choice_of_the_weights_before_the_update(vectors: Any) -> None:
    """R2: what `pi_old` chose is what the update replays, in all of its steps, instead of what the batch had."""
    model = vectors("mixtral")
    batch = sampled(model)
    found = learned(model, batch.replace(experts=np.asarray(batch.experts)[..., ::-1]), "recompute", "dr_grpo")
    own = outputs(model.policy, model.params, batch.replace(experts=None), None, Wanted(("experts",))).extras["experts"]
    real = np.asarray(batch.experts)[..., 0, 0] >= 0
    np.testing.assert_array_equal(np.asarray(found.batch.experts)[real], np.asarray(own)[real])


@pytest.mark.heavy
def test_a_dense_model_trains_as_without(vectors: Any) -> None:
    model = vectors("llama_tied")
    batch = sampled(model)
    assert batch.experts is None
    first, second = (learned(model, batch, routing) for routing in ("rollout", "none"))
    assert same((first.state, first.metrics), (second.state, second.metrics))


@pytest.mark.heavy
def test_where_routers_choose_alike_nothing_changes(vectors: Any) -> None:
    """One gradient step is that without replay; and a reference policy goes by its own routers."""
    model = vectors("mixtral")
    batch = sampled(model)
    objective = algorithms.get("minirl").objective

    def stepped(batch: Trajectories) -> Any:
        batch = batch.replace(old_logp=batch.behaviour_logp, advantages=np.ones(batch.tokens.shape, np.float32))
        params = jax.tree.map(jnp.array, model.params)
        state = start(model.policy, algorithms.get("minirl"), OPTIMIZER, params, None, make_mesh(1))[0]
        return update(model.policy, objective, OPTIMIZER, state, batch)

    (one, of_one), (other, of_other) = stepped(batch), stepped(batch.replace(experts=None))
    assert float(of_one["loss"]) == pytest.approx(float(of_other["loss"]), rel=1e-6)
    for x, y in zip(jax.tree.leaves(one.params), jax.tree.leaves(other.params), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)
    wrong = batch.replace(experts=np.where(np.asarray(batch.experts) < 0, -1, np.asarray(batch.experts)[..., ::-1] ^ 1))
    needs = frozenset({"reference_logp", "old_logp"})
    found = provide(model.policy, needs, model.params, model.params, wrong)
    expected = provide(model.policy, needs, model.params, model.params, batch.replace(experts=None))
    np.testing.assert_array_equal(found.reference_logp, expected.reference_logp)
    assert np.abs(np.asarray(found.old_logp) - np.asarray(expected.old_logp)).max() > 0.1
