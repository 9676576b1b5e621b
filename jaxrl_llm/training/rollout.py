"""Around the sampler: prompts made ready before, completions scored after."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.data.chat import encode_prompt, is_conversation
from jaxrl_llm.data.prompts import load_prompts, without
from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards import Reward, Scores, get_reward, require_columns
from jaxrl_llm.rewards import score as score_completions
from jaxrl_llm.sampling import completion_ids, completion_texts
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.trajectory import Trajectories

GENERATED = "reasoning-gym:"  # how sources begin of which there is no end
HELD_OUT_SEED = 2**31 - 1  # of generated held-out prompts: not the seed of the training prompts


class PromptSet(NamedTuple):
    """Rows of a data set and the token ids of their prompts, in the same order."""

    rows: list[dict[str, Any]]
    ids: list[list[int]]
    skipped: int = 0  # longer than allowed
    shortened: int = 0


def encode_rows(
    tokenizer: Any, rows: Sequence[dict[str, Any]], *, max_tokens: int, long_prompts: str, system_prompt: str | None
) -> PromptSet:
    """Tokenise prompts once; those of more than `max_tokens` are skipped, truncated on the left, or an error."""
    kept, ids, skipped, shortened = [], [], 0, 0
    for row in rows:
        tokens = encode_prompt(tokenizer, row["prompt"], system_prompt=system_prompt)
        if len(tokens) > max_tokens:
            if long_prompts == "error":
                raise InputError(
                    f"a prompt has {len(tokens)} tokens, more than max_prompt_tokens {max_tokens}: "
                    "raise it, or set long_prompts to skip or truncate"
                )
            if long_prompts == "skip":
                skipped += 1
                continue
            tokens, shortened = tokens[-max_tokens:], shortened + 1
        kept.append(row)
        ids.append(tokens)
    if not kept:
        raise InputError(f"all {len(rows)} prompts have more than {max_tokens} tokens: raise max_prompt_tokens")
    return PromptSet(kept, ids, skipped, shortened)


def prompt_sets(config: TrainConfig, tokenizer: Any, context: int) -> tuple[PromptSet, PromptSet | None]:
    """Training and held-out prompts. No held-out prompt is among the training prompts.

    context: tokens of the model's context (0: unlimited); prompt and completion must fit into it.
    """
    rows, held_out = _split(config)
    return _encode(config, tokenizer, context, rows), _encode(
        config, tokenizer, context, held_out
    ) if held_out else None


def evaluation_prompts(
    config: TrainConfig, tokenizer: Any, context: int, *, source: str | None = None, size: int | None = None
) -> PromptSet:
    """Prompts to evaluate a trained run on: its own held-out ones, or those of another source as they are.

    size: how many (default: as many as the run has, 256 of another source). More than the run has come from where its
    held-out prompts came from, without those that it was trained on; InputError where that cannot be.
    """
    if source is not None:
        rows = _held_out(config, source, size or config.eval_size or TrainConfig.eval_size)
        return _encode(config, tokenizer, context, rows)
    trained, rows = _split(config)
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
    return _encode(config, tokenizer, context, rows[:size])


def _has_own_source(config: TrainConfig) -> bool:
    """Whether held-out prompts are drawn apart from the training prompts, not set aside from them."""
    return config.eval_prompts is not None or config.prompts.startswith(GENERATED)


def _split(config: TrainConfig) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows to train on, and held-out rows."""
    held_out: list[dict[str, Any]] = []
    apart = _has_own_source(config)
    rows = _load(config, config.prompts, config.num_prompts + (0 if apart else config.eval_size), config.seed)
    if config.eval_size and apart:
        held_out = _held_out(config, config.eval_prompts or config.prompts, config.eval_size)
    elif config.eval_size:
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
    return rows, held_out


