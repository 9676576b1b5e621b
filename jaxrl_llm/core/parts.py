"""What parts are written with: batches, transforms and objectives, and `part`, which lets a part print as its code."""

from __future__ import annotations

from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Array, PolicyOutputs, Trajectories, row_means, totals_of, weighted
from jaxrl_llm.core.transform import (
    Metrics,
    Objective,
    State,
    Transform,
    chain,
    control,
    controller,
    counted,
    stateless,
)

__all__ = [
    "Array", "Metrics", "Objective", "PolicyOutputs", "State", "Trajectories", "Transform", "chain", "control",
    "controller", "counted", "part", "row_means", "stateless", "totals_of", "weighted",
]  # fmt: skip
