from dataclasses import replace
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.advantages.trackers import DEFAULT_PROMPTS
from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import Count, Fraction, NonNegative, Range, Share, check_number
from jaxrl_llm.core.arguments.hyperparameters import Code, OfRun, Ours, Paper
from jaxrl_llm.core.buckets import bucket_best, bucket_moments, bucket_sums
from jaxrl_llm.core.parts import Trajectories, Transform, chain, part
from jaxrl_llm.core.transform import RunFacts
from jaxrl_llm.curriculum.budgets import apportion, check_budget
from jaxrl_llm.curriculum.compose import choose_prompts
from jaxrl_llm.curriculum.records import Array, PromptFacts, Prompts, State, changed
from jaxrl_llm.curriculum.rules import Machine, Outcome, RuleOf
from jaxrl_llm.curriculum.scores import least_tried


@method(paper="arXiv 2601.19280", test="test_curricula.py::test_gdro_against_a_loop_over_steps")
def gdro(
    controller: Paper[Literal["weights", "samples"]] = "weights",
    bins: Paper[int] = 10,
    bandit_rate: Code[float] = 0.1,
    smoothing: Code[float] = 0.1,
    loss_limit: Code[float] = 3.0,
    most_weight: Code[float] = 10.0,
    hysteresis: Code[float] = 0.0,
    uniform_share: Code[float] = 0.15,
    least_samples: Ours[int] = 2,
    most_samples: Ours[int] = 8,
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
    kl_coefficient: Ours[NonNegative] = 0.04,
    epsilon: Ours[NonNegative] = 1e-6,
    prompts: OfRun[Count | None] = None,
) -> Algorithm:
    """Group Distributionally Robust Optimization for LLM reasoning (GDRO).

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
    """
    base = grpo(clip_low, clip_high, kl_coefficient, ddof=0, epsilon=epsilon)
    if controller == "samples":
        budget = samples_by_bin(bins, least_samples, most_samples, bandit_rate, uniform_share)
        return replace(base, curriculum=choose_prompts(least_tried(), budget))
    weights = weigh_by_bin(bins, bandit_rate, smoothing, loss_limit, most_weight, hysteresis, prompts=prompts)
    return replace(base, transform=chain(base.transform, weights))


class Bins(NamedTuple):
    """How P prompts did, and the smoothed losses of K bins."""

    tries: jax.Array  # f32[P] groups
    solved: jax.Array  # f32[P] groups with a success
    bin: jax.Array  # int32[P]
    loss: jax.Array  # f32[K], NaN before the first prompt of a bin


def bin_of(accuracy: jax.Array, old: jax.Array, count: int, hysteresis: jax.Array | float = 0.0) -> jax.Array:
    """int32[n]: the bin floor(count * accuracy) of n accuracies, the last one closed.

    A bin above the `old` one needs an accuracy of at least its lower edge + hysteresis, one below at most its upper
    edge - hysteresis.
    """

    def at(x: jax.Array) -> jax.Array:
        return jnp.clip(jnp.floor(count * x + 1e-6), 0, count - 1).astype(jnp.int32)

    target = at(accuracy)
    # An upper edge belongs to the bin below it here, unlike in `at`.
    below = jnp.ceil(count * (accuracy + hysteresis) - 1e-6) - 1
    lower = jnp.maximum(target, jnp.clip(below, 0, count - 1).astype(jnp.int32))
    up, down = jnp.maximum(old, at(accuracy - hysteresis)), jnp.minimum(old, lower)
    return jnp.where(target > old, up, jnp.where(target < old, down, old))


def smoothed_losses(before: jax.Array, losses: jax.Array, rate: jax.Array | float) -> jax.Array:
    """S <- (1 - rate) S + rate l, f32[K]; the first l as it is; S stays where l is NaN."""
    after = jnp.where(jnp.isnan(before), losses, (1 - rate) * before + rate * losses)
    return jnp.where(jnp.isnan(losses), before, after)


def bin_weights(losses: jax.Array, strength: jax.Array | float, limit: jax.Array | float) -> jax.Array:
    """exp(strength clip(S, -limit, limit)), f32[K]; 1 where S is NaN."""
    return jnp.exp(strength * jnp.clip(jnp.nan_to_num(losses), -limit, limit))


