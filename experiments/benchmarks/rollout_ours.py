"""Our column of the rollout benchmark; started by rollout.py.

Also: the bandwidth of the machine, the bytes that a decode step must read, and XLA's analysis of shared prompts.
"""

from __future__ import annotations

import argparse
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rollout_tail import TAIL_TASKS, endless
from rollout_worker import peak_memory, random_prompts, serve

from jaxrl_llm.models import Policy, from_hf, init_params, load_policy
from jaxrl_llm.sampling.decode import decode, empty_ring_cache
from jaxrl_llm.sampling.draw import draw
from jaxrl_llm.sampling.kv_cache import PrefixCache
from jaxrl_llm.sampling.prefill import empty_prefix_cache
from jaxrl_llm.sampling.requests import Request
from jaxrl_llm.sampling.rows import no_rows
from jaxrl_llm.sampling.stats import Stats
from jaxrl_llm.sampling.stream import stream
from jaxrl_llm.sampling.weights import take_weights
from jaxrl_llm.sampling.weights.layouts import abstract_weights
from jaxrl_llm.utils.process import compiles, count_compiles, use_compile_cache

# Shapes of models whose weights are made up, which need no file.
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
        "rms_norm_eps": 1e-5, "rope_theta": 100_000.0, "tie_word_embeddings": True, "max_position_embeddings": 8192,
    },
    "llama-8m": {
        "model_type": "llama", "vocab_size": 8192, "hidden_size": 256, "intermediate_size": 768,
        "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "tie_word_embeddings": True, "max_position_embeddings": 8192,
    },
    "qwen3-1.7b": {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True, "max_position_embeddings": 40960,
    },
}  # fmt: skip


class Ours(NamedTuple):
    """The sampler under measurement."""

    policy: Policy
    params: Any
    cache_dtype: Any


def load(model: str, dtype: str, cache_dtype: str | None, param_dtype: str | None = None) -> Ours:
    """model: a folder or name as for `load_policy`, or "random:" and a name of SHAPES. param_dtype: else dtype."""
    cache, kept = jnp.dtype(cache_dtype or dtype), jnp.dtype(param_dtype or dtype)
    if not model.startswith("random:"):
        policy, params, _ = load_policy(model, dtype=jnp.dtype(dtype), param_dtype=kept)
        return Ours(policy, params, cache)
    name = model.removeprefix("random:")
    if name not in SHAPES:
        raise SystemExit(f"no shapes of {name!r} are known; known are {', '.join(SHAPES)}")
    use_compile_cache()
    config = from_hf(SHAPES[name])
    return Ours(Policy(config, jnp.dtype(dtype)), init_params(jax.random.key(0), config, kept), cache)


