"""How much the distributions of two policies overlap."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.distributed.aot import compiled
from jaxrl_llm.distributed.mesh import to_device
from jaxrl_llm.learner.microbatches import Steps, by_slices
from jaxrl_llm.models.outputs import distribution_at, scatter
from jaxrl_llm.models.packed_states import view_of
from jaxrl_llm.models.packing import Packing
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.models.vocabulary import vocabulary_sum


def affinity(
    policy: Policy, params: Params, other: Params, batch: Trajectories, packing: Packing | None = None
) -> jax.Array:
    """sum_v sqrt(p_v q_v) of the policies with two sets of parameters at each action, f32[N, L] (Bhattacharyya).

    A replayed routing is that of the first.
    """
    views = [
        view_of(policy, weights, rows, packing)
        for weights, rows in ((params, batch), (other, batch.replace(experts=None)))
    ]
    sources = [distribution_at(policy, weights, view) for view, weights in zip(views, (params, other), strict=True)]
    return scatter(vocabulary_sum(lambda p, q: jnp.exp((p + q) / 2), *sources), views[0], batch)


@compiled(static_argnames=("policy",))
def affinity_by_slices(
    policy: Policy, params: Params, reference: Params, batch: Trajectories, steps: Steps | None
) -> jax.Array:
    """`affinity` to a reference, whose parameters may be on the host, some rows at a time."""
    reference = to_device(reference)
    return by_slices(lambda part, packing: affinity(policy, params, reference, part, packing), batch, steps)
