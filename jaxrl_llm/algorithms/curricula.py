"""Methods that choose prompts, or numbers of samples, by how hard prompts are; credit and loss are those of GRPO."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from jaxrl_llm.advantages.bins import weigh_by_bin
from jaxrl_llm.advantages.group import drop_rows, group_relative, uniform_groups
from jaxrl_llm.algorithms.group_relative import dapo, grpo
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.reference import periodic_reset
from jaxrl_llm.core.transform import chain
from jaxrl_llm.curriculum.bandit_budgets import samples_by_bin
from jaxrl_llm.curriculum.compose import choose_prompts
from jaxrl_llm.curriculum.neighbours import samples_by_neighbours
from jaxrl_llm.curriculum.scores import least_tried, thompson
from jaxrl_llm.curriculum.stages import hardest_in_phases, sorted_by_profile, staged
from jaxrl_llm.objectives import clip, kl, policy_gradient, token_mean, token_ratio
from jaxrl_llm.rollouts.second_stage import topped_up
from jaxrl_llm.utils.errors import InputError, require_choice

__all__ = ["brorl", "craft_gui", "dars", "drive_pre_grpo", "gdro", "sgpo", "v0_value", "vade"]


def vade(
    kept: float = 0.9,
    faded: float = 0.99,
    prior_count: float = 1.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.0,
) -> Algorithm:
    """Variance-Aware Dynamic Sampling via Online Difficulty Estimation (VADE, arXiv 2511.18902, 2025).

    A Beta posterior of the success rate of every prompt, and Thompson sampling of the most informative prompts:

        p_q ~ Beta(alpha_q, beta_q), and the B prompts with the largest p_q (1 - p_q) are tried

    With c of G samples right, alpha <- kept alpha + c and beta <- kept beta + G - c for prompts that were tried; the
    others go back to the prior, Beta(prior_count, prior_count), of which they keep the share `faded` of their distance
    in each step. Credit and loss are those of GRPO (clip_low, clip_high, kl_coefficient).

    The equations of the paper were not available: the information p (1 - p) and the form of the two decays are ours. In
    sets of more than 65,536 prompts a step considers that many, chosen at random. Images are not supported.

    Defaults. Ours: kept, faded, prior_count, clip_low, clip_high, kl_coefficient.
    """
    curriculum = choose_prompts(thompson(), noise=0.0, prior=(prior_count, prior_count), kept=kept, faded=faded)
    return replace(grpo(clip_low, clip_high, kl_coefficient), curriculum=curriculum)


def gdro(
    controller: Literal["weights", "samples"] = "weights",
    bins: int = 10,
    bandit_rate: float = 0.1,
    smoothing: float = 0.1,
    loss_limit: float = 3.0,
    most_weight: float = 10.0,
    hysteresis: float = 0.0,
    uniform_share: float = 0.15,
    least_samples: int = 2,
    most_samples: int = 8,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.04,
    epsilon: float = 1e-6,
    prompts: int | None = None,
) -> Algorithm:
    """Group Distributionally Robust Optimization for LLM reasoning (GDRO, arXiv 2601.19280, 2026).

    Prompts are in bins by the share of their groups so far that had a success, and one of two controllers favours bins
    in which the policy fails. l is a bin's mean share of failures, 1 - mean reward, among the prompts of the batch.
    controller "weights" (Prompt-GDRO) multiplies GRPO's advantages by the weight of the prompt's bin,

        S <- (1 - smoothing) S + smoothing l
        A <- A min(exp(bandit_rate clip(S, -loss_limit, loss_limit)), most_weight)

    and a prompt changes its bin only if it is `hysteresis` beyond the edge. controller "samples" (Rollout-GDRO) chooses
    the samples of each bin's prompts, n from least_samples to most_samples, with the total of a step unchanged:

        score_b[n] -= l_b    for the n that was used
        p_b = (1 - uniform_share) softmax(bandit_rate score_b) + uniform_share / number of n
        n_b maximise sum_b log p_b(n_b) subject to the total

    In the paper l is GRPO's loss. For samples of the current policy with standardised advantages that is 0 up to
    rounding, so that a bin's weight would depend on the KL penalty alone; the share of failures is ours. The code
    divides the weights by their sum and flips the sign of the bandit's gain; ours follow the paper. The paper's price
    of samples stays 0 because the total is exact. A has the population standard deviation + epsilon; the loss is GRPO's
    with clip_low, clip_high and kl_coefficient. prompts: entries of the table of weights (None: one for each of the
    run).

    Defaults. Paper: controller, bins. Code: bandit_rate, smoothing, loss_limit, most_weight, hysteresis, uniform_share.
    Ours: least_samples, most_samples, clip_low, clip_high, kl_coefficient, epsilon. Run: prompts.
    """
    require_choice("controller", controller, ("weights", "samples"))
    base = grpo(clip_low, clip_high, kl_coefficient, ddof=0, epsilon=epsilon)
    if controller == "samples":
        budget = samples_by_bin(bins, least_samples, most_samples, bandit_rate, uniform_share)
        return replace(base, curriculum=choose_prompts(least_tried(), budget))
    weights = weigh_by_bin(bins, bandit_rate, smoothing, loss_limit, most_weight, hysteresis, prompts=prompts)
    return replace(base, transform=chain(base.transform, weights))


def drive_pre_grpo(
    first_steps: int = 32,
    phases: str = "72x64,50x32,25x32",
    times: int = 8,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.0,
) -> Algorithm:
    """Data curation for RL with verifiable reward in competitive programming (DRIVE, arXiv 2511.06307, 2025).

    A curriculum of two stages over GRPO (clip_low, clip_high, kl_coefficient). For first_steps steps all prompts are
    tried in turn, with the run's group_size; then come `phases`, "72x64,50x32" for 64 steps on 72 prompts, then 32 on
    50. A phase has the prompts of the one before that were solved least,

        P_k = the n_k prompts of P_{k-1} with the lowest mean reward,

    each with `times` as many samples, and a step has so many fewer prompts. The paper measures the rates with the
    policy at the start of a phase; ours are those of each prompt's last group. Ties are broken at random, prompts that
    were never tried come last, and prompts with a rate of 0 stay. Both stages have the run's max_new_tokens (paper: 24k
    tokens, then 32k). The tests that score programs are a reward function of the run.

    Defaults. Paper: first_steps, phases, times. Ours: clip_low, clip_high, kl_coefficient.
    """
    rule = hardest_in_phases(first_steps, parse_phases(phases), times)
    return replace(grpo(clip_low, clip_high, kl_coefficient), curriculum=choose_prompts(rule, least_tried()))


def parse_phases(text: str) -> tuple[tuple[int, int], ...]:
    """(prompts, steps) of each phase.

    >>> parse_phases("72x64, 50x32")
    ((72, 64), (50, 32))
    """
    found = [one.strip().split("x") for one in text.split(",") if one.strip()]
    if not found or not all(len(one) == 2 and all(x.isdigit() and int(x) for x in one) for one in found):
        raise InputError(f"drive_pre_grpo: phases is {text!r}, but must be PROMPTSxSTEPS,... such as 72x64,50x32")
    return tuple((int(n), int(steps)) for n, steps in found)


def brorl(
    clip_low: float = 0.2,
    clip_high: float = 0.4,
    kl_coefficient: float = 1e-4,
    reset_every: int = 200,
    rounds: int = 10,
    epsilon: float = 1e-6,
) -> Algorithm:
    """BroRL: Scaling Reinforcement Learning via Broadened Exploration (arXiv 2510.01180, 2025).

    Hundreds of samples a prompt: the run's group_size, 512 in the paper. A step on the logits of a softmax changes the
    probability Q of the right answers, to first order, by

        dQ = step/N [(R_c - S) (1 - Q) A2 + (S - R_w) Q B2 + S (Q U_w2 - (1 - Q) U_c2)],    S = sum_{sampled} R_j p_j

    A2, B2, U_c2 and U_w2 being the sums of p^2 over right and wrong sampled, and right and wrong unsampled answers.
    Only the last term can lower Q, and it vanishes as N grows. The loss is DAPO's, with clip_low < clip_high, groups
    without signal replaced for up to `rounds` batches, A = (r - mean_g) / (std_g + epsilon), and kl_coefficient
    times k3 to a reference that becomes the policy after every reset_every updates.

    Micro-batches may be smaller than a group, so that the memory of an update does not grow with it. The paper goes on
    from a model that longer training with few samples improves no more. It scales the learning rate with the root of
    the batch.

    Defaults. Ours: clip_low, clip_high, kl_coefficient, reset_every, rounds, epsilon.
    """
    base = dapo(clip_low, clip_high, rounds=rounds, epsilon=epsilon)
    penalty = kl_coefficient * kl(to="reference", estimator="k3", average=token_mean())
    return replace(base, objective=base.objective + penalty, reference=periodic_reset(reset_every))


def dars(
    rule: Literal["equal", "hard"] = "equal",
    most_samples: int | None = None,
    scale: Literal["none", "std"] = "none",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Algorithm:
    """Difficulty Adaptive Rollout Sampling (DARS: Depth-Breadth Synergy in RLVR, arXiv 2508.13755, 2025).

    The sizes of a prompt's N advantages add up to N S, S = 2 a (1 - a) at the accuracy a, so that hard prompts count
    less. Prompts with a < 0.5 therefore get a second stage of samples,

        rule "equal"  ceil((N/2 - N S) / S) more, up to the peak of N S        (the paper's ET)
        rule "hard"   ceil(((1 - a) N - N S) / S) more, harder ones beyond it  (HW)

    a is 0.5/N if no sample is right, and a prompt has at most most_samples (None: 32 for "equal", 64 for "hard").
    scale "std" divides the advantages by the standard deviation, and takes S = 2 sqrt(a (1 - a)) and the peak N. Over
    both stages, A_i = r_i - mean_g, without prompts that are all right or all wrong, in PPO's clipped loss (clip_low,
    clip_high), mean over tokens. DARS-B, the large breadth, is a setting of the run: many prompts_per_step, one
    minibatch, 2 epochs.

    Defaults. Code: rule, most_samples, scale, clip_low, clip_high.
    """
    require_choice("scale", scale, ("none", "std"))
    return Algorithm(
        chain(drop_rows(uniform_groups), group_relative(scale)),
        policy_gradient(token_ratio(), clip(clip_low, clip_high), token_mean()),
        rollout=topped_up(most_samples or (64 if rule == "hard" else 32), rule, scale == "std"),
    )


def sgpo(
    stage_steps: int = 100,
    profile: str = "",
    profile_samples: int = 8,
    trivial: float = 0.75,
    unsolved_share: float = 0.1,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.0,
) -> Algorithm:
    """Sorted Group Policy Optimization (sGPO: Trading Inference FLOPs, arXiv 2606.08854, 2026).

    A profile of each prompt's success rate p before training decides which prompts are used, how many samples each
    gets, and in which order: p > trivial is dropped, of p = 0 a random share unsolved_share is kept, and

        G = 2 where p > 1/4,    4 where 1/8 < p <= 1/4,    8 where 0 < p <= 1/8,

    about the group that has one success. The prompts with G = 2 are trained on first, for stage_steps steps, then those
    with 4, then those with 8; the unsolved ones that are kept belong to each stage. Credit and loss are GRPO's
    (clip_low, clip_high, kl_coefficient) with the population standard deviation, so that A is 1 or -1 in a mixed pair.

    profile: the column of the data set with p; if empty, the first pass over the prompts measures it, with
    profile_samples samples each, and trains as GRPO does meanwhile. The run's group_size must be profile_samples; steps
    with smaller groups have more of them. The paper trains each stage to convergence.

    Defaults. Paper: profile_samples, trivial, unsolved_share. Ours: stage_steps, profile, clip_low, clip_high,
    kl_coefficient.
    """
    rule = sorted_by_profile(stage_steps, profile or None, profile_samples, trivial, unsolved_share)
    base = grpo(clip_low, clip_high, kl_coefficient, ddof=0)
    return replace(base, curriculum=choose_prompts(rule, least_tried()))


def v0_value(
    allocation: Literal["variance", "target"] = "variance",
    context: int = 256,
    kernel_width: float = 0.2,
    threshold: float = 0.5,
    mixed_target: float = 0.9,
    least_samples: int = 2,
    most_samples: int = 32,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.0,
) -> Algorithm:
    """V_0: A Generalist Value Model for Any Policy at State Zero (arXiv 2602.03584, 2026).

    Predicts the policy's success rate p on a prompt before it is sampled, from the outcomes of the last `context`
    prompts, and divides a step's samples by it. The labels are 1 where the mean reward was at least `threshold`.

        p(x) = (1/2 + sum_j k(x, x_j) z_j) / (1 + sum_j k(x, x_j)),    k = exp((cos(x, x_j) - 1) / kernel_width)

    with the cosine of counts of words and pairs of words. allocation "variance" gives samples in proportion to
    p (1 - p); "target" the smallest group that has right and wrong samples with probability mixed_target. Each prompt
    gets from least_samples to most_samples, and all of them the step's total. Credit and loss are GRPO's (clip_low,
    clip_high, kl_coefficient).

    The paper's predictor is a pretrained tabular network over text embeddings, an external model; the kernel average
    has its interface. The paper's rule for the allocation was not available: both rules are ours.

    Defaults. Code: threshold. Ours: allocation, context, kernel_width, mixed_target, least_samples, most_samples,
    clip_low, clip_high, kl_coefficient.
    """
    budget = samples_by_neighbours(
        allocation, context, kernel_width, threshold, mixed_target, least_samples, most_samples
    )
    return replace(grpo(clip_low, clip_high, kl_coefficient), curriculum=choose_prompts(least_tried(), budget))


def craft_gui(
    column: str = "stage",
    stage_steps: int = 100,
    earlier_share: float = 0.0,
    order: str = "",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.04,
) -> Algorithm:
    """Curriculum-Reinforced Agent for GUI Tasks (CRAFT-GUI, arXiv 2508.11360, 2025).

    GRPO (clip_low, clip_high, kl_coefficient) over stages from easy to hard. Each value of a `column` of the data set
    is a stage of stage_steps steps, and the last goes on to the end. They are in ascending order, or in `order`, the
    values with commas between them. earlier_share: the share of prompts from earlier stages.

    The paper's reward is a weighted sum of checks by rule, of format, kind of action and parameters, and a judge's
    score of open answers. They are the run's rewards, with their weights: `--rewards gui_format gui_kind gui_parameter
    FILE.py:JUDGE`, where the judge returns None for what is no answer to a question. The paper's numbers were not
    available. Screens are out of scope: a prompt describes them.

    Defaults. Ours: column, stage_steps, earlier_share, order, clip_low, clip_high, kl_coefficient.
    """
    names = tuple(name.strip() for name in order.split(",") if name.strip())
    curriculum = choose_prompts(staged(column, stage_steps, earlier_share, names))
    return replace(grpo(clip_low, clip_high, kl_coefficient), curriculum=curriculum)
