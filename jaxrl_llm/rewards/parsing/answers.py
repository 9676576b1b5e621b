"""Answer keys: texts that are equal for equal answers, so that votes and measures of diversity can count answers."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_llm.rewards.entries import ANSWER_KEY, REWARD
from jaxrl_llm.rewards.parsing.final_answers import final_answer, is_huge, last_number
from jaxrl_llm.rewards.parsing.readings import readings
from jaxrl_llm.rewards.verifiers import last_tagged, text_of

Function = Callable[..., Any]


def keyed(function: Function, key: Callable[[str], str | None]) -> Function:
    """A reward function that returns each completion's answer key beside its score.

    key: the answer in a completion's text, None where there is none or where it raises.
    """

    def of(completion: Any) -> str | None:
        try:
            return key(text_of(completion))
        except Exception:  # whatever a parser raises on a policy's text: no answer
            return None

    @functools.wraps(function)
    def with_keys(completions: Sequence[Any], **columns: Any) -> dict[str, list[Any]]:
        rewards = function(completions, **columns)
        return {REWARD: list(rewards), ANSWER_KEY: [of(completion) for completion in completions]}

    return providing(with_keys, ANSWER_KEY)


def providing(function: Function, *names: str) -> Function:
    """The function, declared to return these entries."""
    function.provides = frozenset(names)  # type: ignore[attr-defined]
    return function


def trimmed(text: str) -> str | None:
    """The text without white space around it; None for an empty one."""
    return text.strip() or None


def final_number(text: str) -> str | None:
    """The last number of the final answer, as `number_match` reads it.

    >>> final_number("so 0.50"), final_number("1/2"), final_number("none")
    ('1/2', '1/2', None)
    """
    found = final_answer(text)
    value = last_number(text if found is None else found)
    return None if value is None else str(value)


def expression(text: str) -> str | None:
    """The final expression, as math-verify parses it: a number by its value to 12 digits, others in sympy's form."""
    found = None if is_huge(final_answer(text) or text) else next(readings(text), None)
    if not found:
        return None
    try:
        value = complex(found[0].evalf())
        return f"{value.real:.12g}" if abs(value.imag) < 1e-12 else f"{value:.12g}"
    except (AttributeError, TypeError, ValueError):
        return str(found[0])


def tagged(text: str) -> str | None:
    """The text in the last `<answer>...</answer>`, without white space around it."""
    found = last_tagged(text)
    return None if found is None else " ".join(found.split()) or None
