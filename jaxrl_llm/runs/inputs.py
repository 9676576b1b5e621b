"""What a run is given besides a model: prompts and rewards, read and checked before anything else, without JAX."""

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

Rows = list[dict[str, Any]]
HELD_OUT_SEED = 2**31 - 1  # of generated held-out prompts: not the seed of the training prompts


class Prompts(NamedTuple):
    """Rows of prompts, no two alike."""

    training: Rows
    held_out: Rows
    conflicting: int  # rows left out that ask what another row does, but have other columns, such as the answer


class Inputs(NamedTuple):
    """Prompts and rewards of a run."""

    prompts: Prompts
    rewards: list[Reward]

    @property
    def digests(self) -> dict[str, str]:
        """What the data and the rewards' files hold, in a few letters each: another digest, another content."""
        rewards = {f"the reward {reward.name}": reward_digest(reward) for reward in self.rewards}
        prompts = {"the prompts": self.prompts.training, "the held-out prompts": self.prompts.held_out}
        return {**{name: rows_digest(rows) for name, rows in prompts.items()}, **rewards}


@contextmanager
def read_inputs(config: TrainConfig, *, resume: bool = False) -> Iterator[Inputs]:
    """The prompts and rewards of a run, whose processes end with the context.

    Everything that can be wrong with them is said together, before a model is loaded or anything is made: InputError.
    resume: the run goes on; its folder is locked within the context. Otherwise the folder must be free.
    """
    folder = RunFolder(config.output)
    seen_from = folder.started_in() if resume else os.getcwd()
    checks: list[Any] = [lambda: split_prompts(config), lambda: make_rewards(config, seen_from)]
    checks += [lambda: check_writers(config.tensorboard, config.wandb), lambda: _check_model(config.model)]
    checks += [] if resume else [folder.check_free]
    with locked(folder.path) if resume else nullcontext():
        with _told_from(seen_from):
            prompts, rewards, *_ = gather(*checks)
        with _checked(rewards, columns_of(prompts.training, prompts.held_out), config.eval_reward):
            yield Inputs(prompts, rewards)


def _check_model(model: str) -> None:
    """InputError where a run is given for a model."""
    if RunFolder(model).is_run():
        raise InputError(f"model is {model!r}, which is a run: write its model with jaxrl export first, and give that")


@contextmanager
def _told_from(folder: str) -> Iterator[None]:
    """Say of errors which folder relative paths are seen from, where it is not the working directory."""
    try:
        yield
    except InputError as error:
        problems = error.problems if isinstance(error, InputErrors) else [str(error)]
        if folder == os.getcwd() or not any(folder in problem for problem in problems):
            raise
        hint = f"(relative paths of this run are seen from {folder}, where it was started)"
        raise InputErrors(f"{text} {hint}" if folder in text else text for text in problems) from None


@contextmanager
def evaluation_inputs(
    config: TrainConfig, source: str | None, size: int | None, *checks: Callable[[], Any]
) -> Iterator[tuple[Rows, list[Reward]]]:
    """The rows (`evaluation_rows`) and rewards of an evaluation, as `read_inputs`. checks: made with them."""
    reads: list[Any] = [lambda: evaluation_rows(config, source, size), lambda: make_rewards(config)]
    rows, rewards, *_ = gather(*reads, *checks)
    with _checked(rewards, columns_of(rows), config.eval_reward):
        yield rows, rewards


@contextmanager
def _checked(rewards: list[Reward], columns: set[str], judge: str | None) -> Iterator[None]:
    """InputError where a reward asks for another column, or the judge is none of them. Their processes end with it."""
    try:
        require_columns(rewards, columns)
        if judge is not None and judge not in (known := [reward.name for reward in rewards]):
            raise unknown("reward to judge by", judge, known)
        yield
    finally:
        close_rewards(rewards)


def make_rewards(config: TrainConfig, folder: str = ".") -> list[Reward]:
    """The reward functions of a run; files and modules are looked for from `folder`.

    InputError for all that cannot be loaded, or where two share a name.
    """
    rewards = [
        dataclasses.replace(reward, time_limit=config.reward_time_limit, default=config.reward_default)
        for reward in get_rewards(config.rewards, folder)
    ]
    names = [reward.name for reward in rewards]
    if twice := {name for name in names if names.count(name) > 1}:
        close_rewards(rewards)
        raise InputError(f"two rewards are named {min(twice)!r}, and so would be their metrics: rename one of them")
    return rewards


