"""Averages in which some tokens, such as one that chooses how to answer, have a mean and a weight of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from jaxrl_llm.errors import require_choice
from jaxrl_llm.objectives.averages import Average, sequence_mean
from jaxrl_llm.objectives.subset import mean_by
from jaxrl_llm.trajectory import PolicyOutputs, Trajectories, totals_of

Tokens = Callable[[Trajectories], jax.Array]  # batch -> bool[N, L]


def first_action(batch: Trajectories) -> jax.Array:
    """bool[N, L]: the first action of each row."""
    return batch.action_index == 0


def later_actions(batch: Trajectories) -> jax.Array:
    """bool[N, L]: all actions but the first."""
    return batch.action_index > 0


def token_groups(groups: Mapping[str, tuple[float | jax.Array, Tokens]], over: str = "sequence") -> Average:
    """sum_k alpha_k mean_k(v), for groups of tokens by name: (alpha_k, batch -> bool[N, L]).

    over "sequence": mean_k is the mean over sequences (also those without such a token) of the mean over their tokens
    of the group; "token": the mean over all tokens of the group (0 where there are none).
    """
    require_choice("over", over, ("sequence", "token"))

    def masked(batch: Trajectories, tokens: Tokens) -> Trajectories:
        return batch.replace(weights=batch.loss_weights * tokens(batch), totals=totals_of(batch))

    def average(values: jax.Array, batch: Trajectories) -> jax.Array:
        means = {name: sequence_mean() if over == "sequence" else mean_by(f"tokens/{name}") for name in groups}
        parts = [alpha * means[name](values, masked(batch, tokens)) for name, (alpha, tokens) in groups.items()]
        return jnp.sum(jnp.stack(parts))

    def count(outputs: PolicyOutputs, batch: Trajectories) -> Trajectories:
        counts = {name: jnp.sum(batch.loss_weights * tokens(batch)) for name, (_, tokens) in groups.items()}
        return batch.with_controls(**{f"tokens/{name}": value for name, value in counts.items()})

    return Average(average, refresh=count if over == "token" else None)
