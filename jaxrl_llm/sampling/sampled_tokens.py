"""The tokens that rows of the engine drew, on the host."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np

from jaxrl_llm.sampling.decode import RingCache, RowState, finished
from jaxrl_llm.sampling.requests import Request, Tokens, as_tokens, first_not_finite
from jaxrl_llm.sampling.routed_experts import with_experts
from jaxrl_llm.sampling.weights import Weights
from jaxrl_llm.utils.errors import InputError


def in_ring(
    weights: Weights, ring_cache: RingCache, state: RowState, requests: Mapping[int, Request], policy_step: int
) -> dict[int, Tokens]:
    """The tokens of some rows so far, including those that they began with. requests: by row."""
    rows = list(requests)
    size = 1 << (len(rows) - 1).bit_length()
    index = np.resize(np.asarray(rows, np.int32), size)
    last = np.asarray(state.last)[index]
    count, fresh = np.asarray(state.own), np.asarray(state.fresh)
    drawn = jax.tree.map(np.asarray, weights.fetched(finished(ring_cache.drawn, index, last)))
    out = {}
    for i, (row, request) in enumerate(requests.items()):
        own, begun = 0 if fresh[row] else int(count[row]) + 1, request.begun
        if drawn.experts is not None and begun.size < own:
            begun = with_experts(begun, drawn.experts[i, drawn.token.shape[1] - own :][: begun.size])
        out[row] = begun.followed_by(as_tokens(drawn, i, own - begun.size, policy_step))
    return out


def check_finite(requests: Mapping[int, Request], drawn: Mapping[int, Tokens]) -> None:
    """InputError if a token of a request was drawn from logits that are not finite. Both by row."""
    for row, tokens in drawn.items():
        request = requests[row]
        if (place := first_not_finite(tokens.after(request.begun.size))) is not None:
            raise InputError(
                f"the policy's logits are not finite at token {request.begun.size + place + 1} of the completion of "
                f"prompt {request.prompt_id}, sample {request.sample}: check the weights"
            )
