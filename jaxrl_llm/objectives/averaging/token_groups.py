"""Averages with a separate mean and weight per group of tokens, such as a control token that chooses the mode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.core.parts import PolicyOutputs, Trajectories, part, totals_of
from jaxrl_llm.objectives.averaging.averages import Average, sequence_mean
from jaxrl_llm.objectives.averaging.subset import mean_by
from jaxrl_llm.utils.errors import require_choice

Tokens = Callable[[Trajectories], jax.Array]  # batch -> bool[N, L]


@part
def token_groups(
    groups: Mapping[str, tuple[float | jax.Array, Tokens]], over: Literal["sequence", "token"] = "sequence"
) -> Average:
    """sum_k alpha_k mean_k(v) over groups of tokens, given by name as (alpha_k, batch -> bool[N, L]).

    over "sequence": mean_k is the mean over sequences of the mean over their tokens in the group (0 if a sequence has
    none); "token": the mean over all tokens in the group (0 if there are none).
    """
    require_choice("over", over, ("sequence", "token"))

    def masked(batch: Trajectories, tokens: Tokens) -> Trajectories:
        return batch.replace(weights=batch.loss_weights * tokens(batch), totals=totals_of(batch))

    def average(values: jax.Array, batch: Trajectories) -> jax.Array:
        means = {name: sequence_mean() if over == "sequence" else mean_by(f"tokens/{name}") for name in groups}
        terms = [alpha * means[name](values, masked(batch, tokens)) for name, (alpha, tokens) in groups.items()]
        return jnp.sum(jnp.stack(terms))

    def count(outputs: PolicyOutputs, batch: Trajectories) -> Trajectories:
        counts = {name: jnp.sum(batch.loss_weights * tokens(batch)) for name, (_, tokens) in groups.items()}
        return batch.with_controls(**{f"tokens/{name}": value for name, value in counts.items()})

    return Average(average, refresh=count if over == "token" else None)
