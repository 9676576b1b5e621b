"""Prompts and the tokens after them as a batch, and the completions of a batch."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.core.shapes import bucket, check_batch, pad_rows
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.sampling.checks import check_not_negative, check_tokenizer
from jaxrl_llm.sampling.requests import Tokens
from jaxrl_llm.sampling.routed_experts import pad_experts


def completion_ids(trajectories: Trajectories) -> list[list[int]]:
    """The sampled token ids of each row, including a stop token. InputError for another value than a batch."""
    check_batch(trajectories)
    tokens, action = np.asarray(trajectories.tokens), np.asarray(trajectories.action_mask)
    check_not_negative(tokens, action)
    return [row[chosen].tolist() for row, chosen in zip(tokens, action, strict=True)]


def completion_texts(tokenizer: Any, trajectories: Trajectories) -> list[str]:
    """The completions as text, without special tokens."""
    check_tokenizer(tokenizer)
    return [tokenizer.decode(ids, skip_special_tokens=True) for ids in completion_ids(trajectories)]


class BatchRow(NamedTuple):
    """A prompt and the tokens after it: one row of a batch."""

    prompt: Sequence[int]
    tokens: Tokens
    truncated: bool
    prompt_id: int
    group: int
    actions: np.ndarray | None = None  # bool[n], which of the tokens were sampled; None: all
    turns: np.ndarray | None = None  # int32[n], turn of each token, -1 where not sampled; None: all are turn 0
    experts: np.ndarray | None = None  # int[len(prompt) + n, layers, k], see `routed_experts.in_order`


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
        own = row.tokens
        known = own.token, own.logp, own.entropy, own.floor, own.untruncated_logp, own.policy_step
        for to, x in zip((tokens, logp, entropy, floor, whole, step), known, strict=True):
            to[place] = x
    different = truncating or not np.array_equal(whole, logp)
    # The records of soft tokens, f32[len(prompt) + n, 3, K], -1 of others; None in rows that have none.
    thoughts = [
        None if (its := row.tokens.thoughts) is None
        else np.concatenate([np.full((len(row.prompt), *its.shape[1:]), -1, its.dtype), its])
        for row in rows
    ]  # fmt: skip
    fields: dict[str, Any] = {
        "tokens": tokens, "token_mask": real, "action_mask": action, "behaviour_logp": logp, "policy_step": step,
        "turn": turn, "entropy": entropy, "temperature": np.full(N, temperature, np.float32),
        "group": np.asarray([row.group for row in rows], np.int32),
        "prompt_id": np.asarray([row.prompt_id for row in rows], np.int32),
        "truncated": np.asarray([row.truncated for row in rows], bool),
        "support_floor": floor if truncating else None, "untruncated_logp": whole if different else None,
        "experts": pad_experts([row.experts for row in rows], L), "thoughts": pad_experts(thoughts, L),
    }  # fmt: skip
    return Trajectories(**fields)


def prompts_of(batch: Trajectories) -> Iterator[list[int]]:
    """The token ids before the first action of each row."""
    tokens, there, action = (np.asarray(x) for x in (batch.tokens, batch.token_mask, batch.action_mask))
    for row, first in enumerate(np.argmax(action, axis=1)):
        yield tokens[row, :first][there[row, :first]].tolist()
