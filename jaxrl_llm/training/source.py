"""The standard source of batches, made from the configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.core.source import Curriculum, Replay, Source, Step
from jaxrl_llm.replay.disk import is_available, on_disk
from jaxrl_llm.rollouts.asynchronous.source import asynchronous
from jaxrl_llm.rollouts.runtime.source import experience
from jaxrl_llm.rollouts.runtime.source_setup import Clock, Experience, state_of
from jaxrl_llm.rollouts.runtime.sources import no_replay, shuffled_epochs
from jaxrl_llm.rollouts.runtime.swarm import Swarm
from jaxrl_llm.sampling.stats import Stats
from jaxrl_llm.training.asynchrony import asynchrony_of
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.rollout import rollout_of, strategy_of
from jaxrl_llm.training.setup import RunParts
from jaxrl_llm.training.swarm import swarm_source
from jaxrl_llm.utils.storage import is_url

OfRows = Callable[[Sequence[dict[str, Any]]], Curriculum]  # makes it from the training rows


def source_of(
    config: TrainConfig, parts: RunParts, clock: Clock, curriculum: OfRows | None = None,
    watch: Callable[[Stats], object] = lambda stats: None,
) -> Source:  # fmt: skip
    """The `Source` of a run: curriculum, rollouts, rewards, replay. watch: see `Experience`.

    curriculum: instead of the method's, which are shuffled epochs by default.
    """
    rows, algorithm = parts.prompts.rows, parts.algorithm
    if isinstance(algorithm.replay, Swarm):
        return swarm_source(
            config, parts, algorithm.replay, lambda given, alone: source_of(given, alone, clock, curriculum, watch)
        )
    order = (algorithm.prompts or shuffled_epochs)(rows, config.seed) if curriculum is None else curriculum(rows)
    setup = Experience(
        parts.policy, parts.prompts, parts.rewards, order, config.sampling, rollout_of(config, algorithm),
        _replay_of(config, parts), prompts_per_step=config.prompts_per_step, group_size=config.group_size,
        dynamic_sampling=algorithm.resampling, partial=strategy_of(config, algorithm),
        stream_rewards=config.stream_rewards, time_limit=config.rollout_time_limit,
        strict_reruns=config.strict_reruns, mesh=parts.sampler, reference=parts.first_reference, hosts=parts.hosts,
        clock=clock, watch=watch,
        state=lambda step: state_of(step, config.steps, config.prompts_per_step, len(rows)),
        frozen=parts.frozen is not None, record_experts=algorithm.routing == "rollout",
    )  # fmt: skip
    return asynchronous(setup, asynchrony_of(config, parts)) if config.max_staleness else experience(setup)


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
