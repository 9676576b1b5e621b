"""The rollout of a run: its program, its rule for ending a step early, and its checks before a model is loaded."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.hooks import Hook
from jaxrl_llm.core.rollout import Rollout
from jaxrl_llm.core.rules import Partial
from jaxrl_llm.data.chat.encode import whole_text
from jaxrl_llm.rewards.specs import ENVIRONMENT, JUDGE, is_among
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
        own = algorithm.rollout
        kinds = {one.name.partition("(")[0] for one in (own, rollout) if one is not None}
        if own is not None and own.wrap is None and len(kinds) > 1:  # it takes the place of the method's own
            raise InputError(
                f"{config.algorithm} has a rollout of its own, {own.name}, without which it is another method, but "
                f"rollout is {config.rollout}: leave out rollout, or choose another method"
            )
        rollout = _around(algorithm, rollout)
    return with_greedy_baseline(rollout) if GREEDY in algorithm.needs else rollout


def _around(algorithm: Algorithm, rollout: Rollout) -> Rollout:
    """The run's rollout, and around it what the method's adds to any."""
    own = algorithm.rollout
    return rollout if own is None or own.wrap is None else own.wrap(rollout)


def strategy_of(config: TrainConfig, algorithm: Algorithm) -> Partial | None:
    """When a step's rollout ends early (None: it does not). The run's settings override the method's.

    Raises InputError together with dynamic sampling, since both choose which groups a step waits for, and for a method
    that trains on unfinished groups together with stream_rewards, which scores complete ones.
    """
    strategy = algorithm.strategy
    given: dict[str, Any] = {}
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
    conflicts = {
        f"the rollout {name} draws all tokens of an episode through the hook of one step, but {settings} continue it "
        "in others": hook is not None and not hook.lasting,
        f"the members of the rollout {name} are of one step, but {settings} continue their completions in "
        "others": rollout.population is not None,
        f"the games of the rollout {name} are against the league of one step, but {settings} continue them in "
        "others": rollout.demands.league is not None,
        f"the programs of the rollout {name} wait for each other, but {settings} leave some of them to later "
        "steps": rollout.demands.meets,
    }
    for why, conflict in conflicts.items():
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


def check_rollout(config: TrainConfig, algorithm: Algorithm) -> None:
    """InputError if the configured rollout is unknown or does not fit the method."""
    rollout = rollout_of(config, algorithm)
    if config.group_size < (least := rollout.demands.min_samples):
        raise InputError(
            f"group_size is {config.group_size}, but the rollout {rollout.name} needs at least {least} samples"
        )
    limit = config.max_new_tokens
    places = [place for place in rollout.demands.forks if place]
    if places and min(places) >= limit:
        raise InputError(
            f"the rollout {rollout.name} forks after {min(places)} tokens, but completions have at most {limit}, so "
            "that none forks: raise max_new_tokens, or fork earlier"
        )
    strategy_of(config, algorithm)
    check_hook(config, algorithm, rollout)
    check_population(config, rollout)
    check_soft_thinking(config, algorithm, rollout)
    if is_among(config.rewards) and ENVIRONMENT not in rollout.provides:
        raise InputError(
            "rewards has environment, but the run has no environment that gives it: give one, or another reward"
        )
    check_judge(config, rollout)


def check_judge(config: TrainConfig, rollout: Rollout) -> None:
    """InputError unless the rollout has a judge where the rewards have its verdict, and the other way round."""
    judges = JUDGE in rollout.provides
    counts = is_among(config.rewards, JUDGE)
    name = rollout.name
    if counts and not judges:
        raise InputError(
            f"rewards has judge, but the rollout {name} asks none: give --rollout judged_pairs, judged_anchor, "
            "judged_grades or judged_rubric, a method with a judge, or another reward"
        )
    if judges and not counts:
        raise InputError(f"the rollout {name} asks a judge whose verdict no reward counts: add judge to rewards")
    if judges and config.eval_size and all(is_among([spec], JUDGE) for spec in config.rewards):
        raise InputError(
            "rewards has judge alone, which reads groups of training and not held-out completions: give eval_size 0, "
            "or a further reward, which with a weight of 0 is reported alone"
        )


def check_hook(config: TrainConfig, algorithm: Algorithm, rollout: Rollout) -> None:
    """InputError if the rollout does not draw through the method's hook, or not as the run's settings say."""
    own = None if algorithm.rollout is None else algorithm.rollout.hook
    if own is not None and rollout.hook is None:
        raise InputError(
            f"{config.algorithm} draws tokens through the hook {own.name}, but the rollout {rollout.name} does not: "
            "leave out rollout"
        )
    if (hook := rollout.hook) is None or hook.opponent:
        return
    if hook.remember is not None and config.sampling.truncating:
        raise InputError(
            f"the hook {hook.name} forbids tokens itself, which top_k, top_p and min_p do not support: leave them out"
        )
    if hook.other is not None and algorithm.replay is not None:
        raise InputError(
            f"the second policy of the hook {hook.name} is that of a step, but {config.algorithm} replays completions "
            "of other steps or policies: leave out one of the two"
        )
    if hook.other is not None and hook.other.averages and config.adapts:
        raise InputError(
            f"the second policy of the hook {hook.name} is an average of weights, but with lora_rank only adapters are "
            "trained, whose average is not that of their products: train all weights"
        )
    if hook.other is not None and hook.other.models:
        raise InputError(f"the second policy of the hook {hook.name} begins as the initial one, not as another model")


def check_population(config: TrainConfig, rollout: Rollout) -> None:
    """InputError if the samples are those of a population, which the run's settings do not fit."""
    if rollout.population is None:
        return
    own, usual = config.sampling, TrainConfig.temperature
    conflicts = {
        config.adapts: (bool(config.adapts), "its members perturb the model's own matrices"),
        "max_staleness": (config.max_staleness > 0, "its members are of one step"),
        "temperature, top_k, top_p and min_p": (own.truncating or own.temperature != usual, "its members are greedy"),
        "router_aux_coefficient and router_bias_speed": (
            config.router_aux_coefficient > 0 or config.router_bias_speed > 0, "its update runs no model",
        ),
    }  # fmt: skip
    for name, (conflict, why) in conflicts.items():
        if conflict:
            raise InputError(f"{config.algorithm} learns by evolution: {why}, so leave out {name}")


