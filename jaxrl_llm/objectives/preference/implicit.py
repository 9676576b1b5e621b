"""The loss of an implicit reward model: preferences between the episodes of a prompt, by their log-ratios."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.turns.turns import episode_returns, turn_mask
from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import PolicyOutputs, Trajectories
from jaxrl_llm.core.transform import Objective
from jaxrl_llm.objectives.preference.pairs import RowScore, coupled, shares_of_pairs
from jaxrl_llm.utils.errors import InputError, require_choice


def implicit_returns(beta: float, over: Literal["sum", "mean"]) -> RowScore:
    """A function `(outputs, batch) -> f32[N]`: beta times the row's sum of log pi_phi - log pi_old, or that by turn."""

    def returns(outputs: PolicyOutputs, batch: Trajectories) -> jax.Array:
        if "implicit_logp" not in (outputs.extras or {}):
            raise InputError(
                "the loss of an implicit reward model needs outputs.extras['implicit_logp']: give the policy "
                "Critic('likelihood') (models.critic)"
            )
        gain = (outputs.extras or {})["implicit_logp"] - batch.need("old_logp")
        total = beta * jnp.sum(jnp.where(batch.loss_weights != 0, gain, 0.0), axis=1)
        return total if over == "sum" else total / jnp.maximum(jnp.sum(turn_mask(batch), axis=1), 1)

    return returns


@part
def implicit_preference(
    beta: float = 0.05, over: Literal["sum", "mean"] = "sum", success: float | None = None
) -> Objective:
    """mean of -log sigmoid(D_i - D_j) over the pairs of a group of which i has the higher return (2509.19199).

    D = beta sum_t (log pi_phi - log pi_old) over the actions of a row: DPO on whole episodes, with the policy before
    the update as reference. over "mean" divides D by the turns of the row. success: pairs are of returns above it and
    others, instead of all that differ. Without a pair the loss is 0. Only the reward model has a gradient. Pairs are
    formed among the rows of a gradient step.
    """
    check_number("beta", beta, least=0)
    check_number("success", success, or_none=True)
    require_choice("over", over, ("sum", "mean"))

    def shares(D: jax.Array, batch: Trajectories) -> jax.Array:
        own = episode_returns(batch)
        better = own[:, None] > own
        if success is not None:
            better = (own > success)[:, None] & (own <= success)
        return shares_of_pairs(D[:, None] - D, better & (batch.group[:, None] == batch.group))

    needs = frozenset({"implicit_logp", "old_logp"})
    return coupled(implicit_returns(beta, over), shares, "reward_model", needs)
