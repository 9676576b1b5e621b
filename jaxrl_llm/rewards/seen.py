"""What reward functions see of completions: texts or conversations, their prompts, and how the replies begin."""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from jaxrl_llm.rewards.workers.calling import ENVIRONMENTS, REPLY_START


class Talk(NamedTuple):
    """An episode with an environment, as reward functions see it."""

    prompt: list[Mapping[str, Any]]  # messages before the first reply
    completion: list[Mapping[str, Any]]  # replies, their calls of tools, and what tools and environment answered
    environment: Any = None  # the environment itself, after its end


def seen(
    rows: Sequence[dict[str, Any]], texts: Sequence[str], ids: list[list[int]], starts: Sequence[str] | None = None,
    talks: Sequence[Talk] | None = None,
) -> tuple[list[Any], dict[str, list[Any]]]:  # fmt: skip
    """Completions and columns as TRL passes them; rows: the data set row of each, starts: see `reply_starts`.

    A completion is a text where the prompt is one, else a list of messages. talks: episodes with an environment, whose
    prompts and completions are messages in any case.
    """
    columns = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
    completions: list[Any]
    if talks is None:
        completions = [
            [{"role": "assistant", "content": text}] if not isinstance(row["prompt"], str) else text
            for text, row in zip(texts, rows, strict=True)
        ]
        columns |= {"prompts": [row["prompt"] for row in rows]}
    else:
        completions = [talk.completion for talk in talks]
        columns |= {"prompts": [talk.prompt for talk in talks], ENVIRONMENTS: [talk.environment for talk in talks]}
    columns |= {"completion_ids": ids, REPLY_START: [""] * len(ids) if starts is None else list(starts)}
    return completions, columns


_OPENED = re.compile(r"<(?!(?:assistant|model|bot)>)([a-z_]+)>\s*(?:</\1>\s*)?\Z")


def reply_starts(tokenizer: Any, prompts: Iterable[Sequence[int]]) -> list[str]:
    """What each prompt, token ids, already holds of the reply: a tag at its end, which the chat template opened."""

    @cache
    def start(end: tuple[int, ...]) -> str:
        found = _OPENED.search(tokenizer.decode(list(end), skip_special_tokens=False))
        return "" if found is None else found[0]

    return [start(tuple(prompt[-12:])) for prompt in prompts]
