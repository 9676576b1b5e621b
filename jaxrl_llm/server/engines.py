"""Engines that a server samples with, in a thread of their own: requests come and go while others are decoding."""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import jax

from jaxrl_llm.core.shapes import bucket
from jaxrl_llm.models.by_row import can_stack, stacked
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.sampling.capacity import Size, lasting
from jaxrl_llm.sampling.engine import Engine
from jaxrl_llm.sampling.requests import Request, Tokens
from jaxrl_llm.sampling.sampler import cut_at, settings_of
from jaxrl_llm.sampling.stream import engine_of
from jaxrl_llm.sampling.unmasking.engine import UnmaskingEngine
from jaxrl_llm.sampling.weights import Weights, take_weights
from jaxrl_llm.sampling.weights.adapters import with_adapters
from jaxrl_llm.utils.threads import error_in_words

CHUNK = 8  # decode steps between two looks at what arrived; a stream has a piece of text after as many
MOST_ENGINES = 4  # of different settings, whose caches are kept; as many as there are models, if these are more
ROOM = 64  # tokens of a prompt and of a completion for which a new engine has room at least


class How(NamedTuple):
    """How tokens are drawn. Requests that agree on it decode together."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


class Pending(NamedTuple):
    """A completion that is asked for."""

    request: Request
    how: How
    stop: tuple[str, ...] = ()
    adapter: str | None = None  # by name; None: the model as it is


class CompletionSoFar(NamedTuple):
    """What there is of a completion."""

    tokens: Tokens  # all so far
    finish: str | None = None  # "stop", "length", or None while it goes on


Kind = tuple[str | None, How]  # the adapter, where it is alone in its engine, and the settings
Tell = Callable[[CompletionSoFar | BaseException], None]


class _Job(NamedTuple):
    asked: Pending
    tell: Tell
    cut: Any  # of its stop strings, see `requests.Cut`; None: there are none


class Engines:
    """Samples for any number of clients of one policy. `start` begins its thread, and `close` ends it.

    slots: completions of equal settings that decode at a time; others wait. seed: of all noise, with the prompt id and
    the sample number of a request. adapters: by name, parameters with adapters, which share the other arrays of
    `params` (`parameters.combine`), and so their memory. They decode together, a row with each
    (`models.by_row`), but where they adapt experts or embeddings: then one after another. Engines of settings
    that were not asked for longest make room for new ones.
    """

    def __init__(
        self, policy: Policy, params: Params, slots: int = 16, seed: int = 0, adapters: Mapping[str, Params] = {}
    ) -> None:
        base = take_weights(policy, params)
        self.policy, self.weights = policy, dict[str | None, Weights]({None: base})
        self.numbers = dict[str, int]()  # of adapters that decode together
        if adapters and can_stack(policy.config, [params, *adapters.values()]):
            self.weights[None] = with_adapters(policy, base, stacked(params, [*adapters.values()]))
            self.numbers = {name: number for number, name in enumerate(adapters, start=1)}
        else:
            for name, adapted in adapters.items():
                self.weights[name] = with_adapters(policy, base, adapted)
        self.most = max(MOST_ENGINES, len(self.weights))
        self.slots, self.key = slots, jax.random.key(seed)
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._engines: OrderedDict[Kind, Engine | UnmaskingEngine] = OrderedDict()
        self._jobs: dict[tuple[Kind, int], _Job] = {}
        self._thread = threading.Thread(target=self._run, daemon=True, name="server engines")

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread; what is not complete is given up."""
        self._inbox.put(None)
        self._thread.join()

    async def sample(self, asked: Pending) -> AsyncIterator[CompletionSoFar]:
        """The completion as it grows; the last item has a `finish`. Whoever stops iterating gives it up.

        Raises what the engine raised, such as InputError for logits that are not finite.
        """
        loop, told = asyncio.get_running_loop(), asyncio.Queue[CompletionSoFar | BaseException]()
        place: list[tuple[Kind, int]] = []

        def tell(what: CompletionSoFar | BaseException) -> None:
            loop.call_soon_threadsafe(told.put_nowait, what)

        cut = cut_at(self.policy.tokenizer, asked.stop) if asked.stop else None
        self._inbox.put(lambda: self._submit(_Job(asked, tell, cut), place))
        finished = False
        try:
            while not finished:
                found = await told.get()
                if isinstance(found, BaseException):
                    finished = True
                    raise found
                finished = found.finish is not None
                yield found
        finally:
            if not finished:
                self._inbox.put(lambda: self._give_up(place))

    def _run(self) -> None:
        while True:
            try:
                while True:
                    wanted = self._inbox.get(block=not self._jobs)
                    if wanted is None:
                        return
                    wanted()
            except Empty:
                pass
            for kind, engine in list(self._engines.items()):
                if engine.busy:
                    try:
                        self._advance(kind, engine)
                    except BaseException as error:  # of this engine alone
                        self._fail(kind, error)

    def _advance(self, kind: Kind, engine: Engine | UnmaskingEngine) -> None:
        engine.advance(CHUNK)
        for number, tokens in list(engine.running()):
            job = self._jobs[kind, number]
            if job.cut is not None and (end := job.cut(tokens.token)) is not None:
                engine.cancel(number)
                self._end(kind, number, tokens.first(end), "stop")
            elif tokens.size:
                job.tell(CompletionSoFar(tokens))
        for done in engine.completed():
            job = self._jobs[kind, done.index]
            end = None if job.cut is None else job.cut(done.tokens.token)
            tokens = done.tokens if end is None else done.tokens.first(end)
            self._end(kind, done.index, tokens, "stop" if done.ended or end is not None else "length")

    def _end(self, kind: Kind, number: int, tokens: Tokens, finish: str) -> None:
        self._jobs.pop((kind, number)).tell(CompletionSoFar(tokens, finish))

    def _submit(self, job: _Job, place: list[tuple[Kind, int]]) -> None:
        name, request = job.asked.adapter, job.asked.request
        kind: Kind = (None if name in self.numbers else name, job.asked.how)
        if name in self.numbers:
            request = replace(request, adapter=self.numbers[name])
        try:
            number = self._engine(kind, request).submit(request)
        except BaseException as error:
            job.tell(error)
            return
        self._jobs[kind, number] = job
        place.append((kind, number))

    def _give_up(self, place: list[tuple[Kind, int]]) -> None:
        for kind, number in place:
            if self._jobs.pop((kind, number), None) is not None:
                self._engines[kind].cancel(number)

    def _fail(self, kind: Kind, error: BaseException) -> None:
        del self._engines[kind]
        for of, number in list(self._jobs):
            if of == kind:
                self._jobs.pop((of, number)).tell(
                    error if isinstance(error, Exception) else RuntimeError(error_in_words(error))
                )

    def _engine(self, kind: Kind, request: Request) -> Engine | UnmaskingEngine:
        if kind not in self._engines:
            adapter, how = kind
            idle = [other for other, engine in self._engines.items() if not engine.busy]
            while idle and len(self._engines) >= self.most:
                del self._engines[idle.pop(0)]
            size = Size(
                lasting(self.slots, self.slots, self.slots), bucket(max(len(request.prompt), ROOM)),
                bucket(max(request.limit, ROOM)),
            )  # fmt: skip
            settings = settings_of(self.policy, self.key, *how)
            self._engines[kind] = engine_of(self.policy, self.weights[adapter], settings, size)
        self._engines.move_to_end(kind)
        return self._engines[kind]
