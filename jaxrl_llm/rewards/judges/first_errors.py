"""The first wrong step of a solution: the question to a verifier, its answer, and the reward that trains one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from jaxrl_llm.rewards.judges.questions import stated
from jaxrl_llm.rewards.verifiers import text_of
from jaxrl_llm.utils.errors import InputError, shown

NONE = -1  # no step is wrong
FIND = """A solution to a problem follows, in numbered steps. Find the first step that is wrong.

Problem:
{problem}

Reference answer:
{answer}

{steps}

Check the steps one by one. Then write the number of the first wrong step in the last line, between [[ and ]], or [[-1]] if no step is wrong."""  # noqa: E501


def steps_in(text: str) -> list[str]:
    """The steps of a solution: its paragraphs.

    >>> steps_in("Add them.\\n\\nIt is 4.\\n")
    ['Add them.', 'It is 4.']
    """
    return [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]


def question(problem: str, answer: str, steps: Sequence[str]) -> str:
    """The question to a verifier; steps are numbered from 0."""
    listed = "\n\n".join(f"Step {number}:\n{step}" for number, step in enumerate(steps))
    return FIND.format(problem=problem, answer=answer, steps=listed)


def first_error_in(text: str, steps: int) -> int | None:
    """The step that an answer names last, -1 for none; None where it names none of so many steps.

    >>> first_error_in("Step 1 is off. [[1]]", 3), first_error_in("[[-1]]", 3), first_error_in("[[3]]", 3)
    (1, -1, None)
    """
    said = stated(text) or ""
    number = int(said) if re.fullmatch(r"-?[0-9]{1,6}", said) else None
    return number if number is not None and NONE <= number < steps else None


def nearness(found: int | None, expected: int, steps: int) -> float:
    """1 - |found - expected| / steps where both are steps; 1 where neither is, and -1 otherwise (FAPO, 2510.22543).

    >>> nearness(3, 1, 4), nearness(-1, -1, 4), nearness(-1, 1, 4), nearness(2, -1, 4), nearness(None, -1, 4)
    (0.5, 1.0, -1.0, -1.0, -1.0)
    """
    if found is None or (found == NONE) != (expected == NONE):
        return -1.0
    return 1.0 if found == NONE else 1.0 - abs(found - expected) / steps


def first_error(
    completions: Sequence[Any], first_error: Sequence[Any], steps: Sequence[Any], **_: Any
) -> list[float | None]:
    """The reward of a verifier's answers, -1 to 1: `nearness` of the step that each names to the column `first_error`.

    The column `steps` has the steps, or how many there are; `first_error` is -1 where none is wrong. InputError for
    other columns.
    """
    scores: list[float | None] = []
    for completion, expected, listed in zip(completions, first_error, steps, strict=True):
        count = len(listed) if isinstance(listed, list | tuple) else listed
        if not isinstance(count, int) or not isinstance(expected, int) or not NONE <= expected < count:
            raise InputError(f"first_error is {shown(expected)}, but must be -1 or one of the steps, {shown(listed)}")
        scores.append(nearness(first_error_in(text_of(completion), count), expected, count))
    return scores