def _held_out(config: TrainConfig, source: str, size: int, seen: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
    # Generated tasks repeat themselves, so more are drawn than are wanted.
    return without(_load(config, source, 2 * size, HELD_OUT_SEED), seen)[:size]


def _load(config: TrainConfig, source: str, limit: int, seed: int) -> list[dict[str, Any]]:
    options = {name: read_value(text) for name, text in config.task_options.items()}
    return load_prompts(
        source, limit=limit, seed=seed, prompt_column=config.prompt_column, prompt_template=config.prompt_template,
        # Options are of the training task; held-out prompts may come out of a file all the same.
        task_options=options if source == config.prompts or source.startswith(GENERATED) else None,
    )  # fmt: skip


def _encode(config: TrainConfig, tokenizer: Any, context: int, rows: Sequence[dict[str, Any]]) -> PromptSet:
    limit = min(config.max_prompt_tokens, context - config.max_new_tokens) if context else config.max_prompt_tokens
    if limit < 1:
        raise InputError(
            f"max_new_tokens is {config.max_new_tokens}, but the model's whole context is {context} tokens"
        )
    return encode_rows(
        tokenizer, rows, max_tokens=limit, long_prompts=config.long_prompts, system_prompt=config.system_prompt
    )


def read_value(text: Any) -> Any:
    """The value that a piece of text from the command line stands for, as YAML reads it."""
    import yaml

    return yaml.safe_load(text) if isinstance(text, str) else text


def make_rewards(config: TrainConfig, columns: Sequence[str]) -> list[Reward]:
    """The reward functions of a run. InputError where one needs a column that the data lacks, or two share a name."""
    rewards = [
        dataclasses.replace(get_reward(spec), time_limit=config.reward_time_limit, default=config.reward_default)
        for spec in config.rewards
    ]
    names = [reward.name for reward in rewards]
    if twice := {name for name in names if names.count(name) > 1}:
        raise InputError(f"two rewards are named {min(twice)!r}, and so would be their metrics: rename one of them")
    # As `score_batch` passes them on.
    require_columns(rewards, {*columns, "prompts", "completion_ids"} - {"prompt"})
    return rewards


class Scored(NamedTuple):
    """A batch with its rewards, and what is worth knowing about the scoring."""

    batch: Trajectories
    texts: list[str]
    failures: dict[str, int]


def score_batch(
    rewards: Sequence[Reward],
    tokenizer: Any,
    rows: Sequence[dict[str, Any]],
    batch: Trajectories,
    scores: Scores | None = None,
    which: np.ndarray | None = None,
) -> Scored:
    """Score every completion; `rows` holds the data set row of each prompt, in the order of the batch's groups.

    scores: of the batch's rows, where they are known already; then no reward function is called.
    which: bool[N], the completions that reward functions see; the others are not scored (NaN). Default: all.
    """
    texts = completion_texts(tokenizer, batch)
    if scores is None:
        which = np.ones(len(texts), bool) if which is None else which
        of_rows = [rows[group] for group in np.asarray(batch.group)]
        scores = _score_some(rewards, of_rows, texts, completion_ids(batch), which)
    batch = batch.replace(
        rewards={name: jnp.asarray(values) for name, values in scores.components.items()},
        reward=jnp.asarray(scores.total),
    )
    return Scored(batch, texts, scores.failures)


def _score_some(
    rewards: Sequence[Reward],
    rows: Sequence[dict[str, Any]],
    texts: Sequence[str],
    ids: list[list[int]],
    which: np.ndarray,
) -> Scores:
    """`_score` of the completions that `which` names, bool[N], and NaN of the others. It is not called for none."""
    if which.all():
        return _score(rewards, rows, texts, ids)

    def spread(values: np.ndarray | float = np.nan) -> np.ndarray:
        out = np.full(len(texts), np.nan, np.float32)
        out[which] = values
        return out

    if not which.any():
        names = [reward.name for reward in rewards]
        return Scores({name: spread() for name in names}, spread(), dict.fromkeys(names, 0), dict.fromkeys(names, 0.0))
    chosen = np.flatnonzero(which).tolist()
    found = _score(rewards, [rows[i] for i in chosen], [texts[i] for i in chosen], [ids[i] for i in chosen])
    components = {name: spread(values) for name, values in found.components.items()}
    return found._replace(components=components, total=spread(found.total))


def _score(
    rewards: Sequence[Reward], rows: Sequence[dict[str, Any]], texts: Sequence[str], ids: list[list[int]]
) -> Scores:
    """Score completions, each of the prompt of the row beside it."""
    completions = [
        [{"role": "assistant", "content": text}] if is_conversation(row["prompt"]) else text
        for text, row in zip(texts, rows, strict=True)
    ]
    columns = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
    columns |= {"prompts": [row["prompt"] for row in rows], "completion_ids": ids}
    return score_completions(rewards, completions, columns)


def window_metrics(scored: Scored) -> dict[str, float]:
    """Metrics of a batch of windows (info "window" and "unfinished"; see `collect`), whose rows may not be finished.

    What is said of completions counts those that were finished in this step, so that each counts once in a run, and is
    NaN where there are none; tokens are those of the windows. "groups/uniform": of the groups of which at least two
    were finished in this step, those with equal rewards; 0 where there is no such group.
    """
    batch = scored.batch
    window, unfinished = np.asarray(batch.need("window")), np.asarray(batch.need("unfinished"))
    ended = window.any(axis=1) & ~unfinished
    length, count = np.asarray(batch.action_mask).sum(axis=1)[ended], int(ended.sum())
    reward, group = np.asarray(batch.need("reward"))[ended], np.asarray(batch.group)[ended]
    known = [reward[(group == number) & ~np.isnan(reward)] for number in np.unique(group)]
    spread = np.asarray([np.ptp(rewards) for rewards in known if len(rewards) > 1])

    def of(values: np.ndarray, how: Any) -> float:
        return float(how(values)) if count else np.nan

    return {
        "reward/unscored": of(np.isnan(reward), np.mean),
        "completion/length": of(length, np.mean),
        "completion/longest": of(length, np.max),
        "completion/truncated": of(np.asarray(batch.truncated)[ended], np.mean),
        "completion/tokens": float(window.sum()),
        "groups/uniform": float(np.mean(spread == 0)) if len(spread) else 0.0,
        "rollout/finished": float(count),
        "rollout/unfinished": float(unfinished.sum()),
        **{f"rewards/{name}/failed": failed / max(count, 1) for name, failed in scored.failures.items()},
    }


class StreamedScores:
    """Scores groups in a background thread, in the order in which they are given, while others are still sampled.

    One group at a time: no reward function runs twice at once, but for one that was left behind at its time limit.
    A context manager: groups that are not scored when it is left are dropped.
    """

    def __init__(self, rewards: Sequence[Reward], tokenizer: Any) -> None:
        self._rewards, self._tokenizer = rewards, tokenizer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="streamed rewards")
        self._scores: dict[int, Future[Scores]] = {}

    def __enter__(self) -> StreamedScores:
        return self

    def __exit__(self, *unused: object) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def add(self, number: int, row: dict[str, Any], ids: list[list[int]]) -> None:
        """Score a group (its number, its data set row, the token ids of its completions)."""
        # Texts are made here: tokenisers are not made for several threads.
        texts = [self._tokenizer.decode(tokens, skip_special_tokens=True) for tokens in ids]
        self._scores[number] = self._thread.submit(_score, self._rewards, [row] * len(ids), texts, ids)

    def scores(self) -> Scores:
        """The scores of all groups in ascending order of their numbers; waits for them."""
        found = [self._scores[number].result() for number in sorted(self._scores)]
        return Scores(
            {name: np.concatenate([part.components[name] for part in found]) for name in found[0].components},
            np.concatenate([part.total for part in found]),
            {name: sum(part.failures[name] for part in found) for name in found[0].failures},
            {name: sum(part.seconds[name] for part in found) for name in found[0].seconds},
        )
