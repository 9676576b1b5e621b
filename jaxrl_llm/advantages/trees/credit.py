"""Advantages in trees of completions: of segments, of depths, and of leaves among all subtrees that have them.

Rows without a score are left out, and their advantages are 0. See `advantages.trees.values` for nodes and their values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.returns import scored_actions
from jaxrl_llm.advantages.trees.values import leaves, node_values, scored_tree, segment_sums, shares, sums, tree_of
from jaxrl_llm.core.coefficients import check_moments, check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Array, Trajectories
from jaxrl_llm.core.transform import Transform, stateless
from jaxrl_llm.utils.errors import require_choice

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


def depth_advantages(
    batch: Trajectories, fusion: Literal["mean", "softmax"] = "mean", alpha: float = 1.0, epsilon: float = 1e-8
) -> Array:
    """(R(node) - mean_d) / (std_d + epsilon), moments over the nodes of the group at the node's depth d, f32[N, L].

    fusion: R(node) is the mean of its leaves' rewards, or the mean of its children's R with weights
    softmax(alpha log-probability of the child's segment, at sampling). 0 where a depth has one node, or equal ones.
    """
    tree = scored_tree(batch)
    shared = None
    if fusion == "softmax":
        shared = shares(tree, alpha * segment_sums(tree, batch.behaviour_logp))
    R = node_values(tree, batch.scores, shared)[tree.key]
    N, L = R.shape
    at = ((tree.root - N * L)[:, None] * L + jnp.maximum(tree.depth, 0)).reshape(-1)
    top = jax.ops.segment_max(jnp.where(tree.single, R, -jnp.inf).reshape(-1), at, num_segments=N * L)
    below = jnp.where(tree.single, R - top[at].reshape(N, L), 0.0)

    def total(values: Array) -> Array:
        return jax.ops.segment_sum(jnp.where(tree.single, values, 0.0).reshape(-1), at, num_segments=N * L)

    count = total(jnp.ones((N, L)))
    mean = (total(below) / jnp.maximum(count, 1.0))[at].reshape(N, L)
    deviation = jnp.sqrt(total((below - mean) ** 2) / jnp.maximum(count - 1, 1.0))[at].reshape(N, L)
    level = jnp.where(jnp.isfinite(top), top, 0.0)[at].reshape(N, L)
    found = (R - level - mean) / (deviation + epsilon)
    return jnp.where(tree.mask & (deviation > EQUAL * jnp.maximum(jnp.abs(level), 1.0)), found, 0.0)


def subtree_advantages(
    batch: Trajectories, weighting: Literal["average", "size"] = "average", drop_equal: bool = False
) -> Array:
    """The mean over the ancestors of a leaf of r - mean of the leaves of that ancestor, f32[N].

    Ancestors are the root, always, and the nodes of all segments but the last that have more than one leaf; with
    drop_equal, and whose leaves' rewards are not all equal. weighting: all alike, or by the number of their leaves.
    """
    tree = scored_tree(batch)
    r = jnp.where(jnp.isnan(batch.scores), 0.0, batch.scores)
    number, V = leaves(tree), node_values(tree, batch.scores)
    inner = tree.first & ~tree.last & (number[tree.key] > 1)
    if drop_equal:
        spread = sums(tree, (r[:, None] - V[tree.key]) ** 2, tree.first, tree.key)
        inner &= jnp.sqrt(spread / jnp.maximum(number, 1.0))[tree.key] > EQUAL
    weight, at_root = (number[tree.key], number[tree.root]) if weighting == "size" else (1.0, 1.0)
    above = jnp.sum(jnp.where(inner, weight * (r[:, None] - V[tree.key]), 0.0), axis=1) + at_root * (r - V[tree.root])
    mass = jnp.sum(jnp.where(inner, weight, 0.0), axis=1) + at_root
    return jnp.where(jnp.any(tree.mask, axis=1), above / jnp.maximum(mass, 1.0), 0.0)


def segment_subtree_advantages(batch: Trajectories, eta: float = 0.0) -> Array:
    """V(node) - decay V(node before it), f32[N, L], where V of a leaf is its size-weighted `subtree_advantages`.

    The leaf itself counts in that mean, as an ancestor of one leaf. V of other nodes is the mean of their children's,
    V of the root 0. decay: 1 if eta is 0, else eta^(segments to the end of the row + 1).
    """
    tree = scored_tree(batch)
    r = jnp.where(jnp.isnan(batch.scores), 0.0, batch.scores)
    number, V = leaves(tree), node_values(tree, batch.scores)
    weight = jnp.where(tree.first, number[tree.key], 0.0)
    at_root = number[tree.root]
    above = jnp.sum(weight * (r[:, None] - V[tree.key]), axis=1) + at_root * (r - V[tree.root])
    u = above / jnp.maximum(jnp.sum(weight, axis=1) + at_root, 1.0)
    fused = node_values(tree, jnp.where(jnp.isnan(batch.scores), jnp.nan, u), shares(tree))
    left = jnp.max(tree.depth, axis=1, keepdims=True) - tree.depth
    decay = 1.0 if eta == 0 else eta ** (left + 1.0)
    return jnp.where(tree.mask, fused[tree.key] - decay * jnp.where(tree.before < 0, 0.0, fused[tree.parent]), 0.0)


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
    require_choice("scale", scale, ("none", "std"))
    check_moments(0, epsilon)
    return lambda batch: edge_advantages(batch, scale, epsilon)


@part
def by_depth(
    fusion: Literal["mean", "softmax"] = "mean", alpha: float = 1.0, epsilon: float = 1e-8
) -> Callable[[Trajectories], Array]:
    """A function `batch -> f32[N, L]`: `depth_advantages`."""
    require_choice("fusion", fusion, ("mean", "softmax"))
    check_number("alpha", alpha, least=0)
    return lambda batch: depth_advantages(batch, fusion, alpha, epsilon)


@part
def over_subtrees(
    weighting: Literal["average", "size"] = "average", drop_equal: bool = False
) -> Callable[[Trajectories], Array]:
    """A function `batch -> f32[N]`: `subtree_advantages`."""
    require_choice("weighting", weighting, ("average", "size"))
    return lambda batch: subtree_advantages(batch, weighting, drop_equal)


@part
def segments_over_subtrees(eta: float = 0.0) -> Callable[[Trajectories], Array]:
    """A function `batch -> f32[N, L]`: `segment_subtree_advantages`."""
    check_number("eta", eta, least=0)
    return lambda batch: segment_subtree_advantages(batch, eta)


@part
def shared_once() -> Transform:
    """Divide the weight of each action by the number of scored rows that share it: it counts once in token means."""

    def apply(batch: Trajectories) -> Trajectories:
        tree = scored_tree(batch)
        return batch.replace(weights=batch.loss_weights / jnp.maximum(leaves(tree)[tree.key], 1.0))

    return stateless(apply, NODE)


@part
def probable_tokens_out(below: float) -> Transform:
    """Drop the actions whose probability at sampling was not less than `below`."""
    check_number("below", below, least=0, most=1)
    return stateless(lambda b: b.replace(weights=b.loss_weights * (b.behaviour_logp < jnp.log(below))))


@part
def zero_edges_out() -> Transform:
    """Drop the actions whose advantage is 0, up to the rounding of means (`EQUAL`)."""
    return stateless(lambda b: b.replace(weights=b.loss_weights * (jnp.abs(b.need("advantages")) > EQUAL)))


@part
def depths_out(depths: tuple[int, ...]) -> Transform:
    """Drop the actions of segments at these depths; 0 is the first segment of a row."""
    chosen = jnp.asarray(list(depths) or [-1], jnp.int32)

    def apply(batch: Trajectories) -> Trajectories:
        return batch.replace(weights=batch.loss_weights * ~jnp.isin(tree_of(batch).depth, chosen))

    return stateless(apply, NODE)


@part
def last_segments_kept(keep: Literal["best", "extremes"]) -> Transform:
    """Drop the last segments of all rows but some: those of the best leaves of each last fork, or of the group's best
    and worst leaves ("extremes"). Of equal rewards all are kept."""
    require_choice("keep", keep, ("best", "extremes"))

    def apply(batch: Trajectories) -> Trajectories:
        tree, r = scored_tree(batch), batch.scores
        fork = tree.root if keep == "extremes" else jnp.max(jnp.where(tree.last, tree.parent, -1), axis=1)
        fork = jnp.where(fork < 0, tree.root, fork)
        best = jax.ops.segment_max(jnp.where(jnp.isnan(r), -jnp.inf, r), fork, num_segments=tree.bound)[fork]
        kept = r >= best
        if keep == "extremes":
            kept |= r <= jax.ops.segment_min(jnp.where(jnp.isnan(r), jnp.inf, r), fork, num_segments=tree.bound)[fork]
        return batch.replace(weights=batch.loss_weights * (kept[:, None] | ~tree.last))

    return stateless(apply, NODE)


@part
def whiten_counted(epsilon: float = 1e-8) -> Transform:
    """(A - mean) / sqrt(variance + epsilon), moments over the actions of scored rows by their weights (ddof 0)."""
    check_moments(0, epsilon)

    def apply(batch: Trajectories) -> Trajectories:
        A, mask = batch.need("advantages"), scored_actions(batch)
        w = jnp.where(mask, batch.loss_weights, 0.0)
        mass = jnp.maximum(jnp.sum(w), 1e-9)
        top = jnp.max(jnp.where(w > 0, A, -jnp.inf), initial=-jnp.inf)
        below = jnp.where(w > 0, A - top, 0.0)  # equal advantages become exactly 0
        mean = jnp.sum(w * below) / mass
        variance = jnp.sum(w * (below - mean) ** 2) / mass
        return batch.replace(advantages=jnp.where(w > 0, (below - mean) / jnp.sqrt(variance + epsilon), 0.0))

    return stateless(apply)
