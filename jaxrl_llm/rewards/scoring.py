"""Score the completions of a batch, or of one group after another, with reward functions."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.rewards.entries import SPANS, Entries, chosen, joined, provided
from jaxrl_llm.rewards.entry_arrays import alike, blank, with_entries
from jaxrl_llm.rewards.environment import environment
from jaxrl_llm.rewards.seen import Talk, prompts_of, reply_starts, seen
from jaxrl_llm.rewards.workers.calling import Logged, all_logged
from jaxrl_llm.rewards.workers.runner import Reward, Scores, combine
from jaxrl_llm.rewards.workers.runner import score as score_completions
from jaxrl_llm.sampling import completion_ids, completion_texts
from jaxrl_llm.sampling.routed_experts import of_rows

State = Mapping[str, Any]  # attributes of `trainer_state`, see `runner.score`
LOGGED = "logged extras"  # entry of an episode: what `log_extra` gave for it; no function can return that name


class Scored(NamedTuple):
    """A batch with its rewards."""

    batch: Trajectories
    texts: list[str]  # of the completions
    failures: dict[str, int]  # number of samples that got the default, per reward
    entries: tuple[str, ...] = ()  # names in the batch's `info` that reward functions gave
    logged: Logged = Logged()  # what reward functions logged


def score_batch(
    rewards: Sequence[Reward],
    tokenizer: Any,
    rows: Sequence[dict[str, Any]],
    batch: Trajectories,
    scores: Scores | None = None,
    which: np.ndarray | None = None,
    state: State | None = None,
) -> Scored:
    """Score every completion. rows: the data set row of each prompt, in the order of the batch's groups.

    scores: scores of the batch's rows, if already known; then no reward function is called.
    which: bool[N], the completions to score; the others get NaN. Default: all. state: of the run, see `runner.score`.

    Entries that the functions return beside their scores join the batch; see `entry_arrays.with_entries`.
    """
    texts = completion_texts(tokenizer, batch)
    if scores is None:
        which = np.ones(len(texts), bool) if which is None else which
        of_rows = [rows[group] for group in np.asarray(batch.group)]
        starts = reply_starts(tokenizer, prompts_of(batch))
        scores = _score_some(rewards, of_rows, texts, completion_ids(batch), which, state, starts)
    batch = batch.replace(
        rewards={name: np.asarray(values) for name, values in scores.components.items()},
        reward=np.asarray(scores.total),
    )
    batch = with_entries(batch, scores.entries, tokenizer, texts)
    entries = tuple(name for name in scores.entries if name != SPANS)
    return Scored(batch, texts, scores.failures, entries, scores.logged)


def with_defaults(rewards: Sequence[Reward], scored: Scored, which: np.ndarray) -> Scored:
    """Give the rows `which`, bool[N], the rewards' defaults; they count as failures, without entries."""
    found = scored.batch.rewards or {}
    components = {r.name: np.where(which, r.default, found[r.name]).astype(np.float32) for r in rewards}
    total = np.where(which, combine(rewards, components), scored.batch.need("reward")).astype(np.float32)
    failures = {name: count + int(which.sum()) for name, count in scored.failures.items()}
    fields: dict[str, Any] = {"rewards": components, "reward": total}
    if scored.batch.token_rewards is not None:
        fields["token_rewards"] = np.where(which[:, None], 0.0, scored.batch.token_rewards).astype(np.float32)
    if scored.entries:
        info: Any = scored.batch.info or {}
        fields["info"] = {**info, **{name: blank(np.asarray(info[name]), which) for name in scored.entries}}
    return scored._replace(batch=scored.batch.replace(**fields), failures=failures)


def _score_some(
    rewards: Sequence[Reward],
    rows: Sequence[dict[str, Any]],
    texts: Sequence[str],
    ids: list[list[int]],
    which: np.ndarray,
    state: State | None,
    starts: Sequence[str],
) -> Scores:
    """`_score` for the completions `which`, bool[N], and NaN for the others. No function is called if there is none."""
    if which.all():
        return _score(rewards, rows, texts, ids, state, starts)

    def spread(values: np.ndarray | float = np.nan) -> np.ndarray:
        out = np.full(len(texts), np.nan, np.float32)
        out[which] = values
        return out

    if not which.any():
        names = [reward.name for reward in rewards]
        nothing: Entries = {name: [None] * len(texts) for one in rewards for name in provided(one.function)}
        components = {name: spread() for name in names}
        return Scores(components, spread(), dict.fromkeys(names, 0), dict.fromkeys(names, 0.0), nothing)
    some = np.flatnonzero(which).tolist()
    found = _score(
        rewards, [rows[i] for i in some], [texts[i] for i in some], [ids[i] for i in some], state,
        [starts[i] for i in some],
    )  # fmt: skip
    components = {name: spread(values) for name, values in found.components.items()}
    places = [int(np.sum(which[:i])) if one else None for i, one in enumerate(which)]
    logged = found.logged._replace(extras=chosen(found.logged.extras, places))
    entries = chosen(found.entries, places)
    return found._replace(components=components, total=spread(found.total), entries=entries, logged=logged)


