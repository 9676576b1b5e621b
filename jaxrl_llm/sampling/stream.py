"""The engine for a policy, and `stream`: decode a list of requests and yield completions as they end."""

import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.models.checks import check_policy
from jaxrl_llm.models.mesh_axes import SAMPLED_ROWS, row_shards
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.sampling.capacity import Shape, Size, size_for
from jaxrl_llm.sampling.checks import check_requests
from jaxrl_llm.sampling.draw import DrawSettings
from jaxrl_llm.sampling.engine import CHUNK, Engine
from jaxrl_llm.sampling.requests import Completion, Cut, Request
from jaxrl_llm.sampling.speculative.drafts import Drafts
from jaxrl_llm.sampling.stats import Stats
from jaxrl_llm.sampling.unmasking.engine import UnmaskingEngine
from jaxrl_llm.sampling.weights import Weights
from jaxrl_llm.utils.errors import InputError, shown
from jaxrl_llm.utils.process import compiles, count_compiles, interruptible


def stream(
    policy: Policy,
    weights: Weights,
    requests: Sequence[Request],
    settings: DrawSettings,
    *,
    slots: int = 0,
    shape: Shape | None = None,
    cut: Cut | None = None,
    chunk: int = CHUNK,
    enough: Callable[[Completion], bool] | None = None,
    watch: Callable[[int, np.ndarray], None] | None = None,
    cache_dtype: Any = None,
    policy_step: int = 0,
    stats: Stats | None = None,
    speculative_tokens: int = 0,
    drafts: Drafts | None = None,
    record_experts: bool = False,
) -> Generator[Completion, None, None]:
    """Complete requests, yielding each completion as it ends.

    slots: rows decoded at a time; 0: one for each request. A row whose completion ends takes the next waiting request.
    shape: sizes to use instead of those that `capacity.plan` derives from `slots` and these requests, so that rollouts
    with different numbers of requests share one compiled loop.
    cut: called every `chunk` steps, says where a completion ends (stop strings).
    enough: called with each completion. After it returns True decoding stops, and all other requests are yielded as
    unfinished completions (those that were not started without new tokens). Ctrl-C does the same.
    watch: called every `chunk` steps with the index of each running request and its tokens so far.
    cache_dtype: dtype of keys and values, floating or int8; by default the policy's.
    policy_step: recorded with every token drawn. stats: filled in.
    speculative_tokens: once few requests are left, draft this many tokens and verify them in one pass; 0: never. Tokens
    do not change, but where two scores tie within rounding; log-probabilities are those of the verifying pass.
    drafts: earlier completions to draft from. Those of this call are added.
    record_experts: of a mixture of experts, also give the experts of each token (`Tokens.experts`, and
    `Completion.prompt_experts`).

    The tokens of a request depend only on the seed and its prompt, prompt id and sample number.

    Raises InputError immediately for an empty prompt, a limit below 1, token ids outside the vocabulary, and weights or
    settings of another type; and from the iterator where logits are not finite.
    """
    check_policy(policy)
    for name, value, kind, made in (
        ("weights", weights, Weights, "take_weights(policy, params)"),
        ("settings", settings, DrawSettings, "sampling.DrawSettings(...)"),
    ):
        if not isinstance(value, kind):
            raise InputError(f"{name} is a {type(value).__name__}, but must be the result of {made}")
    least_of = {"slots": (slots, 0), "chunk": (chunk, 1), "speculative_tokens": (speculative_tokens, 0)}
    for name, (number, least) in least_of.items():
        if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < least:
            raise InputError(f"{name} is {shown(number)}, but must be a whole number, at least {least}")
    check_requests(requests, policy.config.vocab_size)
    stats = Stats() if stats is None else stats

    def completions() -> Generator[Completion, None, None]:
        count_compiles()
        before, stats.began = compiles()[0], time.perf_counter()
        # Requests that are already complete need no engine.
        open_ones = [request for request in requests if request.begun.size < request.until]
        with interruptible() as interrupted:
            if not open_ones:
                for index, request in enumerate(requests):
                    yield Completion(index, request.begun, False, request.limit)
                return
            engine = engine_of(
                policy, weights, settings, size_for(open_ones, slots, row_shards(weights.mesh, SAMPLED_ROWS), shape),
                cut=cut, cache_dtype=cache_dtype, policy_step=policy_step, stats=stats,
                speculative_tokens=speculative_tokens, drafts=drafts, record_experts=record_experts,
            )  # fmt: skip
            for request in requests:
                engine.submit(request)
            stopping = False
            while not stopping and engine.busy:
                engine.advance(chunk)
                if watch is not None:
                    for number, drawn in engine.running():
                        watch(number, drawn.token)
                for completion in engine.completed():
                    stopping |= enough is not None and enough(completion)
                    yield completion
                stats.seconds, stats.compiles = time.perf_counter() - stats.began, compiles()[0] - before
                stats.interrupted = interrupted()
                stopping |= stats.interrupted
            yield from engine.withdraw()
            stats.interrupted = interrupted()

    return completions()


def engine_of(
    policy: Policy, weights: Weights, settings: DrawSettings, size: Size, **options: Any
) -> Engine | UnmaskingEngine:
    """The engine that completes requests with a policy. options: those of `Engine`."""
    kind = Engine if policy.config.unmasking is None else UnmaskingEngine
    return kind(policy, weights, settings, size, **options)


def renewed(engine: Engine, weights: Weights, settings: DrawSettings, policy_step: int, stats: Stats) -> Engine:
    """The engine, which goes on with new weights and with its caches: keys, values and states of the weights before.

    Nothing is computed again but prompts that come anew: one with rows in flight is shared as it is. Tokens keep the
    policy_step of the weights that drew them; their log-probabilities are those with which they were drawn, of the
    weights of that step over such caches.
    """
    if engine.tail is not None:
        engine.leave_tail()
    engine.note_drawn()
    engine.schedule.forget_unused()
    engine.weights, engine.settings, engine.policy_step, engine.stats = weights, settings, policy_step, stats
    stats.rows, stats.prompt_slots = engine.shape.rows, engine.shape.prompts
    stats.moved_bytes, stats.moved_seconds = weights.moved_bytes, weights.moved_seconds
    return engine
