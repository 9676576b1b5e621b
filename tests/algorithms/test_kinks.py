"""Rounding between sampler and trainer is not a gradient: no method has a kink where a ratio is 1."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from every_method import every_method
from experience import Case, L, N, Steps, case, steps_of

from jaxrl_llm import algorithms
from jaxrl_llm.core.algorithm import Algorithm

NOISE = 1e-6


def first_update(algorithm: Algorithm, noise: float, seed: int = 11) -> Case:
    """A batch before its first gradient step: the policy is the old one, and the sampler's but for its rounding."""
    one = case(seed, algorithm)
    logp = one.outputs.logp
    drawn = jnp.asarray(np.random.default_rng(seed).normal(size=(N, L)), jnp.float32)
    batch = one.batch.replace(behaviour_logp=logp + noise * drawn, old_logp=logp, previous_logp=logp)
    return Case(batch, one.outputs)


@lru_cache(maxsize=2)
def compiled(algorithm: Algorithm) -> Steps:
    return Steps(*map(jax.jit, steps_of(algorithm)))


def gradient(algorithm: Algorithm, one: Case) -> Any:
    steps = compiled(algorithm)
    _, ready = steps.prepare(algorithm.transform.init(), one.batch)
    return steps.gradient(one.outputs, ready)[1].logp


@every_method
def test_rounding_of_the_sampler_changes_no_gradient(name: str) -> None:
    algorithm = algorithms.get(name)
    exact, rounded = (gradient(algorithm, first_update(algorithm, noise)) for noise in (0.0, NOISE))
    size = float(jnp.linalg.norm(exact))
    if size == 0:
        grpo = algorithms.get("grpo")
        size = float(jnp.linalg.norm(gradient(grpo, first_update(grpo, 0.0))))
    assert float(jnp.linalg.norm(rounded - exact)) <= 1e-3 * size
