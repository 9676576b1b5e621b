"""A run's inputs besides the model: prompts and rewards, read and checked before anything else, without JAX."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.data.digest import rows_digest
from jaxrl_llm.data.prompt_set import PromptSet, encode_rows
from jaxrl_llm.data.prompts import conflicting, load_prompts, without
from jaxrl_llm.errors import InputError, InputErrors, gather, shown, unknown
from jaxrl_llm.reporting.writers import check_writers
from jaxrl_llm.rewards import Reward, close_rewards, get_rewards, require_columns, reward_digest
from jaxrl_llm.runs.config import GENERATED, TrainConfig
from jaxrl_llm.runs.lock import locked
from jaxrl_llm.runs.run_folder import RunFolder

PromptRows = list[dict[str, Any]]
HELD_OUT_SEED = 2**31 - 1  # generates held-out prompts; differs from the seed of the training prompts


class Prompts(NamedTuple):
    """Rows of the data set, deduplicated by prompt."""

    training: PromptRows
    held_out: PromptRows
    conflicting: int  # dropped duplicates of a prompt whose other columns, such as the answer, differ


class Inputs(NamedTuple):
    """Prompts and rewards of a run."""

    prompts: Prompts
    rewards: list[Reward]

    @property
    def digests(self) -> dict[str, str]:
        """A digest of the contents of each input (both prompt sets, and each reward), by name."""
        rewards = {f"the reward {reward.name}": reward_digest(reward) for reward in self.rewards}
        prompts = {"the prompts": self.prompts.training, "the held-out prompts": self.prompts.held_out}
        return {**{name: rows_digest(rows) for name, rows in prompts.items()}, **rewards}


@contextmanager
def read_inputs(config: TrainConfig, *, resume: bool = False, first: bool = True) -> Iterator[Inputs]:
    """Context manager: the prompts and rewards of a run. The rewards' processes end with the context.

    Raises InputError with all problems together, before a model is loaded or anything is written.
    resume: the run continues, and its folder is locked within the context. Otherwise the folder must be free.
    first: whether this process writes the run's files, as the first of several hosts does; others leave the folder alone.
    """
    folder = RunFolder(config.output)
    seen_from = folder.started_in() if resume else os.getcwd()
    checks: list[Any] = [lambda: split_prompts(config), lambda: make_rewards(config, seen_from)]
    checks += [lambda: check_writers(config.tensorboard, config.wandb), lambda: _check_model(config.model)]
    checks += [folder.check_free] if first and not resume else []
    with locked(folder.path) if first and resume else nullcontext():
        with _with_folder_hint(seen_from):
            prompts, rewards, *_ = gather(*checks)
        with _checked(rewards, columns_of(prompts.training, prompts.held_out), config.eval_reward):
            yield Inputs(prompts, rewards)


def _check_model(model: str) -> None:
    """InputError if the model is the folder of a run."""
    if RunFolder(model).is_run():
        raise InputError(f"model is {model!r}, which is a run: write its model with jaxrl export first, and give that")


@contextmanager
def _with_folder_hint(folder: str) -> Iterator[None]:
    """Append to errors the folder that relative paths are resolved against, if it is not the working directory."""
    try:
        yield
    except InputError as error:
        problems = error.problems if isinstance(error, InputErrors) else [str(error)]
        if folder == os.getcwd() or not any(folder in problem for problem in problems):
            raise
        hint = f"(relative paths of this run are resolved against {folder}, where it was started)"
        raise InputErrors(f"{text} {hint}" if folder in text else text for text in problems) from None


@contextmanager
def evaluation_inputs(
    config: TrainConfig, source: str | None, size: int | None, *checks: Callable[[], Any]
) -> Iterator[tuple[PromptRows, list[Reward]]]:
    """Context manager: the rows (`evaluation_rows`) and rewards of an evaluation, like `read_inputs`.

    checks: further checks, whose errors are reported together with those of the inputs.
    """
    reads: list[Any] = [lambda: evaluation_rows(config, source, size), lambda: make_rewards(config)]
    rows, rewards, *_ = gather(*reads, *checks)
    with _checked(rewards, columns_of(rows), config.eval_reward):
        yield rows, rewards


@contextmanager
def _checked(rewards: list[Reward], columns: set[str], judge: str | None) -> Iterator[None]:
    """InputError if a reward needs a column that is missing, or `judge` is not a reward. Closes the rewards on exit."""
    try:
        require_columns(rewards, columns)
        if judge is not None and judge not in (known := [reward.name for reward in rewards]):
            raise unknown("reward to judge by", judge, known)
        yield
    finally:
        close_rewards(rewards)


def make_rewards(config: TrainConfig, folder: str = ".") -> list[Reward]:
    """The reward functions of a run; relative files and modules are looked up from `folder`.

    Raises InputError for rewards that cannot be loaded, or share a name.
    """
    rewards = [
        dataclasses.replace(reward, time_limit=config.reward_time_limit, default=config.reward_default)
        for reward in get_rewards(config.rewards, folder)
    ]
    names = [reward.name for reward in rewards]
    if twice := {name for name in names if names.count(name) > 1}:
        close_rewards(rewards)
        raise InputError(f"two rewards are named {min(twice)!r}, so their metrics would clash: rename one of them")
    return rewards


def columns_of(*sets: Sequence[dict[str, Any]]) -> set[str]:
    """Arguments available to reward functions: columns that all sets have, and those that `score_batch` adds."""
    rows = [some[0] for some in sets if some]
    return (set.intersection(*(set(row) for row in rows)) | {"prompts", "completion_ids"}) - {"prompt"}


def split_prompts(config: TrainConfig) -> Prompts:
    """Training and held-out rows; no prompt is in both."""
    apart = _has_own_source(config)
    number = config.num_prompts + (0 if apart else config.eval_size)
    reads = [lambda: _load(config, config.prompts, number, config.seed)]
    if config.eval_size and apart:
        reads.append(lambda: _held_out(config, config.eval_prompts or config.prompts, config.eval_size))
    loaded, *other = gather(*reads)
    rows, held_out = loaded, other[0] if other else []
    if config.eval_size and not apart:
        rows = without(rows, [])
        if len(rows) <= config.eval_size:
            raise InputError(
                f"{config.prompts} has {len(rows)} different prompts, too few to hold {config.eval_size} out for "
                "evaluation: lower eval_size or give eval_prompts"
            )
        order = np.random.default_rng(config.seed).permutation(len(rows))
        held_out, rows = [rows[i] for i in order[: config.eval_size]], [rows[i] for i in order[config.eval_size :]]
    rows = without(rows, held_out)
    if not rows:
        raise InputError(f"every prompt of {config.prompts} is a held-out prompt too: lower eval_size")
    return Prompts(rows, held_out, conflicting(loaded))


def evaluation_rows(config: TrainConfig, source: str | None = None, size: int | None = None) -> PromptRows:
    """Rows to evaluate a trained run on: its own held-out rows, or those of another `source`.

    size: number of rows (default: all held-out rows of the run; for another source the run's eval_size, or 256). If it
    exceeds the run's held-out rows, more are drawn from the same source, without training prompts; InputError if the
    held-out rows were split from the training file, which has no others.
    """
    if source is not None:
        return _held_out(config, source, size or config.eval_size or TrainConfig.eval_size)
    trained, rows, _ = split_prompts(config)
    size = size or len(rows)
    if not size:
        raise InputError("the run has no held-out prompts (eval_size 0): give a size, or prompts")
    if size > len(rows):
        if not _has_own_source(config):
            raise InputError(
                f"the run held {len(rows)} prompts of {config.prompts} out and was trained on the others: give a "
                f"size of at most {len(rows)}, or other prompts (asked for: {size})"
            )
        rows = _held_out(config, config.eval_prompts or config.prompts, size, seen=trained)
    return rows[:size]


def _has_own_source(config: TrainConfig) -> bool:
    """Whether held-out prompts are drawn separately, rather than split off the training prompts."""
    return config.eval_prompts is not None or config.prompts.startswith(GENERATED)


def _held_out(config: TrainConfig, source: str, size: int, seen: Sequence[dict[str, Any]] = ()) -> PromptRows:
    # Generated tasks repeat, so draw more than needed.
    return without(_load(config, source, 2 * size, HELD_OUT_SEED), seen)[:size]


def _load(config: TrainConfig, source: str, limit: int, seed: int) -> PromptRows:
    options = {name: read_value(text, f"task_options.{name}") for name, text in config.task_options.items()}
    return load_prompts(
        source, limit=limit, seed=seed, prompt_column=config.prompt_column, prompt_template=config.prompt_template,
        # The options belong to the generated task; held-out prompts may come from a file.
        task_options=options if source == config.prompts or source.startswith(GENERATED) else None,
    )  # fmt: skip


def read_value(text: Any, name: str = "a value") -> Any:
    """The value of a text from the command line, parsed as YAML; InputError if it is not valid YAML."""
    import yaml

    try:
        return yaml.safe_load(text) if isinstance(text, str) else text
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"{name} is {shown(text)}, which YAML cannot read: {' '.join(str(error).split())}") from None


def prompt_sets(
    config: TrainConfig, tokenizer: Any, context: int, prompts: Prompts | None = None
) -> tuple[PromptSet, PromptSet | None]:
    """Training and held-out prompts, tokenised; no prompt is in both.

    context: the model's context length in tokens (0: unlimited), which must hold prompt and completion.
    prompts: the configuration's prompts, if they have been read already.
    """
    training, held_out, conflicting = split_prompts(config) if prompts is None else prompts
    encoded = encode_for(config, tokenizer, context, training)._replace(conflicting=conflicting)
    return encoded, encode_for(config, tokenizer, context, held_out) if held_out else None


def encode_for(config: TrainConfig, tokenizer: Any, context: int, rows: Sequence[dict[str, Any]]) -> PromptSet:
    """Tokenise prompts as the configuration says; see `prompt_sets`."""
    limit = min(config.max_prompt_tokens, context - config.max_new_tokens) if context else config.max_prompt_tokens
    if limit < 1:
        raise InputError(
            f"max_new_tokens is {config.max_new_tokens}, but the model's context length is {context} tokens"
        )
    return encode_rows(
        tokenizer, rows, max_tokens=limit, long_prompts=config.long_prompts, system_prompt=config.system_prompt
    )
