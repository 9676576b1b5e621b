"""A run's inputs besides the model: prompts and rewards, read and checked before anything else, without JAX."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.data.columns import that_teach
from jaxrl_llm.data.generate import games
from jaxrl_llm.data.load import Same, conflicting, load_prompts, open_prompts, same_prompt, same_row, without
from jaxrl_llm.data.prompt_rows import PromptRows, rows_digest
from jaxrl_llm.data.prompt_set import PromptSet, encode_as_drawn, encode_rows
from jaxrl_llm.data.sources.random_access import RandomAccess
from jaxrl_llm.models.io.adapter_config import read_adapter_config
from jaxrl_llm.models.kinds import path_of
from jaxrl_llm.reporting.logging.services import SERVICES, check_writers
from jaxrl_llm.rewards import Reward, close_rewards, reward_digest
from jaxrl_llm.rewards.specs import GIVEN
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.config.checks import GENERATED, is_agent
from jaxrl_llm.training.folder.files import RunFolder
from jaxrl_llm.training.folder.lock import locked
from jaxrl_llm.training.health.first_checks import (
    Rows,
    available_columns,
    check_answers,
    check_conversations,
    check_model,
    check_rewards,
    checked_rewards,
    closing_on_error,
    make_rewards,
    prompt_options,
    prompt_source,
)
from jaxrl_llm.utils.errors import InputError, InputErrors, gather, several
from jaxrl_llm.utils.starting import phase

HELD_OUT_SEED = 2**31 - 1  # generates held-out prompts; differs from the seed of the training prompts


class DatasetPrompts(NamedTuple):
    """Rows of the data set, deduplicated by prompt, unless they are read as they are drawn."""

    training: Rows | PromptRows
    held_out: Rows
    conflicting: int  # dropped duplicates of a prompt whose other columns, such as the answer, differ
    notes: tuple[str, ...] = ()  # what to say about the sources, such as which columns were chosen


class Inputs(NamedTuple):
    """Prompts and rewards of a run."""

    prompts: DatasetPrompts
    rewards: list[Reward]

    @property
    def digests(self) -> dict[str, str]:
        """A digest of the contents of each input (both prompt sets, and each reward), by name."""
        rewards = {f"the reward {reward.name}": reward_digest(reward) for reward in self.rewards}
        training, held_out = self.prompts.training, rows_digest(self.prompts.held_out)
        drawn = training.fingerprint if isinstance(training, PromptRows) else rows_digest(training)
        return {"the prompts": drawn, "the held-out prompts": held_out, **rewards}


@contextmanager
def read_inputs(
    config: TrainConfig, *, resume: bool = False, first: bool = True, source: RandomAccess | None = None
) -> Iterator[Inputs]:
    """Context manager: the prompts and rewards of a run. The rewards' processes end with the context.

    source: of the training prompts, instead of the configured path; see `open_prompts`.

    Raises InputError with all problems together, before a model is loaded or anything is written.
    resume: the run continues, and its folder is locked within the context. Otherwise the folder must be free.
    first: whether this process writes the run's files, as the first of several hosts does; others do not touch it.
    """
    folder = RunFolder(config.output)
    seen_from = folder.started_in() if resume else os.getcwd()
    projects = {service.package: getattr(config, service.package) for service in SERVICES}
    checks: list[Any] = [lambda: check_writers(config.tensorboard, **projects), lambda: check_model(config.model)]
    checks += [lambda: read_adapter_config(path_of(config.adapter, "adapter"))] if config.adapter else []
    checks += [folder.check_free] if first and not resume else []
    with locked(folder.path) if first and resume else nullcontext():
        with _with_folder_hint(seen_from), phase("check the settings, the rewards and the first prompts"):
            rewards = checked_rewards(config, source, seen_from, *checks)
        # What takes longer comes last: until here, all mistakes are found in a second, and together.
        with closing_on_error(rewards), _with_folder_hint(seen_from), phase("read the prompts"):
            prompts = split_prompts(config, source)
        with _checked(config, rewards, prompts.training, prompts.held_out):
            yield Inputs(prompts, rewards)


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
) -> Iterator[tuple[Rows, list[Reward]]]:
    """Context manager: the rows (`evaluation_rows`) and rewards of an evaluation, like `read_inputs`.

    checks: further checks, whose errors are reported together with those of the inputs.
    """
    reads: list[Any] = [lambda: evaluation_rows(config, source, size), lambda: make_rewards(config)]
    rows, rewards, *_ = gather(*reads, *checks)
    with _checked(config, rewards, rows):
        yield rows, rewards


@contextmanager
def _checked(config: TrainConfig, rewards: list[Reward], *sets: Sequence[dict[str, Any]]) -> Iterator[None]:
    """InputError if rewards do not fit each other or these sets of rows. Closes the rewards on exit."""
    try:
        check_rewards(rewards, available_columns(config, *sets), config.eval_reward)
        check_answers(rewards, *sets)
        check_conversations(config, rewards, *sets)
        yield
    finally:
        close_rewards(rewards)


def split_prompts(config: TrainConfig, source: RandomAccess | None = None) -> DatasetPrompts:
    """Training and held-out rows; no prompt is in both (of rows that are read as they are drawn, none that is drawn).

    source: of the training prompts, instead of the configured path.
    """
    apart = config.eval_prompts is not None or (source is None and _has_own_source(config))
    path, same = prompt_source(config) if source is None else source, same_task(config)
    number = config.num_prompts + (0 if apart else config.eval_size)
    notes = list[str]()

    def training() -> Rows | PromptRows:
        if path == "":
            return games(number, config.seed)
        return open_prompts(path, limit=number, say=notes.append, **prompt_options(config, config.prompts))

    reads: list[Any] = [training]
    if config.eval_size and apart:
        reads.append(lambda: _held_out(config, config.eval_prompts or config.prompts, config.eval_size))
    loaded, *other = gather(*reads)
    if GIVEN in config.rewards and not isinstance(loaded, PromptRows):
        loaded, said = that_teach(loaded, config.prompts)
        notes += said
    rows, held_out = loaded, other[0] if other else []
    if config.eval_size and not apart:
        rows = rows if isinstance(rows, PromptRows) else without(rows, [], same)
        size = _held_out_size(config, len(rows), notes)
        order = np.random.default_rng(config.seed).permutation(len(rows))
        held_out, rows = _take(rows, order[:size])[:], _take(rows, order[size:])
    if isinstance(rows, PromptRows):
        return DatasetPrompts(rows, without(held_out, [], same), 0, tuple(notes))
    rows = without(rows, held_out, same)
    if not rows:
        raise InputError(f"every prompt of {config.prompts} is a held-out prompt too: lower eval_size")
    return DatasetPrompts(rows, held_out, conflicting(loaded) if same is same_prompt else 0, tuple(notes))


def same_task(config: TrainConfig) -> Same:
    """What is equal for rows that are one task."""
    by_row = is_agent(config) if config.same_task == "default" else config.same_task == "row"
    return same_row if by_row else same_prompt


def _held_out_size(config: TrainConfig, rows: int, notes: list[str]) -> int:
    """How many of a file's rows to hold out: eval_size, whose default is at most a quarter of them."""
    size, least = config.eval_size, 4
    if size == TrainConfig.eval_size and least <= rows < 4 * size:
        notes.append(
            f"{config.prompts} has {rows} prompts, of which {rows // 4} are held out for evaluation: eval_size or "
            "eval_prompts say otherwise"
        )
        return rows // 4
    if rows <= size:
        prompts = several(rows, "different prompt")
        raise InputError(
            f"{config.prompts} has {prompts}, too few to hold {size} out for evaluation: lower eval_size (0 is none), "
            "or give eval_prompts"
        )
    return size


