"""The command jaxrl texts: optimise a text with the policy itself."""

import dataclasses
import inspect
from typing import Any

from jaxrl_llm.cli.options import Option, flag, options_class, parse, settings_rows, take
from jaxrl_llm.cli.peer_options import method_name
from jaxrl_llm.core.arguments.signatures import TEXT_METHODS, sentences_about
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.utils.errors import InputError, unknown
from jaxrl_llm.utils.process import preemptible, say

REPLY_TOKENS = 96
SETTINGS = (
    "model", "adapter", "dtype", "output", "seed", "steps", "prompts", "num_prompts", "same_task", "prompt_column",
    "answer_column", "prompt_template", "prompt_format", "template_options", "date", "task_options",
    "max_prompt_tokens", "prompts_per_step", "group_size", "max_new_tokens", "temperature", "top_p", "top_k", "min_p",
    "stop", "slots", "rewards", "reward_time_limit", "reward_default", "eval_prompts", "eval_size", "eval_reward",
)  # fmt: skip
DEFAULTS: dict[str, Any] = {"output": "runs/texts", "steps": 10, "prompts_per_step": 8, "group_size": 4}


def texts_command(arguments: list[str]) -> int:
    """Optimise the text that is put before every prompt, with the policy itself as proposer and judge; no training.

    jaxrl texts METHOD, one of contextevolve, polca, spo_prompt and training_free_grpo (jaxrl algorithms METHOD says
    more), takes the settings of jaxrl train that are about the model, the prompts, the sampling, the rewards and the
    evaluation. --text TEXT is what it begins with. The folder has text.txt, the best text, and text.yaml, with which
    jaxrl train --config has it in its prompts; jaxrl eval and jaxrl sample take the folder as a model.
    --resume RUN goes on with a run, to --steps N if they are given.
    """
    given, arguments = take(arguments, "--resume")
    if given is not None:
        steps, arguments = take(arguments, "--steps")
        if arguments or (steps is not None and not steps.isdecimal()):
            raise InputError(f"--resume takes no options but --steps N: remove {' '.join(arguments) or steps}")
        from jaxrl_llm.texts.run import resume  # here: importing JAX takes seconds

        with preemptible():
            resume(given, steps=None if steps is None else int(steps), say=say)
        return 0
    asks, rest = flag([one for one in arguments if one != "-h"], "--help")
    asks = asks or "-h" in arguments
    method = method_name(rest[0]) if rest and not rest[0].startswith("-") else ""
    if not method and not asks:
        raise InputError(f"jaxrl texts needs a method: {', '.join(TEXT_METHODS)}")
    if method and method not in TEXT_METHODS:
        raise unknown("method of texts", method, TEXT_METHODS)
    config, text, tokens = parse_texts(method, ["--help"] if asks else rest[1:])
    from jaxrl_llm.texts.run import optimise

    with preemptible():
        optimise(config, text, reply_tokens=tokens, say=say)
    say(f"text: {config.output}/text.txt; in the prompts of a run: jaxrl train --config {config.output}/text.yaml ...")
    return 0


def parse_texts(method: str, arguments: list[str]) -> tuple[TrainConfig, str, int]:
    """(the configuration, the text to begin with, tokens of replies) of the options after a method; "" has no own."""
    from jaxrl_llm.core.arguments.hyperparameters import hyperparameters_of

    rows: list[Option] = [
        ("text", str, "The text to begin with.", ""),
        ("reply_tokens", int, "Most tokens of a reply to the method's questions.", REPLY_TOKENS),
        *((name, *what, DEFAULTS.get(name, usual)) for name, *what, usual in settings_rows(TrainConfig, SETTINGS)),
    ]
    parameters = []
    if method:
        from jaxrl_llm.texts.method import constructor

        build = constructor(method)
        parameters = hyperparameters_of(build)
        about = {one.name: sentences_about(one.name, inspect.getdoc(build) or "") for one in parameters}
        group = options_class("algorithm", [(one.name, one.kind, about[one.name], one.default) for one in parameters])
        rows.append(("algorithm", group, f"Hyper-parameters of {method}.", dataclasses.field(default_factory=group)))
    found = parse(options_class("texts", rows), arguments, f"jaxrl texts {method or 'METHOD'}", texts_command.__doc__)
    values = {name: getattr(found, name) for name in SETTINGS}
    chosen = {one.name: getattr(found.algorithm, one.name) for one in parameters}
    config = TrainConfig(**values, algorithm=method, hyperparameters=chosen, tensorboard=False, checkpoint_every=1)
    return config, found.text, found.reply_tokens
