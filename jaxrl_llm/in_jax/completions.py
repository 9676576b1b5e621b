"""What sampling inside a compiled program gives. N rows, T completion tokens."""

from __future__ import annotations

from typing import NamedTuple

from jaxrl_llm.core.trajectory import Array


class Completions(NamedTuple):
    """Of N prompts, a row for each completion."""

    tokens: Array  # int32[N, T], the end token from its first place on
    mask: Array  # bool[N, T] true where the policy chose the token: up to its end token, inclusive
    real: Array  # bool[N, T] true there, and at the environment's tokens between
    logp: Array  # f32[N, T]
    entropy: Array  # f32[N, T]
