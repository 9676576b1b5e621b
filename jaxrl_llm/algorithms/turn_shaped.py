"""Methods of agents that shape the reward of an episode, or choose among episodes, and credit these as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp

from jaxrl_llm.advantages.group import drop_uniform_groups, group_relative
from jaxrl_llm.advantages.turns.episodes import episode_keys, episode_lengths, turns_before
from jaxrl_llm.advantages.turns.turn_rewards import gated_rewards, needs_turns
from jaxrl_llm.advantages.turns.turns import of_episode, turn_advantages, turn_mask
from jaxrl_llm.algorithms.trees import numbers_in
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Array, Trajectories, bucket_sums, joint_key
from jaxrl_llm.core.transform import chain
from jaxrl_llm.curriculum.failed_prompts import hard_buffer
from jaxrl_llm.objectives import clip, policy_gradient, sequence_mean, token_mean, token_ratio
from jaxrl_llm.objectives.policy_gradient import regularised
from jaxrl_llm.objectives.ratios import sequence_ratio
from jaxrl_llm.rewards.shaping import soft_overlong_penalty
from jaxrl_llm.rewards.transforms import leave_out, rescore
from jaxrl_llm.selection.noise import row_noise
from jaxrl_llm.selection.rows import ranks_within
from jaxrl_llm.utils.errors import InputError, require_choice

FORM = "one_answer"  # the reward that says how nearly a completion has one answer
__all__ = ["deeptravel", "eapo_iterresearch", "g_ra", "grpo_roc", "grpo_tcr"]


def g_ra(
    thresholds: str = "0",
    order: str = "",
    scale: Literal["none", "std"] = "std",
    epsilon: float = 1e-6,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Algorithm:
    """Gated Reward Accumulation (G-RA, arXiv 2508.10548, 2025).

    The rewards of turns, for form or progress, count only in episodes whose rewards of higher priority have all passed
    their thresholds, so that they cannot be collected in place of the outcome:

        R = sum_k gate_k R_k,    gate_k = 1 if R_j > threshold_j for all levels j above k, else 0

    The highest level has no gate, the rewards of turns are the lowest. order: names of the components of the reward
    that are levels, by commas, the highest first; "" for the score as the only one. thresholds: of each of these
    levels, by commas, one for all or one for each; the paper's were not in what we read. With an order R is the sum of
    the gated components, without the run's weights.

    The rest is GRPO on the episode's R, where scale "std" divides by its standard deviation + epsilon, with PPO's clip
    (clip_low, clip_high) averaged over tokens; the paper takes any policy gradient.

    Defaults. Ours: thresholds, order, scale, epsilon, clip_low, clip_high.
    """
    levels = tuple(name.strip() for name in order.split(",")) if order else ()
    gates = tuple(numbers_in("thresholds", thresholds))
    if len(gates) not in (1, len(levels)):
        raise InputError(f"thresholds are {len(gates)} numbers for {max(len(levels), 1)} levels: give one for each")
    gates = gates * max(len(levels), 1) if len(gates) == 1 else gates
    return Algorithm(
        chain(needs_turns(), gated_rewards(gates, levels), turn_advantages(of_episode(scale, epsilon=epsilon))),
        policy_gradient(token_ratio(), clip(clip_low, clip_high), token_mean()),
    )


def of_rows(batch: Trajectories, name: str) -> Array | None:
    """An entry of the batch's info f32[N], 0 where a row has none; None without it."""
    value = (batch.info or {}).get(name)
    return None if value is None else jnp.nan_to_num(value)


@part
def credit_of_calls(call_credit: float, most: float, success: float) -> Callable[[Trajectories], Array]:
    """A function `batch -> f32[N]`: 1 for a success; else -1 + call_credit for each turn before the last, to `most`."""

    def score(batch: Trajectories) -> Array:
        calls = turns_before(batch) + jnp.max(jnp.where(batch.action_mask, batch.turn, 0), axis=1)
        return jnp.where(batch.scores > success, 1.0, jnp.minimum(-1.0 + call_credit * calls, most))

    return score