def _score(
    rewards: Sequence[Reward], rows: Sequence[dict[str, Any]], texts: Sequence[str], ids: list[list[int]],
    state: State | None = None, starts: Sequence[str] | None = None, talks: Sequence[Talk] | None = None,
) -> Scores:  # fmt: skip
    """Score completions; see `seen` and `runner.score`."""
    completions, columns = seen(rows, texts, ids, starts, talks)
    return score_completions(rewards, completions, columns, state)


PADDING = {"turn": -1, "support_floor": -np.inf, "experts": -1}  # of fields of tokens; 0 of the others


def rows_of_group(scored: Scored, number: int, size: int) -> Scored:
    """The rows of one group, where all have `size`. Failures are attributed to the first group."""
    return some_rows(scored, number, slice(number * size, (number + 1) * size))


def some_rows(scored: Scored, number: int, place: slice) -> Scored:
    """The rows of group `number`. Failures and metrics are not known per row: all are attributed to the first group."""
    failures = {name: 0 if number else count for name, count in scored.failures.items()}
    batch = jax.tree.map(lambda x: np.asarray(x)[place], scored.batch)
    logged = Logged(
        () if number else scored.logged.metrics, {name: x[place] for name, x in scored.logged.extras.items()}
    )
    return Scored(batch, scored.texts[place], failures, scored.entries, logged)


def concatenate_groups(groups: list[Scored]) -> Scored:
    """Concatenate groups of possibly different widths, renumbering them in their order; one may have several parts."""
    width = max(group.batch.tokens.shape[1] for group in groups)

    def widened(batch: Trajectories, first: int) -> Any:
        padded = {
            name: np.pad(x, ((0, 0), (0, width - x.shape[1])), constant_values=PADDING.get(name, 0))
            for name, x in vars(batch).items()
            if isinstance(x, np.ndarray) and x.ndim == 2
        }
        at_tokens: dict[str, Any] = {
            name: np.pad(x, ((0, 0), (0, width - x.shape[1])), constant_values=np.nan)
            for name, x in (batch.info or {}).items()
            if x.ndim == 2 and x.shape[1] == batch.tokens.shape[1] and x.dtype.kind == "f"
        }
        batch = batch.with_info(**at_tokens) if at_tokens else batch
        number = first + np.unique(batch.group, return_inverse=True)[1]
        return batch.replace(**padded, group=number.astype(np.int32))

    counts = [len(np.unique(group.batch.group)) for group in groups]
    starts = np.cumsum([0, *counts]).tolist()
    batches = [widened(group.batch, first) for first, group in zip(starts, groups, strict=False)]
    infos: Any = alike([(batch.info or {}, len(batch.group)) for batch in batches])
    batches = [batch.replace(info=info or None) for batch, info in zip(batches, infos, strict=True)]
    if any(batch.experts is not None for batch in batches):
        none = [[None] * len(batch.group) if batch.experts is None else list(batch.experts) for batch in batches]
        batches = [b.replace(experts=x) for b, x in zip(batches, _split(none, width), strict=True)]
    if any(batch.token_rewards is not None for batch in batches):
        batches = [b.replace(token_rewards=_or_zeros(b.token_rewards, b.tokens.shape)) for b in batches]
    return Scored(
        jax.tree.map(lambda *x: np.concatenate(x), *batches),
        [text for group in groups for text in group.texts],
        {name: sum(group.failures[name] for group in groups) for name in groups[0].failures},
        tuple(dict.fromkeys(name for group in groups for name in group.entries)),
        all_logged((group.logged, len(group.texts)) for group in groups),
    )


def _split(experts: Sequence[Sequence[Any]], width: int) -> list[np.ndarray]:
    """The experts of the rows of several batches, padded to one width."""
    whole = of_rows([row for rows in experts for row in rows], width)
    assert whole is not None
    return np.split(whole, np.cumsum([len(rows) for rows in experts])[:-1])


def _or_zeros(values: Any, shape: tuple[int, ...]) -> Any:
    return np.zeros(shape, np.float32) if values is None else values


