"""Normalisation of the rewards of single actions."""

from __future__ import annotations

import jax.numpy as jnp

from jaxrl_llm.advantages.normalisation import whiten
from jaxrl_llm.advantages.returns import last_actions, scored_actions, terminal_rewards
from jaxrl_llm.core.coefficients import check_moments
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.core.transform import Transform, stateless


@part
def whiten_rewards(ddof: int = 1, epsilon: float = 1e-8) -> Transform:
    """Divide the rewards of the actions, `terminal_rewards`, by their standard deviation about their mean, which stays:

        r <- (r - mean) / sqrt(var + epsilon) + mean

    over the actions of scored rows. The scores stay as they are: `token_rewards` becomes what they lack, and
    includes what `turn_rewards` had. Chain this
    after what adds token rewards, and before what turns them into advantages.
    """
    check_moments(ddof, epsilon)

    def apply(batch: Trajectories) -> Trajectories:
        new = whiten(terminal_rewards(batch), scored_actions(batch), ddof, epsilon, shift=False)
        score = jnp.where(last_actions(batch), jnp.nan_to_num(batch.scores)[:, None], 0.0)
        return batch.replace(token_rewards=new - score, turn_rewards=None)

    return stateless(apply)
