"""The standard source of batches, made from the configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.source import Curriculum, Replay, Source, Step
from jaxrl_llm.data.prompt_set import PromptSet
from jaxrl_llm.distributed.hosts import Hosts
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.replay.base import Swarm
from jaxrl_llm.replay.disk import is_available, on_disk
from jaxrl_llm.rewards import Reward
from jaxrl_llm.rollouts.asynchronous.source import asynchronous
from jaxrl_llm.rollouts.runtime.source import experience
from jaxrl_llm.rollouts.runtime.source_setup import Clock, Experience, state_of
from jaxrl_llm.rollouts.runtime.sources import no_replay, shuffled_epochs
from jaxrl_llm.sampling.stats import Stats
from jaxrl_llm.training.asynchrony import asynchrony_of, samplers_of
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.rollout import rollout_of, strategy_of
from jaxrl_llm.training.setup import RunParts
from jaxrl_llm.training.source.swarm import swarm_source
from jaxrl_llm.utils.storage import is_url

OfRows = Callable[[Sequence[dict[str, Any]]], Curriculum]  # makes it from the training rows


def source_of(
    config: TrainConfig, parts: RunParts, clock: Clock, curriculum: OfRows | None = None,
    watch: Callable[[Stats], object] = lambda stats: None,
) -> Source:  # fmt: skip
    """The `Source` of a run: curriculum, rollouts, rewards, replay. watch: see `Experience`.

    curriculum: instead of the method's, which are shuffled epochs by default.
    """
    algorithm = parts.algorithm
    if isinstance(algorithm.replay, Swarm):
        return swarm_source(
            config, parts, algorithm.replay, lambda given, alone: source_of(given, alone, clock, curriculum, watch)
        )
    setup = experience_of(
        config, algorithm, parts.policy, parts.prompts, parts.rewards, parts.sampler, parts.hosts, curriculum,
        replay=_replay_of(config, parts), reference=parts.first_reference, clock=clock, watch=watch,
    )  # fmt: skip
    if not config.max_staleness:
        return experience(setup)
    return asynchronous(setup, asynchrony_of(config, parts), samplers_of(config, parts))


def experience_of(
    config: TrainConfig, algorithm: Algorithm, policy: Policy, prompts: PromptSet, rewards: Sequence[Reward],
    mesh: jax.sharding.Mesh, hosts: Hosts, curriculum: OfRows | None = None, **more: Any,
) -> Experience:  # fmt: skip
    """The configuration of a run's standard source. more: further fields of it."""
    rows = prompts.rows
    order = (algorithm.prompts or shuffled_epochs)(rows, config.seed) if curriculum is None else curriculum(rows)
    return Experience(
        policy, prompts, rewards, order, config.sampling, rollout_of(config, algorithm), mesh=mesh, hosts=hosts,
        prompts_per_step=config.prompts_per_step, group_size=config.group_size,
        dynamic_sampling=algorithm.resampling, partial=strategy_of(config, algorithm),
        stream_rewards=config.stream_rewards, time_limit=config.rollout_time_limit, strict_reruns=config.strict_reruns,
        state=lambda step: state_of(step, config.steps, config.prompts_per_step, len(rows)),
        frozen=bool(config.adapts), record_experts=algorithm.routing == "rollout", **more,
    )  # fmt: skip


def _replay_of(config: TrainConfig, parts: RunParts) -> Replay:
    """The method's replay, which keeps the tokens of a large store in the run's folder, where it may."""
    replay = parts.algorithm.replay or no_replay()
    if parts.hosts.count > 1 or is_url(config.output) or not is_available():
        return replay
    return on_disk(replay, Path(config.output) / "replay", config.replay_megabytes * 10**6, config.keep_checkpoints)


def timed(source: Source, clock: Clock) -> Source:
    """The source with its time counted as sampling, but for what it times itself."""

    def following(*arguments: Any) -> tuple[Step, Any]:
        with clock("sample"):
            return source.next(*arguments)

    return source._replace(next=following)
