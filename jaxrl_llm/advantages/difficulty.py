"""Credit by prompt difficulty: weights from the rewards of a group, and subgroups with their own target."""

from __future__ import annotations

from collections.abc import Callable

import jax

from jaxrl_llm.core.arguments.checks import require_function
from jaxrl_llm.core.parts import Trajectories, Transform, part, stateless


@part
def weigh_advantages(weight: Callable[[Trajectories], jax.Array]) -> Transform:
    """Multiply the advantages of each row by `weight(batch)` f32[N]."""
    require_function("the weight of advantages", weight)
    return stateless(lambda b: b.replace(advantages=b.need("advantages") * weight(b)[:, None]))
