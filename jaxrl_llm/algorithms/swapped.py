"""Methods that put stored completions, or copies, in the place of what has no signal, or beside it."""

from __future__ import annotations

from jaxrl_llm.advantages.group import group_relative
from jaxrl_llm.advantages.multi_reward import parse_weights
from jaxrl_llm.advantages.replayed import cloned_rows, relative_to_own, rescale_to_informative
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.transform import chain
from jaxrl_llm.curriculum.pruning import epochs_without_solved
from jaxrl_llm.objectives import by_rows, clip, imitation, kl, policy_gradient, sequence_mean, token_mean, token_ratio
from jaxrl_llm.objectives.off_policy import scale_by_info
from jaxrl_llm.replay.into_groups import (
    best_of_prompt,
    low_and_alike,
    none_above,
    swapped_successes,
    valued_groups,
    with_staged_reward,
)

__all__ = ["a2pr", "arpo_replay", "rapo_reward_aware", "vspo_prs"]


def arpo_replay(
    stored: int = 8,
    success: float = 0.1,
    spread: float = 0.05,
    low: float = 0.2,
    clip_low: float = 0.2,
    clip_high: float = 0.3,
    ddof: int = 1,
    epsilon: float = 1e-6,
    accuracy: str | None = None,
) -> Algorithm:
    """Agentic Replay Policy Optimization (ARPO: End-to-End Policy Optimization for GUI Agents, arXiv 2505.16282, 2025).

    GRPO in which a failed group gets a stored success. B[q] has the newest `stored` completions of prompt q with an
    outcome e > success. With e_1 ... e_G the outcomes of a group,

        if std(e) < spread and mean(e) < low and B[q] is not empty: sample 1 is replaced by one of B[q]
        A = (r - mean_g)/(std_g + epsilon) of the mixed group
        loss = -token mean of min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A),  rho = pi / pi_old

    pi_old is the policy at the start of the update, for stored completions too, so there is no off-policy correction;
    there is no KL. The successes of the step are stored afterwards. accuracy: the reward that is the outcome; None: the
    combined one. r is the run's combination of rewards: the paper adds 0.5 f, f = -1 for a malformed action and else 0,
    as the weight of a format reward does. In runs with --tools or --environment a stored success is an episode, with
    the observations that it had, which stay masked. Not here: the choice of tasks that the base agent can sometimes
    solve.

    Defaults. Code: stored, success, spread, low, clip_low, clip_high. Ours: ddof, epsilon, accuracy.
    """
    check_number("low", low)
    objective = policy_gradient(token_ratio("old"), clip(clip_low, clip_high), token_mean())
    replay = swapped_successes(low_and_alike(spread, low), success, stored, component=accuracy)
    return Algorithm(group_relative(ddof=ddof, epsilon=epsilon), objective, replay=replay)


def rapo_reward_aware(
    solved: float = 0.9,
    success: float = 0.5,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    ddof: int = 0,
    epsilon: float = 1e-6,
    accuracy: str | None = None,
) -> Algorithm:
    """Reward-Aware Policy Optimization (RAPO, Fathom-DeepResearch, arXiv 2509.24107, 2025).

    GRPO with three repairs for groups of equal rewards:

        at the end of an epoch prompts are dropped whose share of samples with r > success is at least `solved`
        A = N/N_good (r - mean_g)/(std_g + epsilon), N_good of the N groups with std_g > 0
        if no sample of prompt q has r > success, a random one is replaced by the latest earlier one that has

    before advantages are computed. A stored completion keeps the log-probabilities of the policy that sampled it, to
    which rho is relative; loss: the sequence mean of -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A). ddof 0: the
    population's deviation. The paper writes G/G_good with G_good a number of groups, so G must be their number too. Its
    solve rate counts r > 0, which with its reward for format is true of any well-formed answer: here it is r > success.
    accuracy: the reward that r stands for in these rules; None: the combined one. The first stage's reward is the run's
    --rewards, 0.1 for format and 0.9 for the answer. In runs with --tools or --environment a stored success is an
    episode with its observations, which stay masked. Not here: the second stage's reward for single calls of tools,
    whose labels a judge gives.

    Defaults. Paper: solved, success, ddof. Ours: clip_low, clip_high, epsilon, accuracy.
    """
    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high), sequence_mean())
    transform = chain(group_relative(ddof=ddof, epsilon=epsilon), rescale_to_informative())
    replay = swapped_successes(none_above(success), success, 1, "random", accuracy)
    return Algorithm(transform, objective, epochs_without_solved(solved, success, accuracy), replay=replay)


