"""Loss and gradient of `fused_logprob` against the formula as one would write it; for the update benchmark."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxrl_kernels import fused_logprob


def plain_logprob(hidden: jax.Array, unembedding: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Log-probability and entropy f32[M] by way of all logits f32[M, V]."""
    logits = jnp.einsum("md,vd->mv", hidden, unembedding, preferred_element_type=jnp.float32)
    logp = jax.nn.log_softmax(logits)
    return jnp.take_along_axis(logp, targets[:, None], axis=1)[:, 0], -jnp.sum(jnp.exp(logp) * logp, axis=1)


def fused(*, rows: int, hidden: int, vocabulary: int, blocks: list[int], dtype: str, repeats: int) -> dict[str, Any]:
    """Both ways, in turns, on `rows` random states: {way: {"seconds", "temporaries", "difference"}}.

    What is timed is a weighted sum of log-probabilities, the mean entropy beside it, and the gradients with respect to
    states and unembedding, as the update needs them. blocks: block sizes to try beside the one that is chosen.
    seconds: of the repeats, after one that warms up. temporaries: bytes, by XLA's memory analysis, without arguments
    and gradients. difference: from the plain gradients, as a share of their norm.
    """
    keys = jax.random.split(jax.random.key(0), 4)
    states = jax.random.normal(keys[0], (rows, hidden), dtype)
    unembedding = 0.02 * jax.random.normal(keys[1], (vocabulary, hidden), dtype)
    targets = jax.random.randint(keys[2], (rows,), 0, vocabulary)
    weights = jax.random.normal(keys[3], (rows,)) / rows

    def program(way: Any) -> Any:
        def loss(states: jax.Array, unembedding: jax.Array) -> tuple[jax.Array, jax.Array]:
            logp, entropy = way(states, unembedding, targets)
            return jnp.sum(weights * logp), jnp.mean(jax.lax.stop_gradient(entropy))

        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True)).lower(states, unembedding).compile()

    ways = {"plain": plain_logprob, "fused": fused_logprob}
    ways |= {f"fused, blocks of {size}": partial(fused_logprob, block_size=size) for size in blocks}
    programs = {name: program(way) for name, way in ways.items()}
    figures: dict[str, Any] = {
        name: {"seconds": [], "temporaries": compiled.memory_analysis().temp_size_in_bytes}
        for name, compiled in programs.items()
    }
    gradients: Any = {}
    for number in range(repeats + 1):
        for name, compiled in programs.items():
            begin = time.perf_counter()
            found = jax.block_until_ready(compiled(states, unembedding))
            if number:
                figures[name]["seconds"].append(time.perf_counter() - begin)
            else:
                gradients[name] = [x.astype(jnp.float32) for x in found[1]]
    for name, of_way in gradients.items():
        pairs = list(zip(of_way, gradients["plain"], strict=True))
        shares = [jnp.linalg.norm(a - b) / jnp.linalg.norm(b) for a, b in pairs]
        figures[name]["difference"] = float(max(shares))
    return figures
