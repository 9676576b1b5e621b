"""The optimiser: schedule values by hand, decay on projections alone, clipping by the global norm."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.learner.optimizer import OptimizerConfig, decayed, learning_rate, make_optimizer
from jaxrl_llm.models import ModelConfig, init_params
from jaxrl_llm.models.stacks import unstack
from jaxrl_llm.utils.errors import InputError

PARAMS = {"embed": jnp.array([3.0, -2.0]), "layers": {"query": jnp.array([1.0]), "query_bias": jnp.array([1.0])}}


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({}, [1, 1, 1, 1, 1, 1, 1]),
        ({"warmup_steps": 3}, [0.25, 0.5, 0.75, 1, 1, 1, 1]),
        ({"schedule": "linear"}, [1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0, 0]),
        ({"schedule": "linear", "warmup_steps": 2, "final_fraction": 0.2}, [1 / 3, 2 / 3, 1, 0.8, 0.6, 0.4, 0.2, 0.2]),
        ({"schedule": "cosine", "warmup_steps": 2}, [1 / 3, 2 / 3, 1, 0.8535534, 0.5, 0.1464466, 0, 0]),
        # 0.1 + 0.9 (1 + cos(pi k / 6)) / 2
        ({"schedule": "cosine", "final_fraction": 0.1}, [1, 0.9397114, 0.775, 0.55, 0.325, 0.1602886, 0.1, 0.1]),
    ],
)
def test_schedule_of_six_steps_by_hand(settings: dict[str, Any], rates: list[float]) -> None:
    schedule = learning_rate(OptimizerConfig(learning_rate=0.02, **settings), total_steps=6)
    np.testing.assert_allclose([float(schedule(i)) for i in range(len(rates))], 0.02 * np.array(rates), atol=1e-8)


def test_a_warm_up_as_long_as_the_run_never_starts_the_decay() -> None:
    schedule = learning_rate(OptimizerConfig(learning_rate=1.0, schedule="linear", warmup_steps=4), total_steps=4)
    np.testing.assert_allclose([float(schedule(i)) for i in range(5)], [0.2, 0.4, 0.6, 0.8, 1.0], rtol=1e-6)


def adamw_by_hand(gradients: list[float], config: OptimizerConfig, parameter: float, decay: float) -> list[float]:
    """The parameter after each step, in double precision."""
    first = second = 0.0
    after = []
    for step, gradient in enumerate(gradients, start=1):
        first = config.beta1 * first + (1 - config.beta1) * gradient
        second = config.beta2 * second + (1 - config.beta2) * gradient**2
        corrected = second / (1 - config.beta2**step)
        change = first / (1 - config.beta1**step) / (corrected**0.5 + config.epsilon)
        parameter -= config.learning_rate * (change + decay * parameter)
        after.append(parameter)
    return after


def test_adamw_by_hand_with_decay_on_projections_alone() -> None:
    config = OptimizerConfig(learning_rate=0.1, weight_decay=0.5, beta1=0.8, beta2=0.9, epsilon=0.01, max_grad_norm=0.0)
    optimizer = make_optimizer(config, 3)
    state, params = optimizer.init(PARAMS), PARAMS
    gradients = [0.5, -2.0, 3.0]
    found = []
    for gradient in gradients:
        changes, state = optimizer.update(
            jax.tree.map(lambda p, g=gradient: jnp.full_like(p, g), params), state, params
        )
        params = jax.tree.map(jnp.add, params, changes)
        found.append(
            [float(x) for x in (params["embed"][0], params["layers"]["query"][0], params["layers"]["query_bias"][0])]
        )
    expected = [adamw_by_hand(gradients, config, start, decay) for start, decay in ((3.0, 0.0), (1.0, 0.5), (1.0, 0.0))]
    np.testing.assert_allclose(np.transpose(found), expected, rtol=1e-5)


@pytest.mark.parametrize(("norm", "clipped"), [(1.0, 0.1), (2.5, 0.25), (10.0, 0.5), (0.0, 0.5)])
def test_the_gradient_is_clipped_by_its_norm_over_all_parameters(norm: float, clipped: float) -> None:
    # The norm of (3, 0; 4; 0) is 5. Adam divides the size away, so it is read off the first moment, a tenth.
    gradients = {"embed": jnp.array([3.0, 0.0]), "layers": {"query": jnp.array([4.0]), "query_bias": jnp.array([0.0])}}
    optimizer = make_optimizer(OptimizerConfig(max_grad_norm=norm), 1)
    _, state = optimizer.update(gradients, optimizer.init(PARAMS), PARAMS)
    moments = jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, "mu"))
    (adam,) = [x for x in moments if hasattr(x, "mu")]
    size = np.sqrt(sum(float(jnp.sum(x**2)) for x in jax.tree.leaves(adam.mu)))
    assert size == pytest.approx(clipped, rel=1e-5)


def test_decay_acts_on_matrices_of_every_kind_of_layer() -> None:
    """A model with every option has parameters of every name."""
    config = ModelConfig(
        family="llama", vocab_size=5, hidden_size=4, intermediate_size=4, num_layers=2, num_heads=2, num_kv_heads=1,
        head_dim=2, norm_epsilon=1e-6, tie_embeddings=False, rope_of_layer=(0, 0), window_of_layer=(0, 0),
        attention_bias=True, output_bias=True, mlp_bias=True, qk_norm=True, query_scale=1.0,
    )  # fmt: skip
    params = jax.eval_shape(lambda: init_params(jax.random.key(0), config))
    found = decayed(params)
    assert {name for name, on in found["layers"].items() if on} == {
        "query",
        "key",
        "value",
        "out",
        "gate",
        "up",
        "down",
    }
    assert not any(found[name] for name in ("embed", "unembed", "final_norm"))
    for name, on in found["layers"].items():
        assert on != name.endswith(("norm", "bias"))
    per_layer = decayed(jax.eval_shape(lambda p: unstack(p, config), params))["layers"]
    assert per_layer == (found["layers"], found["layers"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", -1e-6),
        ("learning_rate", float("nan")),
        ("learning_rate", float("inf")),
        ("warmup_steps", -1),
        ("weight_decay", -0.1),
        ("max_grad_norm", -1.0),
        ("epsilon", -1e-8),
        ("final_fraction", -0.1),
        ("final_fraction", 1.1),
        ("beta1", 1.0),
        ("beta2", -0.1),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(InputError, match=f"{name} is {value}"):
        make_optimizer(dataclasses.replace(OptimizerConfig(), **{name: value}), 10)


def test_an_unknown_schedule_is_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match=r"unknown optimizer.schedule 'cosin': did you mean 'cosine'"):
        make_optimizer(OptimizerConfig(schedule="cosin"), 10)  # type: ignore[arg-type]
