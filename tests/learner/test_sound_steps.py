"""A step that would make a parameter or a moment not finite is not taken, whatever the optimiser, and is named."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from heavy import few
from test_update import BATCH, GRPO, OPTIMIZER, POLICY, bits, fresh_params

from jaxrl_llm.learner.microbatches import plan_steps
from jaxrl_llm.learner.moments import Bounded, bounded, stays_finite
from jaxrl_llm.learner.nonfinite import not_finite, not_finite_in, refusal
from jaxrl_llm.learner.optimizer import ROOM, OptimizerConfig, largest_step, make_optimizer
from jaxrl_llm.learner.train_state import init_state
from jaxrl_llm.learner.update import update

DECAY = make_optimizer(OptimizerConfig(learning_rate=1e20, weight_decay=1e20), 4)  # parameters overflow
ZERO = optax.adam(1e-2, eps=0.0)  # where a gradient is 0 its update is 0/0
NO_GRADIENT = BATCH.replace(weights=jnp.zeros_like(BATCH.weights))


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("optimizer", "batch", "named"),
    [
        pytest.param(
            *(DECAY, BATCH, "the updated parameter layers/down (by this learning rate, weight decay or epsilon)"),
            marks=pytest.mark.heavy,
        ),
        (ZERO, NO_GRADIENT, "the updated parameter embed (by this learning rate, weight decay or epsilon)"),
    ],
    ids=["decay", "epsilon"],
)
def test_a_step_to_parameters_that_are_not_finite_is_not_taken(optimizer: Any, batch: Any, named: str) -> None:
    """Loss and gradient are finite, in every one of four gradient steps."""
    state = init_state(fresh_params(), optimizer)
    before, steps = bits(state), plan_steps(batch, epochs=2, minibatches=2)
    state, metrics = update(POLICY, GRPO.objective, optimizer, state, batch, steps=steps)
    assert float(metrics["finite"]) == 0
    assert np.isfinite([metrics["loss"], metrics["grad_norm"]]).all()
    assert bits(state) == before
    found = not_finite(POLICY, GRPO.objective, state.params, batch, steps, state=state, optimizer=optimizer)
    assert found == named
    assert refusal(3, found, float(metrics["finite"]), steps) == (
        f"step 3: {named} is not finite; 4 of its 4 gradient steps were not taken, and nothing of step 3 is saved"
    )


def test_what_is_said_is_true_for_any_number_of_gradient_steps() -> None:
    one, four = plan_steps(BATCH), plan_steps(BATCH, epochs=2, minibatches=2)
    assert refusal(1, "x", 0.0, one) == "step 1: x is not finite; the parameters were not changed by it"
    assert "1 of its 4 gradient steps was not taken, and nothing of step 1 is saved" in refusal(1, "x", 0.75, four)
    assert "3 of its 4 gradient steps were not taken" in refusal(1, "x", float(np.float32(1) / 4), four)


def test_a_step_that_is_finite_by_its_settings_is_not_looked_at() -> None:
    """The compiled update holds what it held before; with any other optimiser it looks at each parameter and moment."""
    state = jax.eval_shape(lambda: init_state(fresh_params(), OPTIMIZER))
    looks = []
    for optimizer in (OPTIMIZER, optax.GradientTransformationExtraArgs(*OPTIMIZER)):
        text = update.lower(POLICY, GRPO.objective, optimizer, state, BATCH).as_text()
        looks.append(text.count("is_finite"))
    leaves = len(jax.tree.leaves(state.params))
    assert looks[1] - looks[0] >= 3 * leaves
    assert bounded(OPTIMIZER, state.params)
    wide = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float16), state.params)
    assert not bounded(OPTIMIZER, wide)


MAX = float(np.finfo(np.float32).max)
EDGES: dict[str, dict[str, Any]] = {
    "float32": {"learning_rate": 0.5, "weight_decay": 0.5, "epsilon": 1e-28, "max_grad_norm": 1.0},
    "clipped far": {"learning_rate": 0.5, "epsilon": 1e-10, "max_grad_norm": 1e17, "beta1": 0.99, "beta2": 0.1},
    "not clipped": {"learning_rate": 0.5, "epsilon": 1e-8, "max_grad_norm": 0.0, "beta1": 0.0, "beta2": 0.0},
    "long memory": {"epsilon": 1e-20, "beta1": 1 - 2e-6, "beta2": 1 - 2e-6},
    "bfloat16": {"moments": "bfloat16", "epsilon": 1e-28, "weight_decay": 0.5},
    "factored": {"moments": "factored", "learning_rate": 0.5, "epsilon": 1e-8, "weight_decay": 0.5},
    "critic": {"learning_rate": 1e-12, "critic_learning_rate": 0.5},
}


@pytest.mark.parametrize("dtype", few([jnp.float32, jnp.bfloat16], [jnp.float32]))
@pytest.mark.parametrize("edge", EDGES)
def test_steps_that_are_bounded_are_finite_at_the_edge(edge: str, dtype: Any) -> None:
    """The largest and smallest gradients of a finite norm, one after the other, at parameters that leave no room."""
    config = OptimizerConfig(**EDGES[edge])
    assert largest_step(config) < ROOM
    optimizer = make_optimizer(config, 20)
    assert isinstance(optimizer, Bounded)
    values = jnp.asarray([float(jnp.finfo(dtype).max), -float(jnp.finfo(dtype).max), 1.0, -1e-30, 0.0] * 26, dtype)
    params = {"critic": {"down": values}, "layers": {"query": jnp.broadcast_to(values, (130, 130))}}
    state, step = optimizer.init(params), jax.jit(optimizer.update)
    for size in (1e17, 0.0, 1e-25, -1e17, 0.0, 1e-38, 1.0, 1e17, 0.0, 0.0):
        signs = jax.tree.map(lambda p: jnp.where(jnp.arange(p.shape[-1]) % 3 == 0, -1.0, 1.0), params)
        gradients = jax.tree.map(lambda s, p, z=size: jnp.broadcast_to(z * s, p.shape).astype(dtype), signs, params)
        assert np.isfinite(optax.tree.norm(jax.tree.map(jnp.float32, gradients)))
        changes, state = step(gradients, state, params)
        params = optax.apply_updates(params, changes)
        assert not_finite_in((params, state)) is None


@pytest.mark.parametrize(
    "settings",
    [
        {"epsilon": 1e-30},
        {"epsilon": 1e-12, "max_grad_norm": 0.0},
        {"learning_rate": 2.0},
        {"weight_decay": 2.0},
        {"beta1": 0.99999999},
        {"beta2": 0.99999999},
        {"learning_rate": 1e-30, "critic_learning_rate": 0.1, "epsilon": 1e-8, "beta2": 0.99999999},
        {"moments": "factored", "max_grad_norm": 0.0},
    ],
)
def test_no_other_settings_are_trusted(settings: dict[str, Any]) -> None:
    config = OptimizerConfig(**settings)
    assert largest_step(config) >= ROOM
    assert not isinstance(make_optimizer(config, 4), Bounded)


@pytest.mark.parametrize("dtype", few([jnp.float32, jnp.bfloat16], [jnp.bfloat16]))
@pytest.mark.parametrize("moments", ["float32", "bfloat16", "factored"])
def test_asking_gives_what_a_step_gives_and_takes_none(moments: Any, dtype: Any) -> None:
    optimizer = make_optimizer(OptimizerConfig(learning_rate=0.1, moments=moments, weight_decay=0.1), 4)
    random = np.random.default_rng(0)
    params = {"layers": {"query": jnp.asarray(random.normal(size=(128, 2, 64)), dtype)}, "critic": jnp.ones(3)}
    gradients = jax.tree.map(lambda p: jnp.asarray(random.normal(size=p.shape), p.dtype), params)
    state = optimizer.init(params)
    taken, asked = (optimizer.update(gradients, state, params, **how) for how in ({}, {"dry": True}))
    for x, y in zip(jax.tree.leaves(taken), jax.tree.leaves(asked), strict=True):
        np.testing.assert_allclose(np.float32(x), np.float32(y), rtol=1e-5, atol=1e-7)
    program = jax.make_jaxpr(lambda: optimizer.update(gradients, state, params, dry=True))()
    assert "while" not in str(program)


def test_each_parameter_and_moment_is_answered_for() -> None:
    optimizer = optax.chain(optax.trace(0.9), optax.scale(-1.0))
    params = {"critic": jnp.ones(2), "policy": jnp.full(2, MAX)}
    state = optimizer.init(params)
    push = {"critic": jnp.ones(2), "policy": jnp.asarray([0.0, -MAX])}
    new, moments = stays_finite(optimizer, push, state, params)
    assert (bool(new["critic"]), bool(new["policy"])) == (True, False)
    assert all(map(bool, jax.tree.leaves(moments)))
    assert stays_finite(optimizer, push, state, params, "critic")[0] == {"critic": True}
    # A moment that overflows counts, although the parameter would not.
    slow = optax.chain(optax.trace(1.0), optax.scale(0.0))
    _, moments = stays_finite(slow, push, slow.init(params), params)
    assert all(map(bool, jax.tree.leaves(moments)))
    full = jax.tree.map(lambda x: jnp.full_like(x, -MAX), slow.init(params))
    _, moments = stays_finite(slow, push, full, params)
    assert [bool(x) for x in jax.tree.leaves(moments)] == [True, False]
    # One that was infinite before is so by nature.
    best = optax.GradientTransformation(lambda p: jnp.inf * jnp.ones(()), lambda g, state, p=None: (g, state))
    assert bool(stays_finite(best, {"critic": jnp.ones(2)}, best.init(None), {"critic": jnp.ones(2)})[1])
