"""Which settings of a run are allowed: the type and range of each, and what they must be together."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from jaxrl_llm.core.arguments.signatures import hyperparameters, known_methods
from jaxrl_llm.core.by_value import by_value, by_values
from jaxrl_llm.learner.optimizer_config import OptimizerConfig, check_optimizer
from jaxrl_llm.rewards.specs import ENVIRONMENT, is_among
from jaxrl_llm.utils.errors import InputError, gather, shown
from jaxrl_llm.utils.settings import coerce_fields, raise_error, range_checks

if TYPE_CHECKING:
    from jaxrl_llm.training.config import TrainConfig

GENERATED = "reasoning-gym:"  # prefix of unbounded prompt sources, which generate tasks
# Settings of episodes with environments or tools.
AGENT = ("turns", "turn_tokens", "episode_tokens", "compact", "players", "environment_steps", "tool_time_limit")

LoraTarget = Literal[
    "embed", "unembed", "query", "key", "value", "out", "gate", "up", "down", "shared_gate", "shared_up",
    "shared_down", "query_in", "query_out", "latent", "key_out", "value_out", "query_gate", "delta_query", "delta_key",
    "delta_value", "delta_gate", "delta_rate", "delta_decay", "delta_out", "conv_in", "conv_gate", "conv_value",
    "conv_out", "input_gate", "input_out",
]  # fmt: skip


def inside(name: str) -> str:
    """Where a name belongs that is no setting of `TrainConfig`: to the optimiser's, or to the method's."""
    if name in OptimizerConfig.__dataclass_fields__:
        return f"optimizer=OptimizerConfig({name}=...)"
    methods = (one for method in sorted(known_methods()) for one in hyperparameters(method))
    return f"hyperparameters={{{name!r}: ...}}" if any(one.name == name for one in methods) else ""


def is_agent(config: TrainConfig) -> bool:
    """Whether the run's episodes have an environment, a harness or tools."""
    return bool(config.world or config.tools)


def settle(config: TrainConfig) -> None:
    """Bring the settings of a new configuration to their types, and check them. InputError tells all that is wrong."""
    if callable(config.algorithm) or hasattr(config.algorithm, "objective"):
        raise InputError("algorithm is a value, but must be a name here: give the value to train(config, algorithm=)")
    if isinstance(config.template_options, Mapping):
        try:
            object.__setattr__(config, "template_options", json.dumps(config.template_options))
        except (TypeError, ValueError) as error:
            raise InputError(f"template_options cannot be written as JSON: {error}") from None
    for name in ("rewards", "tools"):
        values: Any = by_values(getattr(config, name), name.removesuffix("s"))
        object.__setattr__(config, name, values)
        for one in values if isinstance(values, list | tuple) else ():
            if not isinstance(one, str | os.PathLike):
                raise InputError(f"{name} holds {shown(one)}, but each must be a function, or the name of one")
    for name in ("environment", "harness"):
        object.__setattr__(config, name, by_value(getattr(config, name), name))
    default = type(config).rewards
    usual = config.rewards is default
    wrong = coerce_fields(config)
    if usual:  # kept as it is, so that a changed copy of these settings knows that no reward was chosen
        object.__setattr__(config, "rewards", default if config.world is None else (ENVIRONMENT,))
    judged = config.eval_reward is not None or config.world is None
    if not judged and "rewards" not in wrong and is_among(config.rewards):
        object.__setattr__(config, "eval_reward", ENVIRONMENT)
    gather(
        *(partial(raise_error, error) for error in wrong.values()),
        *range_checks(config, without=wrong),
        *([] if "optimizer" in wrong else [partial(check_optimizer, config.optimizer)]),
        *([] if wrong else [partial(check_texts, config)]),  # only if every field has its type
    )
    _check_together(config)


def check_texts(config: TrainConfig) -> None:
    """InputError for settings that are empty texts."""
    for name in (
        "model", "output", "algorithm", "rollout", "adapter", "teacher", "eval_prompts", "prompt_column",
        "answer_column", "wandb", "trackio", "mlflow", "environment", "harness", "compact", "replay_order",
    ):  # fmt: skip
        text = getattr(config, name)
        if text is not None and (not text.strip() or "\0" in text):
            raise InputError(f"{name} is {shown(text)}: give a name, or leave it out")
    if not config.rewards:
        raise InputError("rewards is empty: name at least one reward function")
    if blank := [text for text in config.tools if not text.strip() or "\0" in text]:
        raise InputError(f"tools holds {shown(blank[0])}: name a function, FILE.py:FUNCTION or MODULE:FUNCTION")
    check_format(config)
    if "" in config.stop:
        raise InputError("stop holds an empty string, which every text contains: remove it")


def check_format(config: TrainConfig) -> None:
    """The settings of the format of prompts."""
    try:
        options = json.loads(config.template_options)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise InputError(
            f"template_options is {shown(config.template_options)}, but must be a JSON object, such as "
            "'{\"enable_thinking\": false}'"
        )
    try:
        datetime.date.fromisoformat(config.date or "2000-01-01")
    except ValueError:
        raise InputError(f"date is {shown(config.date)}, but must be a day, such as 2031-01-31") from None
    if config.prompt_format != "chat" and (options or config.earlier_thoughts != "keep"):
        given = "template_options are" if options else "earlier_thoughts is"
        raise InputError(f"{given} given, but prompt_format is {config.prompt_format}, without a chat template")
    if config.prompt_format == "rendered" and is_agent(config):
        raise InputError(
            "prompt_format is rendered, but an environment or tools need conversations: give chat or plain"
        )
    if config.prompt_format != "chat" and config.system_prompt and not is_agent(config):
        raise InputError(
            f"system_prompt is given, but prompt_format is {config.prompt_format}, without messages: write it into "
            "the prompts, as with prompt_template"
        )


