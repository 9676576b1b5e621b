"""The two pytrees that functions of the library exchange, `Trajectories` and `PolicyOutputs`, and their averages.

N sequences, L token positions, right-padded; prompt and completion share a row.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.utils.errors import InputError

Array = jax.Array
SAMPLED = "sampled_logp"  # in info: what tokens were sampled with, where `behaviour_logp` is of another policy


class Trajectories(flax.struct.PyTreeNode):
    """Sampled sequences and what has been computed for them. A field is None until it is computed.

    Padding is defined by `token_mask`, never by a token id: pad and EOS share an id in many tokenisers.
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
    temperature: Array | None = None  # f32[N] sampling temperature that `behaviour_logp` includes
    support_floor: Array | None = None  # f32[N, L] lowest log-probability that top-k/top-p/min-p kept (-inf: all)
    untruncated_logp: Array | None = (
        None  # f32[N, L] as `behaviour_logp`, before filters and forbidden tokens, where there were
    )
    rewards: dict[str, Array] | None = None  # named components, f32[N] each
    reward: Array | None = None  # f32[N] their combination
    token_rewards: Array | None = None  # f32[N, L] reward of each action, e.g. a penalty; in addition to `reward`
    turn_rewards: Array | None = None  # f32[N, K] reward of each turn, if there are turns
    state_key: Array | None = None  # uint32[N, K] hashed environment state before each turn
    advantages: Array | None = None  # f32[N, L]
    weights: Array | None = None  # f32[N, L] selection: 0 drops a token
    old_logp: Array | None = None  # f32[N, L] under the weights at the start of the update
    reference_logp: Array | None = None  # f32[N, L] under the frozen reference policy
    previous_logp: Array | None = None  # f32[N, L] under the weights before the last update
    entropy: Array | None = None  # f32[N, L] of the behaviour distribution at each action
    values: Array | None = None  # f32[N, L] (or [N, L, H]) of the critic before the update, at each action
    returns: Array | None = None  # f32[N, L] regression targets of the critic
    experts: Array | None = None  # int8/int16[N, L, layers, k] with which a mixture sees each token; -1: its choice
    thoughts: Array | None = None  # f32[N, L, 3, K] records of soft tokens, see `core.soft_thinking`; ids -1: none
    info: dict[str, Array] | None = None  # [N, ...] further arrays, which only some methods use, by name
    totals: dict[str, Array] | None = None  # counts over the whole batch, of which this may be a slice; see `totals_of`
    controls: dict[str, Array] | None = None  # f32[] written by controllers, read by objectives
    feedback: dict[str, Array] | None = None  # f32[] metrics of the last update; "updates" counts them

    @property
    def loss_weights(self) -> Array:
        """f32[N, L]: weight of each token in the loss: its selection weight on actions, 0 elsewhere."""
        return jnp.where(self.action_mask, 1.0 if self.weights is None else self.weights, 0.0).astype(jnp.float32)

    @property
    def lengths(self) -> Array:
        """f32[N]: number of actions in each row."""
        return jnp.sum(self.action_mask, axis=1).astype(jnp.float32)

    @property
    def action_index(self) -> Array:
        """int32[N, L]: index of each action among the actions of its row; -1 elsewhere."""
        return jnp.where(self.action_mask, jnp.cumsum(self.action_mask, axis=1) - 1, -1).astype(jnp.int32)

    @property
    def scores(self) -> Array:
        """f32[N]: the combined reward, NaN (not scored) for rows without actions. InputError without rewards."""
        if self.reward is None:
            raise InputError("the batch has no rewards: score it before the advantages are computed")
        return jnp.where(jnp.any(self.action_mask, axis=1), self.reward, jnp.nan).astype(jnp.float32)

    def need(self, name: str) -> Array:
        """A field, or an entry of `info`; InputError if the batch does not have it."""
        value = getattr(self, name) if name in self.__dataclass_fields__ else (self.info or {}).get(name)
        if value is None:
            raise InputError(f"this method needs {name}, which the batch does not have")
        return value

    def entry(self, name: str, otherwise: float) -> Array:
        """f32[N]: an entry of `info` of numbers of rows; another number where it is NaN, or there is no such entry."""
        found = (self.info or {}).get(name, jnp.full(self.group.shape, otherwise, jnp.float32))
        return jnp.where(jnp.isnan(found), otherwise, found)

    def with_info(self, **entries: Array) -> Trajectories:
        """The batch with more entries in `info`."""
        return self.replace(info={**(self.info or {}), **entries})

    def with_controls(self, **entries: Array) -> Trajectories:
        """The batch with more entries in `controls`."""
        return self.replace(controls={**(self.controls or {}), **entries})

    def __repr__(self) -> str:
        """Shape, counts and the fields that are there, in one line; without counts where the values are not at hand."""
        fields = []
        for name in list(self.__dataclass_fields__)[len(REQUIRED) :]:
            value = getattr(self, name)
            if value is not None:
                fields.append(f"{name}[{', '.join(sorted(value))}]" if isinstance(value, Mapping) else name)
        parts = [*_counts(self), *([f"with {', '.join(fields)}"] if fields else [])]
        return f"Trajectories({'; '.join([' x '.join(map(str, np.shape(self.tokens))), *parts])})"


