"""Projections whose sums the devices along "tensor" share: each device keeps the tokens that are its own."""

from __future__ import annotations

from typing import Any

from jaxrl_llm.core.trajectory import Array
from jaxrl_llm.models.layers.by_row import ROWS
from jaxrl_llm.models.layers.projections import project
from jaxrl_llm.models.parameters import LORA_IN
from jaxrl_llm.models.placement import Placement


def project_summed(x: Array, layer: dict[str, Any], name: str, placement: Placement) -> Array:
    """`project` of x [N, L, K], sharded by K, -> [N, L, D], in the placement that states have between layers.

    XLA for TPUs sums and scatters the rows of a matrix; with more axes it sums all tokens on every device.
    """
    joined, alone = name in placement.joined, name + LORA_IN not in layer and ROWS not in layer
    if alone and (spread := placement.flat(*x.shape[:2])) is not None:
        out = spread(project(x.reshape(-1, x.shape[-1]), layer[name], layer, name, joined))
        return out.reshape(*x.shape[:2], -1)
    return project(x, layer[name], layer, name, joined)