def a2pr(
    alpha: float = 2.5,
    replay_prompts: int = 4096,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    ddof: int = 1,
    epsilon: float = 1e-6,
) -> Algorithm:
    """Advantage-guided policy regularisation (A2PR for Offline RL, arXiv 2405.19909, 2024).

    The paper clones the better of two actions, the data set's and one that is generated near the policy, and only where
    it is better than V. For completions, the two are the best stored and the best fresh answer to a prompt:

        loss = token mean of -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)  over fresh completions
               - 1/alpha mean over the tokens of all y*_q of log pi,  y*_q the best answer if r(y*_q) > mean_g

    A is GRPO's among fresh completions, with ddof and epsilon; mean_g, in place of V(s), is theirs too, so that the
    present policy is the measure of a stored answer. A fresh answer wins ties, and equal fresh ones share the weight.
    The paper weighs its policy loss by alpha, here the other term by 1/alpha. The store has one answer for each of
    replay_prompts prompts. Not here: twin critics, the generator, and its weight 2 where both advantages are positive.

    Defaults. Paper: alpha. Ours: replay_prompts, clip_low, clip_high, ddof, epsilon.
    """
    check_number("alpha", alpha, above=0)
    fresh = by_rows(otherwise=token_mean(), replayed=0.0 * token_mean())
    cloned = by_rows(otherwise=0.0 * token_mean(), cloned=token_mean())
    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high), fresh, needs={"replayed"})
    objective += imitation(cloned_rows, cloned) / alpha
    return Algorithm(relative_to_own(ddof, epsilon), objective, replay=best_of_prompt(replay_prompts))


def vspo_prs(
    copies: float = 2.0,
    highest: float = 1.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.001,
    ddof: int = 1,
    epsilon: float = 1e-6,
    weights: str = "",
) -> Algorithm:
    """VSPO with PRS (Enhancing Agentic RL with Progressive Reward Shaping, arXiv 2512.07478, 2025).

    Value-based Sampling Policy Optimization: groups of equal rewards are replaced by other groups of the batch, drawn
    with probabilities proportional to difficulty times uncertainty, and repeated prompts are damped:

        V_g = (highest - mean_g) std_g,    A <- A min(n_g, copies)/n_g  for a group that is there n_g times

    The loss is GRPO's, the sequence mean of -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) + kl_coefficient k3,
    A with ddof and epsilon. Progressive Reward Shaping: a stage counts only where those before it are met (> 0.5);
    weights "format=0.1,answer=1" names the rewards in the order of the stages, and their weights ("": the run's
    combination). The paper was not available to us: the damping and the form of the stages are our reading of its
    summary. With --tools or --environment the rows of a group are those of episodes, and its copies have their
    observations, which stay masked. Not here: length-aware BLEU and the judge of long answers.

    Defaults. Paper: clip_low, clip_high, kl_coefficient. Ours: copies, highest, ddof, epsilon, weights.
    """
    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high), sequence_mean())
    objective += kl_coefficient * kl(to="reference", estimator="k3", average=sequence_mean())
    replay, stages = valued_groups(copies, highest), parse_weights(weights)
    transform = chain(group_relative(ddof=ddof, epsilon=epsilon), scale_by_info("copy_weight"))
    return Algorithm(transform, objective, replay=with_staged_reward(replay, stages) if stages else replay)
