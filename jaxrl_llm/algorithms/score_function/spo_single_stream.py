from typing import Any

import numpy as np

from jaxrl_llm.advantages import tracked_baseline
from jaxrl_llm.algorithms.method import Algorithm, exactly, method, run_settings
from jaxrl_llm.core.annotations import Code, Count, Fraction, NonNegative, NonNegativeInt, OfRun, Ours, Paper, Positive
from jaxrl_llm.core.parts import Trajectories, batch_part, part
from jaxrl_llm.core.source import Replay
from jaxrl_llm.curriculum.compose import choose_prompts
from jaxrl_llm.curriculum.records import Array, PromptFacts, Prompts, State, changed
from jaxrl_llm.curriculum.rules import SuccessModel
from jaxrl_llm.curriculum.scores import uncertain
from jaxrl_llm.objectives import clipped_policy
from jaxrl_llm.replay import buffers
from jaxrl_llm.replay.base import mixed
from jaxrl_llm.replay.buffers import Store, count, join, keep, take, to_rows, token_places, with_columns
from jaxrl_llm.rewards.scoring import Scored
from jaxrl_llm.rollouts.programs import Episode, Rollout, Task, Tools, altered, group
from jaxrl_llm.utils.errors import InputError, shown


@batch_part
def tracker(
    facts: PromptFacts,
    half_life: Positive = 0.06,
    least: Fraction = 0.875,
    most: Fraction = 0.96,
    column: str | None = None,
    samples: Count = 8,
) -> SuccessModel:
    """The estimate of `advantages.trackers.tracked_baseline` for the prompt, within 0 and 1.

    It is updated after each update of the policy, from the prepared batch and its info["drift"], as that tracker is,
    and a prompt of which the run's own tracker says v has the same v here. column: of the data set, with the mean
    reward of `samples` samples of each prompt before the run, from which trackers start; None: at 1/2. The metric
    curriculum/drift is the mean drift of the last update's prompts that had been answered before, 0 without such.
    """

    def predict(state: State, prompts: Prompts, random: np.random.Generator) -> Array:
        return np.clip(state["value"][prompts.ids].astype(np.float64), 0.0, 1.0)

    def learned(state: State, batch: Trajectories) -> State:
        info = batch.info or {}
        reward = np.where(np.asarray(batch.action_mask).any(axis=1), np.asarray(batch.need("reward")), np.nan)
        known = ~np.isnan(reward) & ~(np.asarray(info.get("measured", np.zeros(len(reward)))) > 0)
        ids, at = np.unique(np.asarray(batch.prompt_id)[known], return_inverse=True)
        value, memory, seen = (state[name][ids] for name in ("value", "memory", "seen"))
        kept, moved = np.full(len(at), least), np.zeros(0)
        if "drift" in info:
            D = np.where(seen[at], np.asarray(info["drift"])[known], 0.0)
            moved = D[seen[at] & ~np.isnan(D)]
            kept = np.where(np.isnan(D), least, np.clip(np.exp2(-D / half_life), least, most))
        n, total, share = (np.bincount(at, x, len(ids)) for x in (np.ones(len(at)), reward[known], kept))
        after = share / np.maximum(n, 1) * memory + n
        new = {"value": value + (total - n * value) / np.maximum(after, 1e-9), "memory": after, "seen": True}
        arrays = {name: changed(state[name], ids, x) for name, x in new.items()}
        return {**arrays, "drift": float(moved.mean()) if len(moved) else 0.0}

    value, memory = np.full(facts.size, 0.5, np.float32), np.ones(facts.size, np.float32)
    if column is not None:
        mean = _means(facts, column)
        value = ((samples * mean + 0.5) / (samples + 1)).astype(np.float32)
        memory = memory / np.float32(1 - least)
    start = {"value": value, "memory": memory, "seen": np.zeros(facts.size, bool), "drift": 0.0}
    return SuccessModel(predict, start, metrics=lambda state: {"drift": state["drift"]}, on_update=learned)


def _means(facts: PromptFacts, column: str) -> Array:
    """f64[P]: the column's mean rewards; InputError for what is no number from 0 to 1."""
    values = facts.column(column)
    for number, value in enumerate(values, start=1):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise InputError(
                f"the column {column!r} of prompt {number} is {shown(value)}, but must be a mean reward from 0 to 1"
            )
    return np.asarray(values, np.float64)


_NOT_READ = ("token:entropy", "token:untruncated_logp")  # of a response that is only measured


