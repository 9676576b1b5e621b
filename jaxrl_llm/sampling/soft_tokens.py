"""Soft tokens (`core.soft_thinking`) as the engine has them on the host; see `Tokens.thoughts`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxrl_llm.core.soft_thinking import RECORD, SoftThinking
from jaxrl_llm.models.outputs.soft_thinking import check_thinking
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.sampling.requests import Tokens
from jaxrl_llm.utils.errors import InputError


def thinking_policy(policy: Policy, turns: bool = False, speculative_tokens: int = 0, ranked: int = 0) -> Policy:
    """A policy that thinks softly, with the id of the token that ends its thoughts.

    InputError for a model that cannot, and for what its engine does not support.
    """
    assert policy.thinking is not None
    for name, given in (
        ("conversations with an environment or tools", turns),
        ("speculative_tokens", speculative_tokens),
        ("a record of the most probable tokens", ranked),
        ("a sampling hook", policy.hook is not None),
        ("members of a population", policy.population is not None),
    ):
        if given:
            raise InputError(f"soft thinking does not support {name}: leave out one of the two")
    check_thinking(policy.thinking, policy.config)
    end = policy.thinking.end_token(policy.tokenizer)
    return dataclasses.replace(policy, thinking=dataclasses.replace(policy.thinking, end=end))


def thoughts_of(thinking: SoftThinking, begun: Sequence[tuple[int, Tokens]], rows: int, columns: int) -> np.ndarray:
    """f32[rows, columns, 3, K]: the records of rows of a prompt and the tokens after it, but for their last one.

    begun: of each row, the length of its prompt and these tokens; -1 where there are none, and in rows of padding.
    """
    out = np.full((rows, columns, RECORD, thinking.top_k), -1, np.float32)
    for row, (prompt, tokens) in zip(out, begun, strict=False):
        if tokens.thoughts is not None:
            row[prompt : prompt + tokens.size - 1] = tokens.thoughts[:-1]
    return out
