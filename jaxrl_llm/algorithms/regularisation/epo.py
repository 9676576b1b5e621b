from typing import NamedTuple

import jax.numpy as jnp

from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.method import Algorithm, method, run_needs
from jaxrl_llm.core.annotations import AtLeastOne, AverageName, Code, NonNegative, Number, OfRun, Paper
from jaxrl_llm.core.parts import Array, Objective, State, Trajectories, Transform, chain, part, totals_of, weighted
from jaxrl_llm.objectives import entropy, entropy_corridor
from jaxrl_llm.objectives.averages import average_part
from jaxrl_llm.objectives.ratios import over_span


@method(paper="arXiv 2509.22576", test="test_regularised.py::test_epo_by_loop")
@run_needs(turns="episodes of several turns")
def epo(
    entropy_coefficient: Paper[NonNegative] = 0.001,
    smoothing: Paper[float] = 0.1,
    corridor_low: Paper[NonNegative] = 0.0,
    corridor_high: Paper[NonNegative] = 2.0,
    decay: Code[NonNegative] = 3.0,
    clip_low: Code[NonNegative] = 0.2,
    clip_high: Code[NonNegative] = 0.2,
    kl_coefficient: Code[NonNegative] = 0.01,
    average: Code[AverageName] = "token",
    total_steps: OfRun[AtLeastOne | None] = None,
) -> Algorithm:
    """Entropy-regularized Policy Optimization for multi-turn agents (EPO).

    loss = GRPO - lambda (L_H - beta_k L_smooth): an entropy bonus L_H, averaged over the tokens of a turn, then over
    turns, then over trajectories, and a penalty, averaged the same way, on token entropies outside a corridor around
    Hbar, the mean token entropy of the run so far:

        L_smooth = mean of alpha [max(0, k_l Hbar - H) + max(0, H - k_r Hbar)],  beta_k = 1 + exp(-g k / floor(K / 2))

    lambda = entropy_coefficient, alpha = smoothing (0.05 for ScienceWorld), k_l = corridor_low, k_r = corridor_high,
    g = decay, K = total_steps (150 where None), k the number of updates so far. L_smooth is 0 before the first update.
    The rest is GRPO with clip_low, clip_high, kl_coefficient (k3) and average (`grpo`'s).

    The released code penalises with a constant outside the corridor, which has no gradient, and bounds the loss of bad
    actions by 3 |A|. The hinge here is the paper's. According to the code's configuration its g is the paper's.
    """
    base = grpo(clip_low, clip_high, kl_coefficient, average=average)
    total = 150 if total_steps is None else total_steps
    corridor = corridor_of_history(corridor_low, corridor_high, smoothing, total, decay)
    return Algorithm(chain(base.transform, corridor), base.objective - entropy_coefficient * smoothed_entropy())


@average_part({"turns"})
def turn_mean(values: Array, batch: Trajectories) -> Array:
    """Mean over sequences of the mean over turns of the mean over a turn's tokens."""
    weights = batch.loss_weights
    size = over_span(jnp.abs(weights), batch, "turn", mean=False)
    of_turn = jnp.where(size > 0, 1 / jnp.where(size > 0, size, 1.0), 0.0)
    turns = jnp.sum(of_turn * weights, axis=1)
    rows = jnp.sum(weighted(values, batch) * of_turn, axis=1) / jnp.where(turns > 0, turns, 1.0)
    return jnp.sum(rows) / totals_of(batch)["sequences"]


class History(NamedTuple):
    """The sum of a metric over past updates, and their number."""

    total: Array  # f32[]
    updates: Array  # f32[]


def with_last(history: History, batch: Trajectories, metric: str) -> History:
    """Add the metric of the last update, if there was one."""
    if batch.feedback is None or metric not in batch.feedback:
        return history
    known = batch.feedback["updates"] > 0
    total = history.total + jnp.where(known, batch.feedback[metric], 0.0)
    return History(total, history.updates + known.astype(jnp.float32))


def phase_weight(k: Number, total: Number, decay: Number) -> Array:
    """1 + exp(-decay k / floor(total / 2)): from 2 at the start of the run towards 1 (2509.22576)."""
    return 1 + jnp.exp(-decay * k / jnp.maximum(jnp.floor(jnp.asarray(total, jnp.float32) / 2), 1))


@part
def corridor_of_history(
    low: NonNegative, high: NonNegative, strength: Number, total: AtLeastOne, decay: Number
) -> Transform:
    """Write a corridor around the mean token entropy H of past updates as controls.

    "entropy_low" = low H, "entropy_high" = high H, and "corridor" = strength * `phase_weight`, 0 before the first
    update.
    """

    def apply(history: History, batch: Trajectories) -> tuple[State, Trajectories]:
        history = with_last(history, batch, "entropy")
        mean = history.total / jnp.maximum(history.updates, 1)
        weight = jnp.where(history.updates > 0, strength * phase_weight(history.updates, total, decay), 0.0)
        return history, batch.with_controls(entropy_low=low * mean, entropy_high=high * mean, corridor=weight)

    return Transform(lambda: History(jnp.float32(0), jnp.float32(0)), apply, frozenset({"feedback"}))


@part
def smoothed_entropy() -> Objective:
    """Entropy minus the control "corridor" times its distance from the corridor, both averaged by `turn_mean`."""
    average = turn_mean()
    return entropy(average, "entropy/turns") - "corridor" * entropy_corridor("entropy_low", "entropy_high", average)
