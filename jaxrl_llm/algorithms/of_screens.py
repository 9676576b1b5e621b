"""Methods for agents of GUIs and models of images, whose screens and images are here described in words."""

from __future__ import annotations

from dataclasses import replace

from jaxrl_llm.advantages.group import group_relative
from jaxrl_llm.advantages.turns.episodes import EPISODES
from jaxrl_llm.advantages.turns.rounds import keep_uncertain_turns
from jaxrl_llm.advantages.turns.turn_rewards import needs_turns
from jaxrl_llm.algorithms.group_relative import grpo
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.transform import chain
from jaxrl_llm.objectives.averaging.averages import sequence_mean
from jaxrl_llm.objectives.off_policy import importance_correction
from jaxrl_llm.objectives.policy_gradient import policy_gradient, regularised
from jaxrl_llm.objectives.ratios import span_ratio
from jaxrl_llm.objectives.surrogates import clip
from jaxrl_llm.replay.into_groups import none_above, swapped_successes
from jaxrl_llm.rewards.compositions import weighted_components
from jaxrl_llm.rewards.transforms import rescore

__all__ = ["dart_gui", "gui_r1", "visual_rft"]


def dart_gui(
    kept: float = 0.8,
    success: float = 0.5,
    stored: int = 1,
    weight_cap: float = 1.0,
    epsilon: float = 1e-6,
    clip_low: float = 0.1,
    clip_high: float = 0.28,
    kl_coefficient: float = 0.1,
) -> Algorithm:
    """Decoupled Agentic RL Training for GUI agents (DART, arXiv 2509.23866, 2025).

    Steps of episodes have the outcome of the whole. Those of high entropy are trained on, with a ratio for each step
    and weights for the mismatch of sampler and trainer. With R the outcome of the step's episode, which counts once,

        A = (R - mean_g R) / (std_g R + epsilon)
        s = exp(1/|o| sum_t (logp - logp_old)) over the tokens of a step, with the gradient of each token's own logp
        w = min(pi_old / pi_behaviour, weight_cap) of each token
        loss = mean over rows of the mean over tokens of -w min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)
               + kl_coefficient k3

    Only the share `kept` of a group's steps is trained on, those of the highest mean entropy. Where no episode of a
    task has R > success, one of its last `stored` successes of earlier steps joins the group, with the
    log-probabilities of the policy that sampled it, to which w is relative.

    Rows are steps with a --rollout that returns `rollouts.agents.agent(ENVIRONMENT, fresh=True)`, whose
    observations are whole prompts, such as a window of the last screens in words. Episodes of --environment are rows,
    whose steps are averaged by their tokens. The released trainer has another filter of steps; the paper's shares and
    thresholds were not available. Not here: fewer samples and steps for tasks that the policy solves, and separate
    services.

    Defaults. Code: weight_cap, clip_low, clip_high, kl_coefficient. Recalled: kept. Ours: success, stored, epsilon.
    """
    ratio = span_ratio("turn", "old", gradient="token")
    objective = policy_gradient(ratio, clip(clip_low, clip_high), sequence_mean())
    transform = chain(
        needs_turns(fresh=True),
        group_relative(epsilon=epsilon, needs=EPISODES),
        importance_correction("token", "truncate", high=weight_cap),
        keep_uncertain_turns(kept),
    )
    return Algorithm(
        transform,
        regularised(objective, sequence_mean(), kl_coefficient=kl_coefficient),
        replay=swapped_successes(none_above(success), success, stored, "added"),
    )


def gui_r1(
    action_weight: float = 0.8,
    format_weight: float = 0.2,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.01,
) -> Algorithm:
    """GUI-R1 (A Generalist R1-Style Vision-Language Action Model For GUI Agents, arXiv 2504.10458, 2025).

    GRPO with a reward for one action on a screen, of one space of actions for all platforms:

        R = action_weight accuracy + format_weight format

    accuracy, `--rewards gui_action`: 1 if the kind of the action is the expected one, and a click is within 140 pixels
    of the expected point, or inside the expected box; the words of type, select and scroll have a token F1 of at least
    0.5 with the expected ones; other actions count by their kind. format, `gui_format`: 1 if thoughts and answer are
    tagged, and the answer is a list of actions with all that they need. The expected action is the data set's column
    `action`. Weights of the run's rewards have no effect. A = (R - mean_g)/std_g, with clip_low, clip_high and the k3
    penalty kl_coefficient. Screenshots are out of scope: a prompt describes the screen.

    Defaults. Code: action_weight, format_weight. Ours: clip_low, clip_high, kl_coefficient.
    """
    return _by_rewards(
        {"gui_action": action_weight, "gui_format": format_weight}, grpo(clip_low, clip_high, kl_coefficient)
    )


def visual_rft(
    classification: bool = False,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.04,
) -> Algorithm:
    """Visual Reinforcement Fine-Tuning (Visual-RFT, arXiv 2503.01785, 2025).

    GRPO with rewards for what an image shows. Boxes are answered with confidences c_j. In descending order of c each is
    matched to the expected box, of those that are left, with which its IoU is largest; iou_j is that IoU where it is
    above 1/2, else 0:

        R = sum_j iou_j / max(number of boxes, number of expected boxes)
            + mean_j (c_j if iou_j > 0, else 1 - c_j) + [tags and list are well-formed]

    by `--rewards box_overlap box_confidence box_format`, with the data set's column `boxes`. classification: R = [the
    answer and the expected name contain each other] + [tags], by `class_match` and `answer_tags`, with the column
    `answer`. Weights of the run's rewards have no effect. A = (R - mean_g)/std_g, with clip_low, clip_high and the k3
    penalty kl_coefficient. The code's first version divides the overlaps by the number of boxes in the answer. Images
    are out of scope: a prompt describes what they show. The paper has 8 samples of a prompt.

    Defaults. Code: kl_coefficient. Ours: classification, clip_low, clip_high.
    """
    names = ("class_match", "answer_tags") if classification else ("box_overlap", "box_confidence", "box_format")
    return _by_rewards(dict.fromkeys(names, 1.0), grpo(clip_low, clip_high, kl_coefficient))


def _by_rewards(weights: dict[str, float], base: Algorithm) -> Algorithm:
    """The method with the weighted sum of these components as its reward, which it then needs."""
    return replace(base, transform=chain(rescore(weighted_components(weights), weights), base.transform))
