"""Bytes of a decode step by the program that an engine runs, compiled for a TPU ahead of time or for this CPU.

    python decode_bytes.py JSON

JSON: {"platform": "tpu" or "cpu", "model": {...} of ModelConfig, "rows", "dtypes": [weight_dtype or null, ...],
"caches": [cache_dtype or null, ...]}; both lists are of one length. Also "group", "prompt" and "new", as arguments of
`measured`, in "lengths". Prints a line with, for each, the numbers that `measured` gives.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from tpu_traffic import loop_traffic

from jaxrl_llm.distributed import fully_sharded, make_mesh
from jaxrl_llm.models import ModelConfig, Policy, init_params
from jaxrl_llm.models.config.rope import Rope
from jaxrl_llm.plan.program.cost import traffic_in
from jaxrl_llm.plan.program.text import turn_of
from jaxrl_llm.plan.sampling_programs import compile_sampling
from jaxrl_llm.sampling.capacity import Shape, Size


def config_of(layers: int, hidden: int, inner: int, vocabulary: int, experts: int = 0) -> ModelConfig:
    """A Qwen3 of these sizes with heads of 128, half as many for keys and values."""
    return ModelConfig(
        family="qwen3_moe" if experts else "qwen3", vocab_size=vocabulary, hidden_size=hidden, intermediate_size=inner,
        num_layers=layers, num_heads=hidden // 128, num_kv_heads=hidden // 256, head_dim=128, norm_epsilon=1e-6,
        tie_embeddings=True, ropes=(Rope(1e6),), rope_of_layer=(0,) * layers, window_of_layer=(0,) * layers,
        query_scale=128**-0.5, max_positions=4096, qk_norm=True, num_experts=experts,
        experts_per_token=2 if experts else 0,
    )  # fmt: skip


def measured(
    device: Any, config: ModelConfig, rows: int, weight_dtype: str | None, cache_dtype: str | None,
    group: int = 1, prompt: int = 128, new: int = 64,
) -> dict[str, float]:  # fmt: skip
    """Of the decode loop: bytes of its arguments and temporaries, what XLA counts, what the loop's text moves (TPU).

    "step" is that of `traffic.traffic_in`, which knows that kernels update the caches in place.
    """
    mesh = make_mesh(1, 1, [device])
    policy = Policy(config, jnp.dtype(jnp.bfloat16))
    shapes = jax.eval_shape(partial(init_params, config=config, dtype=jnp.bfloat16), jax.random.key(0))
    places = fully_sharded(shapes, config, mesh)
    params = jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, places)
    size = Size(Shape(rows, rows // group, group, True), prompt, new)
    cache = None if cache_dtype is None else jnp.dtype(cache_dtype)
    program = compile_sampling(
        policy, params, mesh, size, cache_dtype=cache, names=("decode",), weight_dtype=weight_dtype
    )["decode"].compiled
    memory, text = program.memory_analysis(), program.as_text()
    return {
        "arguments": memory.argument_size_in_bytes, "temporaries": memory.temp_size_in_bytes,
        "counted": program.cost_analysis()["bytes accessed"], "moved": loop_traffic(text),
        "step": traffic_in(turn_of(text)),
    }  # fmt: skip


def main() -> None:
    asked = json.loads(sys.argv[1])
    if asked["platform"] == "cpu":
        device = jax.devices("cpu")[0]
    else:
        from jax.experimental import topologies

        device = topologies.get_topology_desc(platform="tpu", topology_name=asked["platform"]).devices[0]
    config, pairs = config_of(**asked["model"]), zip(asked["dtypes"], asked["caches"], strict=True)
    found = [measured(device, config, asked["rows"], *pair, **asked.get("lengths", {})) for pair in pairs]
    print("RESULT" + json.dumps(found))


if __name__ == "__main__":
    main()
