"""The engine: takes requests, completes them over slots, and gives each back as it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.buckets import bucket, pad_rows
from jaxrl_llm.errors import InputError
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.sampling.cache import Lanes
from jaxrl_llm.sampling.decode import Rows, begin, decode, empty_ring, finished, narrowed, no_rows
from jaxrl_llm.sampling.draw import Settings
from jaxrl_llm.sampling.prefill import empty_prefixes, extend, prefill, restore
from jaxrl_llm.sampling.requests import Completion, Request, Stats, Tokens, as_tokens, first_not_finite
from jaxrl_llm.sampling.reuse import Kept, Reused, absolute_step, best
from jaxrl_llm.sampling.schedule import Placed, Schedule
from jaxrl_llm.sampling.size import Size
from jaxrl_llm.sampling.weights import Weights

CHUNK = 64  # steps between two looks of the host, at most
PREFILL_TOKENS = 512  # of prompts that go through the model together, padding included
IDLE_SHARE = 32  # one row in so many may wait for a new request before the loop is left

Cut = Callable[[np.ndarray], int | None]  # own tokens int32[n] -> how many of them end the completion, or None


class Engine:
    """Completes requests under one set of weights. It takes requests at any time, also while others decode.

    A request waits for a free row; requests that share a prompt share its pass through the model and its cache. A
    request that does not fit makes the engine larger: rows that decode then go on from their tokens, whose keys are
    computed again. Its arrays are on the device, a few numbers a row here. The arguments are those of `stream`.
    """

    def __init__(
        self,
        policy: Policy,
        weights: Weights,
        settings: Settings,
        size: Size,
        *,
        cut: Cut | None = None,
        cache_dtype: Any = None,
        policy_step: int = 0,
        stats: Stats | None = None,
    ) -> None:
        self.policy, self.weights, self.settings = policy, weights, settings
        self.cut, self.policy_step = cut, policy_step
        self.dtype, self.stats = cache_dtype or policy.dtype, Stats() if stats is None else stats
        self.requests: dict[int, Request] = {}  # that are not completed
        self.kept: dict[int, Kept] = {}  # rows that ended and were not given away yet
        self._taken = 0
        self._done: list[Completion] = []  # that needed no step
        self._allocate(size)

    def _allocate(self, size: Size) -> None:
        """New arrays, without any request."""
        self.size, self.shape, self.width = size, size.shape, size.width
        self.schedule = Schedule((), size.shape)
        shape, weights = size.shape, self.weights
        self.prefixes = weights.spread(empty_prefixes(self.policy, shape.prompts, size.width, self.dtype))
        self.ring = weights.spread(empty_ring(self.policy, shape.rows, size.tokens, self.dtype))
        self.rows = no_rows(shape.rows)
        self.kept, self.steps = {}, 0
        self.shortest = min(layer.values.shape[2] for layer in self.ring.layers)
        self.lane = np.arange(shape.rows, dtype=np.int32) % (shape.prompts * shape.lanes)
        self.stats.rows, self.stats.prompt_slots = shape.rows, shape.prompts
        self.stats.moved_bytes, self.stats.moved_seconds = weights.moved_bytes, weights.moved_seconds

    def submit(self, request: Request) -> int:
        """Take a request; returns its number, which its completion has as its index."""
        number, self._taken = self._taken, self._taken + 1
        if request.begun.size >= request.until:
            self._done.append(Completion(number, request.begun, False, request.limit))
            return number
        if not self.size.fits(request):
            self._grow(request)
        self.requests[number] = request
        self.schedule.add(number, request.prompt)
        return number

    def _grow(self, request: Request) -> None:
        """Make room for a request that does not fit. Rows that decode are taken back to their tokens."""
        width = max(self.width, bucket(len(request.prompt)))
        size = Size(self.shape, width, max(self.size.tokens, bucket(request.limit, least=4)))
        for row, tokens in self._drawn(list(self.schedule.placed)).items():
            number = self.schedule.placed[row].request
            self.requests[number] = replace(self.requests[number], begun=tokens)
        self._allocate(size)
        for number, waiting in self.requests.items():
            self.schedule.add(number, waiting.prompt)

    @property
    def busy(self) -> bool:
        """Whether a request is not completed."""
        return bool(self.requests or self._done)

    def step(self, chunk: int = CHUNK) -> list[Completion]:
        """Decode for at most `chunk` steps, and give back the completions that ended."""
        self.advance(chunk)
        return self.completed()

    def advance(self, chunk: int) -> None:
        """Give free rows to requests that wait, and decode for at most `chunk` steps."""
        if self.requests:
            self.admit()
            # The first call takes one step: then first tokens are there, and their time is known.
            self.decode(min(chunk, CHUNK) if self.stats.steps else 1)
            self.stats.seconds = time.perf_counter() - self.stats.began

    def completed(self) -> list[Completion]:
        """Take the completions that ended, whose rows are free from now on."""
        done, self._done = self._done, []
        return done + list(self.ended())

    def withdraw(self) -> list[Completion]:
        """Give back all other requests as they are, unfinished; those that were not begun have no new tokens."""
        left, self._done = self._done, []
        for row, tokens in self._drawn(list(self.schedule.placed)).items():
            number = self.schedule.placed[row].request
            left.append(Completion(number, tokens, False, self.requests.pop(number).limit))
        for number, request in self.requests.items():
            left.append(Completion(number, request.begun, False, request.limit))
        self.requests = {}
        self.schedule = Schedule((), self.shape)
        self.rows = self.rows._replace(done=np.ones(self.shape.rows, bool))  # type: ignore[arg-type]
        return left

    def admit(self) -> None:
        """Give free rows to waiting requests, and put new prompts through the model."""
        placed, new = self.schedule.admit()
        self._prefill([(slot, list(prompt)) for slot, prompt in new])  # type: ignore[call-overload]
        begun = [place for place in placed if self.requests[place.request].begun.size > 1]
        found = {place: self._reusable(place.request) for place in begun}
        if placed:
            self._begin(placed)
        if reused := [(place, how) for place, how in found.items() if how is not None]:
            self._extend(reused)
        missed = [place for place in begun if found[place] is None]
        for start in range(0, len(missed), 8):
            self._restore(missed[start : start + 8])

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
            self.kept.pop(row, None)
        self.rows = rows

    def _reusable(self, number: int) -> Reused | None:
        request = self.requests[number]
        return best(self.kept, request.prompt, request.begun.token, self.steps, self.shortest)

    def _extend(self, placed: list[tuple[Placed, Reused]]) -> None:
        """Copy what the ring still holds of rows that go on, and put the rest of their tokens through the model."""
        requests = [self.requests[place.request] for place, _ in placed]
        ids = [asked.begun.token[how.usable : -1].tolist() for asked, (_, how) in zip(requests, placed, strict=True)]
        size = 1 << (len(placed) - 1).bit_length()
        spare = size - len(placed)
        tokens, _ = pad_rows(ids + [[0]] * spare, bucket(max(map(len, ids)), least=8))
        slots = [place.lane // self.shape.lanes for place, _ in placed]
        columns = {
            "usable": [how.usable for _, how in placed] + [0] * spare,
            "own": [asked.begun.size - 1 for asked in requests] + [1] * spare,
            "shift": [how.shift for _, how in placed] + [0] * spare,
            "source": [how.source for _, how in placed] + [0] * spare,
            "into": [place.row for place, _ in placed] + [self.shape.rows] * spare,
            "slot": slots + [0] * spare,
        }
        arrays = {name: np.asarray(values, np.int32) for name, values in columns.items()}
        params = narrowed(self.policy, self.weights.loop)
        layers = extend(self.policy, params, self.prefixes, self.ring.layers, tokens, *arrays.values(), self.ring.step)
        self.ring = self.ring._replace(layers=layers)
        self.stats.reused_tokens += sum(how.usable for _, how in placed)
        self.stats.padded_tokens += tokens.size

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
        self.steps += steps
        # A token that is none: it is said now, and not when its row is done.
        lost = np.flatnonzero(np.asarray(self.rows.newest) < 0)
        self._drawn([row for row in lost.tolist() if row in self.schedule.placed])
        stats = self.stats
        stats.first_token = stats.first_token or time.perf_counter() - stats.began
        stats.steps, stats.live, stats.tokens = stats.steps + steps, stats.live + live, stats.tokens + live + fresh
        if waiting:
            stats.busy_steps, stats.busy_live = stats.busy_steps + steps, stats.busy_live + live

    def ended(self) -> Iterator[Completion]:
        """Completions of rows that are done, whose rows are freed."""
        done, cut = np.asarray(self.rows.done), self.cut
        for row, tokens in self._drawn([row for row in self.schedule.placed if done[row] or cut is not None]).items():
            number = self.schedule.placed[row].request
            asked = self.requests[number]
            end, drawn = cut(tokens.token[asked.given :]) if cut is not None else None, tokens
            if end is not None:
                tokens = tokens.first(asked.given + end)
            elif not done[row]:
                continue
            stop_tokens = np.asarray(self.settings.stop_tokens)
            ended = end is not None or bool(np.isin(tokens.token[-1], stop_tokens))
            last = absolute_step(self.steps, int(np.asarray(self.rows.last)[row]), self.size.tokens)
            self.kept[row] = Kept(asked.prompt, drawn.token, last)
            self._free(row)
            del self.requests[number]
            yield Completion(number, tokens, ended, asked.limit)

    def running(self) -> Iterator[tuple[int, np.ndarray]]:
        """The requests in the rows, and their tokens."""
        for row, tokens in self._drawn(list(self.schedule.placed)).items():
            yield self.schedule.placed[row].request, tokens.token

    def _drawn(self, rows: list[int]) -> dict[int, Tokens]:
        """What rows have drawn by now, with what they were begun with."""
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
            new = as_tokens(drawn, i, own - begun.size, self.policy_step)
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
