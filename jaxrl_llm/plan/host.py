"""The memory that a run takes of its hosts."""

from __future__ import annotations

from typing import Any

import jax

from jaxrl_llm.distributed.chips import GIB, Topology
from jaxrl_llm.plan.shapes import RunShapes, StateShapes
from jaxrl_llm.training.config import TrainConfig

COPY = "weights while loading, or a checkpoint"
PROCESS = 1.2  # GiB of host memory that Python, JAX and the compiler take


def host_memory(config: TrainConfig, topology: Topology, arrays: RunShapes | StateShapes) -> dict[str, int]:
    """Bytes on each host: the process, the weights while they are loaded, a checkpoint while it is written."""
    hosts = topology.hosts
    reference = arrays.copied_reference if config.reference_memory == "host" else None
    length = config.max_prompt_tokens + config.max_new_tokens
    saved = -(-_bytes(arrays.state) // hosts) if config.checkpoint_every else 0
    return {
        "process": int(PROCESS * GIB),
        COPY: max(_bytes(arrays.params), saved),
        "reference": _bytes(reference) // hosts,
        "batch": config.prompts_per_step * config.group_size * length * 64,  # some fifteen arrays of 4 bytes a token
    }


def _bytes(tree: Any) -> int:
    """Of whole arrays."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
