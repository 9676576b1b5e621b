"""An update in phases: the turns of episodes one after the other, the last turn first (SeeUPO)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.repr import layout
from jaxrl_llm.core.trajectory import Array, Trajectories, bucket_sums, joint_key
from jaxrl_llm.objectives.off_policy import compounded

TURN_FACTOR = "turn_factor"


@dataclass(frozen=True, repr=False)
class TurnPhases:
    """Update turn T - 1, then T - 2, ... then 0 of all episodes, each from the parameters that the last one left.

    In the phase of turn t only the tokens of that turn have a weight in the objective, `old_logp` and all else that the
    method needs is of the parameters at its start, and info["turn_factor"] is M: 1 at first, and after the phase of t

        M <- clip(M q, 1 - e, 1 + e),    q = clip(exp(mean over the turn's tokens of log pi_after - log pi_before))

    as `objectives.off_policy.compounded` has it, e = clip. Episodes without a turn t keep their M. Rows of one episode
    (info["episode"], info["first_turn"]) share it. The transform is applied in each phase. InputError for a clip that
    is not from 0 to 1.
    """

    clip: float = 0.2

    def __post_init__(self) -> None:
        check_number("the clip of a turn's factor", self.clip, least=0, most=1)

    __repr__ = layout

    @property
    def provides(self) -> frozenset[str]:
        """The needs that the phases provide."""
        return frozenset({TURN_FACTOR})


def turn_in_episode(batch: Trajectories) -> Array:
    """int32[N, L]: number of each action's turn in its episode; -1 elsewhere."""
    first = (batch.info or {}).get("first_turn")
    before = 0 if first is None else jnp.nan_to_num(first).astype(jnp.int32)[:, None]
    return jnp.where(batch.action_mask, batch.turn + before, -1).astype(jnp.int32)


def phase_count(batch: Trajectories) -> int:
    """Turns of the longest episode of a batch on the host, at least 1."""
    return max(int(np.max(np.asarray(turn_in_episode(batch)), initial=0)) + 1, 1)


def without_factor(batch: Trajectories) -> Trajectories:
    """The batch, on the host, with a turn factor of 1, as before the first phase."""
    one: Any = np.ones(batch.group.shape, np.float32)
    return batch.with_info(**{TURN_FACTOR: one})


def at_turn(batch: Trajectories, turn: Array) -> Trajectories:
    """The batch in which only the tokens of a turn, int32[], have a weight."""
    chosen = turn_in_episode(batch) == turn
    return batch.replace(weights=jnp.where(chosen, batch.loss_weights, 0.0))


def after_turn(batch: Trajectories, before: Array, turn: Array, clip: float) -> Trajectories:
    """The batch with the factor after the phase of a turn.

    batch: its `old_logp` f32[N, L] is of the parameters after the phase. before: of those before it.
    """
    chosen = turn_in_episode(batch) == turn
    change = jnp.where(chosen, batch.need("old_logp") - before, 0.0)
    info = batch.info or {}
    key = jnp.arange(batch.group.shape[0])
    if "episode" in info and "first_turn" in info:
        key = joint_key(batch.group, jnp.nan_to_num(info["episode"]).astype(jnp.int32))
    total, count = bucket_sums(key, jnp.sum(change, axis=1), jnp.sum(chosen, axis=1).astype(jnp.float32))
    mean = total / jnp.maximum(count, 1)
    factor = compounded(batch.need(TURN_FACTOR), mean[:, None], (count > 0)[:, None], clip)
    return batch.with_info(**{TURN_FACTOR: factor})


def joined(whole: Trajectories, phase: Trajectories, turn: Array) -> Trajectories:
    """The batch of a phase with what earlier phases, in `whole`, computed for the tokens of later turns.

    For records: advantages, weights and old log-probabilities of each token are those with which it was trained.
    """
    later = turn_in_episode(whole) > turn
    fields = {
        name: jnp.where(later, getattr(whole, name), getattr(phase, name))
        for name in ("advantages", "weights", "old_logp")
        if getattr(whole, name) is not None and getattr(phase, name) is not None
    }
    return phase.replace(**fields)
