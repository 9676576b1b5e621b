"""Replays that change groups: a stored success for a failed sample, the best answer so far, copies of other groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.source import Replay
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.replay import buffers
from jaxrl_llm.replay.base import TOLERANCE, group_moments, mixed
from jaxrl_llm.replay.buffers import Store, count, join, keep, marked, take, to_rows
from jaxrl_llm.rewards.scoring import Scored
from jaxrl_llm.utils.errors import require_choice, unknown

Failed = Callable[[np.ndarray], bool]  # the outcomes f32[n] of a group -> whether it counts as failed


@part
def low_and_alike(spread: float = 0.05, mean: float = 0.2) -> Failed:
    """A group failed if the standard deviation of its outcomes is below `spread` and their mean below `mean`."""
    return lambda outcome: bool(len(outcome) and outcome.std() < spread and outcome.mean() < mean)


@part
def none_above(threshold: float = 0.5) -> Failed:
    """A group failed if no outcome exceeds the threshold."""
    return lambda outcome: bool(len(outcome) and outcome.max() <= threshold)


@part
def swapped_successes(
    failed: Failed | None = None,
    success: float = 0.1,
    each: int = 8,
    place: Literal["first", "random", "added"] = "first",
    component: str | None = None,
) -> Replay:
    """In groups that failed, replace one sample by an earlier success of the same prompt, or add one.

    The store has the newest `each` samples of each prompt with an outcome above `success`, of which one is drawn.
    failed: a function of a group's outcomes (None: `low_and_alike()`). place: the sample that is replaced; "added":
    none is. component: the reward that is the outcome; None: their combination. Statistics of the group then include
    the stored sample.

    A sample of several rows, such as an episode whose context was compacted, is stored and replaced as a whole, with
    the observations between its turns. It takes the number of the episode that it replaces, or the next one.
    """
    check_number("success", success)
    check_number("each", each, least=0, whole=True)
    require_choice("place", place, ("first", "random", "added"))
    fails = low_and_alike() if failed is None else failed

    def mix(state: Store, scored: Scored, step: int, seed: int) -> tuple[Scored, Store]:
        random, fresh = np.random.default_rng(seed), to_rows(scored)
        group, prompt = np.asarray(scored.batch.group), np.asarray(scored.batch.prompt_id)
        outcome, sample, episodes_of = (
            outcomes(scored, component),
            samples_of(scored.batch),
            episode_numbers(scored.batch),
        )
        out, chosen, numbers, episodes = np.zeros(len(group), bool), list[int](), list[int](), list[float]()
        for number in np.unique(group):
            rows = np.flatnonzero(group == number)
            _, first = np.unique(sample[rows], return_index=True)
            heads = rows[np.sort(first)]  # one row of each sample
            known = ~np.isnan(outcome[heads])
            there = np.flatnonzero(state["row:prompt_id"] == prompt[rows[0]]) if count(state) else np.zeros(0, int)
            if not len(there) or not fails(outcome[heads][known]):
                continue
            if place == "added":
                episode = float(np.nanmax(episodes_of[rows])) + 1
            else:
                gone = heads[0] if place == "first" else random.choice(heads)
                out[rows[sample[rows] == sample[gone]]] = True
                episode = float(episodes_of[gone])
            again = there[state["of:item"][there] == random.choice(np.unique(state["of:item"][there]))]
            chosen += again.tolist()
            numbers += [int(number)] * len(again)
            episodes += [episode] * len(again)
        past = take(state, chosen) if chosen else {}
        if "row:info:episode" in past:
            past["row:info:episode"] = np.asarray(episodes, past["row:info:episode"].dtype)
        new = marked(fresh, item=buffers.next_item(state) + sample, step=step)
        added = keep(new, np.nan_to_num(outcome, nan=-np.inf) > success)
        store = buffers.newest_of_prompts(join(state, added), each) if each else {}
        left = keep(fresh, ~out)
        return mixed(scored, left, past, group[~out], np.asarray(numbers, group.dtype)), store

    grown: Callable[[int], int] = (lambda rows: 2 * rows) if place == "added" else (lambda rows: rows)
    return Replay(dict, mix, frozenset({"replayed"}), buffers.metrics, grown, by_row=True)


@part
def best_of_prompt(prompts: int = 4096) -> Replay:
    """Add to each group the best earlier answer to its prompt, where there is one.

    The store has one row of each prompt, that of the highest reward and the newest among equals, of the `prompts`
    prompts whose best answer is the newest. The row is in the group of its prompt, so a transform must leave it out of
    the group's statistics where it should not count.
    """
    check_number("prompts", prompts, least=0, whole=True)

    def mix(state: Store, scored: Scored, step: int, seed: int) -> tuple[Scored, Store]:
        fresh, group = to_rows(scored), np.asarray(scored.batch.group)
        numbers, first = np.unique(group, return_index=True)
        asked, past, places = np.asarray(scored.batch.prompt_id)[first], dict[str, np.ndarray](), np.zeros(0, int)
        if count(state):
            order = np.argsort(state["row:prompt_id"])
            at = np.searchsorted(state["row:prompt_id"][order], asked)
            at = order[np.minimum(at, len(order) - 1)]
            known = state["row:prompt_id"][at] == asked
            past, places = take(state, at[known]), numbers[known]
        known = ~np.isnan(np.asarray(scored.batch.need("reward")))
        rows = keep(marked(fresh, item=buffers.next_item(state) + np.arange(len(group)), step=step), known)
        everything = join(state, rows)
        best = np.zeros(count(everything), bool)
        if len(best):
            order = np.lexsort((np.arange(len(best)), everything["row:reward"], everything["row:prompt_id"]))
            ids = everything["row:prompt_id"][order]
            best[order[np.append(ids[1:] != ids[:-1], True)]] = True
            everything = keep(everything, best)
        store = buffers.newest(everything, prompts) if prompts else {}
        return mixed(scored, fresh, past, group, places), store

    return Replay(dict, mix, frozenset({"replayed"}), buffers.metrics, lambda rows: 2 * rows, True)  # groups of one


@part
def valued_groups(copies: float = 2.0, highest: float = 1.0) -> Replay:
    """Replace groups of equal rewards by copies of other groups of the batch, drawn by their value.

    The value of a group is `group_value`, its draws are independent. A group that is there n times has the factor
    info["copy_weight"] = min(n, copies)/n on each row, so that one prompt counts as `copies` at most. Copies have
    info["replayed"]. The batch stays as it is if no group has different rewards. Nothing is stored.
    """
    check_number("copies", copies, least=1)
    check_number("highest", highest)

    def mix(state: Store, scored: Scored, step: int, seed: int) -> tuple[Scored, Store]:
        fresh, group = to_rows(scored), np.asarray(scored.batch.group)
        mean, deviation = group_moments(scored)
        numbers, first = np.unique(group, return_index=True)
        value = group_value(mean[first], deviation[first], highest)
        free = numbers[~(deviation[first] > TOLERANCE)]
        if len(free) == len(numbers) or not len(free):
            weight: Any = np.ones(len(group), np.float32)
            found = mixed(scored, fresh, {}, group, numbers[:0])
            return found._replace(batch=found.batch.with_info(copy_weight=weight)), state
        weights = (
            value / value.sum() if value.sum() > 0 else (deviation[first] > TOLERANCE) / (len(numbers) - len(free))
        )
        drawn = np.random.default_rng(seed).choice(numbers, len(free), p=weights)
        times = {int(number): 1 + int((drawn == number).sum()) for number in numbers}
        left = ~np.isin(group, free)
        members = [np.flatnonzero(group == number) for number in drawn]
        index = np.concatenate(members)
        factor = np.asarray([min(times[int(number)], copies) / times[int(number)] for number in group], np.float32)
        fresh = fresh | {"row:info:copy_weight": factor}
        places = np.repeat(free, [len(rows) for rows in members])
        return mixed(scored, keep(fresh, left), take(fresh, index), group[left], places), state

    return Replay(dict, mix, frozenset({"replayed", "copy_weight"}))


def group_value(mean: np.ndarray, deviation: np.ndarray, highest: float = 1.0) -> np.ndarray:
    """(highest - mean) * deviation, at least 0: difficulty times uncertainty of a group; 0 where nothing is scored.

    >>> group_value(np.array([0.2, 0.8]), np.array([0.4, 0.4])).round(2)
    array([0.32, 0.08])
    """
    value = np.maximum(highest - mean, 0.0) * deviation
    return np.where(deviation > TOLERANCE, np.nan_to_num(value), 0.0)


def episode_numbers(batch: Trajectories) -> np.ndarray:
    """The number of each row's episode in its group, [N]; of batches without episodes, the number of the row."""
    found = (batch.info or {}).get("episode")
    return np.arange(len(batch.group)) if found is None else np.asarray(found)


