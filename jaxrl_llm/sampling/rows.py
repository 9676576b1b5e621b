"""Assemble token sequences into a right-padded batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.buckets import bucket, pad_rows
from jaxrl_llm.sampling.requests import Tokens
from jaxrl_llm.trajectory import Trajectories


class BatchRow(NamedTuple):
    """A prompt and the tokens after it: one row of a batch."""

    prompt: Sequence[int]
    tokens: Tokens
    truncated: bool
    prompt_id: int
    group: int
    actions: np.ndarray | None = None  # bool[n], which of the tokens were sampled; None: all
    turns: np.ndarray | None = None  # int32[n], turn of each token, -1 where not sampled; None: all are turn 0


def assemble(rows: Sequence[BatchRow], temperature: float, truncating: bool, policy_step: int = 0) -> Trajectories:
    """A batch of these rows, as numpy arrays.

    temperature: of the sampling. truncating: whether top-k, top-p or min-p was on. policy_step: of the current weights,
    written where there is no token.
    """
    N, L = len(rows), bucket(max(len(row.prompt) + row.tokens.size for row in rows))
    tokens, real = pad_rows([list(row.prompt) for row in rows], L)
    action, step = np.zeros((N, L), bool), np.full((N, L), policy_step, np.int32)
    turn = np.full((N, L), -1, np.int32)
    logp, entropy, whole = (np.zeros((N, L), np.float32) for _ in range(3))
    floor = np.full((N, L), -np.inf, np.float32)
    for i, row in enumerate(rows):
        place = (i, slice(len(row.prompt), len(row.prompt) + row.tokens.size))
        real[place] = True
        action[place] = True if row.actions is None else row.actions
        turn[place] = 0 if row.turns is None else row.turns
        for to, x in zip((tokens, logp, entropy, floor, whole, step), row.tokens, strict=True):
            to[place] = x
    different = truncating or not np.array_equal(whole, logp)
    fields: dict[str, Any] = {
        "tokens": tokens,
        "token_mask": real,
        "action_mask": action,
        "behaviour_logp": logp,
        "policy_step": step,
        "turn": turn,
        "group": np.asarray([row.group for row in rows], np.int32),
        "prompt_id": np.asarray([row.prompt_id for row in rows], np.int32),
        "truncated": np.asarray([row.truncated for row in rows], bool),
        "temperature": np.full(N, temperature, np.float32),
        "support_floor": floor if truncating else None,
        "untruncated_logp": whole if different else None,
        "entropy": entropy,
    }
    return Trajectories(**fields)
