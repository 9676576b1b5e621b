"""Batches and helpers shared by the tests of the methods, whose references are numpy loops in double precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.trajectory import PolicyOutputs, Trajectories

# One group of four, the batch of most worked examples.
MASK = np.array([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]], bool)
REWARD = np.array([1.0, 0, 0, 1])
OLD = np.array([[-1, -0.5, -2], [-0.7, -1.2, 0], [-0.3, 0, 0], [-1.5, -0.1, -0.9]])
LOGP = np.array([[-0.9, -0.8, -1.5], [-0.6, -1.6, 0], [-0.25, 0, 0], [-1.2, -0.15, -1.4]])
REFERENCE = np.array([[-1.1, -0.6, -1.9], [-0.6, -1, 0], [-0.4, 0, 0], [-1.4, -0.2, -1.1]])


def batch_of(mask: Any = MASK, reward: Any = REWARD, behaviour: Any = OLD, group: Any = None, **fields: Any) -> Any:
    """A scored batch of completions alone; old_logp is behaviour_logp unless given. Numpy arrays become jax's."""
    mask = np.asarray(mask, bool)
    N, L = mask.shape
    group = np.zeros(N, np.int32) if group is None else np.asarray(group, np.int32)
    given = {"old_logp": np.asarray(behaviour), **fields}
    as_jax = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32 if np.asarray(x).dtype.kind == "f" else None), given)
    # Tokens differ between rows, like those of real completions.
    tokens = np.arange(N * L).reshape(N, L) * 7 % 97
    return Trajectories(
        tokens=jnp.asarray(tokens, jnp.int32),
        token_mask=jnp.asarray(mask),
        action_mask=jnp.asarray(mask),
        behaviour_logp=jnp.asarray(behaviour, jnp.float32),
        policy_step=jnp.zeros((N, L), jnp.int32),
        turn=jnp.where(jnp.asarray(mask), 0, -1).astype(jnp.int32),
        group=jnp.asarray(group),
        prompt_id=jnp.asarray(as_jax.pop("prompt_id", group), jnp.int32),
        truncated=jnp.asarray(as_jax.pop("truncated", np.zeros(N, bool))),
        reward=jnp.asarray(reward, jnp.float32),
        **as_jax,
    )


def prepared(algorithm: Algorithm, batch: Trajectories, state: Any = None) -> Trajectories:
    """The batch after the algorithm's transform."""
    return algorithm.transform.apply(algorithm.transform.init() if state is None else state, batch)[1]


def advantages(algorithm: Algorithm, batch: Trajectories) -> np.ndarray:
    """f32[N, L], of actions; 0 elsewhere."""
    return np.asarray(prepared(algorithm, batch).advantages)


def near(found: Any, expected: Any, atol: float = 2e-6) -> None:
    """Equal to 2e-5 and atol."""
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=atol)


def outputs_of(logp: Any, entropy: Any = None, **extras: Any) -> PolicyOutputs:
    """What a policy says, given as arrays."""
    logp = jnp.asarray(logp, jnp.float32)
    entropy = jnp.zeros(logp.shape) if entropy is None else jnp.asarray(entropy, jnp.float32)
    return PolicyOutputs(logp, entropy, jax.tree.map(jnp.asarray, extras) or None)


def loss_of(algorithm: Algorithm, batch: Trajectories, logp: Any = LOGP, entropy: Any = None, **extras: Any) -> float:
    """The loss of a scored batch: the transform, then the objective."""
    return float(algorithm.objective(outputs_of(logp, entropy, **extras), prepared(algorithm, batch))[0])


def gradient_of(
    algorithm: Algorithm, batch: Trajectories, logp: Any = LOGP, entropy: Any = None, **extras: Any
) -> np.ndarray:
    """d loss / d logp, f32[N, L]."""
    ready = prepared(algorithm, batch)

    def loss(logp: jax.Array) -> jax.Array:
        return algorithm.objective(outputs_of(logp, entropy, **extras), ready)[0]

    return np.asarray(jax.grad(loss)(jnp.asarray(logp, jnp.float32)))


def finite_differences(loss: Callable[[np.ndarray], float], at: Any, step: float = 1e-6) -> np.ndarray:
    """The gradient of a loop in double precision by central differences; wrong at kinks within the step."""
    at = np.asarray(at, np.float64)
    out = np.zeros(at.shape)
    for place in np.ndindex(at.shape):
        change = np.zeros(at.shape)
        change[place] = step
        out[place] = (loss(at + change) - loss(at - change)) / (2 * step)
    return out


def random_batch(seed: int, groups: Sequence[int] = (4, 4, 3), length: int = 6, **fields: Any) -> tuple[Any, Any]:
    """A batch of ragged groups with binary rewards (both kinds in each), and current log-probabilities near its own."""
    random = np.random.default_rng(seed)
    N = sum(groups)
    mask = np.arange(length) < random.integers(2, length + 1, N)[:, None]
    group = np.repeat(np.arange(len(groups)), groups)
    reward = np.concatenate([random.permutation([1.0, 0.0, *random.integers(0, 2, n - 2)]) for n in groups])
    behaviour = -random.gamma(2.0, 0.5, (N, length)) * mask
    near = {
        "old_logp": behaviour + 0.05 * random.normal(size=(N, length)) * mask,
        "reference_logp": behaviour + 0.2 * random.normal(size=(N, length)) * mask,
        "entropy": random.gamma(2.0, 0.4, (N, length)) * mask,
    }
    batch = batch_of(mask, reward, behaviour, group, **{**near, **fields})
    return batch, (behaviour + 0.15 * random.normal(size=(N, length))) * mask