def grpo_tcr(
    call_credit: float = 0.1,
    failed_at_most: float = -0.6,
    success: float = 0.0,
    longest: int | None = 20480,
    overlong_buffer: int = 4096,
    epsilon: float = 1e-6,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
) -> Algorithm:
    """GRPO with credit for tool calls (GRPO-TCR of Demystifying RL in Agentic Reasoning, arXiv 2510.11701, 2025).

    Token loss, clip-higher and reward shaping for agents with tools: a failure (score <= success) that tried tools is
    better than one that did not,

        r = 1 for a success,    r = min(failed_at_most, -1 + call_credit * calls) for a failure,

    with a call in each turn but the last; call_credit 0 is the paper's ablation. Episodes of more than longest -
    overlong_buffer sampled tokens, in all of their rows, lose up to 1 (longest None: none do). Then GRPO's advantages
    (epsilon), PPO's clip (clip_low, clip_high) averaged over the tokens of the batch, no penalty and no dynamic
    sampling. Its choice of prompts by the model's own pass rate, and the supervised stage, come before the run.

    Defaults. Code: call_credit, failed_at_most, success, longest, overlong_buffer, epsilon, clip_low, clip_high.
    """
    steps = [needs_turns(), rescore(credit_of_calls(call_credit, failed_at_most, success), {"first_turn"})]
    if longest is not None:
        steps.append(soft_overlong_penalty(longest, overlong_buffer, episode_lengths))
    return Algorithm(
        chain(*steps, group_relative(epsilon=epsilon)),
        policy_gradient(token_ratio(), clip(clip_low, clip_high), token_mean()),
    )


@part
def cleanest_right_rows_out(
    keep: float, least_right: int, least_wrong: int, component: str | None
) -> Callable[[Trajectories], Array]:
    """A function `batch -> bool[N]`: the rows of each group that are not kept, see `grpo_roc`."""

    def out(batch: Trajectories) -> Array:
        scored = ~jnp.isnan(batch.scores)
        right = scored & (batch.scores > 0)
        rows, rights = bucket_sums(batch.group, scored.astype(jnp.float32), right.astype(jnp.float32))
        wrongs, number = rows - rights, jnp.round(keep * rows)
        zero, one = jnp.round(wrongs * keep), jnp.round(rights * keep)
        whole = (zero < least_wrong) & (one < least_right)
        few = jnp.minimum(least_wrong, wrongs)
        zero, one = jnp.where(zero <= few, few, zero), jnp.where(zero <= few, number - few, one)
        few = jnp.minimum(least_right, rights)
        zero, one = jnp.where(one <= few, number - few, zero), jnp.where(one <= few, few, one)
        calls, failed = (of_rows(batch, name) for name in ("calls", "failed_calls"))
        penalty = jnp.full(batch.group.shape, 0.5)
        if calls is not None and failed is not None:
            penalty = jnp.where(calls > 0, failed / jnp.maximum(calls, 1.0), 0.5)
        form = (batch.rewards or {}).get(component or "")
        if form is not None:
            penalty = penalty + 1.0 - jnp.nan_to_num(form)
        elif component not in (None, FORM):
            raise InputError(f"grpo_roc: the reward has no component {component!r}, which says if the form is right")
        noise = row_noise(batch, 0)
        rank = ranks_within(2 * batch.group + right, jnp.where(right, -penalty, 0.0), noise, scored)
        return scored & ~whole & (rank >= jnp.where(right, one, zero))

    return out


def grpo_roc(
    keep: float = 0.5,
    least_right: int = 2,
    least_wrong: int = 2,
    component: str | None = "one_answer",
    epsilon: float = 1e-6,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
) -> Algorithm:
    """GRPO with Resampling on Correct (GRPO-RoC of rStar2-Agent, arXiv 2508.20722, 2025).

    Of each group's samples a share `keep` is trained on: right and wrong ones (score above 0 or not) in proportion, but
    at least least_right and least_wrong of them where there are so many. The wrong ones are drawn at random, the right
    ones are those of the least penalty

        p = failed calls / calls of tools (1/2 without any) + 1 - r_form

    r_form: a component of the reward for the form, from 0 to 1, named by `component`; None: without it. That of the
    code is `one_answer`, with the weight 0: `--rewards number_match 'one_answer*0'`, 0 where the answer's tags are
    missing or unbalanced, else 1 - min((blocks - 1)/turns, 1). So the group
    size of the run is the paper's oversampled one, twice what is trained on. Groups of equal rewards are left out. Then
    GRPO's advantages over the rows that are kept (epsilon), and PPO's clip (clip_low, clip_high) averaged over their
    tokens. This is the released code, which rounds half to even and keeps the right ones of least penalty; the paper
    draws them with a probability that falls with it.

    Defaults. Code: keep, least_right, least_wrong, component, epsilon, clip_low, clip_high.
    """
    check_number("keep", keep, above=0, most=1)
    check_number("least_right", least_right, least=0, whole=True)
    check_number("least_wrong", least_wrong, least=0, whole=True)
    chosen = cleanest_right_rows_out(keep, least_right, least_wrong, component)
    needs = {"calls", "failed_calls", *([FORM] if component == FORM else [])}
    return Algorithm(
        chain(leave_out(chosen, needs), drop_uniform_groups(), group_relative(epsilon=epsilon)),
        policy_gradient(token_ratio(), clip(clip_low, clip_high), token_mean()),
    )


