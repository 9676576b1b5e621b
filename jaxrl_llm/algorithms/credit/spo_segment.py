from collections.abc import Callable
from typing import Annotated, Literal

import jax.numpy as jnp

from jaxrl_llm.advantages.returns import scored_actions
from jaxrl_llm.advantages.trees.credit import EQUAL, edges, gains, shared_once, state_values, tree_credit
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import Code, Count, Divisor, Fraction, NonNegative, Ours, Paper, Range
from jaxrl_llm.core.parts import Array, Trajectories, Transform, chain, part, stateless, stateless_part
from jaxrl_llm.objectives import clipped_policy
from jaxrl_llm.rollouts.trees import tree, valued

STATES = frozenset({"node", "state_value"})


@part
def segment_gains() -> Callable[[Trajectories], Array]:
    """A function `batch -> f32[N, L]`: the value at the end of each action's segment minus that at its beginning."""
    return lambda batch: gains(*state_values(batch))


@method(paper="arXiv 2505.23564", test="test_trees.py::test_spo_against_loops")
def spo_segment(
    form: Paper[Literal["chain", "tree"]] = "chain",
    below: Paper[float] = 0.9,
    continuations: Paper[int] = 9,
    interval: Paper[int] = 5,
    segment: Paper[Count] = 30,
    levels: Paper[Annotated[int, Range(least=1, most=64)]] = 3,
    branches: Paper[int] = 6,
    scale: Paper[Divisor] = "none",
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
    kl_coefficient: Code[NonNegative] = 1e-4,
) -> Algorithm:
    """Segment Policy Optimization (SPO-chain and SPO-tree).

    The advantage of a segment is the difference of the values at its ends, which are mean rewards, without a critic:

        A_seg = V(end) - V(beginning),  V(end of a completion) = its reward

    form: "chain" cuts each sample before every interval-th token with a probability less than `below`, and V is the
    mean reward of `continuations` fresh completions from the cut. "tree" samples trees that fork into `branches` at the
    prompt and after every `segment` tokens, `levels` times; V of a leaf is its reward, of a node the mean of its
    children's. Each segment is trained on once, and dropped if its advantage is 0; scale "std" divides by the standard
    deviation of the values of all children of the node before. With M the tokens of a probability less than `below`

        loss = -mean over M of min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) + kl_coefficient k3

    and A whitened over M. The first segment begins at the prompt, whose value is estimated as well, as in the paper;
    the released code gives no advantage to the tokens before the first cut. Rollout: `rollouts.trees.valued` or `tree`.
    """
    objective = clipped_policy(clip_low, clip_high, kl_coefficient=kl_coefficient)
    if form == "tree":
        rollout = tree(*(segment * level for level in range(levels)), branches=branches)
        credit = [tree_credit(edges(scale)), shared_once(), zero_edges_out()]
    else:
        rollout = valued(continuations, "uncertain", interval, below)
        credit = [tree_credit(segment_gains(), STATES)]
    return Algorithm(chain(*credit, probable_tokens_out(below), whiten_counted()), objective, rollout=rollout)


@part
def probable_tokens_out(below: Fraction) -> Transform:
    """Drop the actions whose probability at sampling was not less than `below`."""
    return stateless(lambda b: b.replace(weights=b.loss_weights * (b.behaviour_logp < jnp.log(below))))


@part
def zero_edges_out() -> Transform:
    """Drop the actions whose advantage is 0, up to the rounding of means (`EQUAL`)."""
    return stateless(lambda b: b.replace(weights=b.loss_weights * (jnp.abs(b.need("advantages")) > EQUAL)))


@stateless_part()
def whiten_counted(batch: Trajectories, epsilon: NonNegative = 1e-8) -> Trajectories:
    """(A - mean) / sqrt(variance + epsilon), moments over the actions of scored rows by their weights (ddof 0)."""
    A = batch.need("advantages")
    mask = scored_actions(batch)
    w = jnp.where(mask, batch.loss_weights, 0.0)
    mass = jnp.maximum(jnp.sum(w), 1e-9)
    top = jnp.max(jnp.where(w > 0, A, -jnp.inf), initial=-jnp.inf)
    below = jnp.where(w > 0, A - top, 0.0)  # equal advantages become exactly 0
    mean = jnp.sum(w * below) / mass
    variance = jnp.sum(w * (below - mean) ** 2) / mass
    return batch.replace(advantages=jnp.where(w > 0, (below - mean) / jnp.sqrt(variance + epsilon), 0.0))