def columns_of(*sets: Sequence[dict[str, Any]]) -> set[str]:
    """What reward functions may ask for: columns that all rows have, and what `rollout.score_batch` adds to them."""
    rows = [some[0] for some in sets if some]
    return (set.intersection(*(set(row) for row in rows)) | {"prompts", "completion_ids"}) - {"prompt"}


def split_prompts(config: TrainConfig) -> Prompts:
    """Rows to train on, and held-out rows. No held-out prompt is among the training prompts."""
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
                f"{config.prompts} has {len(rows)} different prompts, too few to set {config.eval_size} aside for the "
                "evaluation: lower eval_size or give eval_prompts"
            )
        order = np.random.default_rng(config.seed).permutation(len(rows))
        held_out, rows = [rows[i] for i in order[: config.eval_size]], [rows[i] for i in order[config.eval_size :]]
    rows = without(rows, held_out)
    if not rows:
        raise InputError(f"every prompt of {config.prompts} is a held-out prompt too: lower eval_size")
    return Prompts(rows, held_out, conflicting(loaded))


def evaluation_rows(config: TrainConfig, source: str | None = None, size: int | None = None) -> Rows:
    """Rows to evaluate a trained run on: its own held-out ones, or those of another source as they are.

    size: how many (default: as many as the run has, 256 of another source). More than the run has come from where its
    held-out prompts came from, without those that it was trained on; InputError where that cannot be.
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
                f"the run set {len(rows)} prompts of {config.prompts} aside, and was trained on the others: give a "
                f"size of at most that, or other prompts than these (asked for: {size})"
            )
        rows = _held_out(config, config.eval_prompts or config.prompts, size, seen=trained)
    return rows[:size]


def _has_own_source(config: TrainConfig) -> bool:
    """Whether held-out prompts are drawn apart from the training prompts, not set aside from them."""
    return config.eval_prompts is not None or config.prompts.startswith(GENERATED)


def _held_out(config: TrainConfig, source: str, size: int, seen: Sequence[dict[str, Any]] = ()) -> Rows:
    # Generated tasks repeat themselves, so more are drawn than are wanted.
    return without(_load(config, source, 2 * size, HELD_OUT_SEED), seen)[:size]


def _load(config: TrainConfig, source: str, limit: int, seed: int) -> Rows:
    options = {name: read_value(text, f"task_options.{name}") for name, text in config.task_options.items()}
    return load_prompts(
        source, limit=limit, seed=seed, prompt_column=config.prompt_column, prompt_template=config.prompt_template,
        # Options are of the training task; held-out prompts may come out of a file all the same.
        task_options=options if source == config.prompts or source.startswith(GENERATED) else None,
    )  # fmt: skip


def read_value(text: Any, name: str = "a value") -> Any:
    """The value that a piece of text from the command line stands for, as YAML reads it. InputError if it is none."""
    import yaml

    try:
        return yaml.safe_load(text) if isinstance(text, str) else text
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"{name} is {shown(text)}, which YAML cannot read: {' '.join(str(error).split())}") from None


def prompt_sets(
    config: TrainConfig, tokenizer: Any, context: int, prompts: Prompts | None = None
) -> tuple[PromptSet, PromptSet | None]:
    """Training and held-out prompts. No held-out prompt is among the training prompts.

    context: tokens of the model's context (0: unlimited); prompt and completion must fit into it. prompts: those of
    the configuration, where they have been read already.
    """
    training, held_out, conflicting = split_prompts(config) if prompts is None else prompts
    encoded = encode_for(config, tokenizer, context, training)._replace(conflicting=conflicting)
    return encoded, encode_for(config, tokenizer, context, held_out) if held_out else None


def encode_for(config: TrainConfig, tokenizer: Any, context: int, rows: Sequence[dict[str, Any]]) -> PromptSet:
    """Prompts ready to sample, as the configuration says; see `prompt_sets`."""
    limit = min(config.max_prompt_tokens, context - config.max_new_tokens) if context else config.max_prompt_tokens
    if limit < 1:
        raise InputError(
            f"max_new_tokens is {config.max_new_tokens}, but the model's whole context is {context} tokens"
        )
    return encode_rows(
        tokenizer, rows, max_tokens=limit, long_prompts=config.long_prompts, system_prompt=config.system_prompt
    )
