"""Score a sampled batch: the rewards of a notebook's own functions, of files, or of the library."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from jaxrl_llm.core.shapes import check_batch
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.data.chat.encode import is_conversation
from jaxrl_llm.data.chat.messages import text_of_content
from jaxrl_llm.rewards.registry import get_rewards
from jaxrl_llm.rewards.scoring import score_batch
from jaxrl_llm.rewards.workers.runner import Reward, close_rewards, require_columns
from jaxrl_llm.sampling.batch import prompts_of
from jaxrl_llm.sampling.checks import check_tokenizer
from jaxrl_llm.utils.errors import InputError, shown

RewardLike = str | Reward | Callable[..., Any]


def score(
    batch: Trajectories, rewards: RewardLike | Sequence[RewardLike], rows: Sequence[Any], tokenizer: Any
) -> Trajectories:
    """The batch with the rewards of its completions: `rewards`, f32[N] by name, and `reward`, their weighted sum.

    rewards: one or several functions `(completions, **columns) -> scores`, names as for `jaxrl train --rewards`, such
    as "number_match*0.5" or "my.py:reward", and `Reward`s. rows: of each prompt, in the order in which `sample` got
    them: a dict with "prompt" and the columns that the rewards read, or the prompt alone. tokenizer: the third result
    of `load_policy`. A function that fails gives its default, 0, and a warning; see `rewards.score`.

    Raises InputError for a reward that cannot be loaded or reads a column that the rows lack, two of one name, for
    fewer rows than prompts, and for rows in another order.
    """
    check_batch(batch)
    check_tokenizer(tokenizer)
    found = as_rows(rows)
    if len(found) <= (last := int(np.max(np.asarray(batch.group), initial=0))):
        raise InputError(f"there are {len(found)} rows, but the batch has {last + 1} prompts: give the row of each")
    with loaded(rewards) as ready:
        require_columns(ready, reward_columns(found))
        check_order(batch, found, tokenizer)
        return score_batch(ready, tokenizer, found, batch).batch


def as_rows(rows: Sequence[Any]) -> list[dict[str, Any]]:
    """Rows with "prompt", of such rows or of prompts alone: texts, or lists of chat messages. InputError for others."""
    if isinstance(rows, str | dict) or not hasattr(rows, "__len__"):
        raise InputError(f"rows are {shown(rows)}, but must be a list: a dict, or the prompt, of each prompt")
    found = [row if isinstance(row, dict) else {"prompt": row} for row in rows]
    for number, row in enumerate(found, start=1):
        if not isinstance(row.get("prompt"), str | list):
            raise InputError(f"row {number} is {shown(row)}, but must have a prompt: a text, or a list of messages")
    return found


def check_order(batch: Trajectories, rows: Sequence[dict[str, Any]], tokenizer: Any) -> None:
    """InputError for a prompt of the batch that does not hold its row's text, but that of another row."""

    def bare(text: str) -> str:
        return "".join(text.split())

    def said(prompt: Any) -> str:
        return (
            prompt
            if isinstance(prompt, str)
            else text_of_content(prompt[-1]["content"])
            if is_conversation(prompt)
            else ""
        )

    texts = [bare(said(row["prompt"])) for row in rows]
    for group, ids in dict(zip(np.asarray(batch.group).tolist(), prompts_of(batch), strict=True)).items():
        prompt = bare(tokenizer.decode(ids, skip_special_tokens=False))
        if texts[group] in prompt:
            continue
        if other := next((n for n, text in enumerate(texts, start=1) if text and text in prompt), None):
            raise InputError(
                f"row {group + 1} is not of the batch's prompt {group + 1}, which is that of row {other}: give the "
                "rows in the order in which sample got their prompts"
            )


def reward_columns(rows: Sequence[dict[str, Any]]) -> set[str]:
    """What rewards can read of these rows: the columns that all have, and what scoring adds."""
    return (set.intersection(*map(set, rows)) if rows else set()) - {"prompt"} | {"prompts", "completion_ids"}


@contextmanager
def loaded(rewards: RewardLike | Sequence[RewardLike]) -> Iterator[list[Reward]]:
    """Context manager: one or several rewards, ready to score. Processes that it starts end with it."""
    listed = [rewards] if isinstance(rewards, str | Reward) or callable(rewards) else rewards
    if not isinstance(listed, list | tuple) or not listed:
        raise InputError(f"rewards are {shown(rewards)}, but must be functions or names of rewards, at least one")
    started = iter(get_rewards([one for one in listed if isinstance(one, str)]))
    own: list[Reward] = []
    try:
        for one in listed:
            if isinstance(one, str):
                own.append(next(started))
            else:
                own.append(one if isinstance(one, Reward) else Reward(one))
        yield own
    finally:
        close_rewards([one for one, given in zip(own, listed, strict=False) if isinstance(given, str)])
        close_rewards(started)
