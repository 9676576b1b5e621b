"""Scores of groups, found in a background thread while others are still sampled."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from jaxrl_llm.rewards.entries import concatenate_entries
from jaxrl_llm.rewards.scoring import State, score_texts
from jaxrl_llm.rewards.seen import reply_starts
from jaxrl_llm.rewards.specs import environment, judge
from jaxrl_llm.rewards.workers.calling import Logged, all_logged
from jaxrl_llm.rewards.workers.runner import Reward, Scores, weighted_reward

Counted = tuple[Counter[str], list[tuple[str, float]]]  # failures by reward, and the metrics that functions logged


class StreamedScores:
    """Scores groups in a background thread, in the order in which they are added, while others are still sampled.

    Groups are scored one at a time, so no reward function runs twice at once, except for one that was abandoned at its
    time limit. As a context manager it drops groups that are not scored on exit.
    """

    def __init__(self, rewards: Sequence[Reward], tokenizer: Any, state: State | None = None) -> None:
        self._rewards, self._tokenizer, self.state = rewards, tokenizer, state
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="streamed rewards")
        self._scores: dict[int, Future[Scores]] = {}
        self._failures: Counter[str] = Counter()  # of completions that `episodes` scored
        self._metrics: list[tuple[str, float]] = []  # that functions logged for them

    def __enter__(self) -> StreamedScores:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop groups that are not scored."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def add(self, number: int, row: dict[str, Any], ids: list[list[int]], prompt: Sequence[int] = ()) -> None:
        """Score a group (its number, its data set row, the token ids of its completions and of their prompt)."""
        # Decode in this thread, because tokenisers are not thread-safe.
        texts = [self._tokenizer.decode(tokens, skip_special_tokens=True) for tokens in ids]
        starts = reply_starts(self._tokenizer, [prompt] * len(ids))
        given = ([row] * len(ids), texts, ids, self.state, starts)
        self._scores[number] = self._thread.submit(score_texts, self._rewards, *given)

    def scores(self) -> Scores:
        """Wait for the scores of all groups, in ascending order of their numbers."""
        found = [self._scores[number].result() for number in sorted(self._scores)]
        return Scores(
            {name: np.concatenate([part.components[name] for part in found]) for name in found[0].components},
            np.concatenate([part.total for part in found]),
            {name: sum(part.failures[name] for part in found) for name in found[0].failures},
            {name: sum(part.seconds[name] for part in found) for name in found[0].seconds},
            concatenate_entries((part.entries, len(part.total)) for part in found),
            all_logged((part.logged, len(part.total)) for part in found),
        )

    @property
    def any(self) -> bool:
        """Whether a group was added."""
        return bool(self._scores)

    async def episodes(self, row: dict[str, Any], episodes: Sequence[Any]) -> list[Any]:
        """Score episodes of one prompt and return them with their rewards.

        Reward functions see the sampled tokens as text, or `Episode.talk` where all episodes have one.

        The components `environment` and `judge` are what episodes have already, `Episode.rewards`, without a call.
        """
        ids = [episode.own.token[episode.actions].tolist() for episode in episodes]
        texts = [self._tokenizer.decode(tokens, skip_special_tokens=True) for tokens in ids]
        had = {
            reward.name: np.asarray([episode.rewards[reward.name] for episode in episodes], np.float32)
            for reward in self._rewards
            if reward.function in (environment, judge) and all(reward.name in episode.rewards for episode in episodes)
        }
        called = [reward for reward in self._rewards if reward.name not in had]
        found = Scores({}, np.zeros(0), {}, {})
        if called:
            talks = [episode.talk for episode in episodes]
            known = None if any(talk is None for talk in talks) else talks
            starts = reply_starts(self._tokenizer, [episode.prompt for episode in episodes]) if known is None else None
            given = ([row] * len(ids), texts, ids, self.state, starts, known)
            future = self._thread.submit(score_texts, called, *given)
            found = await asyncio.wrap_future(future)
        if had:
            components = {reward.name: {**found.components, **had}[reward.name] for reward in self._rewards}
            found = found._replace(components=components, total=weighted_reward(self._rewards, components))
        for name, count in found.failures.items():
            self._failures[name] += count
        self._metrics += found.logged.metrics
        parts = [{name: float(x[i]) for name, x in found.components.items()} for i in range(len(ids))]
        own = [{name: column[i] for name, column in found.entries.items()} for i in range(len(ids))]
        if extras := found.logged.extras:
            own = [{**one, LOGGED: {name: x[i] for name, x in extras.items()}} for i, one in enumerate(own)]
        each = zip(episodes, found.total, parts, own, strict=True)
        return [episode.scored(float(total), part, entries) for episode, total, part, entries in each]

    def known(self, episodes: Sequence[Any]) -> Scores:
        """The scores of episodes that were scored before. Episodes of failed groups get the rewards' defaults.

        A component that a scored episode does not have is NaN, as where it has the reward NaN because its environment
        failed. Failures and logged metrics are those since the last call.
        """
        names = [reward.name for reward in self._rewards]
        defaults = {reward.name: reward.default for reward in self._rewards}
        each = list(zip(episodes, [episode.reward is None for episode in episodes], strict=True))
        components = {
            name: np.asarray([defaults[name] if lost else e.rewards.get(name, np.nan) for e, lost in each], np.float32)
            for name in names
        }
        total = sum(reward.weight * defaults[reward.name] for reward in self._rewards)
        reward = np.asarray([total if e.reward is None else e.reward for e in episodes], np.float32)
        counted, metrics = self.counted()
        failures = {name: counted[name] for name in names}
        entries = concatenate_entries([({name: [value] for name, value in e.entries.items()}, 1) for e in episodes])
        extras = concatenate_entries(
            [({name: [x] for name, x in (one or {}).items()}, 1) for one in entries.get(LOGGED, ())]
        )
        entries = {name: column for name, column in entries.items() if name != LOGGED}
        logged = Logged(metrics, extras)
        return Scores(components, reward, failures, dict.fromkeys(names, 0.0), entries, logged)

    def counted(self) -> Counted:
        """What `episodes` counted since the last call."""
        found, self._failures, self._metrics = (self._failures, self._metrics), Counter(), []
        return found

    def count(self, more: Counted) -> None:
        """Count what another program's `episodes` counted."""
        self._failures.update(more[0])
        self._metrics += more[1]


LOGGED = "logged extras"  # entry of an episode: what `log_extra` gave for it; no function can return that name
