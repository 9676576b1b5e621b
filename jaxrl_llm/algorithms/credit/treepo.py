from typing import Literal

import jax.numpy as jnp

from jaxrl_llm.advantages import drop_uniform_groups, whiten_advantages
from jaxrl_llm.advantages.filters import mixed_groups
from jaxrl_llm.advantages.trees.credit import EQUAL, leaves, node_values, scored_tree, shares, sums, tree_credit
from jaxrl_llm.algorithms.method import Algorithm, beside, method
from jaxrl_llm.core.annotations import AboveOne, Code, Count, NonNegative, OfRun, Paper
from jaxrl_llm.core.parts import Array, Trajectories, batch_part, chain
from jaxrl_llm.core.rules import DynamicSampling
from jaxrl_llm.objectives import clipped_policy
from jaxrl_llm.rewards.transforms import soft_overlong_penalty
from jaxrl_llm.rollouts.trees import budgeted_tree


@method(paper="arXiv 2508.17445", test="test_trees.py::test_treepo_against_a_loop")
@beside("splits", "the variant that splits by log-probabilities", "forks by log-probabilities")
def treepo(
    credit: Code[Literal["leaf", "segment"]] = "leaf",
    weighting: Paper[Literal["average", "size"]] = "average",
    drop_equal: Paper[bool] = False,
    eta: Code[NonNegative] = 0.0,
    segment: Paper[int] = 512,
    depth: Paper[int] = 14,
    first_least: Paper[int] = 2,
    first_most: Paper[int] = 8,
    branches: Paper[int] = 2,
    clip_low: Code[NonNegative] = 0.2,
    clip_high: Code[NonNegative] = 0.28,
    dual_clip: Code[AboveOne | None] = 10.0,
    dynamic_sampling: Code[bool] = True,
    rounds: Code[Count] = 3,
    overlong_buffer: Code[int | None] = 512,
    max_length: OfRun[Count | None] = None,
) -> Algorithm:
    """Tree-based Policy Optimization (TreePO).

    A group is a tree that grows by segments: first_least to first_most paths at the prompt, later `branches` from each
    segment, until there are as many as the group has samples, each of at most `depth` segments. With G_j the leaves
    below the j-th ancestor of leaf i, G_0 the whole group, and J = 0 and all j with |G_j| > 1 but the leaf itself
    (drop_equal: and different rewards)

        A_i = mean_{j in J} (r_i - mean_{G_j} r);  weighting "size": sum_j |G_j| (r_i - mean_{G_j} r) / sum_j |G_j|

    whitened over all tokens. credit "segment" gives each segment V(node) - V(node before it), V of the prompt being 0,
    where V of a leaf is such a size-weighted mean, with the leaf itself, and V of other nodes the mean of their
    children's; with eta > 0, V of the node before is multiplied by eta^(segments to the leaf + 1). Then DAPO's loss:
    clip (clip_low, clip_high, dual_clip), a token mean where shared tokens count once for each leaf, groups with equal
    rewards replaced (dynamic_sampling, for up to `rounds` batches), and its penalty for answers longer than
    max_length - overlong_buffer. A prompt with one leaf has advantage 0, where the code has A = r. The first split is
    random; the paper's variant that splits by log-probabilities is left out. Rollout: `rollouts.trees.budgeted_tree`.
    """
    steps = [drop_uniform_groups()] if dynamic_sampling else []
    if overlong_buffer is not None and max_length is not None and overlong_buffer < max_length:
        steps.append(soft_overlong_penalty(max_length, overlong_buffer))
    steps.append(
        tree_credit(subtree_advantages(weighting, drop_equal) if credit == "leaf" else segment_advantages(eta))
    )
    return Algorithm(
        chain(*steps, whiten_advantages()),
        clipped_policy(clip_low, clip_high, dual=dual_clip),
        curriculum=DynamicSampling(mixed_groups, rounds) if dynamic_sampling else None,
        rollout=budgeted_tree(segment, depth, first_least, first_most, branches),
    )


@batch_part
def subtree_advantages(
    batch: Trajectories, weighting: Literal["average", "size"] = "average", drop_equal: bool = False
) -> Array:
    """A function of the batch: the mean over a leaf's ancestors of r - mean of the leaves of that ancestor, f32[N].

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


@batch_part
def segment_advantages(batch: Trajectories, eta: NonNegative = 0.0) -> Array:
    """A function of the batch: V(node) - decay V(node before it), f32[N, L], V of a leaf its size-weighted mean.

    That is as of `subtree_advantages`, but the leaf itself counts, as an ancestor of one leaf. V of other nodes is the
    mean of their children's, V of the root 0. decay: 1 if eta is 0, else eta^(segments to the end of the row + 1).
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