def _counts(batch: Trajectories) -> list[str]:
    """Numbers of tokens, actions, groups and the mean reward; empty for a batch that is traced or on other hosts."""
    try:
        mask, groups, reward = (np.asarray(x) for x in (batch.action_mask, batch.group, batch.reward))
        tokens, acted = int(np.sum(np.asarray(batch.token_mask))), mask.any(axis=1)
        counts = [f"{tokens:,} tokens, {int(mask.sum()):,} of them actions", f"groups: {len(np.unique(groups))}"]
        if batch.reward is not None:
            scored = reward[acted & ~np.isnan(reward)]
            counts.append(f"mean reward {scored.mean():.4g}" if scored.size else "no row is scored")
    except Exception:  # what is no array, traced, or not addressable has no values, and JAX has an error for each
        return []
    return counts


class PolicyOutputs(flax.struct.PyTreeNode):
    """The policy's outputs for each action under the parameters being differentiated; zero elsewhere."""

    logp: Array  # f32[N, L]
    entropy: Array  # f32[N, L]
    extras: dict[str, Any] | None = None  # further outputs that an objective needs, e.g. "values"

    def __repr__(self) -> str:
        extras = f", extras[{', '.join(self.extras)}]" if self.extras else ""
        return f"PolicyOutputs({' x '.join(map(str, np.shape(self.logp)))}{extras})"


def weighted(values: Array, batch: Trajectories) -> Array:
    """Values times loss weights, f32[N, L]; masked values may be anything, even NaN."""
    weights = batch.loss_weights
    return jnp.where(weights != 0, values, 0.0) * weights


def row_means(values: Array, batch: Trajectories) -> Array:
    """Mean of each row over its tokens, by loss weight, f32[N]; 0 for rows without weight."""
    length = jnp.sum(batch.loss_weights, axis=1)
    return jnp.sum(weighted(values, batch), axis=1) / jnp.where(length > 0, length, 1.0)


SHARED = ("totals", "controls", "feedback")  # fields without a row axis


def totals_of(batch: Trajectories) -> dict[str, Array]:
    """Denominators of averages, f32[]: "tokens" (summed weights), "sequences" (rows with any weight), "rows" (rows with
    any action), and "contrasts" (groups of which two rows differ in their reward).

    A micro-batch carries the totals of the whole batch, so that `sum(values) / total` summed over micro-batches is the
    value for the whole batch, however it is split.
    """
    if batch.totals is not None:
        return batch.totals
    weights = batch.loss_weights

    def rows(mask: Array) -> Array:
        return jnp.maximum(jnp.sum(jnp.any(mask, axis=1)), 1).astype(jnp.float32)

    tokens = jnp.maximum(jnp.sum(weights), 1e-9)
    found = {"tokens": tokens, "sequences": rows(weights > 0), "rows": rows(batch.action_mask)}
    return found | {"contrasts": _contrasts(batch)}


def _contrasts(batch: Trajectories) -> Array:
    """f32[]: the number of groups with different rewards, at least 1."""
    if batch.reward is None:
        return jnp.float32(1)
    N = batch.tokens.shape[0]
    _, index = jnp.unique(jnp.asarray(batch.group), return_inverse=True, size=N)
    reward = jnp.asarray(batch.scores)  # NaN of rows that do not count
    known = ~jnp.isnan(reward)
    high = jax.ops.segment_max(jnp.where(known, reward, -jnp.inf), index, num_segments=N)
    low = jax.ops.segment_min(jnp.where(known, reward, jnp.inf), index, num_segments=N)
    return jnp.maximum(jnp.sum(high > low), 1).astype(jnp.float32)


def with_totals(batch: Trajectories) -> Trajectories:
    """The batch with its own totals stored; call this before slicing it into micro-batches."""
    return batch.replace(totals=totals_of(batch.replace(totals=None)))


def map_rows(f: Any, batch: Trajectories) -> Trajectories:
    """Apply `f` to every array that has a leading row axis."""
    shared = {name: getattr(batch, name) for name in SHARED}
    return jax.tree.map(f, batch.replace(**dict.fromkeys(SHARED))).replace(**shared)


REQUIRED = [name for name, field in Trajectories.__dataclass_fields__.items() if field.default is not None]


WITHOUT_SCORE = ("demonstrated", "measured", "resampled")  # needs: entries of info that mark rows which need no score


def counted_rows(batch: Trajectories, marks: Collection[str] = ()) -> Array:
    """bool[N]: the rows that count: those with an action and a score.

    A row that goes on in the next step (info["unfinished"]) needs no score, nor one that an entry of info in `marks`
    marks, nor any where there are no rewards.
    """
    acted = jnp.any(batch.action_mask, axis=1)
    if batch.reward is None:
        return acted
    known = ~jnp.isnan(batch.reward)
    for mark in ("unfinished", *marks):
        if (marked := (batch.info or {}).get(mark)) is not None:
            known |= marked > 0
    return acted & known


def counted_alone(batch: Trajectories, marks: Collection[str] = ()) -> Trajectories:
    """The batch in which rows that do not count (`counted_rows`) have no actions."""
    kept = counted_rows(batch, marks)

    def alone(action_mask: Array, turn: Array) -> tuple[Array, Array]:
        return action_mask & kept[:, None], jnp.where(kept[:, None], turn, -1).astype(turn.dtype)

    # Mostly all rows count. Without a branch XLA repeats the masking in each of the fusions that read these arrays.
    mask, turn = jax.lax.cond(jnp.all(kept), lambda *same: same, alone, batch.action_mask, batch.turn)
    return batch.replace(action_mask=mask, turn=turn)


def without_rows(batch: Trajectories, out: Array) -> Trajectories:
    """The batch with the rows bool[N] excluded, as `rewards.transforms.leave_out` does."""
    weights = jnp.where(out[:, None], 0.0, batch.loss_weights)
    return batch.replace(reward=jnp.where(out, jnp.nan, batch.scores), weights=weights)
