"""The experts of tokens as an engine of a mixture records them, on the host; see `Tokens.experts`.

They are those of the forward pass that gave the token's key and value: of its prefill, its decode step, the verifying
pass of speculation, or, for given tokens, the pass that restored the row. Tokens that were sampled keep those of the
time when the one after them was drawn, also where a later step computes their keys again under new weights.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_llm.core.shapes import bucket
from jaxrl_llm.models.layers.moe import NOT_RECORDED
from jaxrl_llm.sampling.kv_cache import PrefixCache
from jaxrl_llm.sampling.requests import Tokens
from jaxrl_llm.sampling.weights import Weights


def experts_of_prompts(
    weights: Weights, prefix_cache: PrefixCache, prompts: Sequence[tuple[int, Any]]
) -> dict[Any, np.ndarray]:
    """int[tokens, layers, k] of each prompt. prompts: pairs of prompt slot and prefix, as they were just computed."""
    if not prompts or prefix_cache.experts is None:
        return {}
    slots = np.asarray([slot for slot, _ in prompts], np.int32)
    found = np.asarray(weights.fetched(_rows(prefix_cache.experts, np.resize(slots, bucket(len(slots), 1, 1)))))
    return {prefix: found[i, : len(prefix.prompt)].copy() for i, (_, prefix) in enumerate(prompts)}


@jax.jit
def _rows(x: jax.Array, index: jax.Array) -> jax.Array:
    return x[index]


def with_experts(tokens: Tokens, found: np.ndarray) -> Tokens:
    """The tokens that a request began with, with the experts that are found now where they were not known.

    found: int[n, layers, k], from the ring KV cache, where the first is not meaningful: it is the prompt's.
    """
    found = found.copy()
    found[:1] = NOT_RECORDED
    known = tokens.experts
    return tokens._replace(experts=found if known is None else np.where(known == NOT_RECORDED, found, known))


def in_order(prompt_length: int, of_prompt: np.ndarray | None, tokens: Tokens) -> np.ndarray | None:
    """int[prompt_length + n, layers, k]: the experts of a prompt's tokens and of n tokens after it, as they stand.

    NOT_RECORDED where they are not known, such as those of the last token. None where none are.
    of_prompt: int[m, layers, k] of the first m tokens, m at most prompt_length + n.
    """
    known = tokens.experts if tokens.experts is not None else of_prompt
    if known is None:
        return None
    out = np.full((prompt_length + tokens.size, *known.shape[1:]), NOT_RECORDED, known.dtype)
    if of_prompt is not None:
        out[: len(of_prompt)] = of_prompt
    if tokens.experts is not None and tokens.size:  # those of the token before each
        place = slice(prompt_length - 1, prompt_length - 1 + tokens.size)
        out[place] = np.where(tokens.experts == NOT_RECORDED, out[place], tokens.experts)
    return out


def pad_experts(experts: Sequence[np.ndarray | None], length: int) -> np.ndarray | None:
    """int[N, length, layers, k]: the experts of N rows, padded with NOT_RECORDED; None where no row has any.

    Other records of tokens too, such as soft ones f32[N, length, 3, K], which are -1 where there is none.
    """
    known = next((one for one in experts if one is not None), None)
    if known is None:
        return None
    out = np.full((len(experts), length, *known.shape[1:]), NOT_RECORDED, known.dtype)
    for row, one in zip(out, experts, strict=True):
        if one is not None:
            row[: len(one)] = one
    return out
