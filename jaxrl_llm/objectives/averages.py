"""Averages: from values of tokens to a number, the same however the batch is split, padded or ordered.

Each is a sum over the rows at hand divided by a total of the whole batch (`trajectory.totals_of`).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_llm.coefficients import check_number
from jaxrl_llm.errors import require_choice
from jaxrl_llm.grouping import bucket_sums
from jaxrl_llm.trajectory import PolicyOutputs, Trajectories, row_means, totals_of, weighted
from jaxrl_llm.transform import Refresh, control

Average = Callable[[jax.Array, Trajectories], jax.Array]  # (values f32[N, L], batch) -> f32[]
AVERAGES = ("sequence", "token", "prompt", "sum", "constant", "slice")


def token_mean() -> Average:
    """Sum over all tokens / number of tokens in the batch: every token counts the same (DAPO)."""
    return lambda values, batch: jnp.sum(weighted(values, batch)) / totals_of(batch)["tokens"]


def sequence_mean() -> Average:
    """Mean over sequences of the mean over their tokens: every sequence counts the same (GRPO)."""
    return lambda values, batch: jnp.sum(row_means(values, batch)) / totals_of(batch)["sequences"]


def sequence_sum() -> Average:
    """Mean over sequences of the sum over their tokens: the gradient of the sequence's log-probability (REINFORCE)."""
    return lambda values, batch: jnp.sum(weighted(values, batch)) / totals_of(batch)["sequences"]


def constant(length: float | jax.Array | str) -> Average:
    """Sum over all tokens / (sequences * length), length a constant: no bias by length (Dr. GRPO, 2503.20783).

    Every sequence with an action counts, also one whose tokens were dropped. length > 0, or InputError; or the name of
    a control, e.g. that of `find_longest`.
    """
    if not isinstance(length, str):
        check_number("length", length, above=0)

    def average(values: jax.Array, batch: Trajectories) -> jax.Array:
        number = control(batch, length) if isinstance(length, str) else length
        return jnp.sum(weighted(values, batch)) / (totals_of(batch)["rows"] * number)

    return average


def find_longest(outputs: PolicyOutputs, batch: Trajectories) -> Trajectories:
    """A `Refresh`: the most actions of any row, at least 1, as the control "longest"."""
    return batch.with_controls(longest=jnp.maximum(jnp.max(batch.lengths, initial=0.0), 1.0))


def prompt_mean() -> Average:
    """Mean over prompts of the mean over the tokens of a prompt's group: every prompt counts the same (DAPO, eq. 8).

    sum_g 1/P 1/T_g sum_{i in g} sum_t v_it, with T_g the group's weighted tokens and P the groups that have any. Needs
    what `find_prompt_shares` writes.
    """
    return lambda values, batch: jnp.sum(jnp.sum(weighted(values, batch), axis=1) * batch.need("prompt_share"))


def find_prompt_shares(outputs: PolicyOutputs, batch: Trajectories) -> Trajectories:
    """A `Refresh`: 1 / (P T_g) of `prompt_mean` for each row, f32[N], as info["prompt_share"]."""
    (tokens,) = bucket_sums(batch.group, jnp.sum(batch.loss_weights, axis=1))
    (rows,) = bucket_sums(batch.group, jnp.ones(tokens.shape, jnp.float32))
    some = tokens > 0
    groups = jnp.maximum(jnp.sum(jnp.where(some, 1 / rows, 0.0)), 1e-9)
    return batch.with_info(prompt_share=jnp.where(some, 1 / (groups * jnp.where(some, tokens, 1.0)), 0.0))


def slice_token_mean() -> Average:
    """Mean over the tokens of the slice at hand, weighted by its share of the sequences (TRL's "bnpo").

    The one average that does depend on how the batch is split into micro-batches; for comparisons only.
    """

    def average(values: jax.Array, batch: Trajectories) -> jax.Array:
        here = totals_of(batch.replace(totals=None))
        share = here["sequences"] / totals_of(batch)["sequences"]
        return share * jnp.sum(weighted(values, batch)) / here["tokens"]

    return average


def average_by_name(name: str, length: float | jax.Array | None = None) -> tuple[Average, Refresh | None]:
    """An average, and the `Refresh` that it needs, if any:

        sequence   mean over sequences of the mean over their tokens
        token      mean over all tokens of the batch
        prompt     mean over prompts of the mean over the tokens of their group
        sum        mean over sequences of the sum over their tokens
        constant   that sum / length; without a length, / the longest row of the batch
        slice      mean over the tokens of the slice at hand, see `slice_token_mean`

    InputError for another name.
    """
    require_choice("average", name, AVERAGES)
    if name == "prompt":
        return prompt_mean(), find_prompt_shares
    if name == "constant":
        return (constant("longest"), find_longest) if length is None else (constant(length), None)
    simple = {"sequence": sequence_mean, "token": token_mean, "sum": sequence_sum, "slice": slice_token_mean}
    return simple[name](), None
