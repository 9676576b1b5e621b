"""Methods whose batches have groups or single completions that earlier steps, or other policies, sampled."""

from __future__ import annotations

import math

from jaxrl_llm.advantages.group import group_relative, truncated_rows
from jaxrl_llm.advantages.replayed import drop_least_varied, keep_stored_advantages, warm_up_replay
from jaxrl_llm.algorithms.presets import presets
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.log_ratios import LARGEST
from jaxrl_llm.core.transform import chain
from jaxrl_llm.curriculum.compose import choose_prompts
from jaxrl_llm.curriculum.targets import near_predicted
from jaxrl_llm.objectives import by_rows, clip, policy_gradient, sequence_sum, token_mean, token_ratio
from jaxrl_llm.objectives.covariance import clip_and_detach, count_batches, draw_covariant
from jaxrl_llm.objectives.off_policy import importance_correction
from jaxrl_llm.replay.base import (
    faded,
    own_good_rows,
    recent_and_reservoir,
    times_as_many,
    whole_groups,
    with_call_reward,
)
from jaxrl_llm.rewards.transforms import leave_out
from jaxrl_llm.rollouts.runtime.swarm import swarm

__all__ = ["dots_rr", "sapo_swarm", "spear", "symphony_fading_replay", "wmar_reservoir_replay"]


@presets(
    first={"fade": 7.0, "fade_power": 2.0, "fade_tail": 0.0},
    second={"fade": 70.0, "fade_power": 30.0, "fade_tail": 0.02},
)
def symphony_fading_replay(
    fade: float = 7.0,
    fade_power: float = 2.0,
    fade_tail: float = 0.0,
    replay_share: float = 1.0,
    replay_groups: int = 1024,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    ddof: int = 1,
    epsilon: float = 1e-6,
) -> Algorithm:
    """Fading replay (Symphony: A Heuristic Normalized Calibrated Advantage Actor Critic, arXiv 2512.10477, 2025).

    Stored data are not cut off at an age, but become rarer: with x = i/n for data of the i-th of the n steps in the
    store (the newest: x = 1),

        p proportional to tanh(fade x^fade_power + fade_tail x^2)

    round(replay_share m) groups are drawn with replacement and join the m groups of a step. The paper controls robots
    by an actor and a critic. Here GRPO takes their place: A is within the group, with ddof and epsilon, and the loss is
    the token mean of -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) with rho relative to the policy that sampled
    the token. The store has the newest replay_groups groups with different rewards.

    preset "first" is the code's first version (fade 7, fade_power 2, fade_tail 0), "second" its second (70, 30, 0.02),
    a sharp recent part with a weak tail.

    Defaults. Code: fade, fade_power, fade_tail. Ours: replay_share, replay_groups, clip_low, clip_high, ddof, epsilon.
    """
    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high), token_mean())
    replay = whole_groups(replay_share, faded(fade, fade_power, fade_tail), replay_groups)
    return Algorithm(group_relative(ddof=ddof, epsilon=epsilon), objective, replay=replay)


def wmar_reservoir_replay(
    recent: int = 512,
    reservoir: int = 512,
    replay_share: float = 1.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    ddof: int = 1,
    epsilon: float = 1e-6,
) -> Algorithm:
    """WMAR's replay (Augmenting Replay in World Models for Continual Reinforcement Learning, arXiv 2401.16650, 2024).

    Two stores: the newest `recent` completions, and a uniform sample of `reservoir` of all so far. Each completion gets
    a key u ~ U(0, 1), and the largest keys stay, so that after n completions each is kept with probability reservoir/n
    and the early prompts of a curriculum stay represented. round(replay_share N) completions join the N of a step, half
    from each store, uniformly.

    The paper learns a world model. Here a completion keeps the advantage that it had in its own group, A =
    (r - mean_g)/(std_g + epsilon) (ddof), those with A = 0 for the whole group are not stored, and the loss is the
    token mean of -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) with rho relative to the policy that sampled the
    token.

    Defaults. Ours: recent, reservoir, replay_share, clip_low, clip_high, ddof, epsilon.
    """
    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high), token_mean())
    transform = chain(group_relative(ddof=ddof, epsilon=epsilon), keep_stored_advantages())
    return Algorithm(transform, objective, replay=recent_and_reservoir(replay_share, recent, reservoir, ddof, epsilon))


