import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxrl_llm.advantages import group_relative
from jaxrl_llm.advantages.multi_reward import parse_weights
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import AtLeastOne, NonNegative, OfRun, Ours, Paper, ZeroOrOne
from jaxrl_llm.core.parts import chain, part
from jaxrl_llm.core.source import Replay
from jaxrl_llm.objectives import clipped_policy, scale_by_info, sequence_mean
from jaxrl_llm.replay.base import TOLERANCE, group_moments, mixed
from jaxrl_llm.replay.buffers import Store, keep, take, to_rows
from jaxrl_llm.replay.into_groups import component_scores
from jaxrl_llm.rewards.scoring import Scored


@method(paper="arXiv 2512.07478", test="test_replayed.py::test_vspo_is_the_loop")
def vspo_prs(
    copies: Ours[float] = 2.0,
    highest: Ours[float | None] = None,
    clip_low: Paper[NonNegative] = 0.2,
    clip_high: Paper[NonNegative] = 0.2,
    kl_coefficient: Paper[NonNegative] = 0.001,
    ddof: Ours[ZeroOrOne] = 1,
    epsilon: Ours[NonNegative] = 1e-6,
    reward_stages: OfRun[str | None] = None,
) -> Algorithm:
    """VSPO with PRS (Enhancing Agentic RL with Progressive Reward Shaping).

    Value-based Sampling Policy Optimization: groups of equal rewards are replaced by other groups of the batch, drawn
    with probabilities proportional to difficulty times uncertainty, and repeated prompts are damped:

        V_g = (highest - mean_g) std_g,    A <- A min(n_g, copies)/n_g  for a group that is there n_g times

    The loss is GRPO's, the sequence mean of -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) + kl_coefficient k3,
    A with ddof and epsilon. Progressive Reward Shaping: a stage counts only where those before it are met (> 0.5);
    reward_stages "format=0.1,answer=1" names the rewards in the order of the stages, and their weights. In a run they
    are its rewards in their order, and without them there is one stage, the reward. highest is that of the reward, by
    default the sum of the stages' positive weights, at least 1. The paper's stages, of its short answers and, by a
    judge, of its long ones:

        --rewards 'one_answer*0.1' 'valid_calls*0.1' answer_bleu
        --rewards 'one_answer*0.1' 'judge*0.1' --rollout judged_grades

    The paper was not available to us: the damping, the form of the stages and that of the length-aware BLEU are our
    reading of its summary. With --tools or --environment the rows of a group are those of episodes, and its copies have
    their observations, which stay masked.
    """
    objective = clipped_policy(clip_low, clip_high, sequence_mean(), kl_coefficient=kl_coefficient)
    weights = parse_weights(reward_stages or "")
    most = max(1.0, sum(max(weight, 0.0) for weight in weights.values())) if highest is None else highest
    replay = valued_groups(copies, most)
    transform = chain(group_relative(ddof=ddof, epsilon=epsilon), scale_by_info("copy_weight"))
    return Algorithm(transform, objective, replay=with_staged_reward(replay, weights) if weights else replay)


@part
def valued_groups(copies: AtLeastOne = 2.0, highest: float = 1.0) -> Replay:
    """Replace groups of equal rewards by copies of other groups of the batch, drawn by their value.

    The value of a group is `group_value`, its draws are independent. A group that is there n times has the factor
    info["copy_weight"] = min(n, copies)/n on each row, so that one prompt counts as `copies` at most. Copies have
    info["replayed"]. The batch stays as it is if no group has different rewards. Nothing is stored.
    """

    def mix(state: Store, scored: Scored, step: int, seed: int) -> tuple[Scored, Store]:
        fresh, group = to_rows(scored), np.asarray(scored.batch.group)
        mean, deviation = group_moments(scored)
        numbers, first = np.unique(group, return_index=True)
        value = group_value(mean[first], deviation[first], highest)
        free = numbers[~(deviation[first] > TOLERANCE)]
        if len(free) == len(numbers) or not len(free):
            weight: Any = np.ones(len(group), np.float32)
            found = mixed(scored, fresh, {}, group, numbers[:0])
            return found._replace(batch=found.batch.with_info(copy_weight=weight)), state
        even = (deviation[first] > TOLERANCE) / (len(numbers) - len(free))
        weights = value / value.sum() if value.sum() > 0 else even
        drawn = np.random.default_rng(seed).choice(numbers, len(free), p=weights)
        times = {int(number): 1 + int((drawn == number).sum()) for number in numbers}
        left = ~np.isin(group, free)
        members = [np.flatnonzero(group == number) for number in drawn]
        index = np.concatenate(members)
        factor = np.asarray([min(times[int(number)], copies) / times[int(number)] for number in group], np.float32)
        fresh = fresh | {"row:info:copy_weight": factor}
        places = np.repeat(free, [len(rows) for rows in members])
        return mixed(scored, keep(fresh, left), take(fresh, index), group[left], places), state

    return Replay(dict, mix, frozenset({"replayed", "copy_weight"}))


def group_value(mean: np.ndarray, deviation: np.ndarray, highest: float = 1.0) -> np.ndarray:
    """(highest - mean) * deviation, at least 0: difficulty times uncertainty of a group; 0 where nothing is scored.

    >>> group_value(np.array([0.2, 0.8]), np.array([0.4, 0.4])).round(2)
    array([0.32, 0.08])
    """
    return np.where(deviation > TOLERANCE, np.nan_to_num(np.maximum(highest - mean, 0.0) * deviation), 0.0)


@part
def with_staged_reward(replay: Replay, weights: Mapping[str, float]) -> Replay:
    """The replay after the rewards are combined in stages: see `staged_reward`."""

    def mix(state: Store, scored: Scored, step: int, seed: int) -> tuple[Scored, Store]:
        total = staged_reward({name: component_scores(scored, name) for name in weights}, weights)
        reward = np.where(np.isnan(np.asarray(scored.batch.need("reward"))), np.nan, total).astype(np.float32)
        return replay.mix(state, scored._replace(batch=scored.batch.replace(reward=reward)), step, seed)

    return dataclasses.replace(replay, mix=mix)


def staged_reward(parts: Mapping[str, np.ndarray], weights: Mapping[str, float]) -> np.ndarray:
    """sum_k w_k s_k prod_{j < k} 1[s_j > 0.5], f64[N]: a component counts only where all before it are met.

    >>> parts = {"form": np.array([0, 1, 1]), "answer": np.array([1, 0.2, 1])}
    >>> staged_reward(parts, {"form": 0.1, "answer": 1.0})
    array([0. , 0.3, 1.1])
    """
    met, total = np.asarray(True), np.asarray(0.0)
    for name, weight in weights.items():
        total = total + weight * np.where(met, parts[name], 0.0)
        met = met & (np.asarray(parts[name]) > 0.5)
    return total
