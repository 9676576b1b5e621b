"""The engine of masked-diffusion models: requests go through it a block at a time, several side by side."""

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core.shapes import bucket
from jaxrl_llm.models.by_row import are_by_row
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.sampling.capacity import Size
from jaxrl_llm.sampling.draw import DrawSettings
from jaxrl_llm.sampling.requests import Completion, Cut, Request, Tokens
from jaxrl_llm.sampling.sampled_tokens import check_finite_draws
from jaxrl_llm.sampling.stats import Stats
from jaxrl_llm.sampling.unmasking.unmask import Canvas, mean_field, unmask
from jaxrl_llm.sampling.weights import Weights
from jaxrl_llm.utils.errors import InputError


class _Written(NamedTuple):
    """What a request has until now."""

    request: Request
    ids: tuple[int, ...]  # of its response, those it began with first


class UnmaskingEngine:
    """Completes requests by unmasking; of the same form as `engine.Engine`.

    Each call of `step` draws a block of as many requests as there are rows, in the order in which they came. Nothing is
    cached between calls: a request that is withdrawn goes on later from its tokens, and what it draws does not depend
    on the others. Log-probabilities and entropies are found when a response is complete (`unmask.mean_field`); of one
    that is withdrawn they are those of what it has.
    InputError for what other models can: conversations, hooks, speculation.
    """

    def __init__(
        self,
        policy: Policy,
        weights: Weights,
        settings: DrawSettings,
        size: Size,
        *,
        cut: Cut | None = None,
        policy_step: int = 0,
        stats: Stats | None = None,
        speculative_tokens: int = 0,
        turns: bool = False,
        ranked: int = 0,
        cache_dtype: Any = None,
        **unused: Any,
    ) -> None:
        """unused: drafts of speculation and the record of experts, which such models have not."""
        if policy.config.unmasking is None:
            raise InputError(f"a {policy.config.family} model is no masked-diffusion model: take engine.Engine")
        other_cache = cache_dtype is not None and jnp.dtype(cache_dtype) != jnp.dtype(policy.activation_dtype)
        for name, given, instead in (
            ("conversations with an environment or tools", turns, "answer prompts in one turn"),
            ("a sampling hook", policy.hook is not None, "leave it out"),
            ("soft thinking", policy.thinking is not None, "leave it out"),
            ("speculative_tokens", speculative_tokens, "leave it out"),
            ("forks at the most probable tokens", ranked, "take another rollout"),
            ("another cache_dtype, since nothing is cached", other_cache, "leave it out"),
            ("adapters or members by row", are_by_row(policy, weights.loop), "sample with one set of weights"),
        ):
            if given:
                raise InputError(f"a masked-diffusion model does not support {name}: {instead}")
        self.policy, self.weights, self.settings, self.own = policy, weights, settings, policy.config.unmasking
        self.cut, self.policy_step, self.stats = cut, policy_step, Stats() if stats is None else stats
        self.stop = frozenset(np.asarray(settings.stop_tokens).tolist())
        self.rows, self.width, self.most = size.shape.rows, size.width, size.tokens
        self.stats.rows, self.stats.prompt_slots = self.rows, self.rows
        self.stats.moved_bytes, self.stats.moved_seconds = weights.moved_bytes, weights.moved_seconds
        self.open: dict[int, _Written] = {}
        self._done: list[Completion] = []
        self._submitted = 0

    @property
    def busy(self) -> bool:
        """Whether any request is not completed."""
        return bool(self.open or self._done)

    def submit(self, request: Request) -> int:
        """Queue a request. Returns its number, which is the index of its completion."""
        number, self._submitted = self._submitted, self._submitted + 1
        self.stats.asked += 1
        if request.begun.size >= request.until:
            self._done.append(Completion(number, request.begun, False, request.limit))
            self.stats.finished += 1
            return number
        if len(request.fixed) > request.limit:
            raise InputError(f"{len(request.fixed)} places are fixed of a completion of at most {request.limit} tokens")
        self.width = max(self.width, bucket(len(request.prompt)))
        self.most = max(self.most, bucket(request.limit, least=4))
        self.open[number] = _Written(request, tuple(map(int, request.begun.token)))
        return number

    def step(self, chunk: int = 1) -> list[Completion]:
        """Draw a block of the first requests, and return the completions that ended. chunk: no matter here."""
        self.advance(chunk)
        return self.completed()

    def advance(self, chunk: int = 1) -> None:
        """Draw a block of the first requests."""
        numbers = list(self.open)[: self.rows]
        if not numbers:
            return
        canvas = self._canvas([self.open[number] for number in numbers])
        found = unmask(self.policy, self.weights.prompts, self.weights.spread(canvas), self.settings)
        block, known = self.weights.fetched(found)
        self.stats.first_token = self.stats.first_token or time.perf_counter() - self.stats.began
        ended = []
        for number, ids, there in zip(numbers, np.asarray(block), np.asarray(known), strict=False):
            written = self.open[number]
            start = len(written.ids) // self.own.block * self.own.block
            count = self.own.block if there.all() else int(np.argmin(there))
            longer = (*written.ids[:start], *ids[:count].tolist())
            self.stats.tokens += len(longer) - len(written.ids)
            self.open[number] = written._replace(ids=longer)
            if (over := self._end(written, longer)) is not None:
                ended.append((number, *over))
        self.stats.steps += self.own.block
        self.stats.live += self.own.block * len(numbers)
        self._done += self._complete(ended)
        self.stats.seconds = time.perf_counter() - self.stats.began

    def _end(self, before: _Written, ids: tuple[int, ...]) -> tuple[int, bool] | None:
        """Where a response ends, and whether by a stop token or string; None where it goes on."""
        request, done = before.request, len(before.ids)
        stop = next((place + 1 for place in range(done, len(ids)) if ids[place] in self.stop), None)
        if self.cut is not None and (end := self.cut(np.asarray(ids[request.given : stop], np.int32))) is not None:
            stop = request.given + end
        if stop is not None and stop <= request.until:
            return stop, True
        return (request.until, False) if len(ids) >= request.until else None

    def completed(self) -> list[Completion]:
        """Collect the completions that ended."""
        done, self._done = self._done, []
        return done

    def withdraw(self) -> list[Completion]:
        """Return all other requests as unfinished completions."""
        left, self._done = self._done, []
        fresh = [n for n, written in self.open.items() if len(written.ids) == written.request.begun.size]
        left += [Completion(n, self.open[n].request.begun, False, self.open[n].request.limit) for n in fresh]
        begun = [(n, len(written.ids), False) for n, written in self.open.items() if n not in fresh]
        left += self._complete(begun, finished=False)
        self.open = {}
        return left

    def running(self) -> Iterator[tuple[int, Tokens]]:
        """The number and tokens of each request that has drawn some."""
        begun = [number for number, written in self.open.items() if len(written.ids) > written.request.begun.size]
        yield from self._tokens([(number, len(self.open[number].ids)) for number in begun]).items()

    def cancel(self, number: int) -> None:
        """Give up a request; nothing for one that is completed."""
        self.open.pop(number, None)

    def _canvas(self, written: list[_Written]) -> Canvas:
        """The next block of each request, and rows of nothing for the rest."""
        B, R = self.own.block, self.rows
        W = self.width + -(-self.most // B) * B
        shapes = ((R, W), np.int32), (R, np.int32), ((R, B), np.int32), ((R, B), bool), *((R, np.int32),) * 3
        canvas: Any = Canvas(*(np.zeros(size, kind) for size, kind in shapes))  # type: ignore[arg-type]
        canvas.known[:] = True
        for row, (request, ids) in enumerate(written):
            start = len(ids) // B * B
            before = (*request.prompt, *ids[:start])
            canvas.tokens[row, : len(before)] = before
            canvas.first[row] = len(before)
            given = np.full(B, -1)
            fixed = request.fixed[start : start + B]
            given[: len(fixed)] = fixed
            given[: len(ids) - start] = ids[start:]
            canvas.block[row], canvas.known[row] = given, given >= 0
            canvas.place[row], canvas.prompt_id[row], canvas.sample[row] = start, request.prompt_id, request.sample
        return Canvas(*map(jnp.asarray, canvas))

    def _complete(self, ended: list[tuple[int, int, bool]], finished: bool = True) -> list[Completion]:
        found = self._tokens([(number, size) for number, size, _ in ended])
        out = []
        for number, _, by_stop in ended:
            request = self.open.pop(number).request
            self.stats.finished += finished
            out.append(Completion(number, found[number], by_stop, request.limit))
        return out

    def _tokens(self, sizes: list[tuple[int, int]]) -> dict[int, Tokens]:
        """The first tokens of requests, with the log-probabilities that they have together. sizes: by number."""
        out: dict[int, Tokens] = {}
        for first in range(0, len(sizes), self.rows):
            out |= self._scored(sizes[first : first + self.rows])
        check_finite_draws({number: self.open[number].request for number in out}, out)
        return out

    def _scored(self, sizes: list[tuple[int, int]]) -> dict[int, Tokens]:
        B, R = self.own.block, self.rows
        T = -(-self.most // B) * B
        tokens, first, end = np.zeros((R, self.width + T), np.int32), np.zeros(R, np.int32), np.ones(R, np.int32)
        for row, (number, size) in enumerate(sizes):
            request, ids = self.open[number]
            text = (*request.prompt, *ids[:size])
            tokens[row, : len(text)] = text
            first[row], end[row] = len(request.prompt), len(request.prompt) + -(-size // B) * B
        given = self.weights.spread(tuple(map(jnp.asarray, (tokens, first, end))))
        temperature = jnp.where(self.settings.temperature > 0, self.settings.temperature, 1.0)
        found = mean_field(self.policy, self.weights.prompts, *given, jnp.zeros(T), temperature)
        logp, entropy = (np.asarray(x) for x in self.weights.fetched(found))
        out = {}
        for row, (number, size) in enumerate(sizes):
            request, ids = self.open[number]
            steps = np.full(size, self.policy_step, np.int32)
            steps[: request.begun.size] = request.begun.policy_step[:size]
            own = logp[row, :size], entropy[row, :size], np.full(size, -np.inf, np.float32), logp[row, :size]
            out[number] = Tokens(np.asarray(ids[:size], np.int32), *own, steps)
        return out