def _take(rows: Rows | PromptRows, numbers: np.ndarray) -> Any:
    return rows.take(numbers) if isinstance(rows, PromptRows) else [rows[i] for i in numbers]


def evaluation_rows(config: TrainConfig, source: str | None = None, size: int | None = None) -> Rows:
    """Rows to evaluate a trained run on: its own held-out rows, or those of another `source`.

    size: number of rows (default: all held-out rows of the run; for another source the run's eval_size, or 256). If it
    exceeds the run's held-out rows, more are drawn from the same source, without training prompts; InputError if the
    held-out rows were split from the training file, which has no others.
    """
    if source is not None:
        return _held_out(config, source, size or config.eval_size or TrainConfig.eval_size)
    trained, rows, *_ = split_prompts(config)
    size = size or len(rows)
    if not size:
        raise InputError("the run has no held-out prompts (eval_size 0): give a size, or prompts")
    if size > len(rows):
        if not _has_own_source(config):
            raise InputError(
                f"the run held {len(rows)} prompts of {config.prompts} out and was trained on the others: give a "
                f"size of at most {len(rows)}, or other prompts (asked for: {size})"
            )
        if isinstance(trained, PromptRows):
            raise InputError(
                f"the run has {len(trained)} training prompts, too many to compare with more held-out prompts than its "
                f"{len(rows)}: give a size of at most that, or other prompts (asked for: {size})"
            )
        rows = _held_out(config, config.eval_prompts or config.prompts, size, seen=trained)
    return rows[:size]


