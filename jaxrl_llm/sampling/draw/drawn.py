"""How to draw tokens, and what is drawn."""

from __future__ import annotations

from typing import NamedTuple

from jaxrl_llm.core.trajectory import Array
from jaxrl_llm.sampling.filters import Filters


class DrawSettings(NamedTuple):
    """How to draw tokens: arrays, so that their values can change without recompilation."""

    seed: Array  # uint32[]
    temperature: Array  # f32[]; 0 is greedy
    filters: Filters | None
    allowed: Array | None  # bool[V], the tokens that may be drawn; None: all
    stop_tokens: Array  # int32[E]; drawing one ends the row
    state: dict[str, Array] | None = None  # f32[] each, the numbers of the policy's hook; None: the first ones


class Drawn(NamedTuple):
    """One drawn token of each row."""

    token: Array  # int32[N]
    logp: Array  # f32[N], under the distribution that it was drawn from
    entropy: Array  # f32[N], of that distribution, in nats
    floor: Array  # f32[N], log-probability at or above which the filters kept tokens (-inf without), or `Hook.remember`
    untruncated_logp: Array  # f32[N], under the distribution before filters, `allowed`, and a hook that truncates
    experts: Array | None = None  # int[N, layers, k], of the token from whose state it was drawn; None: not recorded
    thoughts: Array | None = None  # f32[N, 3, K], records of soft tokens; None: of a policy that does not think so
    # f32[N, 3, K], ids of the K most probable tokens, the best first, their logp and untruncated_logp; None: no record
    ranked: Array | None = None

    @property
    def ranks(self) -> int:
        """How many of the most probable tokens are recorded at each place."""
        return 0 if self.ranked is None else self.ranked.shape[-1]
