"""Small networks that learn beside the policy, as functions of explicit parameters."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from jaxrl_llm.core.shapes import bucket
from jaxrl_llm.curriculum.records import Array, PromptFacts

Layer = dict[str, jax.Array]
CHUNK = 1024  # prompts that are predicted at once


def start_linear(key: jax.Array, inputs: int, outputs: int) -> Layer:
    """{"weight": f32[inputs, outputs], "bias"}: normal with variance 1/inputs, and 0."""
    return {"weight": jax.random.normal(key, (inputs, outputs)) / inputs**0.5, "bias": jnp.zeros(outputs)}


def start_norm(units: int) -> Layer:
    """{"gain": ones f32[units], "shift": zeros}."""
    return {"gain": jnp.ones(units), "shift": jnp.zeros(units)}


def linear(layer: Layer, x: jax.Array) -> jax.Array:
    """x W + b."""
    return x @ layer["weight"] + layer["bias"]


def layer_norm(layer: Layer, x: jax.Array) -> jax.Array:
    """gain (x - mean)/sqrt(variance + 1e-5) + shift, along the last axis."""
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    return layer["gain"] * centred * jax.lax.rsqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + 1e-5) + layer["shift"]


def start_mlp(key: jax.Array, inputs: int, units: int, layers: int) -> dict[str, Any]:
    """The parameters of `mlp`."""
    sizes, keys = [inputs, *[units] * layers], jax.random.split(key, layers)
    return {
        "norms": [start_norm(size) for size in sizes],
        "layers": [start_linear(one, *two) for one, two in zip(keys, pairwise(sizes), strict=True)],
    }


def mlp(params: dict[str, Any], x: jax.Array) -> jax.Array:
    """LayerNorm, linear and GELU as often as there are layers, and a last LayerNorm: [..., inputs] -> [..., units]."""
    for norm, layer in zip(params["norms"], params["layers"], strict=False):
        x = jax.nn.gelu(linear(layer, layer_norm(norm, x)))
    return layer_norm(params["norms"][-1], x)


def attended(queries: jax.Array, keys: jax.Array, values: jax.Array, known: jax.Array) -> jax.Array:
    """Attention softmax_k(q . k / sqrt(D)) v of queries [..., n, D] to keys [..., K, D], over those that are known.

    values [..., K, V]; known: bool, broadcast to [..., n, K]. A query without a known key gets 0.
    """
    logits = queries @ jnp.swapaxes(keys, -1, -2) / queries.shape[-1] ** 0.5
    logits = jnp.where(known, logits, -jnp.inf)
    top = jnp.max(logits, axis=-1, keepdims=True)
    weight = jnp.exp(logits - jnp.where(jnp.isfinite(top), top, 0.0))
    return weight @ values / jnp.maximum(jnp.sum(weight, axis=-1, keepdims=True), 1e-30)


Loss = Callable[..., jax.Array]


def fitted(loss: Loss, check: Loss, start: Array, steps: int, rate: float, every: int, *data: Any) -> Array:
    """f32[1, n]: the best of the parameters after 0, every, 2 every ... `steps` steps of Adam, from `start`.

    loss: (f32[n], number of the step, *data), whose gradient is followed. check: (f32[n], *data), which says what is
    best: of prompts that are not learnt from, so that learning stops before it fits noise; of equal ones the last is.
    Both must be the same objects each time, or they are compiled again.
    """
    return np.asarray(_fitted(loss, check, jnp.asarray(start[0]), -(-steps // every), rate, every, data))[None]


@partial(jax.jit, static_argnames=("loss", "check"))
def _fitted(
    loss: Loss, check: Loss, start: jax.Array, rounds: jax.Array, rate: jax.Array, every: jax.Array,
    data: tuple[Any, ...],
) -> jax.Array:  # fmt: skip
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam())

    def step(number: jax.Array, carry: Any) -> Any:
        params, state = carry
        change, state = optimizer.update(jax.grad(loss)(params, number, *data), state)
        return params - rate * change, state

    def some(number: jax.Array, carry: Any) -> Any:
        params, state, best, least = carry
        params, state = jax.lax.fori_loop(number * every, (number + 1) * every, step, (params, state))
        found = check(params, *data)
        return params, state, jnp.where(found <= least, params, best), jnp.where(found <= least, found, least)

    first = (start, optimizer.init(start), start, check(start, *data))
    return jax.lax.fori_loop(0, rounds, some, first)[2]


def is_held_out(facts: PromptFacts) -> Array:
    """bool[P]: the fifth of the prompts that a network is checked with and does not learn from."""
    return facts.rank % 5 == 0


def flattened(params: Any) -> tuple[Array, Callable[[jax.Array], Any]]:
    """All parameters one after another, f32[1, n], as a state keeps them; and what gives f32[n] their structure."""
    leaves, structure = jax.tree.flatten(params)
    ends = np.cumsum([leaf.size for leaf in leaves])[:-1].tolist()

    def whole(vector: jax.Array) -> Any:
        parts = jnp.split(vector, ends)
        return jax.tree.unflatten(structure, [one.reshape(leaf.shape) for one, leaf in zip(parts, leaves, strict=True)])

    return np.asarray(ravel_pytree(params)[0], np.float32)[None], whole


def in_chunks(function: Callable[[Array], jax.Array], x: Array) -> Array:
    """f64[n]: the function's results f32[m] of the rows x [n, ...], some at once, padded to few different sizes m."""
    out = []
    for first in range(0, len(x), CHUNK):
        part = x[first : first + CHUNK]
        size = min(CHUNK, bucket(len(part), 16, 1))
        padded = np.concatenate([part, np.zeros((size - len(part), *part.shape[1:]), part.dtype)])
        out.append(np.asarray(function(padded), np.float64)[: len(part)])
    return np.concatenate(out) if out else np.zeros(0)
