from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages import group_relative, weigh_advantages
from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import AtLeastOne, AverageName, Code, NonNegative, OfRun, Ours, Paper, Rule
from jaxrl_llm.core.buckets import bucket_moments
from jaxrl_llm.core.parts import Array, Trajectories, batch_part, chain

Edges = Literal["lenient", "strict"]


@method(paper="arXiv 2602.10019", test="test_shaped_reward.py::test_adora_against_a_loop")
def adora(
    rule: Code[Rule] = "length",
    weight: Code[float] = 1.0,
    other_weight: Code[NonNegative] = 0.1,
    success: Ours[float] = 0.5,
    hard: Paper[float] = 0.5,
    edges: Code[Edges] = "strict",
    clip_low: Code[NonNegative] = 0.2,
    clip_high: Code[NonNegative] = 0.2,
    kl_coefficient: Code[NonNegative] = 0.001,
    average: Code[AverageName] = "token",
    max_length: OfRun[AtLeastOne | None] = None,
) -> Algorithm:
    """Advantage Dynamics via Online Rollout Adaptation (ADORA).

    Multiplies GRPO's advantages by `weight` for prompts that satisfy a rule in this batch, by `other_weight` for the
    others. rule: "length", the longest correct sample (reward > success) is longer than the mean wrong one;
    "difficulty", at most the share `hard` of the samples is correct; "or" and "and" of both. Wrong samples that are
    truncated, or have max_length tokens (4054 where None), are ignored. edges, for groups without a correct sample or a
    wrong one that is not ignored: "strict" is the released code for text, "lenient" that for images
    (`length_gain`).

    The code has the length rule with weights 1 and 0.1. According to reviews of the paper this is its choice for
    images; for text it combines both rules, in an unspecified way, with weights 2 and 1. The code's rewards need
    success 1.01. The rest is GRPO with clip_low, clip_high, kl_coefficient and average (the code for images has
    "sequence").
    """
    longest = 4054.0 if max_length is None else max_length
    promise = weight_of_promise(rule, weight, other_weight, success, hard, edges, longest)
    objective = grpo(clip_low, clip_high, kl_coefficient, average=average).objective
    return Algorithm(chain(group_relative(), weigh_advantages(promise)), objective)


def length_gain(correct: Array, wrong: Array, lengths: Array, group: Array, *, edges: Edges = "strict") -> Array:
    """bool[N]: in the row's group the longest correct sample is longer than the mean of the wrong ones (2602.10019).

    correct, wrong bool[N] (a row may be neither), lengths f32[N]. edges, for groups without a correct or without a
    wrong sample: "strict" is false without a correct one, else true; "lenient" is true without a correct one, else
    false.
    """
    _, index = jnp.unique(group, return_inverse=True, size=group.shape[0])
    longest = jax.ops.segment_max(jnp.where(correct, lengths, -jnp.inf), index, num_segments=group.shape[0])[index]
    wrongs, mean, _ = bucket_moments(group, jnp.where(wrong, lengths, jnp.nan))
    some = longest > -jnp.inf
    if edges == "strict":
        return some & ((wrongs == 0) | (longest > mean))
    return ~some | ((wrongs > 0) & (longest > mean))


def promising(
    reward: Array,
    lengths: Array,
    cut_off: Array,
    group: Array,
    *,
    rule: Rule = "length",
    success: float | Array = 0.5,
    hard: float | Array = 0.5,
    edges: Edges = "strict",
) -> Array:
    """bool[N]: whether a row's prompt gets a higher weight now (ADORA, 2602.10019).

    rule "length": `length_gain`, where a truncated sample (cut_off bool[N]) that is not correct does not count as
    wrong; "difficulty": the share of samples with reward > success is at most `hard`; "or", "and": both combined.
    """
    correct, known = reward > success, ~jnp.isnan(reward)
    gain = length_gain(correct, known & ~correct & ~cut_off, lengths, group, edges=edges)
    _, rate, _ = bucket_moments(group, jnp.where(known, correct.astype(jnp.float32), jnp.nan))
    difficult = rate <= hard
    return {"length": gain, "difficulty": difficult, "or": gain | difficult, "and": gain & difficult}[rule]


@batch_part
def weight_of_promise(
    b: Trajectories,
    rule: Rule,
    weight: float,
    other_weight: float,
    success: float,
    hard: float,
    edges: Edges,
    longest: float,
) -> Array:
    """A function `batch -> f32[N]`: the weight of a prompt that satisfies a rule of `adora`, or the other."""
    cut_off = b.truncated | (b.lengths >= longest)
    now = promising(b.scores, b.lengths, cut_off, b.group, rule=rule, success=success, hard=hard, edges=edges)
    return jnp.where(now, weight, other_weight)
