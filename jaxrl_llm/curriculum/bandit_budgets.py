"""A rule of a curriculum that learns how many samples prompts of each difficulty get, as arms of a bandit."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.curriculum.budgets import apportion, check_budget
from jaxrl_llm.curriculum.compose import Machine, RuleOf
from jaxrl_llm.curriculum.records import Array, PromptFacts, Prompts, State, changed
from jaxrl_llm.rollouts.runtime.group_results import Results


def best_arms(log_p: Array, count: Array, arms: Array, total: int) -> Array:
    """int64[B]: the arm of each bin that maximises sum log p, such that sum count arm is as near to `total` as can be.

    log_p f64[B, A], count int[B] prompts in each bin, arms int[A] samples of each. Of two totals as near, the one with
    the larger sum of log p. Dynamic programming over the bins, on the running total.

    >>> p = np.array([[0.6, 0.3, 0.1], [0.2, 0.3, 0.5]])
    >>> best_arms(np.log(p), np.array([3, 1]), np.array([2, 4, 8]), 16).tolist()
    [4, 4]
    """
    B, size = len(count), int(count.sum() * arms.max()) + 1
    value, choice = np.full(size, -np.inf), np.zeros((B, size), np.int64)
    value[0] = 0.0
    for b in range(B):
        new = np.full(size, -np.inf)
        for number, arm in enumerate(arms):
            step = int(count[b] * arm)
            moved = np.full(size, -np.inf)
            moved[step:] = value[: size - step] + log_p[b, number]
            better = moved > new
            new[better], choice[b, better] = moved[better], number
        value = new
    reached = np.flatnonzero(value > -np.inf)
    gap = np.abs(reached - total)
    near = reached[gap == gap.min()]
    at, out = int(near[np.argmax(value[near])]), np.zeros(B, np.int64)
    for b in reversed(range(B)):
        out[b] = arms[choice[b, at]]
        at -= int(count[b] * out[b])
    return out


@part
def samples_by_bin(
    bins: int = 10, least: int = 2, most: int = 8, strength: float = 0.1, uniform: float = 0.15, success: float = 0.5
) -> RuleOf:
    """Bins of prompts by difficulty, each of which gets the number of samples that a bandit prefers for it.

    The bin of a prompt is that of the share of its steps in which a reward is above `success` (0 before the first). For
    bin b and the numbers n from `least` to `most`, score_b[n] -= mean over the step's prompts in b of 1 - mean reward,
    for the n that was used, and

        p_b = (1 - uniform) softmax(strength score_b) + uniform / (number of n)

    The numbers maximise sum_b log p_b(n_b) with the step's total, see `best_arms`; where no choice has the exact total,
    single prompts get a sample more or less. InputError where `least` to `most` samples of each do not allow the total.
    """
    for name, number in {"bins": bins, "least": least, "most": most}.items():
        check_number(f"samples_by_bin: {name}", number, least=1, most=4096, whole=True)
    check_number("samples_by_bin: least", least, most=most)
    check_number("samples_by_bin: strength", strength, least=0)
    check_number("samples_by_bin: uniform", uniform, above=0, most=1)
    arms = np.arange(least, most + 1)

    def bin_of(state: State, prompts: Prompts) -> Array:
        accuracy = state["solved"][prompts.ids] / np.maximum(prompts.tries, 1)
        return np.clip(np.floor(bins * accuracy + 1e-6), 0, bins - 1).astype(np.int64)

    def counts(state: State, prompts: Prompts, total: int, random: np.random.Generator) -> Array:
        check_budget("samples_by_bin", len(prompts.ids), total, least, most)
        found, place = np.unique(bin_of(state, prompts), return_inverse=True)
        score = strength * state["score"][found]
        p = np.exp(score - score.max(axis=1, keepdims=True))
        p = (1 - uniform) * p / p.sum(axis=1, keepdims=True) + uniform / len(arms)
        wanted = best_arms(np.log(p), np.bincount(place), arms, total)[place]
        return apportion(wanted.astype(np.float64), total) if wanted.sum() != total else wanted

    def observe(state: State, results: Results, before: Prompts, everything: Any) -> State:
        score, at = state["score"].copy(), bin_of(state, before)
        for b in np.unique(at):
            inside = at == b
            arm = int(np.clip(np.rint(np.median(results.samples[inside])), least, most)) - least
            score[b, arm] -= np.mean(1 - results.mean[inside])
        hit = state["solved"][results.ids] + (results.best > success)
        return {"score": score, "solved": changed(state["solved"], results.ids, hit)}

    def make(facts: PromptFacts) -> Machine:
        start = {"score": np.zeros((bins, len(arms))), "solved": np.zeros(facts.size, np.int32)}
        return Machine(start, counts=counts, observe=observe)

    return make
