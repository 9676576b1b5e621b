"""The tokens that rows of the engine drew, on the host; soft ones (`core.soft_thinking`), see `Tokens.thoughts`."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_llm.core.shapes import bucket
from jaxrl_llm.core.soft_thinking import RECORD, SoftThinking
from jaxrl_llm.models.outputs.soft_thinking import check_thinking
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.sampling.decode import RingCache, finished_tokens
from jaxrl_llm.sampling.requests import Request, Tokens, as_tokens, first_not_finite
from jaxrl_llm.sampling.routed_experts import with_experts
from jaxrl_llm.sampling.rows import RowState
from jaxrl_llm.sampling.weights import Weights
from jaxrl_llm.utils.errors import InputError


def in_ring(
    weights: Weights, ring_cache: RingCache, state: RowState, requests: Mapping[int, Request], policy_step: int
) -> dict[int, Tokens]:
    """The tokens of some rows so far, including those that they began with. requests: by row."""
    rows = list(requests)
    count, fresh, index = np.asarray(state.own), np.asarray(state.fresh), np.asarray(rows, np.int32)
    if weights.mesh is None and weights.platform == "cpu":  # the host reads them where they are
        T = ring_cache.drawn.token.shape[1]
        columns = (np.asarray(state.last)[index][:, None] + 1 + np.arange(T)) % T  # as in `finished_tokens`
        drawn: Any = jax.tree.map(lambda x: np.asarray(x)[index[:, None], columns], ring_cache.drawn)
    else:
        index = np.resize(index, bucket(len(rows), 1, 1))
        ordered = finished_tokens(ring_cache.drawn, index, np.asarray(state.last)[index])
        drawn = jax.tree.map(np.asarray, weights.fetched(ordered))
    out = {}
    for i, (row, request) in enumerate(requests.items()):
        own, begun = 0 if fresh[row] else int(count[row]) + 1, request.begun
        if drawn.experts is not None and begun.size < own:
            begun = with_experts(begun, drawn.experts[i, drawn.token.shape[1] - own :][: begun.size])
        out[row] = begun.followed_by(as_tokens(drawn, i, own - begun.size, policy_step))
    return out


def check_finite_draws(requests: Mapping[int, Request], drawn: Mapping[int, Tokens]) -> None:
    """InputError if a token of a request was drawn from logits that are not finite. Both by row."""
    for row, tokens in drawn.items():
        request = requests[row]
        if (place := first_not_finite(tokens.after(request.begun.size))) is not None:
            raise InputError(
                f"the policy's logits are not finite at token {request.begun.size + place + 1} of the completion of "
                f"prompt {request.prompt_id}, sample {request.sample}: check the weights"
            )


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
