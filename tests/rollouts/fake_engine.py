"""An engine that decodes nothing: a token a step in each of its rows, all that is known of a token following from its
place. Programs and the driver cannot tell it from the real one."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from jaxrl_llm.core.rollout import Rollout, Task
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.program_host import Draws, MakeEngine
from jaxrl_llm.rollouts.programs import group
from jaxrl_llm.rollouts.runtime.admission import Admit, Collected, Rule, admit_first
from jaxrl_llm.rollouts.runtime.driver import Driver
from jaxrl_llm.rollouts.runtime.replay_log import GroupKey, GroupLog, Held, Pool
from jaxrl_llm.sampling.requests import Completion, Request, Tokens
from jaxrl_llm.sampling.stats import Stats

LIMIT = 64


def length_of(prompt_id: int, sample: int) -> int:
    """Tokens after which a completion ends: half have up to 4, the longest would have more than LIMIT."""
    uniform = np.random.default_rng([7, prompt_id, sample]).uniform()
    return math.ceil(2 / (1 - uniform))  # Pareto with exponent 1


def token_of(prompt_id: int, sample: int, place: int) -> int:
    return 1000 * prompt_id + 100 * sample + place


def tokens_of(prompt_id: int, sample: int, first: int, last: int, step: int) -> Tokens:
    """Tokens first ... last - 1 of a sample."""
    ids = np.asarray([token_of(prompt_id, sample, place) for place in range(first, last)], np.int32)
    known = [(-ids / scale).astype(np.float32) for scale in (3, 5, 7, 11)]
    return Tokens(ids, *known, np.full(len(ids), step, np.int32))


def tokens_with_ties(ties: Mapping[int, tuple[float, float]], alike: bool = False) -> Callable[..., Tokens]:
    """`tokens_of` with the two most probable tokens of each place: those of sample 0, and 9000 + place.

    ties: their probabilities by place, else 0.99 and 0.01. alike: all samples draw the place, but where they may part.
    """

    def tokens(prompt_id: int, sample: int, first: int, last: int, step: int) -> Tokens:
        places = range(first, last)
        ids = [t if alike and t not in ties else token_of(prompt_id, sample, t) for t in places]
        best = [[t if alike and t not in ties else token_of(prompt_id, 0, t), 9000 + t] for t in places]
        logp = np.log(np.asarray([ties.get(t, (0.99, 0.01)) for t in places], np.float32).reshape(-1, 2))
        zeros = np.zeros(len(ids), np.float32)
        ranked = np.stack([np.asarray(best, np.float32).reshape(-1, 2), logp, logp], axis=1)
        own = logp[:, 0] - 1  # so that it shows which tokens were drawn
        steps = np.full(len(ids), step, np.int32)
        return Tokens(np.asarray(ids, np.int32), own, zeros, zeros, own, steps, ranked=ranked)

    return tokens


class FakeEngine:
    """See `sampling.engine.Engine`."""

    def __init__(self, slots: int, step: int = 0) -> None:
        self.slots, self.step_number = slots, step
        self.requests: list[Request] = []
        self.waiting: list[int] = []
        self.rows: dict[int, Tokens] = {}

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.rows)

    def submit(self, request: Request) -> int:
        self.requests.append(request)
        self.waiting.append(len(self.requests) - 1)
        return len(self.requests) - 1

    def step(self, chunk: int) -> list[Completion]:
        while self.waiting and len(self.rows) < self.slots:
            number = self.waiting.pop(0)
            self.rows[number] = self.requests[number].begun
        done = []
        for number, tokens in list(self.rows.items()):
            asked, size = self.requests[number], tokens.size
            tokens = tokens.followed_by(tokens_of(asked.prompt_id, asked.sample, size, size + 1, self.step_number))
            self.rows[number] = tokens
            ended = tokens.size == asked.given + length_of(asked.prompt_id, asked.sample)
            if ended or tokens.size >= asked.limit or tokens.size == asked.pause_at:
                del self.rows[number]
                done.append(Completion(number, tokens, ended, asked.limit))
        return done

    def withdraw(self) -> list[Completion]:
        left = [*self.rows.items(), *((number, self.requests[number].begun) for number in self.waiting)]
        self.rows, self.waiting = {}, []
        return [Completion(number, tokens, False, self.requests[number].limit) for number, tokens in left]


class Words:
    """A tokenizer: a token id is a number, written out; the id of another word is its length."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [int(word) if word.isdigit() else len(word) for word in text.split()]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, ids))


async def score(task: Task, episodes: Sequence[Episode]) -> list[Episode]:
    """The reward is the number of sampled tokens."""
    counts = [float(episode.actions.sum()) for episode in episodes]
    return [episode.scored(count, {"length": count}) for episode, count in zip(episodes, counts, strict=True)]


def begin(prompts: Sequence[int], samples: int, step: int = 0) -> Pool:
    """New groups of prompts (i, 1)."""
    return tuple(GroupLog((i, 1), i, samples, step) for i in prompts)


class Ran:
    """A call of the driver, with what the engines saw."""

    def __init__(
        self, flight: Pool, rule: Rule, rollout: Rollout | None = None, *, slots: int = 1000, step: int = 0,
        limit: int = LIMIT, row: dict[str, Any] | None = None,
        within: Callable[..., Collected] = lambda make, admit, run: run(make, admit), admit: Admit = admit_first,
        held: Mapping[GroupKey, Held] = MappingProxyType({}),
        **settings: Any,
    ) -> None:  # fmt: skip
        """within: see `multihost_gather.in_lockstep`, without its hosts."""
        self.engines: list[FakeEngine] = []
        self.draws: list[Draws] = []  # from what each of them draws

        def make(requests: Sequence[Request], draws: Draws, stats: Stats) -> Any:
            self.engines.append(FakeEngine(slots, step))
            self.draws.append(draws)
            return self.engines[-1]

        def run(make: MakeEngine, admit: Admit) -> Collected:
            driver = Driver(rollout or group(), make, score, Words(), step=step, admit=admit, **settings)
            return driver.run(list(zip(flight, tasks, strict=True)), rule, held=held)

        tasks = [Task({"prompt": "", **(row or {})}, log.prompt, log.prompt_id, log.samples, limit) for log in flight]
        self.found: Collected = within(make, admit, run)

    @property
    def complete(self) -> list[int]:
        return [one.task.prompt_id for one in self.found.groups]

    @property
    def pool(self) -> Pool:
        return self.found.left

    @property
    def requests(self) -> list[Request]:
        return [request for engine in self.engines for request in engine.requests]


def resumed(flight: Pool, rollout: Rollout, segment: int = 3, **options: Any) -> dict[int, list[Episode]]:
    """The episodes by prompt, where each step stops after a group or a segment, and the next one goes on."""
    pool, step, done = flight, 0, dict[int, list[Episode]]()
    while pool:
        ran = Ran(pool, Rule(1, segment), rollout, step=step, **options)
        done |= {one.task.prompt_id: one.episodes for one in ran.found.groups}
        pool, step = ran.pool, step + 1
    assert step > 1
    return done


def right_samples(patch: pytest.MonkeyPatch) -> set[int]:
    """Sample numbers whose reward is 1, none at first; others have 0."""
    numbers: set[int] = set()

    async def scored(task: Task, episodes: Sequence[Episode]) -> list[Episode]:
        return [episode.scored(float(episode.sample in numbers)) for episode in episodes]

    patch.setattr(sys.modules[__name__], "score", scored)
    return numbers