def spear(
    replay_rows: int = 32,
    baselines: int = 32,
    replay_age: int = 10,
    surplus: float = 1.5,
    warm_up: float = 200,
    replay_weight: float = 1.0,
    share: float = 0.02,
    covariance_low: float = 1.0,
    covariance_high: float = 40.0,
    varied: float = 0.75,
    call_reward: float = 0.1,
    call_steps: float = 200,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    max_length: float | None = None,
) -> Algorithm:
    """Self-imitation with Progressive Exploration for Agentic RL (SPEAR, arXiv 2509.22601, 2025).

    loss = L(fresh) + g(t) L(replayed) in step t = 0, 1, ..., of which L(B) is

        -1/(|B| max_length) sum_i sum_t min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)
        g(t) = replay_weight (1 - cos(pi min(t, warm_up)/warm_up))/2

    Fresh: A = r - mean_g; truncated completions are left out, and of the groups the share `varied` stays whose rewards
    vary most; |B| counts those that stay. Replayed: completions better than their group are stored for replay_age
    steps. P is the median of the last `baselines` group means. Once more than surplus * replay_rows stored ones have r
    > P, a random subset joins the batch, of min(replay_rows, the largest power of two that is at most their number),
    with A = r - P, and the store is emptied. rho is relative to the policy that sampled the token.

    In both, a `share` of the tokens is detached, at random among those that are not clipped with covariance_low < cov <
    covariance_high, see `clip_cov`; here covariances are over the batch with its replayed rows. The released code takes
    the replayed step after the others, with a gradient step of its own. max_length None: the run's. Its documentation
    has replay_rows 2048 and baselines 10240, its script for mathematics 32 and 32.

    In runs with --tools or --environment, rewards of episodes with n calls of tools, right or wrong, are raised in step
    t <= call_steps (the paper's is 100 to 200) by

        (cos(pi t/call_steps) + 1)/2 min(call_reward n, 1)

    which stored episodes keep; their observations are masked, as in fresh ones. Not here: filters of empty turns and
    repetitions.

    Defaults. Paper: warm_up, replay_weight, call_reward, call_steps, clip_low, clip_high. Code: replay_rows, baselines,
    replay_age, surplus, share, covariance_low, covariance_high, varied. Run: max_length.
    """
    rho, mean = token_ratio(), sequence_sum() / (8192.0 if max_length is None else max_length)
    draw = draw_covariant(rho, covariance_low, covariance_high, share, clip_low, clip_high)
    fresh = by_rows(otherwise=mean, replayed=0.0 * mean)
    past = by_rows(otherwise=0.0 * mean, replayed=mean)
    surrogate = clip_and_detach(clip_low, clip_high)
    objective = policy_gradient(rho, surrogate, fresh, refresh=draw)
    objective += "replay_weight" * policy_gradient(rho, surrogate, past, refresh=draw)
    transform = chain(
        leave_out(truncated_rows),
        drop_least_varied(varied),
        group_relative("none"),
        keep_stored_advantages(),
        count_batches(),
        warm_up_replay(warm_up, replay_weight),
    )
    replay = with_call_reward(own_good_rows(replay_rows, baselines, replay_age, surplus), call_reward, call_steps)
    return Algorithm(transform, objective, replay=replay)


