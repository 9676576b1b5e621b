"""What the functions of an update are given wrongly is said in a line, before anything is compiled or lost."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_update import BATCH, GRPO, KEY, OPTIMIZER, POLICY, SMALL, bits, fresh_params

from jaxrl_llm.in_jax.steps import draw_steps
from jaxrl_llm.learner.inputs import provide
from jaxrl_llm.learner.microbatches import plan_steps
from jaxrl_llm.learner.optimizer import OptimizerConfig, learning_rate, make_optimizer
from jaxrl_llm.learner.train_state import init_state
from jaxrl_llm.learner.update import gradient, prepare, update
from jaxrl_llm.models import Policy, init_params
from jaxrl_llm.utils.errors import InputError

WIDER = init_params(jax.random.key(0), dataclasses.replace(SMALL, vocab_size=13))
FOREIGN = BATCH.replace(tokens=BATCH.tokens.at[2, 1].set(11))
NEGATIVE = BATCH.replace(tokens=BATCH.tokens.at[2, 1].set(-1))
OTHER = BATCH.replace(tokens=BATCH.tokens.at[2, 1].set((BATCH.tokens[2, 1] + 1) % 11))
HALF = jax.tree.map(lambda x: x[:4], BATCH)
STEPS = plan_steps(BATCH, minibatches=2)
ADAM = optax.adam(1e-3)


@pytest.fixture
def good() -> dict[str, Any]:
    """Arguments of an update that would work."""
    state = init_state(fresh_params(), OPTIMIZER)
    return {"policy": POLICY, "objective": GRPO.objective, "optimizer": OPTIMIZER, "state": state, "batch": BATCH}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"batch": FOREIGN},
            r"batch.tokens holds the token id 11 \(row 2, position 1\), but the model's vocabulary has 11",
        ),
        ({"batch": NEGATIVE}, r"holds the token id -1 \(row 2, position 1\)"),
        ({"batch": BATCH.replace(advantages=jnp.ones(1))}, r"batch.advantages has the shape \[1\]"),
        ({"batch": BATCH.replace(reward=jnp.ones(1))}, r"batch.reward has the shape \[1\]"),
        ({"batch": BATCH.replace(reward=1.0)}, "batch.reward is"),
        ({"batch": {}}, "the batch is of the type dict, but must be Trajectories"),
        ({"policy": "smollm2"}, "the policy is 'smollm2', but must be a Policy"),
        ({"objective": GRPO}, "the objective must be of the type Objective"),
        ({"optimizer": 1e-3}, "the optimiser is 0.001, but must be an optax optimiser"),
        ({"only": "critik"}, "unknown entry of the parameters 'critik'.* Known: embed, final_norm, layers"),
        ({"steps": STEPS, "batch": HALF}, "the steps were planned for 8 rows, but the batch has 4"),
        ({"steps": STEPS, "batch": OTHER}, "the steps were planned for a batch of other tokens"),
        ({"steps": [0, 1]}, r"steps is \[0, 1\], but must be what plan_steps"),
        ({"state": fresh_params()}, "the state is of the type dict, but must be what init_state"),
        ({"state": init_state(WIDER, OPTIMIZER)}, "these are another model's parameters"),
        ({"optimizer": ADAM}, "the state's moments are not of this optimiser and these parameters"),
    ],
)
def test_an_update_refuses(changes: dict[str, Any], message: str, good: dict[str, Any]) -> None:
    before = bits(good["state"])
    with pytest.raises(InputError, match=message) as found:
        update(**good | changes)
    assert "\n" not in str(found.value)
    assert bits(good["state"]) == before


def test_a_state_that_was_taken_is_named(good: dict[str, Any]) -> None:
    jax.tree.map(lambda x: x.delete(), good["state"].params)
    with pytest.raises(InputError, match="the state is gone: an update has taken its memory"):
        update(**good)
    with pytest.raises(InputError, match="a parameter is gone"):
        init_state(good["state"].params, OPTIMIZER)
    with pytest.raises(InputError, match="a parameter is gone"):
        provide(POLICY, frozenset({"old_logp"}), good["state"].params, None, BATCH)


def test_padding_may_be_any_id_and_traced_values_pass(good: dict[str, Any]) -> None:
    """Only shapes are looked at under a trace, whose program is the same as without a look."""
    padded = BATCH.replace(tokens=jnp.where(BATCH.token_mask, BATCH.tokens, -100))
    given = {name: good[name] for name in ("policy", "objective", "optimizer")}
    for batch in (padded, FOREIGN):
        out, metrics = jax.eval_shape(lambda state, b: update(**given, state=state, batch=b), good["state"], batch)
        assert jax.tree.structure(out) == jax.tree.structure(good["state"])
        assert metrics["finite"].shape == ()
    several = jax.tree.map(lambda x: jnp.stack([x, x]), good["state"])
    out, _ = jax.eval_shape(jax.vmap(lambda state: update(**given, state=state, batch=BATCH)), several)
    assert out.step.shape == (2,)
    with pytest.raises(InputError, match="the steps were planned for 8 rows"):
        jax.eval_shape(lambda s: update(**given, state=s, batch=HALF, steps=STEPS), good["state"])


def test_a_second_call_is_no_second_program() -> None:
    """Nor is one with counts of another type, or steps and a mark of other numbers."""
    traced: list[Any] = []

    def function(outputs: Any, batch: Any) -> Any:
        traced.append(outputs)
        return GRPO.objective.function(outputs, batch)

    objective = dataclasses.replace(GRPO.objective, function=function)
    state, counts = init_state(fresh_params(), OPTIMIZER), []
    for batch, count in ((BATCH, 1), (OTHER, np.int64(1)), (BATCH, 1)):
        steps = plan_steps(batch, micro_batches=count)
        state, _ = update(POLICY, objective, OPTIMIZER, state, batch, steps)
        counts.append(len(traced))
    assert counts[0] > 0
    assert counts == counts[:1] * 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (partial(plan_steps, BATCH, epochs=1.5), "epochs is 1.5, but must be a whole number"),  # type: ignore[arg-type]
        (partial(plan_steps, BATCH, minibatches=0), "minibatches is 0, but must be at least 1"),
        (partial(plan_steps, BATCH, micro_batches=-2), "micro_batches is -2, but must be at least 1"),
        (partial(draw_steps, KEY, BATCH, epochs=1.5), "epochs is 1.5, but must be a whole number, at least 1"),
        (partial(draw_steps, KEY, BATCH, epochs=True), "epochs is True, but must be a whole number"),
        (partial(draw_steps, KEY, BATCH, minibatches=0), "minibatches is 0, but must be at least 1"),
        (partial(draw_steps, KEY, BATCH, group_size=-1), "group_size is -1, but must be at least 1"),
        (partial(draw_steps, 0, BATCH), r"key is 0, but must be one random key: jax.random.key\(0\)"),
        (partial(draw_steps, KEY, [BATCH]), "the batch is of the type list"),
        (partial(plan_steps, BATCH, seed="a"), "seed is 'a', but must be a whole number"),  # type: ignore[arg-type]
        (partial(plan_steps, BATCH, seed=-1), "seed is -1, but must be a whole number"),
        (partial(plan_steps, [BATCH]), "the batch is of the type list"),  # type: ignore[arg-type]
        (partial(plan_steps, BATCH.replace(group=BATCH.group[:3])), "batch.group has the shape"),
        (lambda: jax.jit(lambda b: plan_steps(b).rows)(BATCH), "steps are planned on the host"),
        (partial(prepare, GRPO, (), BATCH), "the transform must be of the type Transform"),
        (partial(prepare, GRPO.transform, (), (BATCH,)), "the batch is of the type tuple"),
        (partial(init_state, fresh_params(), "adam"), "the optimiser is 'adam', but must be an optax optimiser"),
        (
            partial(init_state, {"a": "b"}, OPTIMIZER),
            "the parameter a is of the type str, but must be",
        ),
        (
            partial(init_state, {"a": jnp.arange(2)}, OPTIMIZER),
            r"the parameter a is int32\[2\], but must be",
        ),
        (partial(gradient, POLICY, GRPO.objective, WIDER, BATCH), "these are another model's parameters"),
        (partial(gradient, POLICY, GRPO.objective, fresh_params(), FOREIGN), "holds the token id 11"),
        (
            partial(gradient, POLICY, GRPO.objective, fresh_params(), BATCH, 2),
            "slices is of the type int, but must be Slices",
        ),
        (
            partial(gradient, POLICY, GRPO.transform, fresh_params(), BATCH),
            "the objective must be of the type Objective",
        ),
        (partial(gradient, POLICY, GRPO.objective, [1], BATCH), "the parameters are a list, but must be a dictionary"),
        (partial(provide, POLICY, "old_logp", fresh_params(), None, BATCH), "needs is 'old_logp', but must be a set"),
        (partial(provide, POLICY, {"old_logp"}, WIDER, None, BATCH), "these are another model's parameters"),
        (partial(provide, POLICY, {"reference_logp"}, fresh_params(), WIDER, BATCH), "these are another model's"),
        (partial(provide, POLICY, {"old_logp"}, fresh_params(), None, FOREIGN), "holds the token id 11"),
        (partial(provide, Policy, {"old_logp"}, fresh_params(), None, BATCH), "but must be a Policy"),
        (
            partial(provide, POLICY, set(), fresh_params(), None, OTHER, steps=STEPS),
            "planned for a batch of other tokens",
        ),
        (partial(make_optimizer, {"learning_rate": 1.0}, 4), "must be an OptimizerConfig, found dict"),
        (partial(make_optimizer, OptimizerConfig(), 0), "total_steps is 0, but must be at least 1"),
        (partial(make_optimizer, OptimizerConfig(), 2.5), "total_steps is 2.5, but must be a whole number"),
        (partial(make_optimizer, OptimizerConfig(epsilon=0.0), 4), "epsilon is 0.0, but must be at least"),
        (partial(make_optimizer, OptimizerConfig(epsilon=1e-39), 4), "epsilon is 1e-39, but must be at least"),
        (partial(make_optimizer, OptimizerConfig(weight_decay=float("inf")), 4), "weight_decay is inf"),
        (partial(learning_rate, OptimizerConfig(learning_rate=float("nan")), 4), "learning_rate is nan"),
        (partial(learning_rate, OptimizerConfig(), None), "total_steps is None"),
    ],
)
def test_the_other_functions_refuse(call: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as found:
        call()
    assert "\n" not in str(found.value)