def _check_together(config: TrainConfig) -> None:
    """Checks that involve several settings."""
    default = type(config)
    agent = is_agent(config)
    of_agents = [name for name in AGENT if getattr(config, name) != getattr(default, name)]
    of_lora = config.lora_targets or config.lora_alpha != default.lora_alpha
    beside = ("sampler_devices", "samplers", "replay_order", "stale_correction", "stale_cache")
    parts = config.minibatches * config.micro_batches
    # Micro-batches of a single minibatch may cut groups that are too large for the memory: credit is assigned to
    # the whole batch before, and losses add up over micro-batches.
    cut = config.minibatches == 1 and config.prompts_per_step * config.group_size % parts == 0
    problems: list[tuple[object, str]] = [
        (config.environment and config.harness,
         "environment and harness are given, but only one of them can play the episodes: leave out the other"),
        (of_agents and not agent,
         f"{', '.join(of_agents)} {'is' if len(of_agents) == 1 else 'are'} given, but the run has neither an "
         "environment nor tools: give one (TrainConfig takes Python values, as train does), or leave them out"),
        (not agent and 0 < config.context_tokens < config.max_prompt_tokens + config.max_new_tokens,
         f"context_tokens is {config.context_tokens}, but a prompt and its completion may have "
         f"{config.max_prompt_tokens} + {config.max_new_tokens} tokens: lower max_prompt_tokens or max_new_tokens"),
        *((not config.max_staleness and getattr(config, name) != getattr(default, name),
           f"{name} is given, but max_staleness is 0, so that nothing is sampled beside the updates: set it too, "
           "or leave it out") for name in beside),
        (config.samplers and config.sampler_devices,
         f"samplers is {config.samplers}, whose devices are their own, and sampler_devices is "
         f"{config.sampler_devices}: leave one of the two out"),
        (config.compact is not None and not config.context_tokens,
         "compact is given, but context_tokens is not, which says when: give it too"),
        (config.players > 1 and not config.environment,
         f"players is {config.players}, but the run has no environment that they could play: give one"),
        (config.epochs_until and config.epochs == 1,
         f"epochs_until is {config.epochs_until}, but epochs is 1, one pass in all steps: raise epochs, or "
         "leave it out"),
        (config.eval_patience and not (config.eval_every and config.eval_size),
         "eval_patience is given, but nothing is evaluated in mid-run: give eval_every and eval_size"),
        (config.overlong_tokens > config.max_new_tokens,
         f"overlong_tokens is {config.overlong_tokens}, but must be at most max_new_tokens"),
        (config.adapter and (config.lora_rank or of_lora),
         "adapter is given, whose rank, scale and targets are its own: leave out lora_rank, lora_alpha and "
         "lora_targets"),
        (config.sink_slots and config.adapts,
         f"sink_slots are weights that are trained, but with {config.adapts} the weights are frozen: leave one out"),
        (not config.lora_rank and of_lora,
         f"{'lora_targets are' if config.lora_targets else 'lora_alpha is'} given, but lora_rank is 0 (off): set "
         "lora_rank too"),
        (config.adapts and config.reference_memory == "host",
         f"reference_memory is host, but with {config.adapts} the reference policy is the frozen model, which has "
         "no second copy: leave it out"),
        (config.frozen_dtype != "param_dtype" and not config.adapts,
         f"frozen_dtype is {config.frozen_dtype}, but all weights are trained: set lora_rank or adapter too, which "
         "freezes them, or leave it out"),
        (config.frozen_dtype != "param_dtype" and config.weight_dtype != "dtype",
         f"weight_dtype is {config.weight_dtype}, but weights are kept, and sampled with, in {config.frozen_dtype} "
         "(frozen_dtype): leave one of them out"),
        (config.same_rounding and config.weight_dtype == "dtype",
         "same_rounding is given, but weight_dtype is dtype: set it to int8 or float8, or leave it out"),
        (config.task_options and not config.prompts.startswith(GENERATED),
         f"task_options apply to {GENERATED}TASK only, but prompts is {shown(config.prompts)}: leave them out"),
        (config.spike_factor and not config.checkpoint_every,
         "spike_factor is given, but checkpoint_every is 0: there would be nothing to go back to"),
        (not config.eval_size and (config.eval_prompts or config.eval_every),
         "eval_prompts or eval_every is given, but eval_size is 0, which disables evaluation"),
        (config.prompts_per_step % parts and not cut,
         f"prompts_per_step is {config.prompts_per_step}, but must be a multiple of minibatches "
         f"{config.minibatches} x micro_batches {config.micro_batches} = {parts}, so that groups stay whole"),
    ]  # fmt: skip
    for is_so, text in problems:
        if is_so:
            raise InputError(text)
