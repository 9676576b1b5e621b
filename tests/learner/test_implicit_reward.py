"""An implicit reward model beside the policy: its log-probabilities, its gradient, and that it learns preferences."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_update import OPTIMIZER, POLICY, fresh_params, prepared

from jaxrl_llm.algorithms import get
from jaxrl_llm.algorithms.turn_credit.istar import implicit_preference
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.in_jax.steps import draw_steps
from jaxrl_llm.learner.inputs import provide
from jaxrl_llm.learner.train_state import init_state
from jaxrl_llm.learner.update import gradient, update
from jaxrl_llm.models.critic import Critic, init_critic
from jaxrl_llm.models.outputs import Wanted, policy_outputs
from jaxrl_llm.utils.errors import InputError

JUDGED = dataclasses.replace(POLICY, critic=Critic("likelihood"))
NEEDS = frozenset({"implicit_logp", "old_logp"})
LOSS = implicit_preference(2.0)


def judged_params(moved: float = 0.0) -> Any:
    """The policy with a reward model, which may differ from it."""
    params = init_critic(jax.random.key(3), JUDGED, fresh_params(), Critic("likelihood"))
    tower = jax.tree.map(lambda x: x + moved * jnp.sin(jnp.arange(x.size).reshape(x.shape)), params["critic"]["tower"])
    return {**params, "critic": {"tower": tower}}


def batch_with_values(params: Any) -> Trajectories:
    return provide(JUDGED, NEEDS, params, None, prepared())


def test_its_log_probabilities_are_those_of_a_policy_with_its_weights() -> None:
    start = batch_with_values(judged_params())
    np.testing.assert_allclose(start.need("implicit_logp"), start.old_logp, atol=1e-6)
    params = judged_params(0.3)
    found = batch_with_values(params)
    np.testing.assert_array_equal(found.old_logp, start.old_logp)
    alone = policy_outputs(POLICY, params["critic"]["tower"], prepared())
    np.testing.assert_allclose(found.need("implicit_logp"), alone.logp, atol=1e-6)
    assert np.abs(alone.logp - found.old_logp).max() > 0.01
    with pytest.raises(InputError, match="needs an implicit reward model"):
        policy_outputs(POLICY, fresh_params(), prepared(), wanted=Wanted(("implicit_logp",)))
    with pytest.raises(InputError, match="this method needs values"):
        policy_outputs(JUDGED, params, prepared(), wanted=Wanted(("values",)))


@pytest.mark.heavy
def test_its_loss_moves_it_alone_by_finite_differences() -> None:
    params = judged_params(0.3)
    batch = batch_with_values(params)
    slopes, metrics = gradient(JUDGED, LOSS, params, batch)
    assert float(metrics["reward_model"]) > 0
    for name, slope in slopes.items():
        if name != "critic":
            assert not any(np.asarray(x).any() for x in jax.tree.leaves(slope))
    squared = sum(float((np.asarray(x, np.float64) ** 2).sum()) for x in jax.tree.leaves(slopes["critic"]))
    step = 2e-3 / np.sqrt(squared)

    def loss(sign: float) -> float:
        moved = jax.tree.map(lambda p, g: p + sign * step * g, params["critic"], slopes["critic"])
        return float(gradient(JUDGED, LOSS, {**params, "critic": moved}, batch)[1]["reward_model"])

    assert (loss(1) - loss(-1)) / (2 * step) == pytest.approx(squared, rel=0.02)
    sliced, _ = gradient(JUDGED, LOSS, params, batch, draw_steps(jax.random.key(0), batch, minibatches=2).slices)
    for one, other in zip(jax.tree.leaves(sliced), jax.tree.leaves(slopes), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.heavy
def test_it_learns_which_rows_are_better_beside_a_policy_that_learns_as_without_it() -> None:
    method, params = get("istar", beta=2.0), judged_params()
    batch = method.transform.apply(method.transform.init(), batch_with_values(params))[1]
    state, losses = init_state(params, OPTIMIZER), []
    for _ in range(4):
        state, metrics = update(JUDGED, method.objective, OPTIMIZER, state, batch)
        losses.append(float(metrics["reward_model"]))
    assert losses[0] == pytest.approx(np.log(2), abs=1e-5)
    assert losses[3] < losses[2] < losses[1] < losses[0]
    slopes = gradient(JUDGED, method.objective, judged_params(), batch)[0]
    alone = gradient(POLICY, get("istar", reward_coefficient=0.0).objective, fresh_params(), batch)[0]
    for name, x in alone.items():
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), slopes[name], x)
