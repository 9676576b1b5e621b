"""Filling the caches for admitted requests: prompts, and the tokens that a continued completion begins with.

Each function pads a batch on the host, calls one compiled program of `prefill`, and returns the new cache; the cache
that it takes is donated.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.buckets import bucket, pad_rows
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.sampling.cache import PrefixCache
from jaxrl_llm.sampling.decode import RingCache, narrowed
from jaxrl_llm.sampling.prefill import extend, prefill, restore
from jaxrl_llm.sampling.requests import Request, Stats
from jaxrl_llm.sampling.reuse import Reused
from jaxrl_llm.sampling.schedule import Assignment, Shape
from jaxrl_llm.sampling.size import Size
from jaxrl_llm.sampling.weights import Weights

PREFILL_TOKENS = 512  # tokens of prompts in one forward pass, padding included
RESTORE_ROWS = 8  # rows restored in one forward pass


def prefill_prompts(
    policy: Policy,
    weights: Weights,
    prefix_cache: PrefixCache,
    prompts: Sequence[tuple[int, Hashable]],
    size: Size,
    stats: Stats,
) -> PrefixCache:
    """Run new prompts, pairs of prompt slot and token ids, through the model.

    They are batched by width: the width of the cache, halved as often as the prompt still fits.
    """
    widths: dict[int, list[tuple[int, list[int]]]] = {}
    for slot, prompt in prompts:
        ids: list[int] = list(prompt)  # type: ignore[call-overload]
        width = size.width
        while width % 2 == 0 and width // 2 >= max(len(ids), 32):
            width //= 2
        widths.setdefault(width, []).append((slot, ids))
    devices = 1 if weights.mesh is None else weights.mesh.shape.get("data", 1)
    for width, batch in widths.items():
        most = min(max(PREFILL_TOKENS // width, 1), -(-size.shape.prompts // devices))
        most = devices << (most.bit_length() - 1)
        while batch:
            # Two batch sizes are compiled for each width; padding half of a batch is cheaper than many small ones.
            rows = most if 2 * len(batch) > most else devices
            part, batch = batch[:rows], batch[rows:]
            padding = rows - len(part)
            tokens, _ = pad_rows([ids for _, ids in part] + [[0]] * padding, width)
            length = np.asarray([len(ids) for _, ids in part] + [1] * padding, np.int32)
            into = np.asarray([slot for slot, _ in part] + [size.shape.prompts] * padding, np.int32)
            arrays = weights.spread((tokens, length, into))
            prefix_cache = prefill(policy, weights.prompts, prefix_cache, *arrays)
            stats.prompts += len(part)
            stats.prompt_tokens += sum(len(ids) for _, ids in part)
            stats.padded_tokens += tokens.size
    return prefix_cache


def extend_rows(
    policy: Policy,
    weights: Weights,
    prefix_cache: PrefixCache,
    ring_cache: RingCache,
    reused: Sequence[tuple[Assignment, Reused]],
    requests: Mapping[int, Request],
    shape: Shape,
    stats: Stats,
) -> RingCache:
    """Copy the keys and values that the ring KV cache still holds, and run the remaining tokens through the model."""
    if not reused:
        return ring_cache
    begun = [requests[place.request].begun for place, _ in reused]
    ids = [tokens.token[how.usable : -1].tolist() for tokens, (_, how) in zip(begun, reused, strict=True)]
    padding = _next_power_of_two(len(reused)) - len(reused)
    tokens, _ = pad_rows(ids + [[0]] * padding, bucket(max(map(len, ids)), least=8))
    columns = {
        "usable": [how.usable for _, how in reused] + [0] * padding,
        "own": [tokens.size - 1 for tokens in begun] + [1] * padding,
        "shift": [how.shift for _, how in reused] + [0] * padding,
        "source": [how.source for _, how in reused] + [0] * padding,
        "into": [place.row for place, _ in reused] + [shape.rows] * padding,
        "slot": [place.prefix_slot // shape.slots_per_prompt for place, _ in reused] + [0] * padding,
    }
    arrays: dict[str, Any] = {name: np.asarray(values, np.int32) for name, values in columns.items()}
    params = narrowed(policy, weights.loop)
    layers = extend(policy, params, prefix_cache, ring_cache.layers, tokens, *arrays.values(), ring_cache.step)
    stats.reused_tokens += sum(how.usable for _, how in reused)
    stats.padded_tokens += tokens.size
    return ring_cache._replace(layers=layers)


def restore_rows(
    policy: Policy,
    weights: Weights,
    ring_cache: RingCache,
    assigned: Sequence[Assignment],
    requests: Mapping[int, Request],
    shape: Shape,
    stats: Stats,
) -> RingCache:
    """Recompute the keys and values of continued completions under these weights, RESTORE_ROWS rows at a time."""
    for start in range(0, len(assigned), RESTORE_ROWS):
        part = assigned[start : start + RESTORE_ROWS]
        ids = [[*requests[p.request].prompt, *requests[p.request].begun.token[:-1].tolist()] for p in part]
        padding = _next_power_of_two(len(part)) - len(part)
        tokens, _ = pad_rows(ids + [[0]] * padding, bucket(max(map(len, ids)), least=32))
        length = np.asarray([len(row) for row in ids] + [1] * padding, np.int32)
        prompt = np.asarray([len(requests[p.request].prompt) for p in part] + [1] * padding, np.int32)
        into = np.asarray([p.row for p in part] + [shape.rows] * padding, np.int32)
        layers = restore(policy, weights.prompts, ring_cache.layers, tokens, length, prompt, into, ring_cache.step)
        ring_cache = ring_cache._replace(layers=layers)
        stats.padded_tokens += tokens.size
    return ring_cache


def _next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
