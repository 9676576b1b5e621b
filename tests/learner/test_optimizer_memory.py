"""What the optimiser's state takes, to the byte, and that nothing of an update is lost for it."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm.learner.optimizer import MasterState, OptimizerConfig, in_float32, make_optimizer
from jaxrl_llm.models import ModelConfig, init_params
from jaxrl_llm.training.folder.checkpoints import Checkpoints

# Heads of 64 make axes of 128 and 256 together; the two layers, the norms and the key's 64 are too short to factor.
CONFIG = ModelConfig(
    family="llama", vocab_size=300, hidden_size=256, intermediate_size=384, num_layers=2, num_heads=2, num_kv_heads=1,
    head_dim=64, norm_epsilon=1e-5, tie_embeddings=True, rope_of_layer=(0, 0), window_of_layer=(0, 0), query_scale=0.1,
)  # fmt: skip
SIZES = {
    "query": 2 * 256 * 128, "key": 2 * 256 * 64, "value": 2 * 256 * 64, "out": 2 * 128 * 256, "gate": 2 * 256 * 384,
    "up": 2 * 256 * 384, "down": 2 * 384 * 256, "norms": 2 * 2 * 256 + 256, "embed": 300 * 256,
}  # fmt: skip
NUMBERS = sum(SIZES.values())
# Means over rows and over columns of the 6 matrices; of the 5 arrays that are too short, all entries. optax holds one
# number in the place of each of the three (rows, columns, all) that an array does not have.
FACTORED = 2 * ((256 + 128) * 2 + (256 + 384) * 3) + (300 + 256)
WHOLE = SIZES["key"] + SIZES["value"] + SIZES["norms"]
DUMMIES = 6 * 1 + 5 * 2


def state_bytes(dtype: Any, **settings: Any) -> int:
    optimizer = make_optimizer(OptimizerConfig(**settings), 10)
    params = jax.eval_shape(partial(init_params, config=CONFIG, dtype=dtype), jax.random.key(0))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(optimizer.init, params)))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("master_copy", [True, False])
@pytest.mark.parametrize(
    ("moments", "expected"),
    [
        ("float32", 8 * NUMBERS),
        ("bfloat16", 6 * NUMBERS),
        ("factored", 4 * (FACTORED + WHOLE + DUMMIES)),
    ],
)
def test_bytes_of_the_state(moments: str, expected: int, master_copy: bool, dtype: Any) -> None:
    masters = 4 * NUMBERS if master_copy and dtype == jnp.bfloat16 else 0
    counters = 2 * 4  # of Adam's (or Adafactor's) steps, and of the schedule's
    assert state_bytes(dtype, moments=moments, master_copy=master_copy) == expected + masters + counters


def test_factored_moments_are_a_small_part_of_what_they_stand_for() -> None:
    matrices = NUMBERS - WHOLE
    assert matrices / 100 > FACTORED


def run(optimizer: optax.GradientTransformation, params: Any, gradients: Any, steps: int) -> tuple[Any, Any]:
    """Parameters and state after some steps along the same gradients."""

    def step(carry: tuple[Any, Any], _: None) -> tuple[Any, None]:
        params, state = carry
        changes, state = optimizer.update(gradients, state, params)
        return (optax.apply_updates(params, changes), state), None

    return jax.jit(lambda p: jax.lax.scan(step, (p, optimizer.init(p)), None, steps)[0])(params)


@pytest.mark.parametrize("moments", ["float32", "factored"])
def test_a_thousand_small_updates_add_up(moments: Any) -> None:
    """Each is 1e-5 of the parameter, a 400th of what bfloat16 resolves."""
    values = jnp.asarray(np.geomspace(0.5, 2.0, 64).reshape(8, 8), jnp.bfloat16)
    params = {"query_bias": values, "wide": values.astype(jnp.float32)}
    gradients = jax.tree.map(jnp.ones_like, params)
    config = OptimizerConfig(learning_rate=1e-5, moments=moments, max_grad_norm=0.0, epsilon=1e-12)
    exact, _ = run(make_optimizer(config, 1000), jax.tree.map(jnp.float32, params), gradients, 1000)
    np.testing.assert_allclose(exact["query_bias"], values.astype(jnp.float32) - 0.01, atol=2e-5)
    found, state = run(make_optimizer(config, 1000), params, gradients, 1000)
    assert isinstance(state, MasterState)
    np.testing.assert_array_equal(state.master["query_bias"], exact["query_bias"])
    assert state.master["wide"] is None
    assert found["query_bias"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(found["query_bias"], exact["query_bias"].astype(jnp.bfloat16))
    np.testing.assert_array_equal(found["wide"], exact["wide"])
    assert not np.array_equal(found["query_bias"], values)
    without = OptimizerConfig(**{**vars(config), "master_copy": False})
    lost, _ = run(make_optimizer(without, 1000), params, gradients, 1000)
    np.testing.assert_array_equal(lost["query_bias"], values)


def test_what_else_changes_or_keeps_a_parameter_counts() -> None:
    """A parameter put back is where the next update starts; one that follows its master goes on from the master."""
    optimizer = in_float32(optax.sgd(1.0))
    params = {"a": jnp.asarray([1.0, 1.0], jnp.bfloat16)}
    _, state = optimizer.update({"a": jnp.asarray([0.25, 0.001], jnp.bfloat16)}, optimizer.init(params), params)
    np.testing.assert_allclose(state.master["a"], [0.75, 0.999], rtol=1e-5)
    # Not applied: the first is 1 and not 0.75; the second is 0.999 rounded.
    changes, state = optimizer.update({"a": jnp.asarray([0.5, 0.5], jnp.bfloat16)}, state, params)
    np.testing.assert_allclose(state.master["a"], [0.5, 0.499], rtol=1e-4)
    np.testing.assert_array_equal(optax.apply_updates(params, changes)["a"], jnp.bfloat16(state.master["a"]))


def test_of_float32_it_is_the_optimiser_itself() -> None:
    params, gradients = {"a": jnp.arange(3.0)}, {"a": jnp.asarray([0.1, -2.0, 0.3])}
    inner = optax.adam(0.1)
    found, expected = (run(o, params, gradients, 3) for o in (in_float32(inner), inner))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_masters_and_factored_moments_come_back_from_a_checkpoint(tmp_path: Path) -> None:
    """Bit by bit, also where only some parameters have a master."""
    values = jnp.asarray(np.linspace(-1, 1, 6), jnp.bfloat16)
    params = {"layers": {"gate": values, "up": values}, "critic": jnp.arange(3.0)}
    optimizer = make_optimizer(OptimizerConfig(learning_rate=0.01, moments="factored"), 10)
    params, state = run(optimizer, params, jax.tree.map(jnp.ones_like, params), 3)
    with closing(Checkpoints(tmp_path)) as checkpoints:
        checkpoints.save(1, params, state, {})
        checkpoints.wait()
        found = checkpoints.latest(*jax.eval_shape(lambda: (params, optimizer.init(params))))
    assert found is not None
    assert jax.tree.structure(found.state) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves((found.params, found.state)), jax.tree.leaves((params, state)), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.heavy
def test_a_first_moment_in_bfloat16_is_about_that_in_float32() -> None:
    """Within its rounding, of changing gradients; the second moment is the same."""
    random = np.random.default_rng(0)
    wide, narrow = (
        make_optimizer(OptimizerConfig(learning_rate=0.01, moments=m, max_grad_norm=0.0), 30)
        for m in ("float32", "bfloat16")
    )
    params = {"a": jnp.zeros(200)}
    states = {o: (params, o.init(params)) for o in (wide, narrow)}
    for _ in range(30):
        gradients = {"a": jnp.asarray(1.0 + random.normal(size=200), jnp.float32)}
        for o, (p, state) in states.items():
            changes, state = o.update(gradients, state, p)
            states[o] = optax.apply_updates(p, changes), state
    a, b = (np.asarray(states[o][0]["a"]) for o in (wide, narrow))
    assert np.abs(a).mean() > 0.1
    assert 0 < np.abs(a - b).mean() < 0.02 * np.abs(a).mean()
    (first, second) = (jax.tree.leaves(states[o][1], is_leaf=lambda x: hasattr(x, "nu")) for o in (wide, narrow))
    np.testing.assert_array_equal(first[0].nu["a"], second[0].nu["a"])
    assert second[0].mu["a"].dtype == jnp.bfloat16


def adafactor_by_hand(gradients: list[np.ndarray], rate: float, beta2: float, epsilon: float, decay: float) -> Any:
    """A matrix from 1 on, in double precision: factored second moments, update clipped to a root mean square of 1."""
    w = np.ones_like(gradients[0])
    rows, columns = np.zeros(w.shape[0]), np.zeros(w.shape[1])
    for t, g in enumerate(gradients, start=1):
        b = min(1 - t**-0.8, beta2)
        square = g**2 + epsilon**2
        rows, columns = b * rows + (1 - b) * square.mean(axis=1), b * columns + (1 - b) * square.mean(axis=0)
        update = g / np.sqrt(np.outer(rows, columns) / rows.mean())
        update /= max(1.0, np.sqrt((update**2).mean()))
        w = w - rate * (update + decay * w)
    return w


def test_factored_moments_by_hand_with_heads_as_one_axis() -> None:
    random = np.random.default_rng(1)
    gradients = [random.normal(size=(130, 128)) * np.linspace(0.1, 3, 128) * (1 + 5 * (t == 2)) for t in range(5)]
    expected = adafactor_by_hand(gradients, 0.1, 0.6, 1e-3, 0.5)
    config = OptimizerConfig(
        learning_rate=0.1, beta2=0.6, epsilon=1e-3, weight_decay=0.5, max_grad_norm=0.0, moments="factored"
    )
    optimizer = make_optimizer(config, 5)
    params = {"query": jnp.ones((130, 4, 32)), "out": jnp.ones((10, 13, 128)), "bias": jnp.ones(3)}
    state = optimizer.init(params)
    for g in gradients:
        each = {"query": g.reshape(130, 4, 32), "out": g.reshape(10, 13, 128), "bias": np.full(3, 0.2)}
        changes, state = optimizer.update(jax.tree.map(jnp.float32, each), state, params)
        params = optax.apply_updates(params, changes)
    for name in ("query", "out"):
        np.testing.assert_allclose(np.asarray(params[name]).reshape(130, 128), expected, atol=2e-5)
    # Equal gradients move a vector by the rate, and it does not decay.
    np.testing.assert_allclose(params["bias"], 0.5, atol=1e-4)
