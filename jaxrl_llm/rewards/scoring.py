"""Score the completions of a batch with reward functions; scored batches of some groups, and of several together."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.rewards.entries import SPANS, Entries, entries_at, provided
from jaxrl_llm.rewards.entry_arrays import blank, concatenable, with_entries
from jaxrl_llm.rewards.seen import Talk, reply_starts, seen
from jaxrl_llm.rewards.workers.calling import Logged, all_logged
from jaxrl_llm.rewards.workers.runner import Reward, Scores, weighted_reward
from jaxrl_llm.rewards.workers.runner import score as score_completions
from jaxrl_llm.sampling import completion_ids, completion_texts
from jaxrl_llm.sampling.batch import prompts_of
from jaxrl_llm.sampling.requests import RECORDS
from jaxrl_llm.sampling.routed_experts import pad_experts

State = Mapping[str, Any]  # attributes of `trainer_state`, see `runner.score`


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
    total = np.where(which, weighted_reward(rewards, components), scored.batch.need("reward")).astype(np.float32)
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
    """`score_texts` for the completions `which`, bool[N], and NaN for the others. No call if there is none."""
    if which.all():
        return score_texts(rewards, rows, texts, ids, state, starts)

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
    found = score_texts(
        rewards, [rows[i] for i in some], [texts[i] for i in some], [ids[i] for i in some], state,
        [starts[i] for i in some],
    )  # fmt: skip
    components = {name: spread(values) for name, values in found.components.items()}
    places = [int(np.sum(which[:i])) if one else None for i, one in enumerate(which)]
    logged = found.logged._replace(extras=entries_at(found.logged.extras, places))
    entries = entries_at(found.entries, places)
    return found._replace(components=components, total=spread(found.total), entries=entries, logged=logged)


def score_texts(
    rewards: Sequence[Reward], rows: Sequence[dict[str, Any]], texts: Sequence[str], ids: list[list[int]],
    state: State | None = None, starts: Sequence[str] | None = None, talks: Sequence[Talk] | None = None,
) -> Scores:  # fmt: skip
    """Score completions; see `seen` and `runner.score`."""
    completions, columns = seen(rows, texts, ids, starts, talks)
    return score_completions(rewards, completions, columns, state)


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

    starts = np.cumsum([0, *(len(np.unique(group.batch.group)) for group in groups)]).tolist()
    batches = [widened(group.batch, first) for first, group in zip(starts, groups, strict=False)]
    infos: Any = concatenable([(batch.info or {}, len(batch.group)) for batch in batches])
    batches = [batch.replace(info=info or None) for batch, info in zip(batches, infos, strict=True)]
    for name in RECORDS:
        found = [getattr(batch, name) for batch in batches]
        if any(x is not None for x in found):
            rows = [[None] * len(b.group) if x is None else list(x) for b, x in zip(batches, found, strict=True)]
            whole = pad_experts([row for some in rows for row in some], width)
            assert whole is not None
            parts = np.split(whole, np.cumsum([len(some) for some in rows])[:-1])
            batches = [b.replace(**{name: x}) for b, x in zip(batches, parts, strict=True)]
    if any(batch.token_rewards is not None for batch in batches):
        zeros: list[Any] = [np.zeros(b.tokens.shape, np.float32) for b in batches]
        both = zip(batches, zeros, strict=True)
        batches = [b.replace(token_rewards=none if b.token_rewards is None else b.token_rewards) for b, none in both]
    return Scored(
        jax.tree.map(lambda *x: np.concatenate(x), *batches),
        [text for group in groups for text in group.texts],
        {name: sum(group.failures[name] for group in groups) for name in groups[0].failures},
        tuple(dict.fromkeys(name for group in groups for name in group.entries)),
        all_logged((group.logged, len(group.texts)) for group in groups),
    )


PADDING = {"turn": -1, "support_floor": -np.inf, **dict.fromkeys(RECORDS, -1)}  # of fields of tokens; 0 of the others
