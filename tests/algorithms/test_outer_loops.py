"""Outer loops around an optimiser against loops in double precision, and the methods that have one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm import algorithms
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.outer_loop import OuterLoop, extrapolated, outer_step
from jaxrl_llm.utils.errors import InputError

X, TARGET = np.array([1.0, -2.0, 0.5]), np.array([3.0, 1.0, -1.0])


def ran(outer: OuterLoop, count: int, steps: int = 1) -> list[np.ndarray]:
    """The parameters after each gradient step of SGD on |x - TARGET|^2 / 2."""
    optimizer = outer.around(optax.sgd(0.1), steps)
    params: Any = {"x": jnp.asarray(X, jnp.float32)}
    state, found = optimizer.init(params), []
    update = jax.jit(optimizer.update)
    for _ in range(count):
        changes, state = update({"x": params["x"] - TARGET}, state, params)
        params = optax.apply_updates(params, changes)
        found.append(np.asarray(params["x"]))
    return found


def looped(move: Callable[[list[np.ndarray], np.ndarray], np.ndarray], count: int, every: int) -> list[np.ndarray]:
    """The same by hand. move: (where each round began and ended so far, its end) -> where the next begins."""
    x, ends, found = X.copy(), [X.copy()], []
    for step in range(1, count + 1):
        x = x - 0.1 * (x - TARGET)
        if step % every == 0:
            y = x
            x = move(ends, y)
            ends += [y]
        found.append(x)
    return found


@pytest.mark.parametrize(("every", "steps"), [(1, 1), (2, 1), (1, 3)])
def test_apo_accelerated_by_loop(every: int, steps: int) -> None:
    found = ran(extrapolated(0.3, every), 7, steps)
    np.testing.assert_allclose(found, looped(lambda ends, y: y + 0.3 * (y - ends[-1]), 7, every * steps), rtol=1e-5)
    method = algorithms.get("apo_accelerated", momentum=0.3, round_updates=every)
    assert isinstance(method, Algorithm)
    assert repr(method.outer) == ("extrapolated()" if every == 1 else f"extrapolated(0.3, {every})")
    assert method.reference is not None
    moved = [method.reference.update({"w": 0.0}, {"w": 1.0}, jnp.int32(n))["w"] for n in (1, 2, 3)]  # type: ignore[misc]
    assert [float(x) for x in moved] == [float(n % every == 0) for n in (1, 2, 3)]


def test_the_worked_example() -> None:
    """Of the card: log-linear policies, whose logits are the parameters."""
    optimizer = extrapolated(0.3).around(optax.sgd(1.0), 1)
    params = jnp.zeros(3)
    changes, _ = optimizer.update(-jnp.array([0.6, 0.0, -0.3]), optimizer.init(params), params)
    policy = jax.nn.softmax(optax.apply_updates(params, changes))
    np.testing.assert_allclose(policy, [0.565364, 0.259166, 0.175470], atol=1e-6)


def test_ppo_outer_scale_by_loop() -> None:
    method = algorithms.get("ppo_outer_scale", scale=0.6, momentum=0.5, test_from=3)
    assert method.outer is not None
    found = ran(method.outer, 6)
    x, v, expected = X.copy(), np.zeros(3), []
    for number in range(6):
        y = x - 0.1 * (x - TARGET)
        v = 0.5 * v + (y - x)
        x = x + (0.6 if number < 3 else 0.6 / 5) * v
        expected.append(x)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_without_scale_or_momentum_nothing_changes() -> None:
    plain = looped(lambda ends, y: y, 5, 1)
    for outer in (outer_step(every=2), extrapolated(0.0, 2)):
        np.testing.assert_allclose(ran(outer, 5), plain, atol=1e-6)


def test_numbers_out_of_range_are_refused() -> None:
    for wrong in (lambda: extrapolated(1.0), lambda: outer_step(0.0), lambda: extrapolated(every=0)):
        with pytest.raises(InputError):
            wrong()
