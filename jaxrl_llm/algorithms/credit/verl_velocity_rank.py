from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages import group_relative
from jaxrl_llm.advantages.multipliers import capped_bonus
from jaxrl_llm.advantages.returns import last_actions
from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import AverageName, Code, Fraction, NonNegative, Paper
from jaxrl_llm.core.parts import Trajectories, Transform, chain, part


@method(paper="arXiv 2509.23808", test="test_token_credit.py::test_verl_against_a_loop")
def verl_velocity_rank(
    gain: Code[NonNegative] = 2.0,
    coefficient: Code[NonNegative] = 1.0,
    rate: Code[Fraction] = 0.3,
    kappa: Code[NonNegative] = 2.0,
    place: Paper[Literal["all", "last"]] = "all",
    start: Code[Literal["first", "zero"]] = "zero",
    clip_low: Code[NonNegative] = 0.2,
    clip_high: Code[NonNegative] = 0.2,
    kl_coefficient: Code[NonNegative] = 0.001,
    entropy_coefficient: Code[NonNegative] = 0.001,
    average: Code[AverageName] = "token",
) -> Algorithm:
    """Velocity-Exploiting Rank-Learning (VERL).

    Adds a bonus computed from a response's hidden states: their effective rank ER, its growth along the response (ERV),
    and the growth of that growth (ERA). With mu the running means over batches (mu <- (1 - rate) mu + rate batch mean),
    d = clip((x - mu) / (|mu| + 1e-8), -5, 5) and phi = tanh(d),

        b = sigmoid(gain d_ERA);  Phi = coefficient (b phi_ER + (1 - b) phi_ERV)
        A' = A_grpo + min(relu(Phi), |A_grpo| / kappa)

    without a bonus at the first step. place: on "all" tokens, as in the formula, or the "last", as in the released
    code. start: running means start at "zero", as in the code, which makes the first d large, or at the "first"
    batch's. The rest is GRPO with clip_low, clip_high, kl_coefficient (k3), entropy_coefficient and average (the code
    has a token mean). Measures: `core.needs.computed.rank_measures`.
    """
    objective = grpo(clip_low, clip_high, kl_coefficient, entropy_coefficient, average=average).objective
    return Algorithm(chain(group_relative(), rank_bonus(gain, coefficient, rate, kappa, place, start)), objective)


def rank_potential(measures: jax.Array, centre: jax.Array, gain: jax.Array | float) -> jax.Array:
    """b phi_ER + (1 - b) phi_ERV, f32[N]: weigh rank (explore) against velocity (exploit) by acceleration (2509.23808).

    measures f32[N, 3] (rank, velocity, acceleration), centre mu f32[3]; d = clip((x - mu) / (|mu| + 1e-8), -5, 5),
    phi = tanh(d), b = sigmoid(gain d_ERA).

    >>> x, mu = jnp.array([[10.0, 1.5, 0.02]]), jnp.array([8.0, 1.0, 0.01])
    >>> print(rank_potential(x, mu, 2.0).round(5))
    [0.27081]
    """
    d = jnp.clip((measures - centre) / (jnp.abs(centre) + 1e-8), -5.0, 5.0)
    explore = jax.nn.sigmoid(gain * d[:, 2])
    return explore * jnp.tanh(d[:, 0]) + (1.0 - explore) * jnp.tanh(d[:, 1])


@part
def rank_bonus(
    gain: float = 2.0,
    coefficient: float = 1.0,
    rate: float = 0.3,
    kappa: float = 2.0,
    place: Literal["all", "last"] = "all",
    start: Literal["zero", "first"] = "zero",
) -> Transform:
    """A + min(relu(coefficient * `rank_potential`), |A| / kappa), centred on running means mu of the measures.

    mu <- (1 - rate) mu + rate * batch mean, updated after the bonus of the step; no bonus at the first step. start: mu
    starts at "zero", or at the mean of the "first" batch. place: bonus on "all" tokens of a row, or on the "last".
    Reads info["effective_rank"] f32[N, 3]. State: mu f32[3] and the number of batches seen.
    """

    def apply(state: Any, batch: Trajectories) -> tuple[Any, Trajectories]:
        centre, seen = state
        valid = ~jnp.isnan(batch.scores)[:, None]
        measures = jnp.where(valid, batch.need("effective_rank"), 0.0)
        here = last_actions(batch) if place == "last" else batch.action_mask
        bonus = jnp.where(seen > 0, coefficient * rank_potential(measures, centre, gain), 0.0)[:, None]
        A = batch.need("advantages")
        batch = batch.replace(advantages=jnp.where(here, capped_bonus(A, bonus, 1.0 / kappa), A))
        count = jnp.sum(valid)
        mean = jnp.where(count > 0, jnp.sum(measures, axis=0) / jnp.maximum(count, 1), centre)
        share = jnp.where(seen > 0, rate, 1.0) if start == "first" else rate
        return (centre + share * (mean - centre), seen + (count > 0)), batch

    return Transform(lambda: (jnp.zeros(3), jnp.int32(0)), apply, frozenset({"effective_rank"}))
