"""Rewards, weights and advantages as functions of a batch, of which the methods of `shaped_reward` are composed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp

from jaxrl_llm.advantages.difficulty import (
    easiness_weight,
    promising,
    subgroup_advantage,
)
from jaxrl_llm.advantages.multi_reward import component as component_of
from jaxrl_llm.advantages.multipliers import row_mean
from jaxrl_llm.core.choices import Rule
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Array, Trajectories
from jaxrl_llm.rewards import transforms as rewards
from jaxrl_llm.rewards.shaping import overlong_penalty


@part
def graded_by_soundness(success: float, penalty: float) -> Callable[[Trajectories], Array]:
    """A function `batch -> f32[N]`: the rewards of `fapo` before its length penalty."""
    return lambda b: rewards.graded(b.scores > success, rewards.flawed_rows(b), penalty)


@part
def with_overlong_penalty(longest: Any, share: Any) -> Callable[[Trajectories], Array]:
    """A function `batch -> f32[N]`: the scores plus `overlong_penalty` over the last share of the longest row."""
    buffer: Any = jnp.maximum(share * longest, 1e-6)
    return lambda b: b.scores + overlong_penalty(b.lengths, longest, buffer)


@part
def given_budgets(otherwise: float) -> Callable[[Trajectories], Array]:
    """A function `batch -> f32[N]`: info["budget"], or another budget where there is none."""

    def budgets(b: Trajectories) -> Array:
        given = (b.info or {}).get("budget", jnp.full(b.group.shape, jnp.nan))
        return jnp.where(jnp.isnan(given), otherwise, given).astype(jnp.float32)

    return budgets


@part
def reward_within_budget(
    budgets: Callable[[Trajectories], Array], success: float, longest: float, scale: float, slope: float, flat: bool
) -> Callable[[Trajectories], Array]:
    """A function `batch -> f32[N]`: the rewards of `hbpo`."""

    def reward(b: Trajectories) -> Array:
        held = rewards.budget_reward(b.lengths, budgets(b), longest, scale, slope, flat)
        return jnp.where(b.scores > success, held, 0.0)

    return reward


@part
def advantage_within_budget(
    budgets: Callable[[Trajectories], Array], longest: float, scale: float, coefficient: float, epsilon: float
) -> Callable[[Trajectories], Array]:
    """A function `batch -> f32[N]`: the advantages of `hbpo`."""

    def advantage(b: Trajectories) -> Array:
        level = rewards.budget_level(budgets(b), longest, scale)
        return subgroup_advantage(b.scores, level, b.group, budgets(b), coefficient=coefficient, epsilon=epsilon)

    return advantage


@part
def less_for_likely(coefficient: float, offset: float) -> Callable[[Trajectories], Array]:
    """A function `batch -> f32[N]`: the rewards of `unlikeliness_reward`."""

    def reward(b: Trajectories) -> Array:
        return rewards.rank_penalty(b.scores, row_mean(b.behaviour_logp, b.action_mask), b.group, coefficient, offset)

    return reward


@part
def with_useful_range(component: str, low: float, high: float) -> Callable[[Trajectories], Array]:
    """A function `batch -> f32[N]`: the score with one component rescaled from its useful range."""

    def rescaled(b: Trajectories) -> Array:
        part = component_of(b, component)
        return b.scores + jnp.where(jnp.isnan(part), 0.0, rewards.useful_range(part, low, high) - part)

    return rescaled


@part
def weight_of_difficulty(least: float) -> Callable[[Trajectories], Array]:
    """A function `batch -> f32[N]`: `easiness_weight` of the scores."""

    def weight(b: Trajectories) -> Array:
        return easiness_weight(b.scores, b.group, least=least)

    return weight


@part
def times_weight_of_difficulty(least: float) -> Callable[[Trajectories], Array]:
    """A function `batch -> f32[N]`: the scores times `weight_of_difficulty`."""
    return lambda b: b.scores * weight_of_difficulty(least)(b)


@part
def with_tool_bonus(bonus: float) -> Callable[[Trajectories], Array]:
    """A function `batch -> f32[N]`: the scores, plus the bonus where a call of a tool worked; 0 without such calls."""

    def score(b: Trajectories) -> Array:
        calls, failed = ((b.info or {}).get(name) for name in ("calls", "failed_calls"))
        if calls is None or failed is None:
            return b.scores
        return b.scores + bonus * (jnp.nan_to_num(calls) > jnp.nan_to_num(failed))

    return score


@part
def weight_of_promise(
    rule: Rule,
    weight: float,
    other_weight: float,
    success: float,
    hard: float,
    edges: Literal["strict", "lenient"],
    longest: float,
) -> Callable[[Trajectories], Array]:
    """A function `batch -> f32[N]`: the weight of a prompt that satisfies a rule of `adora`, or the other."""

    def factor(b: Trajectories) -> Array:
        cut_off = b.truncated | (b.lengths >= longest)
        now = promising(b.scores, b.lengths, cut_off, b.group, rule=rule, success=success, hard=hard, edges=edges)
        return jnp.where(now, weight, other_weight)

    return factor
