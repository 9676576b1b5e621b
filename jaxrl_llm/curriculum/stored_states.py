"""States of conversations of earlier steps, at which the policy replies anew: a curriculum keeps them for a rollout.

A state is all that the policy sees before a reply. A new reply at a stored state is a draw of the current policy, which
a critic can judge; the environment does not hear it, so it has no reward and nothing follows.
"""

from __future__ import annotations

COLUMN = "stored_states"
Where = tuple[list[int], list[int]]  # token ids of a prompt, and of what comes between it and a reply
