"""The standard source: select prompts, run rollouts on one engine, score them, mix in replay."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from jaxrl_llm.core.rollout import Task
from jaxrl_llm.core.rules import Partial
from jaxrl_llm.core.source import Source, Step
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.models.policy import Params
from jaxrl_llm.rewards.scoring import Scored, score_batch, with_defaults
from jaxrl_llm.rewards.streamed import StreamedScores
from jaxrl_llm.rollouts.episode import Episode, sampled_ids
from jaxrl_llm.rollouts.program_host import MakeEngine
from jaxrl_llm.rollouts.runtime.admission import Admit, Collected, Rule, admit_first
from jaxrl_llm.rollouts.runtime.collate import dataset_rows, mean_metrics, program_metrics, to_batch
from jaxrl_llm.rollouts.runtime.driver import Driver
from jaxrl_llm.rollouts.runtime.engines import engines_of
from jaxrl_llm.rollouts.runtime.group_run import Group
from jaxrl_llm.rollouts.runtime.multihost_gather import admit_on, in_lockstep, meet_on, of_all_hosts
from jaxrl_llm.rollouts.runtime.replay_log import GroupLog, Pool
from jaxrl_llm.rollouts.runtime.sample_numbers import sample_numbers
from jaxrl_llm.rollouts.runtime.source_setup import Experience, ExperienceState, check_setup, loaded, saved
from jaxrl_llm.rollouts.runtime.sources import (
    Resampling,
    draw_prompts,
    rollout_metrics,
    window_metrics,
    with_replay,
    without_references,
)
from jaxrl_llm.sampling.batch import completion_ids
from jaxrl_llm.sampling.engine import CHUNK
from jaxrl_llm.sampling.speculative.drafts import Drafts
from jaxrl_llm.sampling.stats import Stats
from jaxrl_llm.utils.errors import InputError, shown

LOOK = 16  # tokens between two checks for stop strings, complete groups, and samples that a program waits for


StepOf = Callable[[Experience, ExperienceState, Params, jax.Array, int], tuple[Step, ExperienceState]]


def experience(setup: Experience, step_of: StepOf | None = None) -> Source:
    """The source that samples and scores `prompts_per_step` groups a step.

    Dynamic sampling samples until that many groups are informative, or fills up with uninformative groups of the last
    round. With partial rollouts, groups of the pool come before those of new prompts, and a step can have fewer groups,
    but at least one. If a step trains on unfinished completions, the batch has all groups in flight, with
    info["window"] bool[N, L], the actions of this step, and info["unfinished"] bool[N], the rows that continue in the
    next; reward functions see each completion once, in the step in which it finishes, and rows without a score have the
    reward NaN. `next` raises KeyboardInterrupt after Ctrl-C. InputError for partial rollouts of programs that meet, or
    with columns of a curriculum, which a group would not find again in the next step.

    step_of: how the groups of a step are sampled and scored, instead.
    """
    check_setup(setup)
    step_of = step_of or (_complete_step if setup.partial is None else _partial_step)

    def init() -> ExperienceState:
        return ExperienceState(setup.curriculum.init(), setup.replay.init(), (), Drafts())

    def next_step(state: ExperienceState, params: Params, key: jax.Array, step: int) -> tuple[Step, ExperienceState]:
        found, state = step_of(setup, state, params, key, step)
        if setup.sampling.speculative_tokens:
            ids = np.asarray(found.scored.batch.prompt_id).tolist()
            added = zip(ids, completion_ids(found.scored.batch), strict=True)
            state = state._replace(drafts=state.drafts.with_added(added))
        curriculum = setup.curriculum.observe(state.curriculum, found)  # of what was sampled, without replay
        if setup.curriculum.columns is not None:
            found = without_references(found)
        found = found._replace(metrics=found.metrics | setup.curriculum.metrics(curriculum))
        found, replay = with_replay(setup.replay, state.replay, found, key, step, setup.prompts)
        return found, state._replace(replay=replay, curriculum=curriculum)

    def load(saved: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> ExperienceState:
        state = loaded(saved, arrays)
        setup.curriculum.select(state.curriculum, 0)  # so that the curriculum checks its state
        return state

    def on_checkpoint(state: ExperienceState, step: int) -> np.ndarray | None:
        setup.replay.on_checkpoint(state.replay, step)
        return setup.curriculum.excluded(state.curriculum) if setup.curriculum.excluded else None

    def on_update(state: ExperienceState, batch: Trajectories) -> ExperienceState:
        controls = {name: float(x) for name, x in (batch.controls or {}).items() if np.ndim(x) == 0} or state.controls
        replay = setup.replay.on_update(state.replay, batch)
        curriculum = setup.curriculum.on_update(state.curriculum, batch)
        return state._replace(replay=replay, curriculum=curriculum, controls=controls)

    provides = setup.rollout.provides | setup.replay.provides
    return Source(init, next_step, saved, load, provides, on_checkpoint, on_update)


def _complete_step(
    setup: Experience, state: ExperienceState, params: Params, key: jax.Array, step: int
) -> tuple[Step, ExperienceState]:
    dynamic, wanted = setup.dynamic_sampling, setup.prompts_per_step
    rounds = None if dynamic is None else Resampling(dynamic, wanted)
    runs, stats, dropped = list[dict[str, float]](), list[Stats](), 0
    while True:
        round_key = jax.random.fold_in(key, len(runs)) if runs else key
        ids, curriculum, lost = draw_prompts(setup.curriculum, setup.prompts, state.curriculum, wanted)
        state, dropped = state._replace(curriculum=curriculum), dropped + lost
        flight = begin_groups(setup, state.curriculum, ids, wanted, step)
        found, scored = _round(setup, flight, Rule(), params, round_key, step, state)
        stats += found.stats
        runs.append(program_metrics(found.groups))
        metrics = rollout_metrics(stats, dropped) | mean_metrics(runs)
        if rounds is None:
            return Step(scored, dataset_rows(found.groups), metrics), state
        rounds.add(found.groups, scored)
        if not rounds.missing:
            return rounds.step(metrics), state


def _partial_step(
    setup: Experience, state: ExperienceState, params: Params, key: jax.Array, step: int
) -> tuple[Step, ExperienceState]:
    strategy = setup.partial or Partial()
    wanted, new = setup.prompts_per_step, strategy.in_flight(setup.prompts_per_step) - len(state.pool)
    ids, curriculum, dropped = draw_prompts(setup.curriculum, setup.prompts, state.curriculum, new)
    flight = continued_groups(setup, state.pool) + begin_groups(setup, curriculum, ids, new, step)
    segment, windows = strategy.segment_tokens, strategy.train_unfinished
    rule = Rule(None if windows else wanted, segment, train_unfinished=windows)
    found, scored = _round(setup, flight, rule, params, key, step, state)
    batch = scored.batch
    # Age in steps of the tokens that are trained on.
    age = (step - batch.policy_step)[batch.need("window") if windows else batch.action_mask]
    metrics = {
        **rollout_metrics(found.stats, dropped),
        **program_metrics(found.groups),
        **(window_metrics(scored) if windows else {}),
        "rollout/stale_tokens": float(np.mean(age > 0)) if age.size else 0.0,
        "rollout/staleness": float(np.mean(age)) if age.size else 0.0,
        "rollout/groups": float(len(flight) - len(found.left)),
        "rollout/pool": float(len(found.left)),
    }
    state = state._replace(curriculum=curriculum, pool=found.left, held=found.held)
    return Step(scored, dataset_rows(found.groups), metrics), state


def continued_groups(setup: Experience, pool: Pool) -> list[tuple[GroupLog, Task]]:
    """The groups of a pool, which go on."""
    return [(log, _task(setup, log)) for log in pool]


def begin_groups(
    setup: Experience, curriculum: Any, ids: list[int], wanted: int, step: int, earlier: Iterable[int] = ()
) -> list[tuple[GroupLog, Task]]:
    """Groups of these prompts, which begin in this step. wanted: as many samples as so many groups have.

    earlier: the prompts of the groups that began in this step before.
    """
    counts, total = setup.curriculum.counts, wanted * setup.group_size
    samples = [setup.group_size] * len(ids)
    if counts is not None and ids:
        samples = counts(curriculum, np.asarray(ids, np.int32), total).tolist()
        if min(samples) < 1 or sum(samples) != total:
            raise InputError(
                f"a curriculum gave {shown(samples)} samples, but must give each prompt 1 at least, and {total} in all"
            )
    logs, begun = list[GroupLog](), Counter(earlier)
    for i, number in zip(ids, samples, strict=True):
        logs.append(GroupLog(tuple(setup.prompts.ids[i]), i, number, step, repeat=begun[i]))
        begun[i] += 1
    columns: Sequence[Mapping[str, Any]] = [{}] * len(ids)
    if setup.curriculum.columns is not None and ids:
        columns = setup.curriculum.columns(curriculum, np.asarray(ids, np.int32))
    return [(log, _task(setup, log, more)) for log, more in zip(logs, columns, strict=True)]


def _task(setup: Experience, log: GroupLog, columns: Mapping[str, Any] = MappingProxyType({})) -> Task:
    row = {**setup.prompts.rows[log.prompt_id], **columns}
    return Task(row, log.prompt, log.prompt_id, log.samples, setup.sampling.max_new_tokens)


def _round(
    setup: Experience, flight: list[tuple[GroupLog, Task]], rule: Rule, params: Params, key: jax.Array, step: int,
    state: ExperienceState,
) -> tuple[Collected, Scored]:  # fmt: skip
    """Run the programs of the groups in flight and score the groups to train on; each unit its share of them."""
    sampling, hosts, tokenizer = setup.sampling, setup.hosts, setup.policy.tokenizer
    numbers, places = sample_numbers([task for _, task in flight]), hosts.share(range(len(flight)))
    scored: Scored | None = None
    with ExitStack() as stack:
        streamed = stack.enter_context(StreamedScores(setup.rewards, tokenizer, setup.state(step)))

        def on_group(place: int, one: Group) -> None:
            if setup.stream_rewards and not any(one.unfinished) and one.episodes[0].reward is None:
                streamed.add(
                    place, dict(one.task.row), [sampled_ids(episode) for episode in one.episodes], one.task.prompt
                )

        def run(make: MakeEngine, admit: Admit) -> Collected:
            driver = driver_of(
                setup, streamed, make, step, state, on_group=on_group, admit=admit, meet=meet_on(hosts, places)
            )
            own = [flight[place] for place in places]
            return driver.run(own, rule, [numbers[place] for place in places], state.held)

        make = engines_of(setup, len(places), params, key, step, state)
        with setup.clock("sample"):
            found = in_lockstep(hosts, make, admit_first if hosts.count == 1 else admit_on(hosts, places), run)
            remembers = setup.rollout.hook is not None and setup.rollout.hook.remember is not None
            batch_of = partial(
                to_batch, sampling=sampling, step=step, windows=rule.train_unfinished, remembers=remembers
            )
            batch = batch_of(found.groups) if found.groups else None
        with setup.clock("score"):
            if batch is not None:
                scored = score_groups(setup, found.groups, batch, streamed, step)
    if hosts.count == 1:
        assert scored is not None  # a step trains on one group at least
        return found, scored
    with setup.clock("wait"):
        return of_all_hosts(hosts, places, found, scored, batch_of)


def driver_of(
    setup: Experience, streamed: StreamedScores, make: MakeEngine, step: int, state: ExperienceState, **more: Any
) -> Driver:
    """The driver of a step, whose programs have their episodes scored by `streamed`. more: of its fields."""

    async def scores(task: Task, episodes: Sequence[Episode]) -> list[Episode]:
        return await streamed.episodes(dict(task.row), episodes)

    at_once = setup.rollout.demands.at_once and not setup.sampling.stop and setup.partial is None
    return Driver(
        setup.rollout, make, scores, setup.policy.tokenizer, context=setup.policy.config.max_positions, step=step,
        chunk=CHUNK if at_once else LOOK, time_limit=setup.time_limit, controls=state.controls,
        encode=setup.prompts.encode, strict=setup.strict_reruns, **more,
    )  # fmt: skip


def score_groups(
    setup: Experience, groups: Sequence[Group], batch: Trajectories, streamed: StreamedScores, step: int
) -> Scored:
    """The batch with its rewards, some of which may be known already; those of failed groups are the defaults."""
    scored = _scored(setup, groups, batch, streamed, step)
    failed = np.asarray([one.failed for one in groups for _ in one.episodes])
    return with_defaults(setup.rewards, scored, failed) if failed.any() else scored


def _scored(
    setup: Experience, groups: Sequence[Group], batch: Trajectories, streamed: StreamedScores, step: int
) -> Scored:
    rows = dataset_rows(groups)
    episodes = [episode for one in groups for episode in one.episodes]
    goes_on = (batch.info or {}).get("unfinished")
    if any(episode.reward is not None for episode in episodes):
        known = streamed.known(episodes)
        if goes_on is not None:
            later = np.asarray(goes_on)
            components = {name: np.where(later, np.nan, x) for name, x in known.components.items()}
            known = known._replace(components=components, total=np.where(later, np.nan, known.total))
        return score_batch(setup.rewards, setup.policy.tokenizer, rows, batch, known)
    if setup.stream_rewards and streamed.any:
        return score_batch(setup.rewards, setup.policy.tokenizer, rows, batch, streamed.scores())
    which = None
    if goes_on is not None:
        which = np.asarray(batch.need("window")).any(axis=1) & ~np.asarray(goes_on)
    return score_batch(setup.rewards, setup.policy.tokenizer, rows, batch, None, which, setup.state(step))
