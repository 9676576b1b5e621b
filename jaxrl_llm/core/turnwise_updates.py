"""An update in phases: the turns of episodes one after the other, the last turn first (SeeUPO)."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from jaxrl_llm.core.ranges import check_number
from jaxrl_llm.core.repr import layout
from jaxrl_llm.core.trajectory import Array, Trajectories

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
