"""The engine: requests in, completions out as they end, over slots that take the next request when one ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.buckets import bucket, pad_rows
from jaxrl_llm.compilation import compiles, count_compiles
from jaxrl_llm.errors import InputError, shown
from jaxrl_llm.interrupts import interruptible
from jaxrl_llm.models.check import check_policy
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.sampling.cache import Lanes
from jaxrl_llm.sampling.decode import Rows, begin, decode, empty_ring, finished, no_rows
from jaxrl_llm.sampling.draw import Settings
from jaxrl_llm.sampling.prefill import empty_prefixes, prefill, restore
from jaxrl_llm.sampling.requests import Completion, Request, Stats, as_tokens, check_requests, first_not_finite
from jaxrl_llm.sampling.schedule import Placed, Schedule, Shape, plan
from jaxrl_llm.sampling.weights import Weights

CHUNK = 64  # steps between two looks of the host, at most
PREFILL_TOKENS = 512  # of prompts that go through the model together, padding included
IDLE_SHARE = 32  # one row in so many may wait for a new request before the loop is left

Cut = Callable[[np.ndarray], int | None]  # own tokens int32[n] -> how many of them end the completion, or None


def stream(
    policy: Policy,
    weights: Weights,
    requests: Sequence[Request],
    settings: Settings,
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
) -> Generator[Completion, None, None]:
    """Complete requests; yields each completion as it ends, in the order of ending.

    slots: rows that decode at a time, 0 for one a request. A row whose completion ends takes the next waiting request.
    shape: rows, prompt slots and lanes in place of those that `schedule.plan` makes of `slots` and these requests, so
    that rollouts of other numbers of requests share one compiled loop.
    cut: looked at every `chunk` steps, ends a completion by what it says (stop strings).
    enough: called with each completion; from when it gives True nothing more is decoded, and all other requests come
    as they are, unfinished (those that were not begun, without new tokens). Ctrl-C does the same.
    watch: called every `chunk` steps with the index of each running request and its tokens so far.
    cache_dtype: of keys and values, floating or int8; the policy's by default.
    policy_step: written beside every token drawn. stats: filled in.

    The tokens of a request depend on the seed, its prompt, prompt id and sample number only.
    Raises InputError at once for requests that are empty, without room or of tokens beyond the vocabulary, and for
    weights or settings of another kind; and from the iterator where logits are not finite.
    """
    check_policy(policy)
    for name, value, kind, made in (
        ("weights", weights, Weights, "take_weights(policy, params)"),
        ("settings", settings, Settings, "sampling.draw.Settings(...)"),
    ):
        if not isinstance(value, kind):
            raise InputError(f"{name} is a {type(value).__name__}, but must be what {made} gives")
    for name, number, least in (("slots", slots, 0), ("chunk", chunk, 1)):
        if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < least:
            raise InputError(f"{name} is {shown(number)}, but must be a whole number, at least {least}")
    check_requests(requests, policy.config.vocab_size)
    return _stream(
        policy, weights, requests, settings, slots, shape, cut, chunk, enough, watch, cache_dtype, policy_step, stats
    )


def _stream(
    policy: Policy,
    weights: Weights,
    requests: Sequence[Request],
    settings: Settings,
    slots: int,
    shape: Shape | None,
    cut: Cut | None,
    chunk: int,
    enough: Callable[[Completion], bool] | None,
    watch: Callable[[int, np.ndarray], None] | None,
    cache_dtype: Any,
    policy_step: int,
    stats: Stats | None,
) -> Generator[Completion, None, None]:
    stats = Stats() if stats is None else stats
    count_compiles()
    before, stats.began = compiles()[0], time.perf_counter()
    open_ones = []
    for index, request in enumerate(requests):
        if request.begun.size < request.until:
            open_ones.append(index)
        else:
            yield Completion(index, request.begun, False, request.limit)
    if not open_ones:
        return
    asked = [requests[index] for index in open_ones]
    with interruptible() as interrupted:
        engine = _Engine(policy, weights, asked, settings, shape, slots, cache_dtype or policy.dtype, stats)
        stopping = False
        while not stopping and (engine.schedule.placed or engine.schedule.queue):
            engine.admit()
            # The first call takes one step: then first tokens are there, and their time is known.
            engine.decode(min(chunk, CHUNK) if stats.steps else 1)
            if watch is not None:
                for number, tokens in engine.running(policy_step):
                    watch(open_ones[number], tokens)
            for completion in engine.ended(cut, policy_step):
                completion = replace(completion, index=open_ones[completion.index])
                stopping |= enough is not None and enough(completion)
                yield completion
            stats.seconds, stats.compiles = time.perf_counter() - stats.began, compiles()[0] - before
            stats.interrupted = interrupted()
            stopping |= stats.interrupted
        for completion in engine.left(policy_step):
            yield replace(completion, index=open_ones[completion.index])
        stats.interrupted = interrupted()


class _Engine:
    """The state of one rollout: arrays on the device, a few numbers a row here."""

    def __init__(
        self,
        policy: Policy,
        weights: Weights,
        requests: Sequence[Request],
        settings: Settings,
        shape: Shape | None,
        slots: int,
        dtype: Any,
        stats: Stats,
    ) -> None:
        self.policy, self.weights, self.requests, self.settings, self.stats = policy, weights, requests, settings, stats
        mesh = weights.mesh
        prompts = [request.prompt for request in requests]
        shape = shape or plan(prompts, slots, 1 if mesh is None else mesh.shape.get("data", 1))
        self.schedule, self.shape = Schedule(prompts, shape), shape
        self.width = bucket(max(map(len, prompts)))
        tokens = bucket(max(request.limit for request in requests), least=4)
        self.prefixes = weights.spread(empty_prefixes(policy, shape.prompts, self.width, dtype))
        self.ring = weights.spread(empty_ring(policy, shape.rows, tokens, dtype))
        self.rows = no_rows(shape.rows)
        self.lane = np.arange(shape.rows, dtype=np.int32) % (shape.prompts * shape.lanes)
        stats.rows, stats.prompt_slots = shape.rows, shape.prompts
        stats.moved_bytes, stats.moved_seconds = weights.moved_bytes, weights.moved_seconds

    def admit(self) -> None:
        """Give free rows to waiting requests, and put new prompts through the model."""
        placed, new = self.schedule.admit()
        self._prefill([(slot, list(prompt)) for slot, prompt in new])  # type: ignore[call-overload]
        if placed:
            self._begin(placed)
        begun = [place for place in placed if self.requests[place.request].begun.size > 1]
        for start in range(0, len(begun), 8):
            self._restore(begun[start : start + 8])

    def _prefill(self, prompts: list[tuple[int, list[int]]]) -> None:
        """In batches of equal width: the longest prompt's, halved as often as a prompt still fits."""
        widths: dict[int, list[tuple[int, list[int]]]] = {}
        for slot, ids in prompts:
            width = self.width
            while width % 2 == 0 and width // 2 >= max(len(ids), 32):
                width //= 2
            widths.setdefault(width, []).append((slot, ids))
        devices = 1 if self.weights.mesh is None else self.weights.mesh.shape.get("data", 1)
        for width, batch in widths.items():
            most = min(max(PREFILL_TOKENS // width, 1), -(-self.shape.prompts // devices))
            most = devices << (most.bit_length() - 1)
            while batch:
                # Two sizes are compiled for each width; a batch that is mostly filled up is cheaper than single ones.
                size = most if 2 * len(batch) > most else devices
                part, batch = batch[:size], batch[size:]
                spare = size - len(part)
                tokens, _ = pad_rows([ids for _, ids in part] + [[0]] * spare, width)
                length = np.asarray([len(ids) for _, ids in part] + [1] * spare, np.int32)
                into = np.asarray([slot for slot, _ in part] + [self.shape.prompts] * spare, np.int32)
                arrays = self.weights.spread((tokens, length, into))
                self.prefixes = prefill(self.policy, self.weights.prompts, self.prefixes, *arrays)
                self.stats.prompts += len(part)
                self.stats.prompt_tokens += sum(len(ids) for _, ids in part)
                self.stats.padded_tokens += tokens.size

    def _begin(self, placed: list[Placed]) -> None:
        rows: Any = Rows(*map(np.array, self.rows))  # type: ignore[arg-type]
        for request, row, lane in placed:
            asked = self.requests[request]
            begun = asked.begun.token
            rows.prompt[row] = len(asked.prompt)
            rows.newest[row] = begun[-1] if begun.size else 0
            rows.own[row] = max(begun.size - 1, 0)
            rows.fresh[row], rows.done[row] = begun.size == 0, False
            rows.limit[row] = asked.until
            rows.prompt_id[row], rows.sample[row] = asked.prompt_id, asked.sample
            self.lane[row] = lane
        self.rows = rows

    def _restore(self, placed: list[Placed]) -> None:
        """Rebuild the keys and values of rows that go on, under these weights."""
        ids = [[*self.requests[p.request].prompt, *self.requests[p.request].begun.token[:-1].tolist()] for p in placed]
        size = 1 << (len(placed) - 1).bit_length()
        tokens, _ = pad_rows(ids + [[0]] * (size - len(ids)), bucket(max(map(len, ids)), least=32))
        fill = [1] * (size - len(ids))
        length = np.asarray([len(row) for row in ids] + fill, np.int32)
        prompt = np.asarray([len(self.requests[p.request].prompt) for p in placed] + fill, np.int32)
        into = np.asarray([p.row for p in placed] + [self.shape.rows] * len(fill), np.int32)
        layers = restore(
            self.policy, self.weights.prompts, self.ring.layers, tokens, length, prompt, into, self.ring.step
        )
        self.ring = self.ring._replace(layers=layers)
        self.stats.padded_tokens += tokens.size

    def decode(self, chunk: int) -> None:
        """Run the loop until enough rows are done or `chunk` steps are taken."""
        rows, waiting = self.shape.rows, self.schedule.queue
        lanes = None
        if not self.shape.fixed:
            row_in = np.zeros(self.shape.prompts * self.shape.lanes, np.int32)
            for place in self.schedule.placed.values():
                row_in[place.lane] = place.row
            lanes = Lanes(jnp.asarray(self.lane), jnp.asarray(row_in))
        free = rows - len(self.schedule.placed)
        leave_at = min(free + max(rows // IDLE_SHARE, 1), rows) if waiting else rows
        fresh = int(np.sum(np.asarray(self.rows.fresh) & ~np.asarray(self.rows.done)))
        numbers = self.weights.spread(Rows(*map(jnp.asarray, self.rows)))
        of_policy = self.policy, self.weights.loop, self.prefixes, lanes
        if fresh:
            drawn, numbers = begin(*of_policy, self.ring.drawn, self.ring.step, numbers, self.settings)
            self.ring = self.ring._replace(drawn=drawn)
        most = jnp.int32(leave_at), jnp.int32(chunk)
        self.ring, self.rows, work = decode(*of_policy, self.ring, numbers, self.settings, *most)
        steps, live = int(work.steps), int(work.live)
        # A token that is none: it is said now, and not when its row is done.
        lost = np.flatnonzero(np.asarray(self.rows.newest) < 0)
        self._drawn([row for row in lost.tolist() if row in self.schedule.placed], 0)
        stats = self.stats
        stats.first_token = stats.first_token or time.perf_counter() - stats.began
        stats.steps, stats.live, stats.tokens = stats.steps + steps, stats.live + live, stats.tokens + live + fresh
        if waiting:
            stats.busy_steps, stats.busy_live = stats.busy_steps + steps, stats.busy_live + live

    def ended(self, cut: Cut | None, policy_step: int) -> Iterator[Completion]:
        """Completions of rows that are done, whose rows are freed."""
        done = np.asarray(self.rows.done)
        looked = self._drawn([row for row in self.schedule.placed if done[row] or cut is not None], policy_step)
        for row, tokens in looked.items():
            request = self.schedule.placed[row].request
            asked = self.requests[request]
            end = cut(tokens.token) if cut is not None else None
            if end is not None:
                tokens = tokens.first(end)
            elif not done[row]:
                continue
            stop_tokens = np.asarray(self.settings.stop_tokens)
            ended = end is not None or bool(np.isin(tokens.token[-1], stop_tokens))
            self._free(row)
            yield Completion(request, tokens, ended, asked.limit)

    def left(self, policy_step: int) -> Iterator[Completion]:
        """All other requests as they are."""
        for row, tokens in self._drawn(list(self.schedule.placed), policy_step).items():
            request = self.schedule.placed[row].request
            yield Completion(request, tokens, False, self.requests[request].limit)
        for queue in self.schedule.waiting.values():
            for request in queue:
                yield Completion(request, self.requests[request].begun, False, self.requests[request].limit)

    def running(self, policy_step: int) -> Iterator[tuple[int, np.ndarray]]:
        """The requests in the rows, and their tokens."""
        for row, tokens in self._drawn(list(self.schedule.placed), policy_step).items():
            yield self.schedule.placed[row].request, tokens.token

    def _drawn(self, rows: list[int], policy_step: int) -> dict[int, Any]:
        if not rows:
            return {}
        size = 1 << (len(rows) - 1).bit_length()
        index = np.resize(np.asarray(rows, np.int32), size)
        last = np.asarray(self.rows.last)[index]
        count, fresh = np.asarray(self.rows.own), np.asarray(self.rows.fresh)
        drawn = [np.asarray(x) for x in finished(self.ring.drawn, index, last)]
        out = {}
        for i, row in enumerate(rows):
            begun = self.requests[self.schedule.placed[row].request].begun
            own = 0 if fresh[row] else int(count[row]) + 1
            new = as_tokens(drawn, i, own - begun.size, policy_step)
            if (place := first_not_finite(new)) is not None:
                asked = self.requests[self.schedule.placed[row].request]
                raise InputError(
                    f"the policy's logits are not finite at token {begun.size + place + 1} of the completion of prompt "
                    f"{asked.prompt_id}, sample {asked.sample}: are the weights good?"
                )
            out[row] = begun.followed_by(new)
        return out

    def _free(self, row: int) -> None:
        done = np.array(self.rows.done)
        done[row] = True
        self.rows = self.rows._replace(done=done)  # type: ignore[arg-type]
        self.schedule.release(row)
