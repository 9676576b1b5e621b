"""The engine: takes requests, decodes them in slots, and returns each completion as it ends."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxrl_llm.models.policy import Policy
from jaxrl_llm.sampling.capacity import Size
from jaxrl_llm.sampling.decode import decode, empty_ring_cache
from jaxrl_llm.sampling.draw import DrawSettings
from jaxrl_llm.sampling.kv_cache import LayerCache, PrefixSlots
from jaxrl_llm.sampling.prefill import empty_prefix_cache, first_tokens, prefill_prompts
from jaxrl_llm.sampling.requests import Completion, Cut, Request, Tokens
from jaxrl_llm.sampling.resume.kv_offload import Kept, absolute_step, store_of
from jaxrl_llm.sampling.resume.restore import Resuming, resume_rows
from jaxrl_llm.sampling.routed_experts import experts_of_prompts
from jaxrl_llm.sampling.rows import begun_rows, marked_done, no_rows
from jaxrl_llm.sampling.sampled_tokens import check_finite_draws, in_ring, thinking_policy
from jaxrl_llm.sampling.scheduler import Schedule
from jaxrl_llm.sampling.speculative.drafts import Drafts
from jaxrl_llm.sampling.speculative.tail import TailRows, most_rows
from jaxrl_llm.sampling.stats import Stats
from jaxrl_llm.sampling.weights import Weights
from jaxrl_llm.utils.errors import InputError

CHUNK = 64  # decode steps before the loop returns to the host, at most
IDLE_SHARE = 32  # the loop returns to the host when one row in this many is idle and requests are waiting


class Engine:
    """Completes requests under one set of weights. It takes requests at any time, even while others are decoding.

    A request waits for a free row; requests with the same prompt and adapter share its prefill and its cache. A request
    that does not fit makes the engine grow: rows that are decoding then continue from their tokens, whose keys and
    values are recomputed. The caches stay on the device; the host keeps a few numbers for each row. The arguments are
    those of `stream`.
    """

    def __init__(
        self,
        policy: Policy,
        weights: Weights,
        settings: DrawSettings,
        size: Size,
        *,
        cut: Cut | None = None,
        cache_dtype: Any = None,
        policy_step: int = 0,
        stats: Stats | None = None,
        speculative_tokens: int = 0,
        drafts: Drafts | None = None,
        record_experts: bool = False,
        turns: bool = False,
        ranked: int = 0,
    ) -> None:
        """turns: requests of conversations, which come back; they keep their rows while nobody else needs them.

        ranked: how many of the most probable tokens to record at each place, `Tokens.ranked`.
        """
        if policy.config.unmasking is not None:
            raise InputError("a masked-diffusion model draws tokens in no order: take sampling.stream.engine_of")
        if policy.thinking is not None:
            policy = thinking_policy(policy, turns=turns, speculative_tokens=speculative_tokens, ranked=ranked)
        self.policy, self.weights, self.settings = policy, weights, settings
        self.cut, self.policy_step, self.turns = cut, policy_step, turns
        self.dtype, self.stats = cache_dtype or policy.activation_dtype, Stats() if stats is None else stats
        self.requests: dict[int, Request] = {}  # not completed yet, by number
        self.speculative_tokens, self.drafts = speculative_tokens, Drafts() if drafts is None else drafts
        self.record, self.ranked = record_experts and policy.config.num_experts > 0, ranked
        self.stop = frozenset(np.asarray(settings.stop_tokens).tolist())
        self.prompt_experts: dict[Any, np.ndarray] = {}  # by prompt, where they are recorded
        self._submitted = 0
        self._done: list[Completion] = []  # complete on submission
        self._allocate(size)

    def _allocate(self, size: Size) -> None:
        shape, weights = size.shape, self.weights
        self.size, self.shape, self.schedule = size, shape, Schedule((), shape)
        self.prefix_cache = weights.zeros(
            empty_prefix_cache, self.policy, shape.prompts, size.width, self.dtype, self.record
        )
        own = self.policy, shape.rows, size.tokens, self.dtype, self.record, self.ranked
        self.ring_cache = weights.zeros(empty_ring_cache, *own)
        self.rows = no_rows(shape.rows, self.policy.thinking)
        beside = empty_ring_cache, self.policy, size.parked, size.tokens, self.dtype, self.record
        self.kept = store_of(self.policy, weights, beside, size.parked)  # rows that ended
        self.steps = 0
        self.tail: TailRows | None = None  # the rows that decode by speculation
        caches = (layer for layer in self.ring_cache.layers if isinstance(layer, LayerCache))
        self.shortest = min((cache.values.shape[2] for cache in caches), default=size.tokens)
        self.stats.rows, self.stats.prompt_slots = shape.rows, shape.prompts
        self.stats.moved_bytes, self.stats.moved_seconds = weights.moved_bytes, weights.moved_seconds

    def submit(self, request: Request) -> int:
        """Queue a request. Returns its number, which is the index of its completion."""
        if request.fixed:
            raise InputError(
                "only a masked-diffusion model writes around fixed tokens: let a completion begin with them"
            )
        number, self._submitted = self._submitted, self._submitted + 1
        self.stats.asked += 1
        # What the request brings after earlier turns may be given to it, and end it.
        over = request.begun.size > request.given and int(request.begun.token[-1]) in self.stop
        if over or request.begun.size >= request.until:
            self._done.append(Completion(number, request.begun, over, request.limit))
            self.stats.finished += 1
            return number
        if not self.size.fits(request):
            self._grow(request)
        self.requests[number] = request
        # Who began first ends first, so that few conversations are under way at a time.
        self.schedule.add(number, request.prefix, first=self.turns and request.begun.size > 0)
        return number

    def _grow(self, request: Request) -> None:
        """Make room for a request that does not fit. Rows that are decoding are requeued with their tokens."""
        self.note_drawn()
        self._allocate(self.size.grown(request))
        for number, waiting in self.requests.items():
            self.schedule.add(number, waiting.prefix)

    def note_drawn(self) -> None:
        """Let the requests that are decoding begin with the tokens that they have drawn."""
        for _, number, request, tokens in self._decoding():
            self.requests[number] = replace(request, begun=tokens)

    @property
    def busy(self) -> bool:
        """Whether any request is not completed."""
        return bool(self.requests or self._done)

    def step(self, chunk: int = CHUNK) -> list[Completion]:
        """Decode for at most `chunk` steps and return the completions that ended."""
        self.advance(chunk)
        return self.completed()

    def advance(self, chunk: int) -> None:
        """Give free rows to waiting requests and decode for at most `chunk` steps."""
        if self.requests:
            if self.tail is not None and self.schedule.queue:
                self.leave_tail()
            self.admit()
            # The first call takes one step, to measure the time to the first token.
            self.decode(min(chunk, CHUNK) if self.stats.steps else 1)
            self.stats.seconds = time.perf_counter() - self.stats.began

    def completed(self) -> list[Completion]:
        """Collect the completions that ended and free their rows."""
        done, self._done = self._done, []
        return done + list(self.ended())

    def withdraw(self) -> list[Completion]:
        """Return all other requests as unfinished completions; those that were not started have no new tokens."""
        left, self._done = self._done, []
        for _, number, request, tokens in self._decoding():
            del self.requests[number]
            left.append(Completion(number, tokens, False, request.limit, self.prompt_experts.get(request.prefix)))
        left += [Completion(number, request.begun, False, request.limit) for number, request in self.requests.items()]
        self.requests, self.tail = {}, None
        self.schedule = Schedule((), self.shape)
        self.rows = marked_done(self.rows, range(self.shape.rows))
        return left

    def admit(self) -> None:
        """Give free rows to waiting requests, and fill the caches with their prompts and the tokens they begin with."""
        row_for = partial(self.kept.row_for, self.requests, self.steps, self.shortest)
        assigned, new_prompts = self.schedule.admit(row_for) if self.turns else self.schedule.admit()
        self.prefix_cache = prefill_prompts(
            self.policy, self.weights, self.prefix_cache, new_prompts, self.size, self.stats
        )
        self.prompt_experts |= experts_of_prompts(self.weights, self.prefix_cache, new_prompts)
        begun = [place for place in assigned if self.requests[place.request].begun.size > 1]
        if begun or self.kept.rows:
            own = Resuming(self.policy, self.weights, self.prefix_cache, self.requests, self.shape, self.stats)
            self.ring_cache = resume_rows(own, self.kept, self.ring_cache, begun, assigned, self.steps, self.shortest)
        if assigned:
            self.rows = begun_rows(self.rows, assigned, self.requests, self.policy.thinking)

    def decode(self, chunk: int) -> None:
        """Run the decode loop until enough rows are done or `chunk` steps are taken."""
        rows, waiting, live = self.shape.rows, self.schedule.queue, len(self.schedule.placed)
        fresh = int(np.sum(np.asarray(self.rows.fresh) & ~np.asarray(self.rows.done)))
        leave_at = rows
        if self.speculative_tokens and not waiting:
            few = most_rows(self.size, self.weights.mesh)
            if live <= few and not fresh:
                self._decode_tail(chunk)
                return
            leave_at, chunk = (rows - few, chunk) if live > few else (rows, 1)
        indices = self.schedule.slot_of_row.copy(), self.schedule.row_in
        slots = None if self.shape.fixed else PrefixSlots(*jax.device_put(indices))
        if waiting or self.turns:
            leave_at = min(rows - live + max(rows // IDLE_SHARE, 1), rows)
        self.ring_cache = self.kept.park_overwritten(self.ring_cache, self.steps, chunk, self.shortest)
        numbers = self.weights.spread(jax.device_put(self.rows))
        shared = self.policy, self.weights.loop, self.prefix_cache, slots
        if fresh:
            self.ring_cache, numbers = first_tokens(
                self.policy, self.weights, self.prefix_cache, slots, self.ring_cache, numbers, self.settings
            )
        limits = jax.device_put((np.int32(leave_at), np.int32(chunk)))
        self.ring_cache, *found = decode(*shared, self.ring_cache, numbers, self.settings, *limits)
        self.rows, counts = self.weights.fetched(found)
        self.steps += int(counts.steps)
        # A row whose logits are not finite has the token -1: raise now, not when the row is done.
        invalid = np.flatnonzero(np.asarray(self.rows.newest) < 0)
        self._decoding(row for row in invalid.tolist() if row in self.schedule.placed)
        self.stats.count(int(counts.steps), int(counts.live), fresh, bool(waiting))

    def _decode_tail(self, chunk: int) -> None:
        """Let the rows that are decoding, which are few, take at most `chunk` passes of speculation."""
        if self.tail is None:
            self.note_drawn()
            self.tail = TailRows(
                self.policy, self.weights, self.settings, self.size, self.speculative_tokens, self.requests,
                list(self.schedule.placed.values()), (self.prefix_cache, self.ring_cache), self.rows,
            )  # fmt: skip
        self.rows = marked_done(self.rows, self.tail.advance(chunk, self.drafts, self.stats))
        self._decoding()  # see `decode`

    def leave_tail(self) -> None:
        """Requeue the rows that decode by speculation, with their tokens."""
        for row, number, request, tokens in self._decoding():
            self._leave(row, request, tokens)
            self.requests[number] = replace(request, begun=tokens)
            self.schedule.add(number, request.prefix)
        self.tail = None

    def _leave(self, row: int, request: Request, drawn: Tokens) -> None:
        """Free a row, and remember whose keys and values are there until another takes it."""
        if self.policy.thinking is None:  # what soft tokens left is told by no ids
            # Tokens of speculation are not in the ring KV cache.
            tokens = drawn.token if self.tail is None else request.begun.token
            last = absolute_step(self.steps, int(np.asarray(self.rows.last)[row]), self.size.tokens)
            self.kept.rows[row] = Kept(request.prefix, tokens, last)
        self._free(row)

    def ended(self) -> Iterator[Completion]:
        """Yield the completions of rows that are done, and free the rows."""
        done, cut = np.asarray(self.rows.done), self.cut
        rows = [row for row in self.schedule.placed if done[row] or cut is not None]
        for row, number, request, tokens in self._decoding(rows):
            end, drawn = cut(tokens.token[request.given :]) if cut is not None else None, tokens
            if end is not None:
                tokens = tokens.first(request.given + end)
            elif not done[row]:
                continue
            ended = end is not None or int(tokens.token[-1]) in self.stop
            self._leave(row, request, drawn)
            if self.speculative_tokens:
                self.drafts.add(request.prompt_id, tokens.token)
            del self.requests[number]
            self.stats.finished += 1
            yield Completion(number, tokens, ended, request.limit, self.prompt_experts.get(request.prefix))
        if not self.schedule.placed:
            self.tail = None

    def running(self) -> Iterator[tuple[int, Tokens]]:
        """The number and tokens of each request that is decoding."""
        return iter([(number, tokens) for _, number, _, tokens in self._decoding()])

    def cancel(self, number: int) -> None:
        """Give up a request, whether it is decoding or waits; nothing for one that is completed."""
        if self.requests.pop(number, None) is None:
            return
        row = next((row for row, place in self.schedule.placed.items() if place.request == number), None)
        if row is None:
            self.schedule.drop(number)
        else:
            self._free(row)

    def _decoding(self, rows: Iterable[int] | None = None) -> list[tuple[int, int, Request, Tokens]]:
        """The row, number and request of what is decoding, in some rows or in all, with its tokens so far, including
        those that it began with. InputError where logits are not finite."""
        placed = self.schedule.placed
        asked = {row: self.requests[placed[row].request] for row in (placed if rows is None else rows)}
        if not asked:
            return []
        if self.tail is None:
            out = in_ring(self.weights, self.ring_cache, self.rows, asked, self.policy_step)
        else:
            out = self.tail.drawn(list(asked), self.policy_step)
        check_finite_draws(asked, out)
        return [(row, placed[row].request, request, out[row]) for row, request in asked.items()]

    def _free(self, row: int) -> None:
        self.rows = marked_done(self.rows, [row])
        self.schedule.release(row)
