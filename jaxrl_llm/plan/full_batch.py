"""The largest batch that a step of a run may learn from, as rollouts give it."""

import dataclasses
from typing import Any

import numpy as np

from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.needs import need_of, value_of
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.layers.moe import index_dtype
from jaxrl_llm.plan.shapes import records
from jaxrl_llm.rewards.specs import component_name
from jaxrl_llm.sampling.batch import BatchRow, assemble
from jaxrl_llm.sampling.requests import Tokens
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.other_policies.teacher import teachers_of
from jaxrl_llm.training.rollout import rollout_of, strategy_of


def as_trained(config: TrainConfig, algorithm: Algorithm) -> TrainConfig:
    """The configuration with groups of as many rows as the rollout may return, in whole multiples of their samples."""
    times = -(-rollout_of(config, algorithm).rows(config.group_size) // config.group_size)
    return dataclasses.replace(config, group_size=times * config.group_size)


def full_batch(
    config: TrainConfig, algorithm: Algorithm, vocabulary: int, model: ModelConfig | None = None
) -> Trajectories:
    """A scored batch on the host in which every prompt and completion is as long as the settings allow.

    It has the fields that a rollout's has. What the method needs of a rollout has the value that stands in for it. It
    has the most rows that a step may have: as many as the rollout may return, and those of a replay. model: of a
    mixture of experts the batch has those that a rollout records. Where the rollout thinks softly all tokens are soft.
    """
    config = as_trained(config, algorithm)
    P, T, G = config.max_prompt_tokens, config.max_new_tokens, config.group_size
    usual, random = config.prompts_per_step * G, np.random.default_rng(0)
    N = usual if algorithm.replay is None else -(-algorithm.replay.grown(usual) // usual) * usual
    prompts = random.integers(0, vocabulary, (N // G, P), dtype=np.int32)
    rows = []
    for number in range(N):
        token, zeros = random.integers(0, vocabulary, T, dtype=np.int32), np.zeros(T, np.float32)
        drawn = Tokens(token, zeros - 1, zeros, zeros - 2, zeros - 1, np.zeros(T, np.int32))
        rows.append(BatchRow(prompts[number // G].tolist(), drawn, False, number // G, number // G))
    batch = assemble(rows, config.temperature, config.sampling.truncating)
    reward = (np.arange(N) % 2).astype(np.float32)
    scores: dict[str, Any] = {"rewards": dict.fromkeys(map(component_name, config.rewards), reward), "reward": reward}
    batch = batch.replace(**scores)
    if model is not None and records(algorithm, model):
        chosen: Any = np.zeros((*batch.tokens.shape, model.num_layers, model.experts_per_token), index_dtype(model))
        batch = batch.replace(experts=chosen)
    if (thinking := rollout_of(config, algorithm).thinking) is not None:
        ids = random.integers(0, vocabulary, (*batch.tokens.shape, thinking.top_k))
        each: Any = np.stack([ids, np.zeros(ids.shape) - 1, np.zeros(ids.shape) - 2], axis=2).astype(np.float32)
        batch = batch.replace(thoughts=np.where(batch.action_mask[..., None, None], each, np.float32(-1)))
    for text in sorted(algorithm.needs):
        (_, carried), need = value_of(text), need_of(text)
        if need.provider is not None and need.stand_in.value is not None and need.of(batch, carried) is None:
            value: Any = np.asarray(need.stand_in.value(batch, carried))
            batch = need.put(batch, value, carried)
    if "measured" in algorithm.needs:
        batch = batch.with_info(measured=(np.arange(N) >= usual).astype(np.float32))  # type: ignore[arg-type]
    if teachers_of(config.teacher):
        batch = batch.with_info(teacher=np.zeros(N, np.int32))  # type: ignore[arg-type]
    strategy = strategy_of(config, algorithm)
    if strategy is not None and strategy.train_unfinished:
        unfinished: Any = np.zeros(N, bool)
        batch = batch.with_info(window=batch.action_mask, unfinished=unfinished)
    return batch