def samples_of(batch: Trajectories) -> np.ndarray:
    """Numbers int[N] from 0 on, equal for the rows of one episode of a group, in the order of their first rows.

    Without info["episode"] each row is a sample of its own.
    """
    pairs = np.stack([np.asarray(batch.group), episode_numbers(batch)], axis=1)
    _, first, index = np.unique(pairs, axis=0, return_index=True, return_inverse=True)
    rank = np.argsort(np.argsort(first))
    return np.asarray(rank[index.reshape(-1)])


def outcomes(scored: Scored, component: str | None) -> np.ndarray:
    """f32[N]: a component of the reward, or their combination; InputError if there is no such component."""
    if component is None:
        return np.asarray(scored.batch.need("reward"))
    components = scored.batch.rewards or {}
    if component not in components:
        raise unknown("reward", component, components)
    return np.asarray(components[component])


@part
def with_staged_reward(replay: Replay, weights: Mapping[str, float]) -> Replay:
    """The replay after the rewards are combined in stages: see `staged_reward`."""

    def mix(state: Store, scored: Scored, step: int, seed: int) -> tuple[Scored, Store]:
        parts = {name: outcomes(scored, name) for name in weights}
        total = staged_reward(parts, weights)
        reward = np.where(np.isnan(np.asarray(scored.batch.need("reward"))), np.nan, total).astype(np.float32)
        return replay.mix(state, scored._replace(batch=scored.batch.replace(reward=reward)), step, seed)

    return dataclasses.replace(replay, mix=mix)


def staged_reward(parts: Mapping[str, np.ndarray], weights: Mapping[str, float]) -> np.ndarray:
    """sum_k w_k s_k prod_{j < k} 1[s_j > 0.5], f64[N]: a component counts only where all before it are met.

    >>> parts = {"form": np.array([0, 1, 1]), "answer": np.array([1, 0.2, 1])}
    >>> staged_reward(parts, {"form": 0.1, "answer": 1.0})
    array([0. , 0.3, 1.1])
    """
    met, total = np.asarray(True), np.asarray(0.0)
    for name, weight in weights.items():
        total = total + weight * np.where(met, parts[name], 0.0)
        met = met & (np.asarray(parts[name]) > 0.5)
    return total
