"""Implicit step rewards (iStar, first posted as OPRL).

The model is a copy of the policy that learns beside it from preferences between episodes.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages import compared, of_episode, turn_advantages
from jaxrl_llm.advantages.turns import OfTurns, episode_returns, group_keys, turn_count, turn_mask, turn_numbers
from jaxrl_llm.algorithms.method import Algorithm, method, presets, run_needs
from jaxrl_llm.core.annotations import Divisor, NonNegative, Ours, Paper
from jaxrl_llm.core.buckets import bucket_moments
from jaxrl_llm.core.parts import Array, Objective, PolicyOutputs, Trajectories, batch_part, part
from jaxrl_llm.objectives import clipped_policy, coupled
from jaxrl_llm.objectives.preference.pairs import shares_of_pairs
from jaxrl_llm.objectives.values import COPY, needed_output

FORMS: dict[str, dict[str, Any]] = {"rloo": {"baseline": "leave_one_out"}, "grpo": {"scale": "std"}, "centred": {}}


@method(paper="arXiv 2509.19199", test="test_turn_models.py::test_istar_worked_example")
@run_needs(state_key="how many turns there are", turns="episodes of several turns")
@presets(
    paper={"over": "sum", "steps": "all", "success": None}, code={"over": "mean", "steps": "first", "success": 0.0}
)
def istar(
    beta: Paper[NonNegative] = 0.05,
    step_weight: Paper[float] = 1.0,
    form: Paper[Literal["rloo", "grpo", "centred"]] = "rloo",
    over: Paper[Literal["sum", "mean"]] = "sum",
    steps: Paper[Literal["all", "first"]] = "all",
    success: Ours[float | None] = None,
    reward_coefficient: Ours[NonNegative] = 1.0,
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
    kl_coefficient: Paper[NonNegative] = 0.0,
    epsilon: Ours[NonNegative] = 1e-6,
) -> Algorithm:
    """Implicit step rewards (iStar, first posted as OPRL).

    A second copy of the policy, pi_phi, learns beside it by DPO which episodes of a prompt are better. Its log-ratio to
    the policy before the update, summed over the tokens of a turn, is the reward of that turn:

        r_t = beta sum_l (log pi_phi(y_l) - log pi_old(y_l)),    D = sum_t r_t
        L_phi = reward_coefficient mean over pairs of -log sigmoid(D(+) - D(-))
        A_t = f(R) + step_weight f(r_t),    f(x) = n / (n - 1) (x - mean x)

    R is the return of the episode; f(R) is over the episodes of the group, and f(r_t) over all turns of these. form:
    "rloo" is as above, "centred" without the factor, and "grpo" with 1 / (deviation + epsilon) in its place (n - 1).
    A_t is on all tokens of the turn, in PPO's clip (clip_low, clip_high) with kl_coefficient k3, averaged over tokens.
    Turns are scored with pi_phi as it was before the update, which then changes both models, each by its own loss. A
    row is an episode.

    preset "code": as in the released code D is the mean of the turns' rewards (over "mean"), the baseline of a turn is
    over the first turns of the group's episodes (steps "first"), and pairs are of returns above `success` and others.
    success None: of all returns that differ, for graded outcomes. Penalties for invalid actions (0.1) are the
    environment's.

    pi_phi takes the memory of a second model that is trained, all of it with adapters too. It is not sampled from, and
    ends with the run. --optimizer.critic-learning-rate is its learning rate (the paper: 1e-6, twice that of the
    policy), and one bound of the gradient is for both.
    """
    chosen, rewards = FORMS[form], implicit_rewards(beta)
    if steps == "all":
        step = compared(rewards, same_group(), epsilon=epsilon, **chosen)
    else:
        step = above_first_turns(rewards, epsilon=epsilon, **chosen)
    credit = turn_advantages(
        of_episode(epsilon=epsilon, **chosen), step, weights=(1.0, step_weight), needs={"state_key", *IMPLICIT}
    )
    objective = clipped_policy(clip_low, clip_high, kl_coefficient=kl_coefficient)
    return Algorithm(credit, objective + reward_coefficient * implicit_preference(beta, over, success))


IMPLICIT = frozenset({"implicit_logp", "old_logp"})


@batch_part
def implicit_rewards(batch: Trajectories, beta: NonNegative = 0.05) -> Array:
    """Values: beta sum (log pi_phi - log pi_old) over the tokens of each turn (2509.19199).

    pi_phi is the reward model before the update. Needs implicit_logp and old_logp.
    """
    gain = jnp.where(batch.action_mask, batch.need("implicit_logp") - batch.need("old_logp"), 0.0)
    own = jax.nn.one_hot(turn_numbers(batch), turn_count(batch))
    return jnp.where(turn_mask(batch), beta * jnp.einsum("nl,nlk->nk", gain, own), 0.0)


@batch_part
def above_first_turns(
    batch: Trajectories,
    values: OfTurns,
    scale: Divisor = "none",
    baseline: Literal["mean", "leave_one_out"] = "mean",
    epsilon: float = 1e-6,
) -> Array:
    """Advantages of turns: the values less the mean over the first turns of the group's G episodes.

    baseline "leave_one_out" multiplies the difference by G / (G - 1); scale "std" divides it by the deviation (n - 1)
    of the first turns + epsilon. A group with one episode gets 0.
    """
    mask, own = turn_mask(batch), values(batch)
    of_first = jnp.take_along_axis(own, jnp.argmax(mask, axis=1)[:, None], axis=1)[:, 0]
    first = jnp.where(jnp.any(mask, axis=1), of_first, jnp.nan)
    count, mean, deviation = (x[:, None] for x in bucket_moments(batch.group, first))
    above = own - mean
    if baseline == "leave_one_out":
        above = above * count / jnp.maximum(count - 1, 1)
    if scale == "std":
        above = above / (deviation + epsilon)
    return jnp.where(mask & (count > 1), above, 0.0)


@part
def same_group() -> OfTurns:
    """Keys: all turns of a group."""
    return lambda batch: group_keys(batch, turn_count(batch))


@part
def implicit_preference(
    beta: NonNegative = 0.05, over: Literal["sum", "mean"] = "sum", success: float | None = None
) -> Objective:
    """mean of -log sigmoid(D_i - D_j) over the pairs of a group of which i has the higher return (2509.19199).

    D = beta sum_t (log pi_phi - log pi_old) over the actions of a row: DPO on whole episodes, with the policy before
    the update as reference. over "mean" divides D by the turns of the row. success: pairs are of returns above it and
    others, instead of all that differ. Without a pair the loss is 0. Only the reward model has a gradient. Pairs are
    formed among the rows of a gradient step.
    """

    def returns(outputs: PolicyOutputs, batch: Trajectories) -> jax.Array:
        logp = needed_output(outputs, "implicit_logp", "the loss of an implicit reward model", COPY)
        gain = logp - batch.need("old_logp")
        total = beta * jnp.sum(jnp.where(batch.loss_weights != 0, gain, 0.0), axis=1)
        return total if over == "sum" else total / jnp.maximum(jnp.sum(turn_mask(batch), axis=1), 1)

    def shares(D: jax.Array, batch: Trajectories) -> jax.Array:
        own = episode_returns(batch)
        better = own[:, None] > own
        if success is not None:
            better = (own > success)[:, None] & (own <= success)
        return shares_of_pairs(D[:, None] - D, better & (batch.group[:, None] == batch.group))

    return coupled(returns, shares, "reward_model", IMPLICIT)
