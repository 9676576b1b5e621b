"""Parts that are written as functions of a batch and of settings: factories of the settings alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxrl_llm.advantages import on_actions
from jaxrl_llm.core.annotations import Fraction
from jaxrl_llm.core.parts import (
    Trajectories,
    Transform,
    batch_part,
    objective_part,
    stateless_part,
    step_part,
    surrogate_part,
)
from jaxrl_llm.utils.errors import InputError


@batch_part
def least(batch: Trajectories, bound: Fraction, name: str = "a") -> jax.Array:
    """A function `batch -> f32[N]`: at least `bound`."""
    return jnp.maximum(batch, bound)


@step_part
def at_step(step: jax.Array, batch: Trajectories, rate: float = 1.0) -> jax.Array:
    return step * rate + batch


@stateless_part({"old_logp"})
def raised(batch: Trajectories, by: float) -> Trajectories:
    return batch.replace(reward=batch.scores + by)


def test_they_print_as_they_are_called_and_compute() -> None:
    assert [repr(one) for one in (least(0.5), least(0.5, name="b"), at_step(), raised(2.0))] == [
        "least(0.5)", 'least(0.5, name="b")', "at_step()", "raised(2.0)",
    ]  # fmt: skip
    assert least(0.5)(jnp.array([0.0, 1.0])).tolist() == [0.5, 1.0]
    assert at_step(2.0)(jnp.float32(3), jnp.float32(1)) == 7
    assert isinstance(raised(2.0), Transform)
    assert raised(2.0).needs == {"old_logp"}


def test_their_signatures_are_of_the_settings() -> None:
    assert list(inspect.signature(least).parameters) == ["bound", "name"]
    assert list(inspect.signature(least(0.5)).parameters) == ["batch"]
    assert list(inspect.signature(at_step()).parameters) == ["step", "batch"]
    assert inspect.signature(raised).return_annotation is Transform


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: least(), "missing a required argument: 'bound'"),
        (lambda: least(2.0), "bound of least is 2.0, but must be at least 0 and at most 1"),
        (lambda: least(0.5, nam="b"), "unknown argument of least 'nam': did you mean 'name'"),
        (lambda: on_actions(least), "the function least, which makes a part: call it"),
        (lambda: on_actions(at_step()), "the advantage is a function of 2 values"),
        (lambda: stateless_part(raised), "@stateless_part stands above a function without paren"),  # type: ignore[arg-type]
        (lambda: on_actions(raised), "the advantage is raised, which makes a value of the type Transform"),
    ],
)
def test_settings_and_uses_that_are_wrong_are_one_clear_line(call: object, words: str) -> None:
    with pytest.raises(InputError, match=words) as error:
        call()  # type: ignore[operator]
    assert "\n" not in str(error.value)


@stateless_part()
def forgotten(batch: Trajectories) -> Trajectories:
    return None  # type: ignore[return-value]


@objective_part()
def of_rows(outputs: Any, batch: Any) -> Any:
    return outputs, {}


@surrogate_part
def alone(ratio: Any, outputs: Any, batch: Any) -> Any:
    return ratio


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: forgotten().apply.function((), None),
            "what forgotten returns is None, but must be the batch, su",
        ),
        (lambda: of_rows().function(jnp.ones(3), None), r"what of_rows returns is .*, but must be \(loss, metrics by"),
        (lambda: alone()(jnp.ones(3), None, None), r"what alone returns is .*, but must be \(gain of each token, stat"),
    ],
)
def test_what_the_function_of_a_part_must_return_is_said(call: Callable[[], object], words: str) -> None:
    with pytest.raises(InputError, match=words) as error:
        call()
    assert "\n" not in str(error.value)
