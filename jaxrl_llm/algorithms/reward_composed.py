"""Methods whose own idea is how a reward is composed, and losses that read rewards of whole lists of samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from jaxrl_llm.advantages.group import group_relative
from jaxrl_llm.advantages.reward_to_go import gains_to_come
from jaxrl_llm.algorithms.actor_critic import ppo
from jaxrl_llm.algorithms.run_settings import rewards_up_to, run_settings
from jaxrl_llm.core.algorithm import Algorithm, DynamicSampling
from jaxrl_llm.core.choices import AverageName
from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.transform import chain
from jaxrl_llm.objectives.averaging.averages import average_by_name, sequence_mean
from jaxrl_llm.objectives.constraints import log_barrier, starting_means
from jaxrl_llm.objectives.policy_gradient import policy_gradient, regularised
from jaxrl_llm.objectives.preference.listwise import pairwise_policy, tilted_targets
from jaxrl_llm.objectives.ratios import token_ratio
from jaxrl_llm.objectives.surrogates import clip, log_probability
from jaxrl_llm.rewards.compositions import (
    failures_by_distance,
    length_graded,
    product_of_factors,
    reward_component,
    success_rate,
    with_length_beside_mates,
)
from jaxrl_llm.rewards.transforms import leave_out, rescore
from jaxrl_llm.utils.errors import InputError

__all__ = [
    "brain", "c_morl", "carl_multiplicative_reward", "open_rs", "p3o_pairwise", "srpo_self_referential", "subpo",
    "ui_r1",
]  # fmt: skip


def open_rs(
    accuracy: str | None = None,
    success: float = 0.5,
    accuracy_weight: float = 2.0,
    format_weight: float = 1.0,
    right: float = 0.5,
    worst: float = -0.5,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.04,
    max_length: float | None = None,
) -> Algorithm:
    """Open-RS (Reinforcement Learning for Reasoning in Small LLMs, arXiv 2503.16219, 2025).

    GRPO with a reward that falls along a cosine with the length: with x = min(length / max_length, 1) and
    f = (1 + cos(pi x))/2,

        R = accuracy_weight (right + (1 - right) f          if the answer is right,
                             worst - worst f                if it is wrong)
            + format_weight (sum of the other components)

    so that right answers get 1 where they are short and `right` where they are long, wrong ones 0 and `worst`. An
    answer is right where the component `accuracy`, or the combined reward where it is None, is above `success`; name
    it in runs with a format reward. A = (R - mean_g) / std_g, with clip_low, clip_high and the k3 penalty
    kl_coefficient. The released code measures the length in characters (at most 3584 in the third experiment); here it
    is in tokens, and max_length is the run's limit (3584 where None). Its bare function falls from -1 to -0.5 for wrong
    answers; the training script, whose numbers these are, the other way.

    Defaults. Code: accuracy_weight, format_weight, right, worst. Ours: accuracy, success, clip_low, clip_high,
    kl_coefficient. Run: max_length.
    """
    longest = 3584 if max_length is None else max_length
    check_number("max_length", longest, above=0)
    composed = length_graded(accuracy, success, accuracy_weight, format_weight, longest, right, worst)
    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high), sequence_mean())
    objective = regularised(objective, sequence_mean(), kl_coefficient=kl_coefficient)
    return Algorithm(chain(rescore(composed), group_relative()), objective)


def carl_multiplicative_reward(
    component: str | None = None,
    terminal: str | None = None,
    penalty: float = 1.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    gamma: float = 1.0,
    lam: float = 0.95,
    kl_coefficient: float = 0.05,
) -> Algorithm:
    """CaRL's multiplicative reward (Learning Scalable Planning Policies with Simple Rewards, arXiv 2504.17838, 2025).

    One term of progress, which soft infractions multiply and a hard one replaces, trained with PPO:

        R = progress prod_i p_i,   R = -penalty after a hard infraction

    progress: the reward `component`. p_i: the other components, clipped to [0, 1]; 1 is no infraction. None: all
    components are such factors, and a single one is the reward. terminal: the component that is above 0.5 for a hard
    infraction (None: there is none), which in the paper also ends the episode; then the reward is -penalty. Style alone
    earns nothing, and cannot be traded against progress. The weights of the rewards have no effect. PPO with clip_low,
    clip_high, gamma, lam, and kl_coefficient in the reward as in `ppo`. The paper drives cars, with rewards of each
    time step; here an episode is a completion, scored at its end.

    Defaults. Paper: clip_low, clip_high. Ours: component, terminal, penalty, gamma, lam, kl_coefficient.
    """
    check_number("penalty", penalty, least=0)
    base = ppo(clip_low, clip_high, gamma=gamma, lam=lam, kl_coefficient=kl_coefficient)
    return replace(base, transform=chain(rescore(product_of_factors(component, terminal, penalty)), base.transform))


def brain(reward_temperature: float = 1.0, scale: float = 1.0) -> Algorithm:
    """Bayesian Reward-conditioned Amortized Inference (BRAIn, arXiv 2402.02479, 2024).

    The policy learns the posterior of the reference given a good reward, p(y|x) exp(r/gamma), from the samples y_i of a
    prompt, drawn from q, the policy that sampled them:

        a = softmax_i(log p(y_i) + r_i/gamma - log q(y_i)),   b = softmax_i(scale (log pi(y_i) - log q(y_i)))
        loss = mean over prompts of -sum_i a_i log b_i

    with sums over the tokens of a sequence. The gradient is sum_i (b_i - a_i) grad log pi(y_i) (times scale): weighted
    samples minus a self-normalised baseline. gamma = reward_temperature; p the reference. Long sequences make the
    softmax peaky; a scale below 1 tempers the policy's. With two samples, q = p and a = (1, 0), the loss is DPO's with
    beta = scale. A prompt with one sample teaches nothing.

    Defaults. Ours: reward_temperature, scale.
    """
    return Algorithm(chain(), tilted_targets(reward_temperature, scale))


def p3o_pairwise(
    kl_coefficient: float = 0.05,
    clip_range: float = 0.2,
    clip: Literal["separate", "joint", "none"] = "separate",
) -> Algorithm:
    """Pairwise Proximal Policy Optimization (P3O, arXiv 2310.00212, 2023).

    A policy gradient on the difference of the rewards of two responses to a prompt, which no shift of the rewards of a
    prompt changes. With R = r - kl_coefficient log(pi_old(y)/pi_ref(y)), D = R_1 - R_2, w = pi(y)/pi_old(y) of whole
    responses, and e = clip_range, the loss is minus the mean over the pairs of a prompt of

        "separate"  [min(w_1 a_1, clip(w_1, 1-e, 1+e) a_1) + min(w_2 a_2, clip(w_2, 1-e, 1+e) a_2)]/2,
                    a_1 = D sg(w_2), a_2 = -D sg(w_1)
        "joint"     min(c u, c clip(u, -e, e))/2,  u = log w_1 - log w_2,  c = D sg(w_1 w_2)
        "none"      D sg(w_1 w_2) u/2

    as clip says. On policy all have the gradient D grad(log pi(y_1) - log pi(y_2))/2. The paper has two responses to a
    prompt; here all pairs of a group count. The clipped forms are derived from the pairwise gradient, not read.

    Defaults. Ours: kl_coefficient, clip_range, clip.
    """
    return Algorithm(chain(), pairwise_policy(clip_range, clip, kl_coefficient))


def srpo_self_referential(
    success: float = 0.5,
    most: float = 0.6,
    slope: float = 10.0,
    least_rate: float = 0.1,
    most_rate: float = 0.9,
    rounds: int = 10,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    average: AverageName = "token",
) -> Algorithm:
    """Self-Referential Policy Optimization (SRPO, arXiv 2511.15605, 2025).

    Failures are graded by how close they come to the successes of the same prompt in the same batch. With d_i the
    distance of failure i to the nearest centre of a cluster of successes, rescaled over the failures of the prompt
    to [0, 1],

        r_i = 1 for a success (score above `success`),   r_i = most sigmoid(slope (1/2 - d_i)) for a failure

    and 0 for failures of prompts without a success. Then GRPO with standard deviations, clip_low and clip_high, and no
    penalties, on prompts whose success rate is within [least_rate, most_rate]: others are sampled again, for at most
    `rounds` rounds, and left out. average: see `average_by_name`.

    The paper trains robots' policies, whose trajectories are videos in the latent space of a world model. Here they are
    texts: `--rewards 'distances(number_match)'` measures info["distance"] on counts of words; with another `success`
    than 0.5 write it there too, 'distances(number_match, 0.8)'. Another encoder is a
    reward function that returns the entry "distance".

    Defaults. Code: most, slope, least_rate, most_rate, clip_low, clip_high. Ours: success, rounds, average.
    """
    check_number("rounds", rounds, least=1, whole=True)
    if not 0 <= least_rate <= most_rate <= 1:
        raise InputError(f"the rates are {least_rate} and {most_rate}, but must be 0 <= least_rate <= most_rate <= 1")
    informative = success_rate(least_rate, most_rate, success)
    outside = success_rate(least_rate, most_rate, success, within=False)
    grade = rescore(failures_by_distance(success, most, slope), {"distance"})
    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high), average_by_name(average))
    return Algorithm(
        chain(leave_out(outside), grade, group_relative()),
        objective,
        curriculum=DynamicSampling(informative, rounds),
    )


def subpo(average: AverageName = "sum") -> Algorithm:
    """Submodular Policy Optimization (SubPO; Submodular Reinforcement Learning, arXiv 2307.13372, 2023).

    The reward of a trajectory is a set function F of what it visits, with diminishing returns; each step earns what it
    adds, F(S and s) - F(S), which depends on all before it. REINFORCE with the gains still to come:

        loss = -1/N sum_i sum_t (sum_{j >= t} gain_j - b_t) log pi(a_t)

    Gains are the rewards of spans of the completion, each where its span ends: `--rewards 'coverage(COLUMN)'` gives 1/n
    for the first mention of each of n items of a column of the data set. b_t is the mean of the gains still to come of
    the prompt's other samples at the same token number, 0 where they have ended. The score, if there is one, is a gain
    of the last token. With an additive F this is REINFORCE with rewards to go. The paper leaves b open. average: see
    `average_by_name`.

    Defaults. Recalled: average.
    """
    objective = policy_gradient(token_ratio(), log_probability(), average_by_name(average))
    return Algorithm(gains_to_come(), objective)


@run_settings(
    rewards_up_to(
        "right", "answer_tags", "gui_kind", "gui_click", why="rewards that add up to `right` in a right answer"
    )
)
def ui_r1(
    right: float = 3.0,
    slope: float = -0.5,
    offset: float = 0.5,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.04,
) -> Algorithm:
    """UI-R1 with its length reward (Enhancing Action Prediction of GUI Agents by RL, arXiv 2503.21620, 2025).

    GRPO, with a term for the length that depends on how hard the prompt is. With p the share of right samples of a
    prompt (score at least `right`), the suitable length is B = p (mean length of the right ones) + (1 - p) (longest),
    and with x = (length - B)/B

        R = r + max(slope x + offset, 0.1) if right,   R = r + min(0.9 x - 0.1, -0.1) if wrong

    so that easy prompts get short answers. A = (R - mean_g)/std_g, with clip_low, clip_high and the k3 penalty
    kl_coefficient. The rewards r themselves are the run's: the paper's are `--rewards answer_tags gui_kind gui_click`
    (tags, the kind of the action, a click inside the box) of 0 or 1 each, and right is their sum, 3. A run takes
    the sum of the weights of its rewards for `right`, so that the length term suits any task. Screenshots are out of
    scope: a prompt describes the screen.

    Defaults. Code: right, slope, offset. Ours: clip_low, clip_high, kl_coefficient.
    """
    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high), sequence_mean())
    objective = regularised(objective, sequence_mean(), kl_coefficient=kl_coefficient)
    return Algorithm(chain(rescore(with_length_beside_mates(right, slope, offset)), group_relative()), objective)


def c_morl(
    component: str | None = None,
    share: float = 0.9,
    sharpness: float = 20.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    average: AverageName = "token",
) -> Algorithm:
    """C-MORL (Multi-Objective RL through Efficient Discovery of Pareto Front, arXiv 2410.02236, 2025).

    The extension of a policy on the front: raise one component of the reward, l = `component`, while no other falls
    below a share of its mean under the policy that the run starts from, by an interior-point method:

        loss = -mean min(rho A_l, clip(rho, 1 - clip_low, 1 + clip_high) A_l) - 1/sharpness mean_{i != l} log c_i
        c_i = G_i(pi) - share G_i(pi_start)

    A_l: the component, standardised in its group. component None: the combined reward, with each component as a
    constraint. G_i: the mean of component i, to first order in the policy, see `objectives.constraints`; it must be
    above 0 at the start to constrain anything. Below 0.001 the logarithm goes on along its tangent. average: of the
    first term, see `average_by_name`.

    The released code has c_i = (clip(rho) - share) mean r_i for each step, and stops at 0.001. Then log c_i is
    log mean r_i plus a function of rho alone, whose gradient has the expectation 0 on policy: the rewards would not
    matter, and a violated constraint would have no gradient. So c_i is here derived from the problem that it is to
    solve. The first stage trains policies for fixed weights of the rewards, which is `grpo` with weights; the choice of
    policies to extend, in the sparsest regions of the front, compares runs. Both are out of scope here: a run extends
    the policy that --model names.

    Defaults. Code: share, sharpness, clip_low, clip_high. Ours: component, average.
    """
    check_number("sharpness", sharpness, above=0)
    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high), average_by_name(average))
    objective += (1 / sharpness) * log_barrier(component, share, clip_low, clip_high)
    return Algorithm(
        chain(starting_means(component), rescore(reward_component(component)), group_relative()), objective
    )
