"""Tree-based Policy Optimization (TreePO)."""

from __future__ import annotations

from typing import Annotated, Literal

from jaxrl_llm.advantages.group import drop_uniform_groups, mixed_groups
from jaxrl_llm.advantages.returns import whiten_advantages
from jaxrl_llm.advantages.trees.credit import over_subtrees, segments_over_subtrees, tree_credit
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.hyperparameters import CODE, PAPER, RUN, Count, NonNegative
from jaxrl_llm.core.rules import DynamicSampling
from jaxrl_llm.core.transform import chain
from jaxrl_llm.objectives import clip, policy_gradient, token_mean, token_ratio
from jaxrl_llm.rewards.shaping import soft_overlong_penalty
from jaxrl_llm.rollouts.trees import budgeted_tree
from jaxrl_llm.utils.errors import require_choice


@method(
    paper="arXiv 2508.17445",
    year=2025,
    test="test_trees.py::test_treepo_against_a_loop",
    beside={"splits": ("the variant that splits by log-probabilities", "forks by log-probabilities")},
)
def treepo(
    credit: Annotated[Literal["leaf", "segment"], CODE] = "leaf",
    weighting: Annotated[Literal["average", "size"], PAPER] = "average",
    drop_equal: Annotated[bool, PAPER] = False,
    eta: Annotated[NonNegative, CODE] = 0.0,
    segment: Annotated[int, PAPER] = 512,
    depth: Annotated[int, PAPER] = 14,
    first_least: Annotated[int, PAPER] = 2,
    first_most: Annotated[int, PAPER] = 8,
    branches: Annotated[int, PAPER] = 2,
    clip_low: Annotated[NonNegative, CODE] = 0.2,
    clip_high: Annotated[NonNegative, CODE] = 0.28,
    dual_clip: Annotated[float | None, CODE] = 10.0,
    dynamic_sampling: Annotated[bool, CODE] = True,
    rounds: Annotated[Count, CODE] = 3,
    overlong_buffer: Annotated[int | None, CODE] = 512,
    max_length: Annotated[Count | None, RUN] = None,
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
    require_choice("credit", credit, ("leaf", "segment"))
    check_number("rounds", rounds, least=1)
    steps = [drop_uniform_groups()] if dynamic_sampling else []
    if overlong_buffer is not None and max_length is not None and overlong_buffer < max_length:
        steps.append(soft_overlong_penalty(max_length, overlong_buffer))
    steps.append(tree_credit(over_subtrees(weighting, drop_equal) if credit == "leaf" else segments_over_subtrees(eta)))
    return Algorithm(
        chain(*steps, whiten_advantages()),
        policy_gradient(token_ratio(), clip(clip_low, clip_high, dual_clip), token_mean()),
        curriculum=DynamicSampling(mixed_groups, rounds) if dynamic_sampling else None,
        rollout=budgeted_tree(segment, depth, first_least, first_most, branches),
    )
