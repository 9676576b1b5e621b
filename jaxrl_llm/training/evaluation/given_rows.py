"""Rows of a data set as the episodes of a rollout that samples nothing."""

from __future__ import annotations

import jax
import numpy as np

from jaxrl_llm.data.prompt_set import PromptSet
from jaxrl_llm.models.policy import Params
from jaxrl_llm.rewards.scoring import Scored
from jaxrl_llm.rollouts.runtime.source import experience
from jaxrl_llm.rollouts.runtime.source_setup import Experience
from jaxrl_llm.rollouts.runtime.sources import same_prompts
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.rollout import rollout_of
from jaxrl_llm.training.setup import RunParts


def given_rows(config: TrainConfig, parts: RunParts, prompts: PromptSet, places: np.ndarray, params: Params) -> Scored:
    """The scored episodes of the rows at some places int[n], one step of them."""
    chosen = places.astype(np.int32)
    source = experience(
        Experience(
            parts.policy, prompts, parts.rewards, same_prompts(chosen), config.sampling,
            rollout_of(config, parts.algorithm),
            prompts_per_step=len(chosen), group_size=config.group_size, time_limit=config.rollout_time_limit,
            mesh=parts.sampler, hosts=parts.hosts,
        )
    )  # fmt: skip
    return source.next(source.init(), params, jax.random.key(config.seed), 0)[0].scored