class StreamedScores:
    """Scores groups in a background thread, in the order in which they are added, while others are still sampled.

    Groups are scored one at a time, so no reward function runs twice at once, except for one that was abandoned at its
    time limit. As a context manager it drops groups that are not scored on exit.
    """

    def __init__(self, rewards: Sequence[Reward], tokenizer: Any, state: State | None = None) -> None:
        self._rewards, self._tokenizer, self._state = rewards, tokenizer, state
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="streamed rewards")
        self._scores: dict[int, Future[Scores]] = {}
        self._failures: Counter[str] = Counter()  # of completions that `episodes` scored
        self._metrics: list[tuple[str, float]] = []  # that functions logged for them

    def __enter__(self) -> StreamedScores:
        return self

    def __exit__(self, *unused: object) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def add(self, number: int, row: dict[str, Any], ids: list[list[int]], prompt: Sequence[int] = ()) -> None:
        """Score a group (its number, its data set row, the token ids of its completions and of their prompt)."""
        # Decode in this thread, because tokenisers are not thread-safe.
        texts = [self._tokenizer.decode(tokens, skip_special_tokens=True) for tokens in ids]
        starts = reply_starts(self._tokenizer, [prompt] * len(ids))
        given = ([row] * len(ids), texts, ids, self._state, starts)
        self._scores[number] = self._thread.submit(_score, self._rewards, *given)

    def scores(self) -> Scores:
        """Wait for the scores of all groups, in ascending order of their numbers."""
        found = [self._scores[number].result() for number in sorted(self._scores)]
        return Scores(
            {name: np.concatenate([part.components[name] for part in found]) for name in found[0].components},
            np.concatenate([part.total for part in found]),
            {name: sum(part.failures[name] for part in found) for name in found[0].failures},
            {name: sum(part.seconds[name] for part in found) for name in found[0].seconds},
            joined((part.entries, len(part.total)) for part in found),
            all_logged((part.logged, len(part.total)) for part in found),
        )

    @property
    def any(self) -> bool:
        """Whether a group was added."""
        return bool(self._scores)

    async def episodes(self, row: dict[str, Any], episodes: Sequence[Any]) -> list[Any]:
        """Score episodes of one prompt and return them with their rewards.

        Reward functions see the sampled tokens as text, or `Episode.talk` where all episodes have one.

        The component `environment` is what episodes have already, `Episode.rewards`: no function is called for it.
        """
        ids = [episode.own.token[episode.actions].tolist() for episode in episodes]
        texts = [self._tokenizer.decode(tokens, skip_special_tokens=True) for tokens in ids]
        had = {
            reward.name: np.asarray([episode.rewards[reward.name] for episode in episodes], np.float32)
            for reward in self._rewards
            if reward.function is environment and all(reward.name in episode.rewards for episode in episodes)
        }
        called = [reward for reward in self._rewards if reward.name not in had]
        found = Scores({}, np.zeros(0), {}, {})
        if called:
            talks = [episode.talk for episode in episodes]
            known = None if any(talk is None for talk in talks) else talks
            starts = reply_starts(self._tokenizer, [episode.prompt for episode in episodes]) if known is None else None
            given = ([row] * len(ids), texts, ids, self._state, starts, known)
            future = self._thread.submit(_score, called, *given)
            found = await asyncio.wrap_future(future)
        if had:
            components = {reward.name: {**found.components, **had}[reward.name] for reward in self._rewards}
            found = found._replace(components=components, total=combine(self._rewards, components))
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
        failed.
        """
        names = [reward.name for reward in self._rewards]
        defaults = {reward.name: reward.default for reward in self._rewards}
        missing = [episode.reward is None for episode in episodes]
        each = list(zip(episodes, missing, strict=True))
        components = {
            name: np.asarray([defaults[name] if lost else e.rewards.get(name, np.nan) for e, lost in each], np.float32)
            for name in names
        }
        total = sum(reward.weight * defaults[reward.name] for reward in self._rewards)
        reward = np.asarray([total if e.reward is None else e.reward for e in episodes], np.float32)
        failures = {name: self._failures[name] for name in names}
        entries = joined([({name: [value] for name, value in e.entries.items()}, 1) for e in episodes])
        extras = joined([({name: [x] for name, x in (one or {}).items()}, 1) for one in entries.get(LOGGED, ())])
        entries = {name: column for name, column in entries.items() if name != LOGGED}
        logged = Logged(self._metrics, extras)
        return Scores(components, reward, failures, dict.fromkeys(names, 0.0), entries, logged)
