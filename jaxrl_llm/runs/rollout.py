"""The rollout of a run: its program, and when a step's rollout ends early."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.algorithms import Algorithm
from jaxrl_llm.errors import InputError
from jaxrl_llm.rollouts.by_name import rollout_by_name
from jaxrl_llm.rollouts.programs import Rollout, with_greedy_baseline
from jaxrl_llm.rollouts.rules import Partial
from jaxrl_llm.runs.config import TrainConfig

GREEDY = "greedy_reward"


def check_rollout(config: TrainConfig, algorithm: Algorithm) -> None:
    """InputError where the rollout cannot be what the configuration says."""
    rollout_of(config, algorithm)
    strategy_of(config, algorithm)


def check_columns(config: TrainConfig, rows: Sequence[Mapping[str, Any]]) -> None:
    """InputError where the rollout reads a column that no row of the prompts has."""
    rollout = rollout_by_name(config.rollout)
    for column in rollout.columns:
        if not any(column in row for row in rows):
            raise InputError(f"the rollout {config.rollout} reads the column {column!r}, which no prompt has")


def rollout_of(config: TrainConfig, algorithm: Algorithm) -> Rollout:
    """The run's program, with what the method needs of it. InputError for an unknown one."""
    rollout = rollout_by_name(config.rollout)
    return with_greedy_baseline(rollout) if GREEDY in algorithm.needs else rollout


def strategy_of(config: TrainConfig, algorithm: Algorithm) -> Partial | None:
    """How a step's rollout ends early, if it does: as the run's settings say, where they do, else as the method asks.

    InputError where the method resamples: both choose which groups a step waits for; and where whole groups are to be
    scored at once, but are not finished at once.
    """
    strategy, given = algorithm.strategy, dict[str, Any]()
    if config.oversample > 1:
        given["oversample"] = config.oversample
    if config.segment_tokens:
        given["segment_tokens"] = config.segment_tokens
    if given:
        strategy = dataclasses.replace(strategy or Partial(), **given)
    if strategy is not None and algorithm.curriculum is not None:
        raise InputError(
            f"{config.algorithm} samples other prompts for groups without signal, which partial rollouts (oversample, "
            "segment_tokens) cannot do: leave out one of the two"
        )
    if strategy is not None and strategy.train_unfinished and config.stream_rewards:
        raise InputError(
            f"{config.algorithm} trains on groups before they are complete, but stream_rewards scores complete groups: "
            "leave it out"
        )
    return strategy
