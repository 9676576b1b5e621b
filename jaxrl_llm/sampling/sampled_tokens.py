"""The tokens that rows of the engine drew, on the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxrl_llm.core.shapes import bucket
from jaxrl_llm.sampling.decode import RingCache, finished
from jaxrl_llm.sampling.draw import Drawn
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
        drawn: Any = _in_order(jax.tree.map(np.asarray, ring_cache.drawn), index, np.asarray(state.last)[index])
    else:
        index = np.resize(index, bucket(len(rows), 1, 1))
        ordered = finished(ring_cache.drawn, index, np.asarray(state.last)[index])
        drawn = jax.tree.map(np.asarray, weights.fetched(ordered))
    out = {}
    for i, (row, request) in enumerate(requests.items()):
        own, begun = 0 if fresh[row] else int(count[row]) + 1, request.begun
        if drawn.experts is not None and begun.size < own:
            begun = with_experts(begun, drawn.experts[i, drawn.token.shape[1] - own :][: begun.size])
        out[row] = begun.followed_by(as_tokens(drawn, i, own - begun.size, policy_step))
    return out


def _in_order(drawn: Drawn, rows: np.ndarray, last: np.ndarray) -> Any:
    """`finished`, on the host."""
    columns = (last[:, None] + 1 + np.arange(drawn.token.shape[1])) % drawn.token.shape[1]
    return jax.tree.map(lambda x: x[rows[:, None], columns], drawn)


def check_finite(requests: Mapping[int, Request], drawn: Mapping[int, Tokens]) -> None:
    """InputError if a token of a request was drawn from logits that are not finite. Both by row."""
    for row, tokens in drawn.items():
        request = requests[row]
        if (place := first_not_finite(tokens.after(request.begun.size))) is not None:
            raise InputError(
                f"the policy's logits are not finite at token {request.begun.size + place + 1} of the completion of "
                f"prompt {request.prompt_id}, sample {request.sample}: check the weights"
            )
