"""Every method of the catalogue, whatever it is: named, documented, usable with its defaults."""

from __future__ import annotations

import inspect
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import algorithms
from jaxrl_llm.algorithms import Algorithm
from jaxrl_llm.errors import InputError
from jaxrl_llm.trajectory import PolicyOutputs, Trajectories

N, L = 6, 5
GROUP = [0, 0, 0, 1, 1, 2]  # of three, two and one
every = pytest.mark.parametrize("name", algorithms.names())


def scored_batch() -> Trajectories:
    random = np.random.default_rng(0)
    place, end = np.arange(L), np.array([5, 3, 4, 5, 2, 4])[:, None]
    mask = jnp.asarray((place >= 1) & (place < end))
    logp = jnp.asarray(-random.random((N, L)), jnp.float32)
    zeros = jnp.zeros((N, L), jnp.int32)
    return Trajectories(
        tokens=zeros,
        token_mask=jnp.asarray(place < end),
        action_mask=mask,
        behaviour_logp=logp * mask,
        policy_step=zeros,
        turn=jnp.where(mask, 0, -1),
        group=jnp.asarray(GROUP),
        prompt_id=jnp.asarray(GROUP),
        truncated=jnp.zeros(N, bool),
        rewards={"score": jnp.asarray([1.0, 0, 0, 1, 1, 0])},
        reward=jnp.asarray([1.0, 0, 0, 1, 1, 0]),
        old_logp=logp * mask * 1.05,
        reference_logp=logp * mask * 1.1,
        entropy=mask * 0.5,
    )


def run(algorithm: Algorithm, batch: Trajectories) -> tuple[Any, Any]:
    """Loss with metrics, and gradient by log-probabilities and entropies."""
    _, batch = algorithm.transform.apply(algorithm.transform.init(), batch)
    mask = batch.action_mask

    def loss(logp: jax.Array, entropy: jax.Array) -> Any:
        return algorithm.objective(PolicyOutputs(logp, entropy), batch)

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(batch.behaviour_logp + 0.1 * mask, 0.4 * mask)


def test_names_are_those_of_the_catalogue_in_order() -> None:
    assert algorithms.names() == sorted(algorithms.CATALOGUE)
    assert "grpo" in algorithms.names()


@every
def test_it_is_documented(name: str) -> None:
    text = inspect.getdoc(algorithms.constructor(name))
    assert text
    assert text.splitlines()[0].endswith(".")
    parameters = inspect.signature(algorithms.constructor(name)).parameters
    for parameter in parameters:
        assert parameter in text or parameter in ("scale", "ddof"), f"{name} does not explain {parameter}"


@every
def test_all_its_hyperparameters_have_defaults_that_json_can_hold(name: str) -> None:
    parameters = inspect.signature(algorithms.constructor(name)).parameters.values()
    defaults = {p.name: p.default for p in parameters}
    assert inspect.Parameter.empty not in defaults.values()
    assert all(p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in parameters)
    again = json.loads(json.dumps(defaults))
    assert again == defaults
    (loss, _), gradient = run(algorithms.get(name, **again), scored_batch())
    (expected, _), expected_gradient = run(algorithms.get(name), scored_batch())
    assert float(loss) == float(expected)
    for a, b in zip(gradient, expected_gradient, strict=True):
        np.testing.assert_array_equal(a, b)


@every
def test_it_learns_from_a_small_batch(name: str) -> None:
    algorithm, batch = algorithms.get(name), scored_batch()
    (loss, metrics), gradients = run(algorithm, batch)
    assert loss.shape == ()
    assert np.isfinite(loss)
    assert metrics
    assert all(np.isfinite(value).all() for value in metrics.values())
    for gradient in gradients:
        assert np.isfinite(gradient).all()
        assert (np.asarray(gradient)[~np.asarray(batch.action_mask)] == 0).all()
    assert np.abs(gradients[0]).max() > 0


@every
def test_it_asks_for_fields_that_a_batch_can_have_and_uses_no_others(name: str) -> None:
    algorithm, batch = algorithms.get(name), scored_batch()
    assert algorithm.needs <= set(Trajectories.__dataclass_fields__)
    given = {field: getattr(batch, field) for field in algorithm.needs}
    bare = batch.replace(old_logp=None, reference_logp=None).replace(**given)
    assert float(run(algorithm, bare)[0][0]) == float(run(algorithm, batch)[0][0])


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match="unknown algorithm 'gropo': did you mean 'grpo'"):
        algorithms.get("gropo")
    with pytest.raises(InputError, match="unknown algorithm"):
        algorithms.constructor("")


def test_an_unknown_hyperparameter_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        InputError, match="unknown hyper-parameter of grpo 'kl_coeficient': did you mean 'kl_coefficient'"
    ):
        algorithms.get("grpo", kl_coeficient=0.1)