def _has_own_source(config: TrainConfig) -> bool:
    """Whether held-out prompts are drawn separately, rather than split off the training prompts."""
    return config.eval_prompts is not None or not config.prompts or config.prompts.startswith(GENERATED)


def _held_out(config: TrainConfig, source: str, size: int, seen: Sequence[dict[str, Any]] = ()) -> Rows:
    if not source:
        loaded = games(2 * size, HELD_OUT_SEED)
    else:  # generated tasks repeat, so draw more than needed
        loaded = load_prompts(source, limit=2 * size, **{**prompt_options(config, source), "seed": HELD_OUT_SEED})
    return without(loaded, seen, same_task(config))[:size]


def prompt_sets(
    config: TrainConfig,
    tokenizer: Any,
    context: int,
    prompts: DatasetPrompts | None = None,
    vocabulary: int | None = None,
) -> tuple[PromptSet, PromptSet | None]:
    """Training and held-out prompts, tokenised; no prompt is in both.

    context: the model's context length in tokens (0: unlimited), which must hold prompt and completion.
    prompts: the configuration's prompts, if they have been read already. vocabulary: ids that the model has.
    """
    training, held_out, conflicting, _ = split_prompts(config) if prompts is None else prompts
    encoded = encode_for(config, tokenizer, context, training, held_out, vocabulary)._replace(conflicting=conflicting)
    return encoded, encode_for(config, tokenizer, context, held_out, vocabulary=vocabulary) if held_out else None


def encode_for(
    config: TrainConfig,
    tokenizer: Any,
    context: int,
    rows: Sequence[dict[str, Any]],
    held_out: Sequence[dict[str, Any]] = (),
    vocabulary: int | None = None,
) -> PromptSet:
    """Tokenise prompts as the configuration says; see `prompt_sets`.

    held_out: their prompts are dropped where rows are read as they are drawn.
    """
    limit, new = config.max_prompt_tokens, config.max_new_tokens
    limit = min(limit, context - new) if context else limit
    if limit < 1:
        raise InputError(f"max_new_tokens is {new}, but the model's context length is {context} tokens")
    how: dict[str, Any] = {
        "max_tokens": limit, "long_prompts": config.long_prompts, "system_prompt": config.system_prompt,
        "format": config.format, "dialect": is_agent(config), "vocabulary": vocabulary,
    }  # fmt: skip
    if isinstance(rows, PromptRows):
        return encode_as_drawn(tokenizer, rows, held_out=held_out, same=same_task(config), **how)
    return encode_rows(tokenizer, rows, **how)
