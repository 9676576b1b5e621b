"""The two pytrees that travel through the library: `Trajectories` and `PolicyOutputs`.

N sequences, L token positions, right-padded; prompt and completion share a row.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

Array = jax.Array


class Trajectories(flax.struct.PyTreeNode):
    """Sampled sequences and what is known of them. Fields that are None are not known (yet).

    Padding is what `token_mask` says, never a token id: pad and EOS are the same id in many tokenisers.
    """

    tokens: Array  # int32[N, L] prompt, then the policy's tokens (with environment tokens between, if any)
    token_mask: Array  # bool[N, L] true on real tokens, false on padding
    action_mask: Array  # bool[N, L] true where the policy chose the token; the loss sees only these
    behaviour_logp: Array  # f32[N, L] log-probability under the weights and sampling settings that drew the token
    policy_step: Array  # int32[N, L] training step of those weights
    turn: Array  # int32[N, L] turn number of each action token, -1 elsewhere
    group: Array  # int32[N] samples of one prompt share it; groups may differ in size
    prompt_id: Array  # int32[N] stable id of the prompt in its data set
    truncated: Array  # bool[N] ran out of budget before the end of the answer
    temperature: Array | None = None  # f32[N] of the distribution that `behaviour_logp` is of
    support_floor: Array | None = None  # f32[N, L] least log-probability that top-k/top-p/min-p kept (-inf: all)
    rewards: dict[str, Array] | None = None  # named components, f32[N] each
    reward: Array | None = None  # f32[N] their combination
    advantages: Array | None = None  # f32[N, L]
    weights: Array | None = None  # f32[N, L] selection: 0 drops a token
    old_logp: Array | None = None  # f32[N, L] under the weights at the start of the update
    reference_logp: Array | None = None  # f32[N, L] under the frozen reference policy
    entropy: Array | None = None  # f32[N, L] of the behaviour distribution at each action
    totals: dict[str, Array] | None = None  # counts over the whole batch of which this may be a slice; see `totals_of`

    @property
    def loss_weights(self) -> Array:
        """f32[N, L]: how much each token counts in the loss: its selection weight on actions, 0 elsewhere."""
        return jnp.where(self.action_mask, 1.0 if self.weights is None else self.weights, 0.0).astype(jnp.float32)


class PolicyOutputs(flax.struct.PyTreeNode):
    """What the policy says of each action under the parameters being differentiated. Zero where there is no action."""

    logp: Array  # f32[N, L]
    entropy: Array  # f32[N, L]
    extras: dict[str, Any] | None = None  # what else an objective declared that it needs


def totals_of(batch: Trajectories) -> dict[str, Array]:
    """Denominators of the averages: weighted tokens, sequences with any weight, and all sequences.

    A micro-batch carries the totals of the whole batch, so that sums over micro-batches of
    `sum(values) / total` are the value for the whole batch, however it was split.
    """
    if batch.totals is not None:
        return batch.totals
    weights = batch.loss_weights
    return {
        "tokens": jnp.maximum(jnp.sum(weights), 1e-9),
        "sequences": jnp.maximum(jnp.sum(jnp.any(weights > 0, axis=1)), 1).astype(jnp.float32),
        "rows": jnp.float32(weights.shape[0]),
    }


def with_totals(batch: Trajectories) -> Trajectories:
    """The batch with its own totals written down; do this before slicing it into micro-batches."""
    return batch.replace(totals=totals_of(batch.replace(totals=None)))


def map_rows(f: Any, batch: Trajectories) -> Trajectories:
    """Apply `f` to every array that has a leading row axis (all but the totals)."""
    return jax.tree.map(f, batch.replace(totals=None)).replace(totals=batch.totals)
