"""Methods whose samples are trees, or whose segments have values of their own from fresh completions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from jaxrl_llm.advantages.group import above_baseline, drop_uniform_groups, mixed_groups
from jaxrl_llm.advantages.returns import whiten_advantages
from jaxrl_llm.advantages.trees.credit import (
    by_depth,
    depths_out,
    edges,
    last_segments_kept,
    over_subtrees,
    probable_tokens_out,
    segments_over_subtrees,
    shared_once,
    tree_credit,
    whiten_counted,
    zero_edges_out,
)
from jaxrl_llm.advantages.trees.values import best_of, gains, state_values
from jaxrl_llm.algorithms.group_relative import grpo
from jaxrl_llm.algorithms.presets import presets
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.choices import AverageName
from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.reference import another
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.rules import DynamicSampling
from jaxrl_llm.core.trajectory import Array, Trajectories
from jaxrl_llm.core.transform import chain
from jaxrl_llm.objectives import clip, kl, policy_gradient, token_mean, token_ratio
from jaxrl_llm.rewards.shaping import soft_overlong_penalty
from jaxrl_llm.rollouts.lookahead import near_ties
from jaxrl_llm.rollouts.trees import budgeted_tree, tree, valued
from jaxrl_llm.utils.errors import InputError, require_choice, shown

__all__ = ["branchgrpo", "latr", "pav", "spo_segment", "treepo"]

STATES = frozenset({"node", "state_value"})


def numbers_in(name: str, text: str) -> list[float]:
    """The numbers in a text, separated by commas or colons; InputError if it has anything else.

    >>> numbers_in("shares", "0:1,10:0.75")
    [0.0, 1.0, 10.0, 0.75]
    """
    try:
        return [float(part) for part in text.replace(":", ",").split(",")]
    except ValueError:
        raise InputError(f"{name} is {shown(text)}, but must be numbers, separated by commas") from None


@part
def segment_gains() -> Callable[[Trajectories], Array]:
    """A function `batch -> f32[N, L]`: the value at the end of each action's segment minus that at its beginning."""
    return lambda batch: gains(*state_values(batch))


def spo_segment(
    form: Literal["chain", "tree"] = "chain",
    below: float = 0.9,
    continuations: int = 9,
    interval: int = 5,
    segment: int = 30,
    levels: int = 3,
    branches: int = 6,
    scale: Literal["none", "std"] = "none",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 1e-4,
) -> Algorithm:
    """Segment Policy Optimization (SPO-chain and SPO-tree, arXiv 2505.23564, 2025).

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

    Defaults. Paper: form, below, continuations, interval, segment, levels, branches, scale. Code: kl_coefficient. Ours:
    clip_low, clip_high.
    """
    require_choice("form", form, ("chain", "tree"))
    require_choice("scale", scale, ("none", "std"))
    check_number("segment", segment, least=1, whole=True)
    check_number("levels", levels, least=1, most=64, whole=True)
    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high), token_mean())
    objective += kl_coefficient * kl(to="reference", estimator="k3", average=token_mean())
    if form == "tree":
        rollout = tree(*(segment * level for level in range(levels)), branches=branches)
        credit = [tree_credit(edges(scale)), shared_once(), zero_edges_out()]
    else:
        rollout = valued(continuations, "uncertain", interval, below)
        credit = [tree_credit(segment_gains(), STATES)]
    transform = chain(*credit, probable_tokens_out(below), whiten_counted())
    return Algorithm(transform, objective, rollout=rollout)


def treepo(
    credit: Literal["leaf", "segment"] = "leaf",
    weighting: Literal["average", "size"] = "average",
    drop_equal: bool = False,
    eta: float = 0.0,
    segment: int = 512,
    depth: int = 14,
    first_least: int = 2,
    first_most: int = 8,
    branches: int = 2,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = 10.0,
    dynamic_sampling: bool = True,
    rounds: int = 3,
    overlong_buffer: int | None = 512,
    max_length: int | None = None,
) -> Algorithm:
    """Tree-based Policy Optimization (TreePO, arXiv 2508.17445, 2025).

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

    Defaults. Paper: weighting, drop_equal, segment, depth, first_least, first_most, branches. Code: credit, eta,
    clip_low, clip_high, dual_clip, dynamic_sampling, rounds, overlong_buffer. Run: max_length.
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


def branchgrpo(
    forks: int = 4,
    spacing: int = 64,
    branches: int = 2,
    fusion: Literal["mean", "softmax"] = "mean",
    alpha: float = 1.0,
    keep: Literal["all", "best", "extremes"] = "all",
    skip_depths: str = "",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    epsilon: float = 1e-8,
) -> Algorithm:
    """BranchGRPO (Stable and Efficient GRPO with Structured Branching in Diffusion Models, arXiv 2509.06040, 2025).

    Its tree estimator for texts: segments take the place of denoising steps. A tree forks into `branches` at the prompt
    and after every `spacing` tokens, `forks` times. Rewards of leaves are fused upwards, and each depth d is normalised
    on its own, over the nodes of the group:

        A(node) = (R(node) - mean_d) / (std_d + epsilon)

    fusion: R(node) is the mean of its leaves' rewards, or sum_c softmax_c(alpha log pi(segment c)) R(c) over its
    children. Each segment is trained on once, with the advantage of its node, by PPO's clip (clip_low, clip_high) and a
    token mean. Pruning leaves segments out of the update alone: keep, the last segments of the "best" leaves of each
    last fork, or of the group's best and worst ("extremes"); skip_depths, all segments at these depths, from 0, such as
    "0,1". The sampler of images and its noise are out of scope. Rollout: `rollouts.trees.tree`.

    Defaults. Code: forks, branches, fusion, alpha, keep, skip_depths, epsilon. Ours: spacing, clip_low, clip_high.
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


