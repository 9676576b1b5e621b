from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.method import Algorithm, given_responses, method, run_settings
from jaxrl_llm.core.annotations import NonNegative, Paper, Positive, PositiveNumber, Recalled
from jaxrl_llm.core.log_ratios import log_ratio_sums
from jaxrl_llm.core.parts import Metrics, Objective, PolicyOutputs, State, Trajectories, Transform, control, part
from jaxrl_llm.objectives import best_and_worst, pairwise, weighted_losses
from jaxrl_llm.objectives.preference.losses import Pairs, of_each_pair, sigmoid
from jaxrl_llm.rollouts.guidance.responses import chosen_and_rejected

SHIFT = "reward_shift"  # control: the mean of beta u so far


@method(paper="arXiv 2411.10442", test="test_mpo.py::test_mpo_by_loop")
@run_settings(*given_responses(2))
def mpo(
    preference: Recalled[NonNegative] = 0.8,
    quality: Recalled[NonNegative] = 0.2,
    generation: Recalled[NonNegative] = 1.0,
    beta: Paper[Positive] = 0.1,
) -> Algorithm:
    """Mixed Preference Optimization (MPO).

    The columns chosen and rejected of a row are two responses to its prompt. With u the log-ratio of a whole response
    to the reference, |y| its tokens and d the mean of beta u over all responses of the steps before, 0 at first,

        loss = mean over pairs of  preference (-log sigmoid(beta (u_chosen - u_rejected)))
               + quality (-log sigmoid(beta u_chosen - d) - log sigmoid(d - beta u_rejected))
               + generation (-log pi(y_chosen) / |y_chosen|)

    DPO, BCO (2404.04656) and supervised steps on the chosen response. Of equal rewards a row has no pair.
    """
    of_pairs = pairwise(weighted_losses((sigmoid, preference), (mean_nll, generation)), beta)
    return Algorithm(moving_shift(beta), of_pairs + quality * quality_loss(beta), rollout=chosen_and_rejected())


@of_each_pair
def mean_nll(pairs: Pairs, beta: PositiveNumber = 0.1) -> jax.Array:
    """The chosen responses' negative log-likelihood, nats a token, f[P]. beta: no matter here."""
    return -pairs.chosen_logp / pairs.chosen_length


class Shift(NamedTuple):
    """The responses so far."""

    mean: jax.Array  # f32[], of beta u
    rows: jax.Array  # f32[]


@part
def moving_shift(beta: PositiveNumber = 0.1) -> Transform:
    """Write the control "reward_shift": the mean of beta u over all responses of the steps before, 0 in the first.

    Needs "old_logp" and "reference_logp".
    """

    def apply(state: Shift, batch: Trajectories) -> tuple[State, Trajectories]:
        u = beta * log_ratio_sums(batch.need("old_logp"), batch.need("reference_logp"), batch)
        rows = jnp.any(batch.loss_weights != 0, axis=1)
        total = state.rows + jnp.sum(rows)
        mean = state.mean + jnp.sum(jnp.where(rows, u - state.mean, 0.0)) / jnp.maximum(total, 1)
        return Shift(mean, total), batch.with_controls(**{SHIFT: state.mean})

    return Transform(lambda: Shift(jnp.float32(0), jnp.float32(0)), apply, frozenset({"old_logp", "reference_logp"}))


@part
def quality_loss(beta: PositiveNumber = 0.1) -> Objective:
    """BCO's loss of both responses, a mean over pairs: each by itself is better, or worse, than those so far.

    Reads the control "reward_shift". Needs "reference_logp". Metric: "quality".
    """
    choose = best_and_worst()

    def refresh(outputs: PolicyOutputs, batch: Trajectories) -> Trajectories:
        rows = choose(batch)
        share = rows.valid / jnp.maximum(jnp.sum(rows.valid), 1)
        signed = jnp.zeros(batch.lengths.shape).at[rows.chosen].add(share).at[rows.rejected].add(-share)
        return batch.with_info(quality_share=signed)

    def objective(outputs: PolicyOutputs, batch: Trajectories) -> tuple[jax.Array, Metrics]:
        share = batch.need("quality_share")
        gain = beta * log_ratio_sums(outputs.logp, batch.need("reference_logp"), batch) - control(batch, SHIFT)
        value = jnp.sum(jnp.abs(share) * jax.nn.softplus(-jnp.sign(share) * gain))
        return value, {"quality": value}

    return Objective(objective, frozenset({"reference_logp"}), refresh)
