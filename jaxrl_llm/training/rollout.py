"""Around the sampler: prompts made ready before, completions scored after."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.data.chat import encode_prompt, is_conversation
from jaxrl_llm.errors import InputError, shown
from jaxrl_llm.rewards import Reward, Scores
from jaxrl_llm.rewards import score as score_completions
from jaxrl_llm.sampling import completion_ids, completion_texts
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.inputs import Prompts, split_prompts
from jaxrl_llm.trajectory import Trajectories


class PromptSet(NamedTuple):
    """Rows of a data set and the token ids of their prompts, in the same order."""

    rows: list[dict[str, Any]]
    ids: list[list[int]]
    skipped: int = 0  # longer than allowed
    shortened: int = 0
    conflicting: int = 0  # rows left out that ask what another does, with another answer


def encode_rows(
    tokenizer: Any, rows: Sequence[dict[str, Any]], *, max_tokens: int, long_prompts: str, system_prompt: str | None
) -> PromptSet:
    """Tokenise prompts once; those of more than `max_tokens` are skipped, truncated on the left, or an error."""
    kept, ids, skipped, shortened = [], [], 0, 0
    for number, row in enumerate(rows, start=1):
        try:
            tokens = encode_prompt(tokenizer, row["prompt"], system_prompt=system_prompt)
        except InputError as error:
            raise InputError(f"prompt {number} of {len(rows)}, {shown(row['prompt'])}: {error}") from None
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
