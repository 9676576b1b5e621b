"""The KL penalty as a reward of each token, and its coefficient as a controller."""

from collections.abc import Callable

import jax.numpy as jnp

from jaxrl_llm.core.annotations import Estimator, NonNegativeNumber, Number, PositiveNumber, Source
from jaxrl_llm.core.log_ratios import ESTIMATORS, log_ratio, needed, source
from jaxrl_llm.core.parts import Array, State, Trajectories, Transform, control, part, row_means, stateless


def _divergence(batch: Trajectories, estimator: str, of: str, to: str) -> Array:
    """The estimated divergence f32[N, L] at each action, 0 elsewhere."""
    return ESTIMATORS[estimator](log_ratio(source(batch, of), source(batch, to), batch.action_mask))


@part
def kl_reward(
    coefficient: Number | str, estimator: Estimator = "k1", of: Source = "behaviour", to: Source = "reference"
) -> Transform:
    """Add -coefficient * k(log pi_of - log pi_to) to each action's reward; k is usually the plain log-ratio, k1.

    coefficient: a number, or the name of a control. estimator, and the log-probability sources `of` and `to`: see
    `objectives.kl`. Chain this before the transform that turns token rewards into advantages.
    """

    def apply(batch: Trajectories) -> Trajectories:
        beta = control(batch, coefficient) if isinstance(coefficient, str) else coefficient
        before = jnp.zeros(batch.tokens.shape) if batch.token_rewards is None else batch.token_rewards
        return batch.replace(token_rewards=before - beta * _divergence(batch, estimator, of, to))

    return stateless(apply, needed(of) | needed(to))


@part
def adaptive_kl(
    start: NonNegativeNumber = 0.001,
    target: PositiveNumber = 0.1,
    horizon: PositiveNumber = 10000.0,
    name: str = "kl_coefficient",
    estimator: Estimator = "k1",
    of: Source = "behaviour",
    to: Source = "reference",
) -> Transform:
    """Adapt a KL coefficient so that the divergence stays near a target (1909.08593), and write it as a control:

        e = clip(KL / target - 1, -0.2, 0.2),    beta <- beta (1 + e n / horizon)

    KL is the mean over the batch's n sequences of the mean over their tokens. Each batch is penalised with the
    coefficient from before its own update. start: the first coefficient. horizon: number of sequences over which the
    coefficient can change by about a fifth.
    """

    def divergence_and_step(batch: Trajectories) -> tuple[Array, Array]:
        rows = jnp.sum(batch.lengths > 0).astype(jnp.float32)
        per_row = row_means(_divergence(batch, estimator, of, to), batch.replace(weights=None))
        return jnp.sum(per_row) / jnp.maximum(rows, 1), rows / horizon

    return _controller(start, target, name, divergence_and_step, needed(of) | needed(to))


def _controller(
    start: Number, target: Number, name: str, measured: Callable[[Trajectories], tuple[Array, Number]],
    needs: frozenset[str],
) -> Transform:  # fmt: skip
    """beta <- beta (1 + step clip(KL / target - 1, -0.2, 0.2)), written as a control before its own update.

    measured: batch -> (KL, step).
    """

    def apply(beta: Array, batch: Trajectories) -> tuple[State, Trajectories]:
        divergence, step = measured(batch)
        error = jnp.clip(divergence / target - 1, -0.2, 0.2)
        return beta * (1 + error * step), batch.with_controls(**{name: beta})

    return Transform(lambda: jnp.asarray(start, jnp.float32), apply, needs)


@part
def stepwise_kl(
    start: NonNegativeNumber = 0.1,
    target: PositiveNumber = 0.1,
    rate: NonNegativeNumber = 0.1,
    name: str = "kl_coefficient",
    of: Source = "behaviour",
    to: Source = "reference",
) -> Transform:
    """As `adaptive_kl`, with the same step for batches of all sizes, and KL the mean over the batch's tokens (k1):

    beta <- beta (1 + rate clip(KL / target - 1, -0.2, 0.2)).
    """

    def divergence_and_step(batch: Trajectories) -> tuple[Array, Number]:
        return jnp.sum(_divergence(batch, "k1", of, to)) / jnp.maximum(jnp.sum(batch.action_mask), 1), rate

    return _controller(start, target, name, divergence_and_step, needed(of) | needed(to))
