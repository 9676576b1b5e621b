"""How the arrays of a run are sharded, as a table."""

from __future__ import annotations

from typing import NamedTuple

import jax

from jaxrl_llm.plan.shapes import RunShapes, bytes_on_a_device


class Row(NamedTuple):
    """An array in the table of shardings."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    sharding: str
    bytes: int  # on a device


def sharding_table(shapes: RunShapes) -> list[Row]:
    """Every array that a run keeps on its devices: parameters, moments, reference, the sampler's weights and caches."""
    engine = shapes.engine()
    trees = {
        "parameters": shapes.state.params, "frozen": shapes.learner.frozen, "optimiser": shapes.state.optimizer,
        "reference": shapes.copied_reference if shapes.config.reference_memory == "device" else None,
        **shapes.learner.policies,
        "sampler": engine.weights, "prompt cache": engine.prefix_cache, "ring cache": engine.ring_cache,
        "conversations": engine.parked,
    }  # fmt: skip
    rows = []
    for part, tree in trees.items():
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            spec = tuple(getattr(x.sharding, "spec", ()))
            said = ", ".join("+".join(s) if isinstance(s, tuple) else str(s or "-") for s in spec)
            name = "/".join([part, jax.tree_util.keystr(path, simple=True, separator="/")])
            rows.append(Row(name, x.shape, str(x.dtype), said or "replicated", bytes_on_a_device(x)))
    return rows
