"""Heads and vocabulary over a mesh's axis "tensor": the same tokens as on one device, and weights that move once."""

from __future__ import annotations

from typing import Any

import pytest
from other_process import on_devices, result_of

pytestmark = pytest.mark.heavy

ON_EIGHT_DEVICES = """
import json, sys
import jax, numpy as np
jax.config.update("jax_platforms", "cpu")
from jax.sharding import NamedSharding, PartitionSpec
from jaxrl_llm import load_policy, sample
from jaxrl_llm.distributed import make_mesh, shard_params
from jaxrl_llm.sampling import Stats, completion_ids

policy, params, _ = load_policy(sys.argv[1])
prompts = [[5, 9, 200], [7, 1, 60, 61, 62, 3, 9], [80, 81], [100] * 6]
settings = dict(group_size=2, max_new_tokens=12, stop_token_ids=[-1], temperature=2.0)

def draw(params, **more):
    stats = Stats()
    found = sample(policy, params, prompts, jax.random.key(0), stats=stats, **settings | more)
    return completion_ids(found), np.asarray(found.behaviour_logp), stats

out = []
for more in ({}, {"slots": 3}, {"top_k": 9, "cache_dtype": "bfloat16"}, {"weight_dtype": "float8_blocks"}):
    expected, logp, _ = draw(params, **more)
    for data, tensor in ((4, 2),) if more else ((4, 2), (2, 4)):
        mesh = make_mesh(data, tensor, devices=jax.devices()[: data * tensor])
        for name, placed in {
            "as the engine wants them": shard_params(params, policy.config, mesh),
            "whole on each device": jax.device_put(params, NamedSharding(mesh, PartitionSpec())),
            "on one device": params,
        }.items():
            if more and name != "on one device":
                continue
            found, found_logp, stats = draw(placed, mesh=mesh, **more)
            out.append({
                "case": [data, tensor, name, sorted(more)], "same": found == expected,
                "error": float(np.abs(found_logp - logp).max()), "moved": stats.moved_bytes,
                "rows": stats.rows, "prompts": stats.prompt_slots,
            })
size = sum(x.nbytes for x in jax.tree.leaves(params))
print("RESULT" + json.dumps([out, size]))
"""


@pytest.fixture(scope="module")
def results(vectors: Any) -> Any:
    return result_of(ON_EIGHT_DEVICES, str(vectors("qwen3").folder), environment=on_devices(8))


def test_tokens_are_those_of_one_device(results: Any) -> None:
    """Two key-value heads split over 2 and not over 4; 257 tokens of vocabulary are padded to split at all."""
    out, _ = results
    assert len(out) == 9
    for found in out:
        assert found["same"], found
        assert found["error"] < (2e-2 if "cache_dtype" in found["case"][3] else 1e-4), found
        data = found["case"][0]
        assert found["rows"] % data == found["prompts"] % data == 0


def test_weights_move_once_and_are_counted(results: Any) -> None:
    """Nothing where devices hold their part already; a copy of its part for each device that has nothing."""
    out, size = results
    moved = {(tuple(found["case"][:2]), found["case"][2]): found["moved"] for found in out if not found["case"][3]}
    for mesh in ((4, 2), (2, 4)):
        assert moved[mesh, "as the engine wants them"] == 0
        assert moved[mesh, "whole on each device"] == 0
        assert 0 < moved[mesh, "on one device"] < 7 * size
    # Over four devices the heads do not split: their weights go whole to each.
    assert moved[(2, 4), "on one device"] > moved[(4, 2), "on one device"]
