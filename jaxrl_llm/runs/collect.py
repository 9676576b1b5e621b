"""One step's experience: prompts drawn, completions sampled and scored, uninformative groups replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.data import PromptStream
from jaxrl_llm.interrupts import stop_if
from jaxrl_llm.models.policy import Params
from jaxrl_llm.rollouts import partial
from jaxrl_llm.sampling import engine, sample
from jaxrl_llm.rollouts.partial import Enough, Group, Partial, Pool
from jaxrl_llm.sampling.requests import Completion, Request, Stats
from jaxrl_llm.sampling.sampler import assemble, requests_of
from jaxrl_llm.sampling.schedule import lasting
from jaxrl_llm.sampling.weights import take_weights
from jaxrl_llm.runs.config import TrainConfig
from jaxrl_llm.runs.record import rollout_metrics
from jaxrl_llm.rewards.scoring import Scored, StreamedScores, score_batch, group_of, join
from jaxrl_llm.runs.record import window_metrics
from jaxrl_llm.runs.run_folder import Clock
from jaxrl_llm.runs.setup import Parts, strategy_of
from jaxrl_llm.trajectory import Trajectories

Rows = list[dict[str, Any]]
LOOK = 16  # tokens between two looks whether enough groups are complete


class Collected(NamedTuple):
    """A scored batch, the data set row of each of its groups, and how it came to be."""

    scored: Scored
    rows: Rows
    rounds: int  # batches of prompts that it took
    metrics: dict[str, float]  # of the rollout
    pool: Pool = ()  # groups that were begun and go on in the next step


def collect(
    parts: Parts,
    config: TrainConfig,
    params: Params,
    stream: PromptStream,
    key: jax.Array,
    step: int,
    clock: Clock,
    pool: Pool = (),
) -> Collected:
    """Sample and score `prompts_per_step` groups; where the method resamples, until so many are informative.

    Where the rounds end before there are enough, uninformative groups of the last round fill up. With partial rollouts
    the groups of the `pool` come first, then those of new prompts (the stream gives one at a time); there can be fewer
    groups, but at least one. Raises KeyboardInterrupt after Ctrl-C.

    Where the strategy trains on unfinished completions, the batch is all that is in flight. info["window"] bool[N, L]
    are the actions of this step and info["unfinished"] bool[N] the rows that go on in the next; reward functions see a
    completion once, in the step in which it is finished, and rows without a score have the reward NaN.
    """
    strategy = strategy_of(config, parts.algorithm)
    if strategy is not None:
        return _partial(parts, config, strategy, params, stream, key, step, clock, pool)
    curriculum = parts.algorithm.curriculum
    if curriculum is None:
        scored, rows, stats = _round(parts, config, params, stream, key, step, clock)
        return Collected(scored, rows, 1, stats.metrics())
    kept: list[tuple[Scored, dict[str, Any]]] = []
    spare: list[tuple[Scored, dict[str, Any]]] = []
    runs: list[Stats] = []
    while len(runs) < curriculum.rounds and len(kept) < config.prompts_per_step:
        round_key = jax.random.fold_in(key, len(runs)) if runs else key
        scored, rows, stats = _round(parts, config, params, stream, round_key, step, clock)
        good = np.asarray(curriculum.informative(scored.batch))[:: config.group_size]
        groups = [(group_of(scored, i, config.group_size), row) for i, row in enumerate(rows)]
        kept += [group for group, fine in zip(groups, good, strict=True) if fine]
        spare = [group for group, fine in zip(groups, good, strict=True) if not fine]
        runs.append(stats)
    chosen = (kept + spare)[: config.prompts_per_step]
    scored = join([scored for scored, _ in chosen])
    return Collected(scored, [row for _, row in chosen], len(runs), rollout_metrics(runs))


def _round(
    parts: Parts, config: TrainConfig, params: Params, stream: PromptStream, key: jax.Array, step: int, clock: Clock
) -> tuple[Scored, Rows, Stats]:
    rows, ids = next(stream)
    prompts, stats = [parts.prompts.ids[i] for i in ids], Stats()
    with StreamedScores(parts.rewards, parts.tokenizer) as streamed:
        with clock("sample"):
            batch = sample(
                parts.policy, params, prompts, key, group_size=config.group_size, prompt_ids=ids.tolist(),
                policy_step=step, slots=config.slots, cache_dtype=config.sampling_cache, mesh=parts.mesh, stats=stats,
                **_settings(config),
                on_completion=_by_group(streamed, rows, config.group_size) if config.stream_rewards else None,
            )  # fmt: skip
        stop_if(stats.interrupted)
        best = _likeliest(parts, config, params, prompts, ids, key, step, clock)
        with clock("score"):
            scored = _scored(parts, config, rows, batch, streamed, best)
    return scored, rows, stats


def _partial(
    parts: Parts,
    config: TrainConfig,
    strategy: Partial,
    params: Params,
    stream: PromptStream,
    key: jax.Array,
    step: int,
    clock: Clock,
    pool: Pool,
) -> Collected:
    """As `collect`, for a strategy."""
    limit, wanted = config.max_new_tokens, config.prompts_per_step
    drawn = [int(next(stream)[1][0]) for _ in range(strategy.in_flight(wanted) - len(pool))]
    flight = (*pool, *partial.begin([(parts.prompts.ids[i], i) for i in drawn], config.group_size, step))
    asked = requests_of(parts.policy, [group.prompt for group in flight], key, **_settings(config))
    weights = cache(lambda: take_weights(parts.policy, params, parts.mesh))
    runs: list[Stats] = []
    # The same for every step: the number of requests differs, and the loop is compiled for a shape.
    slots = config.slots or wanted * config.group_size
    shape = lasting(slots, len(flight), config.group_size, parts.mesh.shape["data"])

    def generate(requests: Sequence[Request], enough: Enough) -> Iterable[Completion]:
        runs.append(Stats())
        yield from engine.stream(
            parts.policy, weights(), requests, asked.settings, cut=asked.cut, chunk=LOOK,
            shape=shape, enough=enough, policy_step=step, cache_dtype=config.sampling_cache, stats=runs[-1],
        )  # fmt: skip
        stop_if(runs[-1].interrupted)

    with StreamedScores(parts.rewards, parts.tokenizer) as streamed:

        def score(number: int, group: Group) -> None:
            ids = [sample.tokens.token.tolist() for sample in group.samples]
            streamed.add(number, parts.prompts.rows[group.prompt_id], ids)

        with clock("sample"):
            if strategy.train_unfinished:
                chosen = partial.advance_all(flight, limit, generate, strategy.segment_tokens)
                left = tuple(group for group in chosen if group.unfinished(limit))
            else:
                chosen, left = partial.advance(
                    flight, wanted, limit, generate, segment_tokens=strategy.segment_tokens,
                    on_group=score if config.stream_rewards else None,
                )  # fmt: skip
            requests, completions, numbers = partial.completions_of(chosen, limit)
            truncating = asked.settings.filters is not None
            batch = assemble(requests, completions, numbers, config.temperature, truncating, step)
            if strategy.train_unfinished:
                batch = batch.with_info(
                    window=batch.action_mask & (batch.policy_step == step),
                    unfinished=jnp.asarray([completion.unfinished for completion in completions]),
                )
        ids = np.asarray([group.prompt_id for group in chosen])
        rows = [parts.prompts.rows[i] for i in ids]
        best = _likeliest(parts, config, params, [parts.prompts.ids[i] for i in ids], ids, key, step, clock)
        with clock("score"):
            scored = _scored(parts, config, rows, batch, streamed, best)
    # Of the tokens that the policy is trained on.
    trained = batch.need("window") if strategy.train_unfinished else batch.action_mask
    age = (step - np.asarray(batch.policy_step))[np.asarray(trained)]
    metrics = {
        **rollout_metrics(runs),
        **(window_metrics(scored) if strategy.train_unfinished else {}),
        "rollout/stale_tokens": float(np.mean(age > 0)),
        "rollout/staleness": float(np.mean(age)),
        "rollout/groups": float(len(flight) - len(left)),
        "rollout/pool": float(len(left)),
    }
    return Collected(scored, rows, 1, metrics, left)


def _settings(config: TrainConfig) -> dict[str, Any]:
    """Of `sample`, but for what differs between greedy and other completions of a step."""
    return {
        "max_new_tokens": config.max_new_tokens, "stop": config.stop, "temperature": config.temperature,
        "top_p": config.top_p, "top_k": config.top_k, "min_p": config.min_p,
    }  # fmt: skip


def _likeliest(
    parts: Parts,
    config: TrainConfig,
    params: Params,
    prompts: Sequence[Sequence[int]],
    ids: np.ndarray,
    key: jax.Array,
    step: int,
    clock: Clock,
) -> Trajectories | None:
    """A greedy completion of each prompt, where the method needs its score."""
    if "greedy_reward" not in parts.algorithm.needs:
        return None
    stats = Stats()
    with clock("sample"):
        batch = sample(
            parts.policy, params, prompts, key, temperature=0.0, prompt_ids=ids.tolist(), stop=config.stop,
            max_new_tokens=config.max_new_tokens, policy_step=step, slots=config.slots,
            cache_dtype=config.sampling_cache, mesh=parts.mesh, stats=stats,
        )  # fmt: skip
    stop_if(stats.interrupted)
    return batch


def _scored(
    parts: Parts,
    config: TrainConfig,
    rows: Rows,
    batch: Trajectories,
    streamed: StreamedScores,
    likeliest: Trajectories | None,
) -> Scored:
    """The batch with its rewards, which may have been found already, and those of the likeliest completions."""
    known, which = streamed.scores() if config.stream_rewards else None, None
    if batch.info is not None and "window" in batch.info:
        which = np.asarray(batch.info["window"]).any(axis=1) & ~np.asarray(batch.info["unfinished"])
    scored = score_batch(parts.rewards, parts.tokenizer, rows, batch, known, which)
    if likeliest is None:
        return scored
    best = score_batch(parts.rewards, parts.tokenizer, rows, likeliest).batch.scores
    return scored._replace(batch=scored.batch.with_info(greedy_reward=best[batch.group]))


def _by_group(streamed: StreamedScores, rows: Rows, size: int) -> Callable[[Completion], None]:
    """Called with each completion of `sample`: gives a group to be scored as soon as it is whole."""
    found: dict[int, dict[int, list[int]]] = {}

    def ended(completion: Completion) -> None:
        number, place = divmod(completion.index, size)
        group = found.setdefault(number, {})
        group[place] = completion.tokens.token.tolist()
        if len(group) == size:
            streamed.add(number, rows[number], [group[i] for i in range(size)])

    return ended
