"""The rollout of a run: its program, and its rule for ending a step early."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.hooks import Hook
from jaxrl_llm.core.rollout import Rollout
from jaxrl_llm.core.rules import Partial
from jaxrl_llm.rollouts.programs import with_greedy_baseline
from jaxrl_llm.rollouts.registry import rollout_by_name
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.config.checks import is_agent
from jaxrl_llm.training.rollout.agents import agent_of
from jaxrl_llm.utils.errors import InputError

GREEDY = "greedy_reward"


def rollout_of(config: TrainConfig, algorithm: Algorithm) -> Rollout:
    """The configured rollout program, else the method's, with a greedy baseline if the method needs one.

    A population has the run's seed. Of a run with an environment or tools, `rollouts.agents.agent`. InputError for an
    unknown program, and for an environment or tools beside another rollout.
    """
    found = _rollout_of(config, algorithm)
    if (population := found.population) is None:
        return found
    return dataclasses.replace(found, drawing=dataclasses.replace(population, seed=config.seed))


def _rollout_of(config: TrainConfig, algorithm: Algorithm) -> Rollout:
    if is_agent(config):
        what = "environment" if config.environment else "harness" if config.harness else "tools"
        if config.rollout != TrainConfig.rollout:
            raise InputError(f"{what} is given, but the rollout is {config.rollout}: leave out one of the two")
        if algorithm.rollout is not None and algorithm.rollout.wrap is None:
            raise InputError(
                f"{what} is given, but {config.algorithm} has a rollout of its own, {algorithm.rollout.name}: choose "
                "another method, or leave it out"
            )
        if GREEDY in algorithm.needs:
            raise InputError(
                f"{what} is given, but {config.algorithm} needs the reward of a greedy completion, which episodes of "
                "several turns do not have: choose another method"
            )
        return _around(algorithm, agent_of(config, algorithm.needs))
    rollout = rollout_by_name(config.rollout)
    if config.rollout == TrainConfig.rollout and algorithm.rollout is not None:
        rollout = algorithm.rollout
    elif config.rollout != TrainConfig.rollout:
        check_replaced(config, algorithm, rollout)
        rollout = _around(algorithm, rollout)
    return with_greedy_baseline(rollout) if GREEDY in algorithm.needs else rollout


def check_replaced(config: TrainConfig, algorithm: Algorithm, rollout: Rollout) -> None:
    """InputError if a rollout takes the place of the method's own, and is no other call of the same."""
    own = algorithm.rollout
    if own is None or own.wrap is not None or _kind(own) == _kind(rollout):
        return
    raise InputError(
        f"{config.algorithm} has a rollout of its own, {own.name}, without which it is another method, but rollout is "
        f"{config.rollout}: leave out rollout, or choose another method"
    )


def _kind(rollout: Rollout) -> str:
    return rollout.name.partition("(")[0]


def _around(algorithm: Algorithm, rollout: Rollout) -> Rollout:
    """The run's rollout, and around it what the method's adds to any."""
    own = algorithm.rollout
    return rollout if own is None or own.wrap is None else own.wrap(rollout)


def strategy_of(config: TrainConfig, algorithm: Algorithm) -> Partial | None:
    """When a step's rollout ends early (None: it does not). The run's settings override the method's.

    Raises InputError together with dynamic sampling, since both choose which groups a step waits for, and for a method
    that trains on unfinished groups together with stream_rewards, which scores complete ones.
    """
    strategy, given = algorithm.strategy, dict[str, Any]()
    if config.oversample > 1:
        given["oversample"] = config.oversample
    if config.segment_tokens:
        given["segment_tokens"] = config.segment_tokens
    if given:
        strategy = dataclasses.replace(strategy or Partial(), **given)
    if strategy is None:
        return None
    if algorithm.resampling is not None:
        raise InputError(
            f"{config.algorithm} resamples groups without a learning signal, which partial rollouts (oversample, "
            "segment_tokens) do not support: leave out one of the two"
        )
    rollout = rollout_of(config, algorithm)
    hook, name, settings = rollout.hook, rollout.name, "oversample and segment_tokens"
    conflicts = (
        (
            hook is not None and not hook.lasting,
            f"the rollout {name} draws all tokens of an episode through the hook of one step, but {settings} continue "
            "it in others",
        ),
        (
            rollout.population is not None,
            f"the members of the rollout {name} are of one step, but {settings} continue their completions in others",
        ),
        (
            rollout.demands.league is not None,
            f"the games of the rollout {name} are against the league of one step, but {settings} continue them in "
            "others",
        ),
        (
            rollout.demands.meets,
            f"the programs of the rollout {name} wait for each other, but {settings} leave some of them to later steps",
        ),
    )
    for conflict, why in conflicts:
        if conflict:
            raise InputError(f"{why}: leave them out")
    if strategy.train_unfinished and config.stream_rewards:
        raise InputError(
            f"{config.algorithm} trains on groups before they are complete, but stream_rewards scores complete groups: "
            "leave it out"
        )
    return strategy


def hook_of(config: TrainConfig, algorithm: Algorithm, own_source: bool = False) -> Hook | None:
    """What tokens are drawn through that are trained on. own_source: of a source of its own, what the method's says."""
    rollout = algorithm.rollout if own_source else rollout_of(config, algorithm)
    return None if rollout is None or rollout.hook is None or rollout.hook.opponent else rollout.hook