def static(ours: Ours, *, batch: int, prompt: int, new: int, group: int, seed: int) -> dict[str, Any]:
    """One rollout of `batch` completions of exactly `new` tokens; `group` of them share a prompt.

    seconds: from the training layout of the weights to the last token on the host, as in every step of training.
    """
    prompts = random_prompts(batch // group, prompt, ours.policy.config.vocab_size)
    requests = [
        Request(tuple(ids), new, number, sample) for number, ids in enumerate(prompts) for sample in range(group)
    ]
    settings, stats = endless(seed), Stats()
    count_compiles()
    before, begin = compiles()[0], time.perf_counter()
    weights = take_weights(ours.policy, ours.params)
    jax.block_until_ready(weights.loop)
    taken = time.perf_counter() - begin
    completions = list(stream(ours.policy, weights, requests, settings, cache_dtype=ours.cache_dtype, stats=stats))
    seconds = time.perf_counter() - begin
    tokens = sum(completion.tokens.size for completion in completions)
    if tokens != batch * new:
        raise RuntimeError(f"{tokens} tokens came of {batch} completions of {new}")
    return {
        "seconds": seconds,
        "tokens": tokens,
        "first_token": taken + stats.first_token,
        "steps_after": stats.steps - 1,  # the engine's first look comes after one step
        "weights_seconds": taken,
        "compiles": compiles()[0] - before,
    }


def loop_weights(ours: Ours) -> Any:
    """Shapes of the weights that the decode loop reads, in the dtype in which it does."""
    return abstract_weights(ours.policy, ours.params)


def needed_bytes(ours: Ours, *, batch: int, prompt: int, new: int, group: int) -> dict[str, Any]:
    """Bytes that a decode step must read, on the average over the new - 1 steps of a static case.

    weights: all parameters once; of an embedding that is not the unembedding only a few rows, which are left out.
    cache: keys and values of each distinct prompt once, and of each row's own tokens so far, in the cache's dtype
    with its scales; layers with a window of w tokens see the last w. Nothing that is written counts.
    """
    config, dtype = ours.policy.config, ours.cache_dtype
    parameters = {name: x for name, x in loop_weights(ours).items() if config.tie_embeddings or name != "embed"}
    vector = config.head_dim * dtype.itemsize + (4 if dtype == jnp.int8 else 0)
    token = 2 * config.num_kv_heads * vector  # of one layer
    steps = np.arange(1, new)
    cache = np.zeros(new - 1)
    for window in config.window_of_layer:
        own = np.minimum(steps, window) if window else steps
        of_prompt = np.minimum(prompt, window - own) if window else prompt
        cache += token * (batch // group * of_prompt + batch * own)
    return {"weights": size_of(parameters), "cache": float(cache.mean())}


def size_of(tree: Any) -> int:
    """Bytes of arrays, or of what would be arrays of such shapes."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def bandwidth(size: int = 0) -> dict[str, Any]:
    """Bytes a second that sums over a large array read: the best of some ways and runs. size: bytes of the array."""
    platform = jax.devices()[0].platform
    count = (size or (512 << 20 if platform == "cpu" else 4 << 30)) // 4096
    x = jax.block_until_ready(jax.jit(lambda: jnp.ones((1024, count), jnp.float32))())
    best = 0.0
    for axis in (0, 1, None):
        total = jax.jit(lambda x, axis=axis: jnp.sum(x, axis=axis))
        jax.block_until_ready(total(x))
        for _ in range(7):
            begin = time.perf_counter()
            jax.block_until_ready(total(x))
            best = max(best, x.nbytes / (time.perf_counter() - begin))
    return {"bytes_per_second": best}


def shared(ours: Ours, *, rows: int, groups: int, prompt: int, new: int) -> dict[str, Any]:
    """What XLA says of `decode` with `groups` prompts for all rows, and with a prompt for each row. Nothing runs.

    cache_bytes: of the prompts' keys and values. argument_bytes: of all that the program is given, by XLA's memory
    analysis: weights, prompts and the full ring, which a last step reads. step_bytes: "bytes accessed" by its cost
    analysis, which counts the loop's body once and every operation's operands and results, also those that stay in a
    processor's cache; the draw of first tokens, which comes before the loop, is taken off.
    """
    policy, dtype = ours.policy, ours.cache_dtype
    weights = loop_weights(ours)
    settings = jax.eval_shape(lambda: endless(0))
    hidden = jax.ShapeDtypeStruct((rows, policy.config.hidden_size), policy.dtype)
    counters = jax.ShapeDtypeStruct((rows, 4), jnp.uint32)
    before = accessed(jax.jit(draw, static_argnums=0).lower(policy, weights, hidden, counters, settings).compile())

    def figures(prompts: int) -> dict[str, Any]:
        prefix_cache: PrefixCache = jax.eval_shape(lambda: empty_prefix_cache(policy, prompts, prompt, dtype))
        ring = jax.eval_shape(lambda: empty_ring_cache(policy, rows, new, dtype))
        number = jax.ShapeDtypeStruct((), jnp.int32)
        arguments = (jax.eval_shape(lambda: no_rows(rows)), settings, number, number)
        program = decode.lower(policy, weights, prefix_cache, None, ring, *arguments).compile()
        return {
            "cache_bytes": size_of(prefix_cache.layers),
            "argument_bytes": program.memory_analysis().argument_size_in_bytes,
            "step_bytes": accessed(program) - before,
        }

    return {"shared": figures(groups), "unshared": figures(rows)}


def accessed(program: jax.stages.Compiled) -> float:
    """Bytes that a compiled program reads and writes, by XLA's cost analysis."""
    cost: Any = program.cost_analysis()
    return cost["bytes accessed"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--cache-dtype")
    options = parser.parse_args()
    held: list[Ours] = []

    def peak() -> dict[str, Any]:
        device = jax.devices()[0]
        kept = device.memory_stats() if device.platform != "cpu" else None
        return {"peak_bytes": kept["peak_bytes_in_use"] if kept else peak_memory()}

    def begin() -> dict[str, Any]:
        start = time.perf_counter()
        held.append(jax.block_until_ready(load(options.model, options.dtype, options.cache_dtype)))
        device = jax.devices()[0]
        return {
            "version": f"jaxrl_llm, JAX {jax.__version__}",
            "platform": device.platform,
            "device": device.device_kind,
            "seconds": time.perf_counter() - start,
        } | peak()

    serve({
        "load": begin,
        "static": lambda **case: static(held[0], **case) | peak(),
        "needed_bytes": lambda **case: needed_bytes(held[0], **case),
        "bandwidth": bandwidth,
        "shared": lambda **case: shared(held[0], **case),
        **{name: lambda task=task, **case: task(*held[0], **case) | peak() for name, task in TAIL_TASKS.items()},
    })  # fmt: skip


if __name__ == "__main__":
    main()
