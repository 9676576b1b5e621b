"""What `packed_attention` compiles to for TPUs, ahead of time."""

from __future__ import annotations

import json

import pytest
from other_process import result_of
from tpu_environment import tpu_environment

TPU_PROGRAM = r"""
import json, sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jaxrl_kernels.packed_attention import PackedTokens, block_pairs, packed_attention

def report(chip, H, K, h, T, dtype, softcap):
    one = jax.sharding.SingleDeviceSharding(topologies.get_topology_desc(platform="tpu", topology_name=chip).devices[0])
    of = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=one)
    arrays = [of(dtype, 1, heads * h, T) for heads in (H, K, K)]  # as XLA lays them out for the kernels
    tokens = PackedTokens(*[of("int32", 1, T)] * 3)

    def forward(q, k, v, tokens, pairs=None):
        q, k, v = (x.swapaxes(1, 2).reshape(1, T, -1, h) for x in (q, k, v))
        out, lse = packed_attention(q, k, v, tokens, pairs=pairs, query_scale=h**-0.5, softcap=softcap)
        return out.reshape(1, T, -1).swapaxes(1, 2), lse

    def backward(tokens, pairs, *xs):
        (out, lse), pull = jax.vjp(lambda *xs: forward(*xs, tokens, pairs), *xs)
        return pull((xs[0], lse))

    pairs = jax.eval_shape(block_pairs, tokens, tokens)
    pairs = jax.tree.map(lambda x: of(x.dtype, *x.shape), pairs)
    programs = jax.jit(forward).lower(*arrays, tokens, pairs), jax.jit(backward).lower(tokens, pairs, *arrays)
    ahead, back = (program.compile() for program in programs)
    return {
        "bytes": ahead.cost_analysis()["bytes accessed"],
        "temporaries": [x.memory_analysis().temp_size_in_bytes for x in (ahead, back)],
        "kernels": back.as_text().count('custom_call_target="tpu_custom_call"'),
    }

print("RESULT" + json.dumps([report(*case) for case in json.loads(sys.argv[1])]))
"""
CASES = [
    ("v5e:2x2", 32, 8, 128, 17_408, "bfloat16", 0.0),  # Qwen3-8B: a prompt and 16 completions of 1,024
    ("v5e:2x2", 32, 8, 128, 8_704, "bfloat16", 0.0),  # half of that
    ("v6e:2x2", 16, 8, 128, 4096, "bfloat16", 0.0),
    ("v5p:2x2x1", 32, 8, 128, 133_120, "bfloat16", 0.0),  # keys that do not stay in VMEM, and larger blocks
    ("v5e:2x2", 8, 4, 256, 2048, "bfloat16", 50.0),  # Gemma 2
    ("v5e:2x2", 9, 3, 64, 1024, "float32", 0.0),  # SmolLM2
]


@pytest.mark.heavy
def test_compiles_for_tpus_with_memory_linear_in_the_tokens() -> None:
    found = result_of(TPU_PROGRAM, json.dumps(CASES), environment=tpu_environment())
    for case, report in zip(CASES, found, strict=True):
        assert report["kernels"] == 3, case  # the forward pass, dq, and dk with dv
    whole, half = found[:2]
    _, H, K, h, T, *_ = CASES[0]
    arrays = (2 * H + 2 * K) * h * T * 2  # queries, keys, values and results
    assert whole["bytes"] <= 1.3 * arrays
    assert whole["temporaries"][1] <= 2.1 * half["temporaries"][1]
    assert whole["temporaries"][1] < arrays, "nothing of the size of queries x keys"