def sapo_swarm(
    nodes: int = 2,
    own: int = 4,
    foreign: int = 4,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    ddof: int = 1,
    epsilon: float = 1e-6,
) -> Algorithm:
    """Swarm sAmpling Policy Optimization (SAPO, Sharing is Caring, arXiv 2509.08721, 2025).

    Nodes with policies of their own share completions and not weights. In a step each samples groups for its prompts,
    publishes them, and trains on `own` of its groups and `foreign` of the others', drawn uniformly after groups of the
    others with equal rewards are dropped. With rho = pi/pi_old, pi_old the node's own policy before the update, also
    for what others sampled,

        loss = -token mean of min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A),  A = (r - mean_g)/(std_g + epsilon)

    without a KL; ddof is of the deviation. A run trains `nodes` policies in one process, all from its model; its
    metrics, evaluation and result are those of the first, "swarm/reward_K" is the mean reward of another.
    prompts_per_step should be at least `own`. Tokens and rewards of others stay as they are, because the nodes share
    tokenizer and reward functions. Not here: nodes with different models, and a network between them. The paper has 8
    nodes.

    Defaults. Paper: own, foreign, clip_low, clip_high. Ours: nodes, ddof, epsilon.
    """
    objective = policy_gradient(token_ratio("old"), clip(clip_low, clip_high), token_mean())
    return Algorithm(group_relative(ddof=ddof, epsilon=epsilon), objective, replay=swarm(nodes, own, foreign))


def dots_rr(
    target: float = 0.5,
    temperature: float = 1e-3,
    references: int = 256,
    every: int = 2,
    width: float = 0.2,
    embedding: str = "",
    fresh_share: float = 0.5,
    replay_groups: int = 512,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    ddof: int = 1,
    epsilon: float = 1e-6,
) -> Algorithm:
    """Difficulty-targeted Online Data Selection and Rollout Replay (DOTS + RR, arXiv 2506.05316, 2025).

    In every `every`-th step the groups of `references` more prompts, drawn uniformly, measure success rates d_k and are
    not trained on. Those of the others are predicted by attention to them, and prompts are drawn without replacement:

        p0 = sum_k softmax_k(e_q . e_k / width) d_k,    p = sigmoid(logit(p0) / s + b)
        P proportional to exp(-|p - target| / temperature)

    From the second step on, groups of the store join the fresh ones, (1 - fresh_share)/fresh_share of their number,
    drawn uniformly and whole; it has the newest replay_groups groups with different rewards. prompts_per_step is the
    number of fresh groups. With mu the policy that sampled the token, r = pi/mu, r0 = pi_old/mu (stop-gradient),

        loss = token mean of max(-A r, -A clip(r, r0 (1 - clip_low), r0 (1 + clip_high)))

    which is r0 times PPO's clipped loss in pi/pi_old. A = (reward - mean_g)/(std_g + epsilon) (ddof) is what it was
    when the group was fresh, and then r0 = 1.

    The paper embeds prompts with a language model, maps them by two networks, and computes s and b by a third from the
    mean and deviation of d, all trained before the run on measured rates. Here e are the normalised numbers in the
    column `embedding` of the data set, or, without one, counts of words and pairs of words; the width, s and b are 7
    numbers fitted during the run by the same cross-entropy (`curriculum.difficulty`). The paper measures the references
    before it draws the same step's prompts; here they are sampled beside these, and serve the draws after that step.

    Defaults. Paper: target, temperature, references, every, fresh_share, replay_groups, clip_low, clip_high. Ours:
    width, embedding, ddof, epsilon.
    """
    check_number("fresh_share", fresh_share, above=0, most=1)
    rule = near_predicted(target, temperature, references, every, width, embedding or None)
    weighted = importance_correction("token", "truncate", high=math.exp(LARGEST))  # never truncated
    objective = policy_gradient(token_ratio("old"), clip(clip_low, clip_high), token_mean())
    return Algorithm(
        chain(group_relative(ddof=ddof, epsilon=epsilon), weighted), objective, curriculum=choose_prompts(rule),
        replay=whole_groups(**times_as_many((1 - fresh_share) / fresh_share), groups=replay_groups),
    )  # fmt: skip