@part
def discounted_by_round(gamma: float) -> Callable[[Trajectories], Array]:
    """A function `batch -> f32[N]`: gamma^(rows of the episode after this one) times the score.

    Without the numbers of episodes and turns each row is an episode.
    """
    check_number("gamma", gamma, above=0, most=1)

    def score(batch: Trajectories) -> Array:
        before = turns_before(batch).astype(jnp.float32)
        later = ranks_within(episode_keys(batch), before, before, ~jnp.isnan(batch.scores))
        return gamma**later * batch.scores

    return score


def eapo_iterresearch(
    gamma: float = 0.995,
    epsilon: float = 1e-6,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Algorithm:
    """Efficiency-Aware Policy Optimization (EAPO of IterResearch, arXiv 2511.07327, 2025).

    In each round of an episode the policy sees a fresh prompt, of the question, its own report and the last result; a
    round is a row of the batch. Of T rounds with the final reward R round t gets

        r_t = gamma^(T - t) R,    A_t = (r_t - mean_g r) / (std_g r + epsilon),

    g: all rounds of all episodes of the question, so that short successes are worth more than long ones, and long
    episodes count more often. The loss is GSPO's, with the ratio of a round's whole sequence and its clip (clip_low,
    clip_high), averaged over rounds (eqs. 5 to 7). The paper drops rows to a multiple of its devices; here batches are
    filled up with rows that count nowhere.

    Rounds come from `rollouts.agents.agent(ENVIRONMENT, fresh=True)`: each observation is a whole prompt. gamma
    in the paper was not in what we read, and 0.995 is an example's.

    Defaults. Ours: gamma, epsilon, clip_low, clip_high.
    """
    rounds = rescore(discounted_by_round(gamma), {"episode", "first_turn", "fresh_prompts"})
    return Algorithm(
        chain(rounds, group_relative(epsilon=epsilon, over="rows")),
        policy_gradient(sequence_ratio(), clip(clip_low, clip_high), sequence_mean()),
    )


@part
def verified(threshold: float, combine: Literal["all", "mean"]) -> Callable[[Trajectories], Array]:
    """A function `batch -> f32[N]`: the score times whether all turns of its episode pass, or the share that does.

    A turn passes if its reward is at least the threshold. Without rewards of turns the score alone.
    """
    require_choice("combine", combine, ("all", "mean"))

    def score(batch: Trajectories) -> Array:
        if batch.turn_rewards is None:
            return batch.scores
        mask = turn_mask(batch)
        passed = mask & ~(batch.turn_rewards < threshold)
        episode = of_rows(batch, "episode")
        number = jnp.arange(mask.shape[0]) if episode is None else episode.astype(jnp.int32)
        turns, good = (jnp.sum(x, axis=1).astype(jnp.float32) for x in (mask, passed))
        turns, good = bucket_sums(joint_key(batch.group, number), turns, good)
        share = good / jnp.maximum(turns, 1.0)
        return batch.scores * (jnp.where(good == turns, 1.0, 0.0) if combine == "all" else share)

    return score


def deeptravel(
    threshold: float = 0.0,
    combine: Literal["all", "mean"] = "all",
    replay_share: float = 0.5,
    every: int = 4,
    failed_below: float = 1e-6,
    most_stored: int = 10_000,
    epsilon: float = 1e-6,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.0,
) -> Algorithm:
    """Verified turns and a buffer of failed queries (DeepTravel, arXiv 2509.21842, 2025; its abstract was read).

    A verifier of the whole answer comes first, and those of its turns count only where it passes:

        R = V_T prod_k V_k    (combine "mean": V_T mean_k V_k)

    V_T is the score. V_k = 1 if the reward of turn k is at least the threshold, else 0: a verifier gives a turn whose
    result the answer contradicts a reward below it. A query that failed in all its samples (mean R < failed_below) is
    kept, and asked again until it is solved: every so many steps replay_share times as many queries come from that
    buffer, of most_stored at most. What is replayed is the query, not old tokens. Then GRPO on R: advantages (epsilon)
    of whole episodes, PPO's clip (clip_low, clip_high) and kl_coefficient k3, averaged over tokens.

    The travel sandbox and the judges are the environment's; the paper's defaults were not read.

    Defaults. Ours: threshold, combine, replay_share, every, failed_below, most_stored, epsilon, clip_low, clip_high,
    kl_coefficient.
    """
    score = verified(threshold, combine)
    steps = chain(needs_turns(), rescore(score, {"turn_rewards"}), group_relative(epsilon=epsilon))
    loss = policy_gradient(token_ratio(), clip(clip_low, clip_high), token_mean())
    return Algorithm(
        steps, regularised(loss, token_mean(), kl_coefficient=kl_coefficient),
        curriculum=hard_buffer(replay_share, failed_below, most_stored, every, score),
    )  # fmt: skip
