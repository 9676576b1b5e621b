"""Reward-Aware Policy Optimization (RAPO, Fathom-DeepResearch)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.advantages.group import group_relative, uniform_groups
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.hyperparameters import OURS, PAPER
from jaxrl_llm.core.ranges import Fraction, NonNegative, Share, ZeroOrOne
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.source import Curriculum, MakeCurriculum, Step
from jaxrl_llm.core.trajectory import Trajectories, bucket_sums
from jaxrl_llm.core.transform import Transform, chain, stateless
from jaxrl_llm.curriculum.excluded import Why, left_out_metrics, where
from jaxrl_llm.curriculum.records import State
from jaxrl_llm.objectives import clip, policy_gradient, sequence_mean, token_ratio
from jaxrl_llm.replay.into_groups import none_above, outcomes, swapped_successes


@method(
    paper="arXiv 2509.24107",
    year=2025,
    test="test_replayed.py::test_rapo_worked_example_and_loop",
    lacks={"step_rewards": ("the second stage's reward for single calls of tools", "a judge of calls")},
)
def rapo_reward_aware(
    solved: Annotated[Fraction, PAPER] = 0.9,
    success: Annotated[float, PAPER] = 0.5,
    clip_low: Annotated[NonNegative, OURS] = 0.2,
    clip_high: Annotated[NonNegative, OURS] = 0.2,
    ddof: Annotated[ZeroOrOne, PAPER] = 0,
    epsilon: Annotated[NonNegative, OURS] = 1e-6,
    accuracy: Annotated[str | None, OURS] = None,
) -> Algorithm:
    """Reward-Aware Policy Optimization (RAPO, Fathom-DeepResearch).

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
    """
    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high), sequence_mean())
    transform = chain(group_relative(ddof=ddof, epsilon=epsilon), rescale_to_informative())
    replay = swapped_successes(none_above(success), success, 1, "random", accuracy)
    return Algorithm(transform, objective, epochs_without_solved(solved, success, accuracy), replay=replay)


@part
def rescale_to_informative() -> Transform:
    """Multiply the advantages by the number of groups over that of groups with different rewards.

    Groups without a scored row do not count.
    """

    def apply(batch: Trajectories) -> Trajectories:
        known = ~jnp.isnan(batch.scores)
        (size,) = bucket_sums(batch.group, known.astype(jnp.float32))
        each = jnp.where(known, 1.0 / jnp.maximum(size, 1.0), 0.0)  # sums to 1 over a group
        good = jnp.sum(jnp.where(uniform_groups(batch), 0.0, each))
        factor = jnp.sum(each) / jnp.where(good > 0, good, 1.0)
        return batch.replace(advantages=batch.need("advantages") * factor)

    return stateless(apply)


@part
def epochs_without_solved(solved: Share = 0.9, success: float = 0.0, component: str | None = None) -> MakeCurriculum:
    """Epochs in random order; at the end of each, prompts whose last solve rate is at least `solved` are dropped.

    The solve rate is the share of a group's samples with an outcome above `success`. component: the reward that is the
    outcome; None: their combination. If all prompts are dropped, all come back: metric "curriculum/restarts". Metric
    "curriculum/left_out/solved": the share of dropped ones.
    """

    def make(rows: Sequence[dict[str, Any]], seed: int) -> Curriculum:
        number = len(rows)

        def epoch(state: State) -> State:
            left = state["left"] & ~(state["rate"] >= solved)
            restarts = state["restarts"] + (not left.any())
            left = left if left.any() else np.ones(number, bool)
            order = np.random.default_rng([seed, state["epoch"] + 1]).permutation(np.flatnonzero(left))
            rate = np.where(left & (state["rate"] >= solved), 0.0, state["rate"]).astype(np.float32)
            return {
                "order": order.astype(np.int32), "at": 0, "epoch": state["epoch"] + 1, "left": left, "rate": rate,
                "restarts": int(restarts),
            }  # fmt: skip

        def init() -> State:
            return epoch({"left": np.ones(number, bool), "rate": np.zeros(number, np.float32), "epoch": -1,
                          "restarts": 0})  # fmt: skip

        def select(state: State, count: int) -> tuple[np.ndarray, State]:
            chosen = [np.zeros(0, np.int32)]
            while count:
                if state["at"] == len(state["order"]):
                    state = epoch(state)
                taken = state["order"][state["at"] : state["at"] + count]
                chosen.append(taken)
                state, count = {**state, "at": state["at"] + len(taken)}, count - len(taken)
            return np.concatenate(chosen), state

        def observe(state: State, step: Step) -> State:
            outcome, prompt = outcomes(step.scored, component), np.asarray(step.scored.batch.prompt_id)
            known, rate = ~np.isnan(outcome), state["rate"].copy()
            ids, index = np.unique(prompt[known], return_inverse=True)
            if len(ids):
                rate[ids] = np.bincount(index, outcome[known] > success) / np.bincount(index)
            return {**state, "rate": rate}

        def left_out(state: State) -> np.ndarray:
            return where(Why.SOLVED, ~state["left"])

        def metrics(state: State) -> dict[str, float]:
            return {
                **left_out_metrics(left_out(state), (Why.SOLVED,)),
                "curriculum/restarts": float(state["restarts"]),
            }

        return Curriculum(init, select, observe, metrics=metrics, excluded=left_out)

    return make