@part
def last_responses(prompts: NonNegativeInt = 16_384) -> Replay:
    """Bring back the last response to each prompt of the batch, with info["measured"] 1: no update trains on it.

    The store has one response of each prompt, those of the `prompts` prompts that were answered last. Its
    `behaviour_logp` is what the learner computed before the update on that response, once there was one, and not what
    the sampler did: the two differ by rounding, which would count as a move of the policy.
    """

    def mix(state: Store, scored: Scored, step: int, seed: int) -> tuple[Scored, Store]:
        fresh, group = to_rows(scored), np.asarray(scored.batch.group)
        asked, past = np.asarray(scored.batch.prompt_id), dict[str, np.ndarray]()
        if count(state):
            past = take(state, np.flatnonzero(np.isin(state["row:prompt_id"], asked)))
        found = mixed(scored, fresh, past, group, group.max() + 1 + np.arange(count(past)))
        # Where each row is in the mixed batch, whose first rows these are, in the order of their groups.
        place = np.empty(len(group), np.int64)
        place[np.argsort(group, kind="stable")] = np.arange(len(group))
        light = {name: x for name, x in fresh.items() if name not in _NOT_READ}
        new = with_columns(light, item=buffers.next_item(state) + np.arange(len(group)), step=step, place=place)
        answered: Any = np.asarray(scored.batch.action_mask).any(axis=1)
        new = keep(new, answered)
        old = with_columns(state, place=-1) if count(state) else {}
        store = buffers.newest(buffers.newest_of_prompts(join(old, new), 1), prompts)
        batch = found.batch
        return found._replace(batch=batch.with_info(measured=(batch.info or {})["replayed"])), store

    def learned(state: Store, batch: Trajectories) -> Store:
        if not count(state):
            return state
        which = np.flatnonzero(state["of:place"] >= 0)
        rows = state["of:place"][which]
        old_logp: Any = np.asarray(batch.need("old_logp"))[rows]
        told = old_logp[np.asarray(batch.token_mask)[rows]]
        logp = state["token:behaviour_logp"].copy()
        logp[token_places(state["length"], which)] = told
        return with_columns(state | {"token:behaviour_logp": logp}, place=-1)

    return Replay(
        dict, mix, frozenset({"replayed", "measured"}), buffers.metrics, lambda rows: 2 * rows, on_update=learned
    )


@part
def with_start_value(rollout: Rollout, column: str) -> Rollout:
    """A rollout whose episodes know what their prompt's completions earned before the run.

    column: of the data set, with that mean reward. Provides info["start_value"].
    """

    async def program(tools: Tools, task: Task) -> list[Episode]:
        value = float(task.row[column])
        return [episode.with_info(start_value=value) for episode in await rollout.program(tools, task)]

    return altered(rollout, program, "start value", {"start_value"}, [column])


@method(paper="arXiv 2509.13232", test="test_critic_free.py::test_spo_is_the_loop_over_updates")
@run_settings(exactly("group_size", 1, "one response to each prompt, whose baseline is the prompt's own history"))
def spo_single_stream(
    half_life: Paper[float] = 0.06,
    least_kept: Paper[Fraction] = 0.875,
    most_kept: Paper[Fraction] = 0.96,
    prompts: OfRun[Count | None] = None,
    clip_low: Paper[NonNegative] = 0.2,
    clip_high: Paper[NonNegative] = 0.28,
    epsilon: Paper[NonNegative] = 1e-8,
    least_weight: Code[float] = 0.05,
    stored: Ours[NonNegativeInt] = 16384,
    profile: Ours[str] = "",
    profile_samples: Paper[int] = 8,
) -> Algorithm:
    """Single-stream Policy Optimization (SPO).

    No groups: the baseline is a tracker's estimate for the prompt, and advantages are standardised over the batch.

        A = r - v(x),    A <- (A - mean) / (std + epsilon),    and then the tracker is updated,
        alpha <- k alpha + r,    beta <- k beta + 1 - r,    v = alpha / (alpha + beta)
        k = clip(2^(-D / half_life), least_kept, most_kept)

    in PPO's clipped loss (clip_low, clip_high), mean over tokens. D is how far the policy moved since it last answered
    x: the mean over the tokens of that response of |log pi_now - log pi_then|, both before the update of their step, by
    the learner; 0 at the first visit. (The code has both after it.) The run keeps the last responses of `stored`
    prompts, and the forward pass before an update reads those of the batch's prompts; no gradient step does. Where a
    response is no longer kept, k = least_kept.

    Prompts are drawn without replacement in proportion to sqrt(v (1 - v)) + least_weight. Trackers start at v = 0.5
    with the weight of one observation; or, with the column `profile` of the data set, which has the mean reward of
    profile_samples samples of each prompt before training, at v = (n mean + 1/2)/(n + 1) with the weight
    1/(1 - least_kept). prompts: size of the tracker (None: one entry for each prompt of the run); prompt ids beyond it
    share entries. Several responses to a prompt are one update. The run's group_size should be 1.
    """
    column, offline = profile or None, profile_samples if profile else 0
    rule = uncertain(least_weight, tracker(half_life, least_kept, most_kept, column, profile_samples))
    transform = tracked_baseline(prompts, half_life, least_kept, most_kept, epsilon, offline)
    return Algorithm(
        transform, clipped_policy(clip_low, clip_high), curriculum=choose_prompts(rule), replay=last_responses(stored),
        rollout=with_start_value(group(), profile) if profile else None,
    )  # fmt: skip
