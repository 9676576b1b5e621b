"""From a configuration to the standard source."""

from __future__ import annotations

from jaxrl_llm.rollouts.experience import Clock, Experience, experience
from jaxrl_llm.rollouts.sources import Source, shuffled_epochs
from jaxrl_llm.runs.config import TrainConfig
from jaxrl_llm.runs.rollout import rollout_of, strategy_of
from jaxrl_llm.runs.setup import Parts


def source_of(config: TrainConfig, parts: Parts, clock: Clock) -> Source:
    """Where a run's batches come from."""
    return experience(
        Experience(
            parts.policy, parts.prompts, parts.rewards, shuffled_epochs(parts.prompts.rows, config.seed),
            config.sampling, rollout_of(config, parts.algorithm), prompts_per_step=config.prompts_per_step,
            group_size=config.group_size, dynamic_sampling=parts.algorithm.curriculum,
            partial=strategy_of(config, parts.algorithm), stream_rewards=config.stream_rewards,
            time_limit=config.rollout_time_limit, mesh=parts.mesh, clock=clock,
        )
    )  # fmt: skip
