"""Completions of very uneven lengths: slots that are filled again, static batches, and rounds that are cut short.

For the rollout benchmark: `long_tail` and `partial` are one repeat each, in the process of our column.
"""

from __future__ import annotations

import math
import random
import time
from statistics import NormalDist
from typing import Any

import jax
import jax.numpy as jnp
from rollout_worker import random_prompts

from jaxrl_llm.models import Policy
from jaxrl_llm.sampling.draw import DrawSettings, seed_of
from jaxrl_llm.sampling.requests import Request
from jaxrl_llm.sampling.stats import Stats
from jaxrl_llm.sampling.stream import stream
from jaxrl_llm.sampling.weights import take_weights


def tail_sigma(count: int, longest: float) -> float:
    """Standard deviation of log(length) at which the longest of `count` quantiles is `longest` times the median."""
    return math.log(longest) / NormalDist().inv_cdf(1 - 0.5 / count)


def tail_limits(count: int, median: float, longest: float, seed: int) -> list[int]:
    """`count` lengths in tokens, >= 1: the middles of as many equal parts of a log-normal distribution, shuffled."""
    sigma = tail_sigma(count, longest)
    parts = [NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)]
    lengths = [max(1, round(median * math.exp(sigma * z))) for z in parts]
    random.Random(seed).shuffle(lengths)
    return lengths


def endless(seed: int) -> DrawSettings:
    """Temperature 1, and no token that ends a completion: only its limit does."""
    return DrawSettings(seed_of(jax.random.key(seed)), jnp.float32(1.0), None, None, jnp.asarray([-1], jnp.int32))


def tail_requests(limits: list[int], prompt: int, group: int, vocabulary: int) -> list[Request]:
    """Requests with these limits; `group` next to each other share a prompt of `prompt` tokens."""
    prompts = random_prompts(-(-len(limits) // group), prompt, vocabulary)
    return [
        Request(tuple(prompts[number // group]), limit, number // group, number % group)
        for number, limit in enumerate(limits)
    ]


def long_tail(
    policy: Policy, params: Any, dtype: Any, *,
    how: str, count: int, slots: int, median: float, longest: float, prompt: int, group: int, seed: int,
) -> dict[str, Any]:  # fmt: skip
    """Sample `count` completions with the limits of `tail_limits`.

    how: "continuous", where a slot that ends takes the next request, or "static", where the same engine is called with
    `slots` requests at a time. occupancy: share of row-steps that gave a token; busy_occupancy: while requests waited.
    """
    requests = tail_requests(tail_limits(count, median, longest, 0), prompt, group, policy.config.vocab_size)
    size = count if how == "continuous" else slots
    settings, every = endless(seed), []
    begin = time.perf_counter()
    weights = take_weights(policy, params)
    tokens = 0
    for start in range(0, count, size):
        every.append(Stats())
        part = requests[start : start + size]
        done = stream(policy, weights, part, settings, slots=slots, cache_dtype=dtype, stats=every[-1])
        tokens += sum(completion.tokens.size for completion in done)
    seconds = time.perf_counter() - begin
    if tokens != sum(request.limit for request in requests):
        raise RuntimeError(f"{tokens} tokens came where {sum(request.limit for request in requests)} were asked for")
    return {
        "seconds": seconds,
        "tokens": tokens,
        "steps": sum(stats.steps for stats in every),
        "occupancy": sum(stats.live for stats in every) / sum(stats.rows * stats.steps for stats in every),
        "busy_occupancy": every[0].busy_occupancy if how == "continuous" else None,
        "compiles": sum(stats.compiles for stats in every),
    }


def partial(
    policy: Policy, params: Any, dtype: Any, *,
    how: str, rounds: int, wanted: int, asked: int, slots: int, median: float, longest: float, prompt: int, group: int,
    seed: int,
) -> dict[str, Any]:  # fmt: skip
    """Several rounds, each of which must give `wanted` completions.

    how: "wait" asks for `wanted` and waits for the last; "enough" asks for `asked` and stops when there are `wanted`:
    the others are kept as they are and go on in the next round, first in the queue.
    tail_steps: decode steps while no request waited. stale_share: of the tokens of finished completions, how many came
    from an earlier round than that in which the completion ended.
    """
    limits = [limit for number in range(rounds) for limit in tail_limits(wanted, median, longest, number)]
    limits += tail_limits(asked, median, longest, rounds)  # for the rest that is always kept open
    pool = tail_requests(limits, prompt, group, policy.config.vocab_size)
    settings = endless(seed)
    spare = 0 if how == "wait" else asked - wanted
    every, kept, taken, finished, tokens, stale = [], [], 0, 0, 0, 0
    begin = time.perf_counter()
    for number in range(rounds):
        weights = take_weights(policy, params)  # they change from round to round in training
        missing = wanted * (number + 1) - finished
        fresh = missing + spare - len(kept)
        requests = [*kept, *pool[taken : taken + fresh]]
        taken += fresh
        kept, came, stats = [], 0, Stats()

        def enough(completion: Any, missing: int = missing) -> bool:
            nonlocal came
            came += 1
            return came >= missing

        for completion in stream(
            policy, weights, requests, settings, slots=slots, cache_dtype=dtype, policy_step=number, stats=stats,
            enough=enough if spare else None,
        ):  # fmt: skip
            if completion.unfinished:
                old = requests[completion.index]
                kept.append(Request(old.prompt, old.limit, old.prompt_id, old.sample, completion.tokens))
            else:
                finished += 1
                tokens += completion.tokens.size
                stale += int((completion.tokens.policy_step < number).sum())
        every.append(stats)
    seconds = time.perf_counter() - begin
    return {
        "seconds": seconds,
        "finished": finished,
        "tokens": tokens,
        "drawn": sum(stats.tokens for stats in every),
        "steps": sum(stats.steps for stats in every),
        "tail_steps": sum(stats.steps - stats.busy_steps for stats in every),
        "occupancy": sum(stats.live for stats in every) / sum(stats.rows * stats.steps for stats in every),
        "stale_share": stale / max(tokens, 1),
        "unfinished": len(kept),
        "compiles": sum(stats.compiles for stats in every),
    }


TAIL_TASKS = {"long_tail": long_tail, "partial": partial}