def check_soft_thinking(config: TrainConfig, algorithm: Algorithm, rollout: Rollout) -> None:
    """InputError if the method thinks softly and its rollout does not, or as the run's settings do not fit."""
    own = None if algorithm.rollout is None else algorithm.rollout.thinking
    method = config.algorithm
    if own != rollout.thinking:
        raise InputError(f"the rollout {rollout.name} does not think as {method} learns: leave out rollout")
    if own is not None and config.speculative_tokens:
        raise InputError(f"{method} thinks softly, which speculation cannot draft: leave out speculative_tokens")


def fork_notes(config: TrainConfig, algorithm: Algorithm) -> list[str]:
    """What to say of forks that no completion reaches, where others are reached."""
    rollout = rollout_of(config, algorithm)
    limit = config.max_new_tokens
    beyond = " and ".join(str(place) for place in rollout.demands.forks if place >= limit)
    text = f"the rollout {rollout.name} never reaches its forks after {beyond} tokens: completions have at most {limit}"
    return [text] if beyond else []


def check_columns(config: TrainConfig, algorithm: Algorithm, rows: Sequence[Mapping[str, Any]]) -> None:
    """InputError if the rollout reads a column that the prompts do not have. All rows have the same columns."""
    rollout = rollout_of(config, algorithm)
    for column in rollout.columns:
        names = column.split("|")  # of which a row has one
        if not any(name in row for row in rows[:1] for name in names):
            listed = " or ".join(map(repr, names))
            raise InputError(f"the rollout {rollout.name} reads the column {listed}, which no prompt has")
    if any(whole_text(row) is not None for row in rows[:1]) and not rollout.demands.given:
        raise InputError(
            f"the rows are whole texts (column text), after which nothing is sampled, but {config.algorithm} samples: "
            "name the prompt's column with --prompt-column, or take sft, which learns to write them"
        )
