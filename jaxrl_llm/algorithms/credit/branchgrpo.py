"""BranchGRPO (Stable and Efficient GRPO with Structured Branching in Diffusion Models)."""

from __future__ import annotations

from typing import Annotated, Literal

from jaxrl_llm.advantages.trees.credit import by_depth, depths_out, last_segments_kept, shared_once, tree_credit
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.hyperparameters import CODE, OURS, NonNegative
from jaxrl_llm.core.transform import chain
from jaxrl_llm.objectives import clip, policy_gradient, token_mean, token_ratio
from jaxrl_llm.rollouts.trees import tree
from jaxrl_llm.utils.errors import InputError, require_choice, shown


def numbers_in(name: str, text: str) -> list[float]:
    """The numbers in a text, separated by commas or colons; InputError if it has anything else.

    >>> numbers_in("shares", "0:1,10:0.75")
    [0.0, 1.0, 10.0, 0.75]
    """
    try:
        return [float(part) for part in text.replace(":", ",").split(",")]
    except ValueError:
        raise InputError(f"{name} is {shown(text)}, but must be numbers, separated by commas") from None


@method(
    paper="arXiv 2509.06040",
    year=2025,
    test="test_trees.py::test_branchgrpo_against_a_loop",
    beside={"images": ("the sampler of images and its noise; segments of texts take their place", "diffusion")},
)
def branchgrpo(
    forks: Annotated[int, CODE] = 4,
    spacing: Annotated[int, OURS] = 64,
    branches: Annotated[int, CODE] = 2,
    fusion: Annotated[Literal["mean", "softmax"], CODE] = "mean",
    alpha: Annotated[NonNegative, CODE] = 1.0,
    keep: Annotated[Literal["all", "best", "extremes"], CODE] = "all",
    skip_depths: Annotated[str, CODE] = "",
    clip_low: Annotated[NonNegative, OURS] = 0.2,
    clip_high: Annotated[NonNegative, OURS] = 0.2,
    epsilon: Annotated[NonNegative, CODE] = 1e-8,
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
    require_choice("keep", keep, ("all", "best", "extremes"))
    check_number("forks", forks, least=1, most=64, whole=True)
    check_number("spacing", spacing, least=1, whole=True)
    pruned = [] if keep == "all" else [last_segments_kept(keep)]
    pruned += [depths_out(tuple(map(int, numbers_in("skip_depths", skip_depths))))] if skip_depths else []
    return Algorithm(
        chain(tree_credit(by_depth(fusion, alpha, epsilon)), shared_once(), *pruned),
        policy_gradient(token_ratio(), clip(clip_low, clip_high), token_mean()),
        rollout=tree(*(spacing * level for level in range(forks)), branches=branches),
    )
