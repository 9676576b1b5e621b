"""Replays that change groups: a stored success for a failed sample, the best answer so far, copies of other groups."""

from collections.abc import Callable
from typing import Literal

import numpy as np

from jaxrl_llm.core.arguments.ranges import NonNegativeInt
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.source import Replay
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.replay import buffers
from jaxrl_llm.replay.base import mixed
from jaxrl_llm.replay.buffers import Store, count, join, keep, take, to_rows, with_columns
from jaxrl_llm.rewards.scoring import Scored
from jaxrl_llm.utils.errors import unknown

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
    each: NonNegativeInt = 8,
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
    fails = low_and_alike() if failed is None else failed

    def mix(state: Store, scored: Scored, step: int, seed: int) -> tuple[Scored, Store]:
        random, fresh = np.random.default_rng(seed), to_rows(scored)
        group, prompt = np.asarray(scored.batch.group), np.asarray(scored.batch.prompt_id)
        outcome, sample = component_scores(scored, component), samples_of(scored.batch)
        episodes_of = episode_numbers(scored.batch)
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
        new = with_columns(fresh, item=buffers.next_item(state) + sample, step=step)
        added = keep(new, np.nan_to_num(outcome, nan=-np.inf) > success)
        store = buffers.newest_of_prompts(join(state, added), each) if each else {}
        return mixed(scored, keep(fresh, ~out), past, group[~out], np.asarray(numbers, group.dtype)), store

    grown: Callable[[int], int] = (lambda rows: 2 * rows) if place == "added" else (lambda rows: rows)
    return Replay(dict, mix, frozenset({"replayed"}), buffers.metrics, grown, by_row=True)


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
    return np.asarray(np.argsort(np.argsort(first))[index.reshape(-1)])


def component_scores(scored: Scored, component: str | None) -> np.ndarray:
    """f32[N]: a component of the reward, or their combination; InputError if there is no such component."""
    if component is None:
        return np.asarray(scored.batch.need("reward"))
    components = scored.batch.rewards or {}
    if component not in components:
        raise unknown("reward", component, components)
    return np.asarray(components[component])