@part
def weigh_by_bin(
    bins: Count = 10,
    strength: NonNegative = 0.1,
    smoothing: Fraction = 0.1,
    limit: NonNegative = 3.0,
    most: NonNegative = 10.0,
    hysteresis: NonNegative = 0.0,
    success: float = 0.5,
    prompts: Count | None = None,
) -> Transform:
    """Multiply advantages by a weight of the prompt's bin, larger for bins in which the policy fails more.

    The bin of a prompt is that of the share of its groups, this one included, in which a score is above `success`. With
    l the mean over the batch's prompts in a bin of the share of failures, 1 - mean score,

        S <- (1 - smoothing) S + smoothing l,    A <- A min(exp(strength clip(S, -limit, limit)), most)

    The state has an entry for each prompt of the run (`RunFacts`), or `prompts` entries if given, or 4096 if neither is
    known; a prompt's entry is prompt_id modulo their number.
    """

    def start(facts: RunFacts) -> Bins:
        P = prompts or facts.prompts or DEFAULT_PROMPTS
        return Bins(jnp.zeros(P), jnp.zeros(P), jnp.zeros(P, jnp.int32), jnp.full(bins, jnp.nan))

    def apply(state: Bins, batch: Trajectories) -> tuple[Bins, Trajectories]:
        P = state.tries.shape[0]
        index, r = jnp.mod(batch.prompt_id, P), batch.scores
        known = ~jnp.isnan(r)
        hit = bucket_best(index, jnp.where(known, (r > success).astype(jnp.float32), jnp.nan))
        tries, solved = state.tries[index] + 1, state.solved[index] + hit
        accuracy = solved / tries
        seen = state.tries[index] > 0
        at = jnp.where(seen, bin_of(accuracy, state.bin[index], bins, hysteresis), bin_of(accuracy, 0 * index, bins))
        _, mean, _ = bucket_moments(index, r)
        (n,) = bucket_sums(index, known.astype(jnp.float32))
        share = jnp.where(known, 1 / jnp.maximum(n, 1), 0.0)  # so that each prompt counts once
        mass = jax.ops.segment_sum(share, at, bins)
        total = jax.ops.segment_sum(share * (1 - mean), at, bins)
        loss = smoothed_losses(state.loss, jnp.where(mass > 0, total / jnp.maximum(mass, 1e-9), jnp.nan), smoothing)
        weight = jnp.minimum(bin_weights(loss, strength, limit), most)[at]
        place = jnp.where(known, index, P)  # rows of a prompt write the same values; unscored ones are dropped
        after = Bins(
            state.tries.at[place].set(tries, mode="drop"), state.solved.at[place].set(solved, mode="drop"),
            state.bin.at[place].set(at, mode="drop"), loss,
        )  # fmt: skip
        return after, batch.replace(advantages=batch.need("advantages") * weight[:, None])

    return Transform(start, apply)


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
    bins: Annotated[int, Range(least=1, most=4096)] = 10,
    least: Annotated[int, Range(least=1, most=4096)] = 2,
    most: Annotated[int, Range(least=1, most=4096)] = 8,
    strength: NonNegative = 0.1,
    uniform: Share = 0.15,
    success: float = 0.5,
) -> RuleOf:
    """Bins of prompts by difficulty, each of which gets the number of samples that a bandit prefers for it.

    The bin of a prompt is that of the share of its steps in which a reward is above `success` (0 before the first). For
    bin b and the numbers n from `least` to `most`, score_b[n] -= mean over the step's prompts in b of 1 - mean reward,
    for the n that was used, and

        p_b = (1 - uniform) softmax(strength score_b) + uniform / (number of n)

    The numbers maximise sum_b log p_b(n_b) with the step's total, see `best_arms`; where no choice has the exact total,
    single prompts get a sample more or less. InputError where `least` to `most` samples of each do not allow the total.
    """
    check_number("samples_by_bin: least", least, most=most)
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

    def observe(state: State, outcome: Outcome) -> State:
        results, score, at = outcome.results, state["score"].copy(), bin_of(state, outcome.before)
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
