"""Rows of process reward models: solutions in steps, each of which has a label at its end."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxrl_llm.utils.errors import InputError

NO_LABEL = -100  # as in TRL's and torch's data
SEPARATOR = "\n"  # after each step, if nothing else is said


class LabelledSteps(NamedTuple):
    """A prompt and its steps as tokens, with the labels of the tokens at which steps end."""

    tokens: list[int]
    labels: list[int]  # NO_LABEL elsewhere


def encode_steps(
    tokenizer: Any,
    prompt: str,
    steps: Sequence[str],
    labels: Sequence[bool | int],
    *,
    separator: str = SEPARATOR,
    only_last: bool = False,
    max_tokens: int | None = None,
) -> LabelledSteps:
    """Tokens of a prompt and of steps with a separator after each, whose last token has the step's label, as in TRL.

    labels: of the steps, classes from 0 on; only_last: keep the last step's alone. max_tokens: cut the end off, with
    the labels there. Prompt and steps are tokenised one by one, after the token that the tokenizer begins texts with.
    InputError for no steps, another number of labels, and a separator without tokens.
    """
    if not steps or len(steps) != len(labels):
        raise InputError(
            f"there are {len(steps)} steps and {len(labels)} labels: give one label for each, at least one"
        )
    end = _bare(tokenizer, separator)
    if not end:
        raise InputError(f"the separator of steps is {separator!r}, which has no tokens: choose another")
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    tokens = [*start, *_bare(tokenizer, prompt)]
    found = [NO_LABEL] * len(tokens)
    for number, (step, label) in enumerate(zip(steps, labels, strict=True), start=1):
        own = [*_bare(tokenizer, step), *end]
        kept = int(label) if number == len(steps) or not only_last else NO_LABEL
        tokens, found = tokens + own, [*found, *[NO_LABEL] * (len(own) - 1), kept]
    return LabelledSteps(tokens[:max_tokens], found[:max_tokens])


def _bare(tokenizer: Any, text: str) -> list[int]:
    return [int(one) for one in tokenizer(text, add_special_tokens=False)["input_ids"]]
