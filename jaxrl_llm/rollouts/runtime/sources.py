"""Parts of sources: shuffled epochs, batches with replayed rows, and metrics of rollouts and windows.

And groups of a step that are not trained on: those without a learning signal, and those that only measure difficulty.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_llm.core.rules import DynamicSampling
from jaxrl_llm.core.source import ONLY_MEASURED, Curriculum, MakeCurriculum, Replay, Source, State, Step  # noqa: F401 (old path)
from jaxrl_llm.data.prompt_set import PromptSet
from jaxrl_llm.data.stream import PromptStream
from jaxrl_llm.replay.buffers import take, to_rows, to_scored
from jaxrl_llm.rewards.scoring import Scored, concatenate_groups, some_rows
from jaxrl_llm.rollouts.runtime.collate import dataset_rows
from jaxrl_llm.rollouts.runtime.group_run import Group
from jaxrl_llm.sampling.stats import Stats
from jaxrl_llm.utils.errors import InputError

_MOST_DROPPED = 10_000  # prompts in one step


def shuffled_epochs(rows: Sequence[dict[str, Any]], seed: int) -> Curriculum:
    """Epochs over all prompts, each in a new random order. It reads no row."""
    stream = PromptStream(rows, batch_size=1, seed=seed)
    start = stream.state()

    def select(state: State, count: int) -> tuple[np.ndarray, State]:
        if stream.state() != state:
            stream.restore(state)
        ids = [stream.next_ids() for _ in range(count)]
        return np.concatenate([np.zeros(0, np.int32), *ids]), stream.state()

    return Curriculum(lambda: start, select, lambda state, step: state)


def same_prompts(ids: np.ndarray) -> Curriculum:
    """The prompts int32[n] in each step."""
    return Curriculum(lambda: 0, lambda state, count: (ids, state), lambda state, step: state)


def draw_prompts(curriculum: Curriculum, prompts: PromptSet, state: State, count: int) -> tuple[list[int], State, int]:
    """(ids of `count` prompts, the curriculum's state after them, number of prompts dropped among them).

    Prompts that are read as they are drawn may be dropped (too long, or held out): the next ones of the curriculum take
    their places, so that the order is that of the curriculum without them. Then worker threads begin to read the
    prompts that the curriculum would draw next.

    Raises InputError for a row that cannot be read, and if nearly all prompts are dropped.
    """
    ids, state = curriculum.select(state, count)
    chosen = [int(i) for i in ids]
    count = len(chosen)  # a curriculum that divides the samples may choose another number of prompts
    if prompts.ahead is None:
        return chosen, state, 0
    prompts.ahead(chosen)
    taken, drawn = [i for i in chosen if prompts.ids[i]], len(chosen)
    while len(taken) < count:
        if drawn - len(taken) > _MOST_DROPPED:
            raise InputError(
                f"of {drawn} prompts drawn, {drawn - len(taken)} are held out or too long: raise max_prompt_tokens, or "
                "set long_prompts to truncate"
            )
        ids, state = curriculum.select(state, count - len(taken))
        prompts.ahead(ids)
        taken += [int(i) for i in ids if prompts.ids[i]]
        drawn += len(ids)
    prompts.ahead(curriculum.select(state, drawn)[0])
    return taken, state, drawn - len(taken)


def unchanged(
    state: dict[str, np.ndarray], scored: Scored, step: int, seed: int
) -> tuple[Scored, dict[str, np.ndarray]]:
    """The batch as it is."""
    return scored, state


def no_replay() -> Replay:
    """No replay: batches stay as they are."""
    return Replay(dict, unchanged)


def with_replay(
    replay: Replay, state: dict[str, np.ndarray], found: Step, key: jax.Array, step: int, prompts: PromptSet
) -> tuple[Step, dict[str, np.ndarray]]:
    """The step with its batch mixed, the rows of the mixed batch's groups, and metrics of the replay.

    "replay/share" is the share of replayed rows in the batch, "replay/age" the mean age of their actions in steps.
    """
    if replay.mix is unchanged:
        return found, state
    seed = int(jax.random.bits(jax.random.fold_in(key, 2**31 - 1)))
    scored, state = replay.mix(state, found.scored, step, seed)
    mixed = mixed_step(found, scored, step, prompts)
    return mixed._replace(metrics=mixed.metrics | replay.metrics(state)), state


def mixed_step(found: Step, scored: Scored, step: int, prompts: PromptSet) -> Step:
    """The step with a mixed batch, the data set rows of its groups, and "replay/share" and "replay/age"."""
    batch, metrics = scored.batch, dict[str, float]()
    ids, before = _prompts_of(scored), _prompts_of(found.scored)
    rows = [
        found.rows[number] if number < len(before) and before[number] == one else dict(prompts.rows[one])
        for number, one in enumerate(ids)
    ]
    past = (batch.info or {}).get("replayed")
    if past is not None:
        again = np.asarray(past) > 0
        age = (step - np.asarray(batch.policy_step))[np.asarray(batch.action_mask) & again[:, None]]
        metrics = {"replay/share": float(again.mean()), "replay/age": float(age.mean()) if age.size else 0.0}
    return Step(scored, rows, found.metrics | metrics, None if past is None else found.scored, found.others)


def _prompts_of(scored: Scored) -> list[int]:
    """The prompt of each group, in the order of their numbers."""
    _, first = np.unique(np.asarray(scored.batch.group), return_index=True)
    return np.asarray(scored.batch.prompt_id)[first].tolist()


def window_metrics(scored: Scored) -> dict[str, float]:
    """Metrics of a batch of windows (info "window" and "unfinished"; see `source`), some rows of which continue.

    Metrics of completions cover those that finished in this step, so that each counts once in a run; NaN if there are
    none. Token counts are of the windows. "groups/uniform" is the share of groups with equal rewards among those of
    which at least two completions finished in this step; 0 if there is no such group.
    """
    batch = scored.batch
    window, unfinished = np.asarray(batch.need("window")), np.asarray(batch.need("unfinished"))
    # What an agent said last may be of an earlier step than the reward of its episode.
    ended = (window.any(axis=1) | ~np.isnan(np.asarray(batch.need("reward")))) & ~unfinished
    length, count = np.asarray(batch.action_mask).sum(axis=1)[ended], int(ended.sum())
    reward, group = np.asarray(batch.need("reward"))[ended], np.asarray(batch.group)[ended]
    known = [reward[(group == number) & ~np.isnan(reward)] for number in np.unique(group)]
    spread = np.asarray([np.ptp(rewards) for rewards in known if len(rewards) > 1])

    def of(values: np.ndarray, how: Any) -> float:
        return float(how(values)) if count else np.nan

    return {
        "reward/unscored": of(np.isnan(reward), np.mean),
        "completion/length": of(length, np.mean),
        "completion/longest": of(length, np.max),
        "completion/truncated": of(np.asarray(batch.truncated)[ended], np.mean),
        "completion/tokens": float(window.sum()),
        "groups/uniform": float(np.mean(spread == 0)) if len(spread) else 0.0,
        "rollout/finished": float(count),
        "rollout/unfinished": float(unfinished.sum()),
        **{f"rewards/{name}/failed": failed / max(count, 1) for name, failed in scored.failures.items()},
    }


def rollout_metrics(runs: Sequence[Stats], dropped: int = 0) -> dict[str, float]:
    """`Stats.metrics` over the rollouts of a step; all 0 if nothing was sampled.

    dropped: the number of prompts that `draw_prompts` dropped; a metric if there are any.
    """
    if dropped:
        return {**rollout_metrics(runs), "prompts/dropped": float(dropped)}
    if len(runs) == 1:
        return runs[0].metrics()
    summed = (
        "steps", "tokens", "prompt_tokens", "padded_tokens", "drafted", "accepted", "seconds", "compiles",
        "moved_bytes", "moved_seconds",
    )  # fmt: skip
    total = dataclasses.replace(Stats(), **{name: sum(getattr(run, name) for run in runs) for name in summed})
    row_steps = sum(run.rows * run.steps for run in runs)
    return {
        **total.metrics(),
        "rollout/occupancy": sum(run.live for run in runs) / max(row_steps, 1),
        "rollout/first_token_seconds": runs[0].first_token if runs else 0.0,
    }


WITHOUT_SIGNAL = "no signal"  # why a group is left out

_Group = tuple[Scored, list[dict[str, Any]]]


class Resampling:
    """The groups of the rounds of a step, until `wanted` of them are informative or the rule has no more rounds."""

    def __init__(self, rule: DynamicSampling, wanted: int) -> None:
        self.rule, self.wanted, self.rounds = rule, wanted, 0
        self._kept, self._spare = list[_Group](), list[_Group]()
        self._others: list[tuple[Scored, str]] = []

    def add(self, groups: Sequence[Group], scored: Scored) -> np.ndarray:
        """Take the groups of a round. Returns which of them are informative, bool[groups]."""
        ends = np.cumsum([len(one.episodes) for one in groups]).tolist()
        starts = [0, *ends[:-1]]
        good = np.logical_or.reduceat(np.asarray(self.rule.informative(scored.batch)), starts)
        parts = [
            (some_rows(scored, i, slice(*place)), dataset_rows([one]))
            for i, (*place, one) in enumerate(zip(starts, ends, groups, strict=True))
        ]
        self._kept += [one for one, fine in zip(parts, good, strict=True) if fine]
        self._others += [(one, WITHOUT_SIGNAL) for one, _ in self._spare]
        self._spare = [one for one, fine in zip(parts, good, strict=True) if not fine]
        self.rounds += 1
        return good

    @property
    def missing(self) -> int:
        """Groups that the next round is to replace; 0: the step is complete."""
        return 0 if self.rounds >= self.rule.rounds else max(self.wanted - len(self._kept), 0)

    def step(self, metrics: Mapping[str, float]) -> Step:
        """The step: informative groups, filled up with others of the last round."""
        chosen = (self._kept + self._spare)[: self.wanted]
        others = [*self._others, *((one, "more than a step needs") for one, _ in self._kept[self.wanted :])]
        others += [(one, WITHOUT_SIGNAL) for one, _ in self._spare[max(self.wanted - len(self._kept), 0) :]]
        rows = [row for _, some in chosen for row in some]
        scored = concatenate_groups([one for one, _ in chosen])
        return Step(scored, rows, {**metrics, "rounds": float(self.rounds)}, others=others)


def without_references(found: Step) -> Step:
    """The step without the groups that are `ONLY_MEASURED`, as their rows say, which are in `others` as "reference".

    A step trains on one group at least: nothing is left out if all groups would be.
    """
    out = np.array([bool(row.get(ONLY_MEASURED)) for row in found.rows])
    if out.all() or not out.any():
        return found
    batch = found.scored.batch
    group = np.asarray(batch.group)
    numbers = np.unique(group)
    rows = to_rows(found.scored)

    def of(chosen: np.ndarray) -> Scored:
        index = np.flatnonzero(np.isin(group, numbers[chosen]))
        _, consecutive = np.unique(group[index], return_inverse=True)
        some = to_scored(take(rows, index), consecutive, batch.tokens.shape[1], found.scored.failures)
        return found.scored._replace(batch=some.batch, texts=some.texts)

    kept = [row for row, is_out in zip(found.rows, out, strict=True) if not is_out]
    return found._replace(scored=of(~out), rows=kept, others=(*found.others, (of(out), "reference")))
