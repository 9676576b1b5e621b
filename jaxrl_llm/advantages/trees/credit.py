"""Advantages in trees of completions: of segments, of depths, and of leaves among all subtrees that have them.

Rows without a score are left out, and their advantages are 0. See `advantages.trees.values` for nodes and their values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp

from jaxrl_llm.advantages.returns import scored_actions
from jaxrl_llm.advantages.trees.values import leaves, node_values, scored_tree, shares, sums
from jaxrl_llm.core.arguments.ranges import check_moments
from jaxrl_llm.core.parts import Array, Trajectories, Transform, part, stateless, stateless_part

NODE = frozenset({"node"})
EQUAL = 1e-6  # standard deviations and differences of values below are 0


def edge_advantages(batch: Trajectories, scale: Literal["none", "std"] = "none", epsilon: float = 1e-8) -> Array:
    """V(node) - V(node before it) on the actions of each segment, f32[N, L]; V as `node_values` from children.

    scale "std": divided by the standard deviation (ddof 0) of the values of all children of the node before, plus
    epsilon; 0 where these are equal.
    """
    tree = scored_tree(batch)
    V = node_values(tree, batch.scores, shares(tree))
    gain = V[tree.key] - V[tree.parent]
    gain = jnp.where(jnp.abs(gain) > EQUAL * jnp.maximum(jnp.abs(V[tree.key]), 1.0), gain, 0.0)  # means round
    if scale == "std":
        count = jnp.maximum(sums(tree, jnp.ones(gain.shape), tree.single, tree.parent), 1.0)
        mean = sums(tree, gain, tree.single, tree.parent) / count
        squares = sums(tree, (gain - mean[tree.parent]) ** 2, tree.single, tree.parent) / count
        deviation = jnp.sqrt(squares)[tree.parent]
        gain = jnp.where(deviation > EQUAL, gain / (deviation + epsilon), 0.0)
    return jnp.where(tree.mask, gain, 0.0)


@part
def tree_credit(credit: Callable[[Trajectories], Array], needs: frozenset[str] = NODE) -> Transform:
    """Write credit(batch) f32[N] or f32[N, L] as the advantages of the actions of scored rows."""

    def apply(batch: Trajectories) -> Trajectories:
        found = credit(batch)
        found = found[:, None] if found.ndim == 1 else found
        return batch.replace(advantages=jnp.where(scored_actions(batch), found, 0.0))

    return stateless(apply, needs)


@part
def edges(scale: Literal["none", "std"] = "none", epsilon: float = 1e-8) -> Callable[[Trajectories], Array]:
    """A function `batch -> f32[N, L]`: `edge_advantages`."""
    check_moments(0, epsilon)
    return lambda batch: edge_advantages(batch, scale, epsilon)


@stateless_part(NODE)
def shared_once(batch: Trajectories) -> Trajectories:
    """Divide the weight of each action by the number of scored rows that share it: it counts once in token means."""
    tree = scored_tree(batch)
    return batch.replace(weights=batch.loss_weights / jnp.maximum(leaves(tree)[tree.key], 1.0))
