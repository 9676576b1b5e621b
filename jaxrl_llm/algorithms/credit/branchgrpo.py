from typing import Annotated, Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages import shared_once
from jaxrl_llm.advantages.trees.credit import EQUAL, NODE, Tree, node_values, scored_tree, shares, tree_credit, tree_of
from jaxrl_llm.algorithms.method import Algorithm, beside, method
from jaxrl_llm.core.annotations import Code, Count, NonNegative, Ours, Range
from jaxrl_llm.core.parts import Array, Trajectories, batch_part, chain, stateless_part
from jaxrl_llm.objectives import clipped_policy
from jaxrl_llm.rollouts.trees import tree
from jaxrl_llm.utils.errors import InputError, shown


def numbers_in(name: str, text: str) -> list[float]:
    """The numbers in a text, separated by commas or colons; InputError if it has anything else.

    >>> numbers_in("shares", "0:1,10:0.75")
    [0.0, 1.0, 10.0, 0.75]
    """
    try:
        return [float(part) for part in text.replace(":", ",").split(",")]
    except ValueError:
        raise InputError(f"{name} is {shown(text)}, but must be numbers, separated by commas") from None


@method(paper="arXiv 2509.06040", test="test_trees.py::test_branchgrpo_against_a_loop")
@beside("images", "the sampler of images and its noise; segments of texts take their place", "diffusion")
def branchgrpo(
    forks: Code[Annotated[int, Range(least=1, most=64)]] = 4,
    spacing: Ours[Count] = 64,
    branches: Code[int] = 2,
    fusion: Code[Literal["mean", "softmax"]] = "mean",
    alpha: Code[NonNegative] = 1.0,
    keep: Code[Literal["all", "best", "extremes"]] = "all",
    skip_depths: Code[str] = "",
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
    epsilon: Code[NonNegative] = 1e-8,
) -> Algorithm:
    """BranchGRPO (Stable and Efficient GRPO with Structured Branching in Diffusion Models).

    Its tree estimator for texts: segments take the place of denoising steps. A tree forks into `branches` at the prompt
    and after every `spacing` tokens, `forks` times. Rewards of leaves are fused upwards, and each depth d is normalised
    on its own, over the nodes of the group:

        A(node) = (R(node) - mean_d) / (std_d + epsilon)

    fusion: R(node) is the mean of its leaves' rewards, or sum_c softmax_c(alpha log pi(segment c)) R(c) over its
    children. Each segment is trained on once, with the advantage of its node, by PPO's clip (clip_low, clip_high) and a
    token mean. Pruning leaves segments out of the update alone: keep, the last segments of the "best" leaves of each
    last fork, or of the group's best and worst ("extremes"); skip_depths, all segments at these depths, from 0, such as
    "0,1". The sampler of images and its noise are out of scope. Rollout: `rollouts.trees.tree`.
    """
    pruned = [] if keep == "all" else [last_segments_kept(keep)]
    pruned += [depths_out(tuple(map(int, numbers_in("skip_depths", skip_depths))))] if skip_depths else []
    return Algorithm(
        chain(tree_credit(depth_advantages(fusion, alpha, epsilon)), shared_once(), *pruned),
        clipped_policy(clip_low, clip_high),
        rollout=tree(*(spacing * level for level in range(forks)), branches=branches),
    )


@batch_part
def depth_advantages(
    batch: Trajectories, fusion: Literal["mean", "softmax"] = "mean", alpha: NonNegative = 1.0, epsilon: float = 1e-8
) -> Array:
    """A function of the batch: (R(node) - mean_d) / (std_d + epsilon), f32[N, L], moments over the group's nodes at
    the node's depth d.

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


@stateless_part(NODE)
def depths_out(batch: Trajectories, depths: tuple[int, ...]) -> Trajectories:
    """Drop the actions of segments at these depths; 0 is the first segment of a row."""
    chosen = jnp.asarray(list(depths) or [-1], jnp.int32)
    return batch.replace(weights=batch.loss_weights * ~jnp.isin(tree_of(batch).depth, chosen))


@stateless_part(NODE)
def last_segments_kept(batch: Trajectories, keep: Literal["best", "extremes"]) -> Trajectories:
    """Drop the last segments of all rows but some: those of the best leaves of each last fork, or of the group's best
    and worst leaves ("extremes"). Of equal rewards all are kept."""
    tree, r = scored_tree(batch), batch.scores
    fork = tree.root if keep == "extremes" else jnp.max(jnp.where(tree.last, tree.parent, -1), axis=1)
    fork = jnp.where(fork < 0, tree.root, fork)
    kept = r >= jax.ops.segment_max(jnp.where(jnp.isnan(r), -jnp.inf, r), fork, num_segments=tree.bound)[fork]
    if keep == "extremes":
        kept |= r <= jax.ops.segment_min(jnp.where(jnp.isnan(r), jnp.inf, r), fork, num_segments=tree.bound)[fork]
    return batch.replace(weights=batch.loss_weights * (kept[:, None] | ~tree.last))


def segment_sums(tree: Tree, values: Array) -> Array:
    """f32[N, L]: the sum of values over the segment of each action."""
    N, L = values.shape
    own = (jnp.arange(N)[:, None] * L + jnp.maximum(tree.depth, 0)).reshape(-1)
    found = jnp.where(tree.mask, values, 0.0).reshape(-1)
    return jax.ops.segment_sum(found, own, num_segments=N * L)[own].reshape(N, L)