@presets(
    countdown={"absolute": 0.25, "relative": 0.15, "edit": 0.4, "suffix": None, "overlap": None, "until": 512,
               "shares": "0:1,10:0.75,20:0.5,80:0.25,200:0"},
    math={"absolute": 0.15, "relative": 0.25, "edit": None, "suffix": 0.2, "overlap": 0.5, "until": 1024,
          "shares": "0:1,100:0.75,200:0.5,300:0.25"},
)  # fmt: skip
def latr(
    absolute: float = 0.25,
    relative: float = 0.15,
    windows: str = "20,30,50",
    edit: float | None = 0.4,
    suffix: float | None = None,
    overlap: float | None = None,
    until: int = 512,
    shares: str = "0:1,10:0.75,20:0.5,80:0.25,200:0",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.0,
    average: AverageName = "token",
) -> Algorithm:
    """Lookahead Tree-Based Rollouts (LATR, arXiv 2510.24302, 2025).

    GRPO on groups that grow as trees. A branch opens where two tokens are nearly as likely,

        p(c_1) > absolute, p(c_2) > absolute, |p(c_1) - p(c_2)| < relative

    among the first `until` tokens, and is dropped if r tokens later, for an r of `windows`, it is too similar to its
    parent: edit distance / r below `edit`, the match of the ends above `suffix`, or ROUGE-L above `overlap`.
    A share of the group is the tree, given by `shares` as STEP:SHARE, from these training steps on; the rest are
    independent samples, and so are the missing ones where fewer branches open (the paper repeats the first). The
    loss is GRPO's (clip_low, clip_high, kl_coefficient, average). The presets "countdown" and "math" are the paper's
    two settings.

    c_2 is drawn from the policy at the same place instead of ranked, since the engine reports the probabilities of
    drawn tokens alone: a near tie is found with the probability of its second token. Tokens between forks are sampled,
    an option of the paper; its script takes the most probable. Rollout: `rollouts.lookahead.near_ties`.

    Defaults. Paper: absolute, relative, windows, edit, suffix, overlap, until, shares. Ours: clip_low,
    clip_high, kl_coefficient, average.
    """
    method = grpo(clip_low=clip_low, clip_high=clip_high, kl_coefficient=kl_coefficient, average=average)
    lengths = [int(r) for r in numbers_in("windows", windows)]
    steps, parts = (numbers_in("shares", shares)[i::2] for i in (0, 1))
    rollout = near_ties(absolute, relative, lengths, edit, suffix, overlap, until, [int(s) for s in steps], parts)
    return Algorithm(method.transform, method.objective, rollout=rollout)


@part
def outcome_and_progress(k: int, strength: float) -> Callable[[Trajectories], Array]:
    """A function `batch -> f32[N, L]`: the advantages of `pav`."""

    def credit(batch: Trajectories) -> Array:
        progress = gains(*state_values(batch, lambda value: best_of(value, k)))
        return above_baseline(batch.scores, batch.group)[:, None] + strength * progress

    return credit


def pav(
    k: int = 4,
    strength: float = 3.0,
    continuations: int = 8,
    interval: int = 1,
    prover: str | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Algorithm:
    """Process Advantage Verifiers (Rewarding Progress, arXiv 2410.08146, 2024).

    To the outcome of a completion each step, a line, adds how much it changes the chance that a prover mu finishes
    right: the best of k attempts of the initial policy, or of the model `prover`, a name or folder with weights of the
    same shapes. It stays as it is during the run. With V the mean reward, in [0, 1], of `continuations` fresh
    completions of that policy from a state

        Q_mu = 1 - (1 - V)^k;    A_step = r - mean_g r + strength (Q_mu after the step - Q_mu before it)

    and Q_mu after the last step is the reward itself. Progress is credited to its own step, and not summed into the
    returns of earlier ones, where it would telescope. The loss is REINFORCE with PPO's clip (clip_low, clip_high) and a
    token mean. interval: lines in a step. Values are estimated from the attempts of each step anew; the paper first
    fits a verifier to such estimates, and reads its values. Rollout: `rollouts.trees.valued`, with an engine for the
    prover beside the policy's.

    The strength is from memory of the paper.

    Defaults. Paper: k. Recalled: strength. Ours: continuations, interval, prover, clip_low, clip_high.
    """
    check_number("k", k, least=1, whole=True)
    check_number("strength", strength, least=0)
    return Algorithm(
        tree_credit(outcome_and_progress(k, strength), STATES),
        policy_gradient(token_ratio(), clip(clip_low, clip_high), token_mean()),
        rollout=valued(continuations, "lines", interval, of="reference"),
        reference=None if prover is None else another(prover),
    )
