"""What `fused_logprob` and its gradient are compiled to: memory and operations beside the plain formula's."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from compiling import optimised
from jaxrl_kernels import fused_logprob
from other_process import result_of
from tpu_environment import tpu_environment

GIB = 2**30

# The compiler counts the operations of a loop's body once, however often it runs. So they are counted where the
# vocabulary is one block and there is no loop. Both formulas do the same for every token of the vocabulary: the ratio
# is that of any number of blocks.
TPU_PROGRAM = """
import json, sys
from functools import partial
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jaxrl_kernels import fused_logprob

def report(topology, rows, width, vocabulary, dtype, settings, floor=False, unembedding=jnp.bfloat16):
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    shaped = partial(jax.ShapeDtypeStruct, sharding=jax.sharding.SingleDeviceSharding(device))
    def loss(hidden, unembedding, targets, floors):
        logp, entropy = fused_logprob(
            hidden, unembedding, targets, support_floor=floors if floor else None, **settings
        )
        return jnp.mean(logp) + jnp.mean(entropy)
    arrays = shaped((rows, width), dtype), shaped((vocabulary, width), unembedding), shaped((rows,), jnp.int32)
    compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*arrays, shaped((rows,), jnp.float32)).compile()
    text = compiled.as_text()
    return {
        "temporaries": compiled.memory_analysis().temp_size_in_bytes,
        "operations": compiled.cost_analysis()["flops"],
        "kernels": text.count('"tpu_custom_call"'),
        "logits": f"[{rows},{vocabulary}]" in text,
        "copies": sum(f"[{vocabulary},{width}]" in line and " copy(" in line for line in text.splitlines()),
    }

plain = {"implementation": "reference"}
large, smollm = ("v5e:2x2", 8192, 4096), ("v5e:2x2", 1024, 576, 49152)
truncated = {"temperature": 0.7, "softcap": 30.0, "block_size": 1024}
print("RESULT" + json.dumps({
    "large": report(*large, 151936, jnp.bfloat16, {}),
    "large plain": report(*large, 151936, jnp.bfloat16, plain),
    "block": report(*large, 8192, jnp.bfloat16, {}),
    "block plain": report(*large, 8192, jnp.bfloat16, plain),
    "smollm": report(*smollm, jnp.float32, {}, unembedding=jnp.float32),
    "truncated": report("v5e:2x2", 300, 100, 5003, jnp.bfloat16, truncated, floor=True),
    "v6e": report("v6e:2x2", 200, 512, 50257, jnp.float32, {}),
    "wide": report("v5p:2x2x1", 2048, 8192, 9000, jnp.bfloat16, {}),
    "one row": report("v6e:2x2", 1, 1024, 20000, jnp.bfloat16, {}),
}))
"""


@pytest.mark.heavy
def test_on_tpu_memory_operations_and_kernels() -> None:
    found = result_of(TPU_PROGRAM, environment=tpu_environment())
    plain = found.pop("large plain")
    assert plain["logits"]
    assert plain["temporaries"] > 4 * GIB
    assert found["large"]["temporaries"] < GIB  # hidden states and weights of bfloat16
    one_block, one_plain = found.pop("block"), found.pop("block plain")
    products = 2 * 8192 * 4096 * 8192
    assert 4 * products < one_block["operations"] < 1.4 * one_plain["operations"]
    assert abs(one_plain["operations"] / (3 * products) - 1) < 0.01
    assert one_block["kernels"] == 2
    for name, case in found.items():
        assert not case["logits"], name
        # Forward, another with a floor, and in the gradient one in the loop and one after it where a block is short.
        assert case["kernels"] in (2, 3, 4), name
        assert case["copies"] == 0, name
    assert found["truncated"]["kernels"] == 4
    assert found["smollm"]["kernels"] == 2
    assert found["smollm"]["temporaries"] < 2**20


def compiled(rows: int, width: int, vocabulary: int, **settings: Any) -> Any:
    def loss(hidden: Any, unembedding: Any, targets: Any) -> jax.Array:
        logp, entropy = fused_logprob(hidden, unembedding, targets, **settings)
        return jnp.mean(logp) + jnp.mean(entropy)

    shaped = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    arrays = shaped((rows, width)), shaped((vocabulary, width)), shaped((rows,), dtype=jnp.int32)
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*arrays).compile()


@optimised
def test_on_cpu_memory_and_operations_for_smollm2() -> None:
    rows, width, vocabulary, block = 1024, 576, 49152, 2048
    fused, plain = (compiled(rows, width, vocabulary, **options) for options in ({}, {"implementation": "reference"}))
    logits = 4 * rows * vocabulary
    assert plain.memory_analysis().temp_size_in_bytes > 2 * logits
    assert fused.memory_analysis().temp_size_in_bytes < logits / 4
    # A loop forward and one back: the body of each is counted once, for one of 24 blocks.
    in_block, in_plain = (program.cost_analysis()["flops"] for program in (fused, plain))
    products = 2 * rows * width * vocabulary
    assert abs(in_plain / (3 * products) - 1) < 0.02
    assert 4 * products < in_block * vocabulary / block < 1.4 * in_plain
