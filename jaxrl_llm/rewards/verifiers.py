"""Rewards that compare a completion with a known answer: 1.0 if it is correct, else 0.0.

Each takes `completions` (N strings, or N message lists) and columns of N values by keyword, and returns N floats.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from jaxrl_llm.errors import InputError, missing_package
from jaxrl_llm.rewards.calling import per_sample

_UNSIGNED = (
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<!\.)\.[0-9]+)(?:[eE][-+]?[0-9]{1,3}(?!\w))?"
)
# A number starts neither inside a word ("x2") nor after the point of another ("1.2.3"). A sign right after a closing
# bracket is an operator, "(1)-2". Exponents have at most three digits, so that "1e999999999" cannot exhaust memory.
_NUMBER = re.compile(
    rf"(?<![0-9A-Za-z])(?<![0-9]\.)(?:(?<![)\]}}])(?P<sign>[-+])\$?)?(?P<value>{_UNSIGNED})"
    rf"(?:\s*/\s*(?P<denominator>{_UNSIGNED}))?"
)
_ANSWER_TAGS = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_LATEX_DELIMITERS = ("$", r"\(", r"\[", r"\boxed", r"\begin")


def text_of(completion: Any) -> str:
    """The text of a completion: a string as it is, or the content of a message list's last assistant message.

    >>> text_of([{"role": "assistant", "content": "4"}])
    '4'

    Raises InputError for anything else.
    """
    if isinstance(completion, str):
        return completion
    if not isinstance(completion, Sequence) or not all(isinstance(message, dict) for message in completion):
        raise InputError(f"a completion is a string or a list of messages, found {type(completion).__name__}")
    contents = [message.get("content") for message in completion if message.get("role") == "assistant"]
    content = contents[-1] if contents else None
    if isinstance(content, list):  # a list of parts, of which only text can be compared
        return "".join(part.get("text", "") for part in content)
    return content or ""


def exact_match(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float]:
    """1.0 if the completion equals the answer, ignoring leading and trailing white space."""
    pairs = zip(completions, answer, strict=True)
    return [float(text_of(completion).strip() == str(expected).strip()) for completion, expected in pairs]


def number_match(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float]:
    """1.0 if the last number in the completion equals the last number in the answer exactly.

    Reads 42, -3, 0.5, .5, 1,234.50, 1e-3 and 3/4 in plain text; for LaTeX use `math_verify`.

    >>> number_match(["half of 2,468 is 1,234."], answer=["1234.0"])
    [1.0]

    Raises InputError for an answer without a number.
    """
    scores = []
    for completion, expected in zip(completions, answer, strict=True):
        wanted = last_number(str(expected))
        if wanted is None:
            raise InputError(f"the answer {str(expected)[:80]!r} has no number to match: use exact_match for text")
        scores.append(float(last_number(text_of(completion)) == wanted))
    return scores


def format_match(pattern: str) -> Callable[..., list[float]]:
    """A reward that is 1.0 if the whole completion matches the regular expression; `.` also matches newlines.

    Matching with a pattern of exponential backtracking, such as "(a+)+b", can be killed only in a process: use
    `get_reward("format_match(REGEX)")`, or avoid nested repetitions.

    >>> format_match("<think>.*</think>.+")(["<think>2 + 2</think>4", "4"])
    [1.0, 0.0]

    Raises InputError for an invalid pattern.
    """
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except (re.error, OverflowError, RecursionError) as error:  # RecursionError: thousands of nested brackets
        raise InputError(f"format_match: {pattern!r} is not a regular expression: {error}") from error

    @per_sample
    def format_match(completions: Sequence[Any], **_: Any) -> list[float]:
        return [float(compiled.fullmatch(text_of(completion)) is not None) for completion in completions]

    return format_match


@per_sample
def math_verify(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float]:
    """1.0 if math-verify judges the completion's final expression to be mathematically equal to the answer.

    An answer without LaTeX delimiters is read as a single formula: `x^2+1` means `$x^2+1$`.

    Raises InputError if math-verify is not installed or an answer cannot be parsed.
    """
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise missing_package("math-verify", "verifiers", "the reward 'math_verify'") from error
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).addFilter(_is_not_about_timeouts)

    scores = []
    for completion, expected in zip(completions, answer, strict=True):
        gold_text = str(expected)
        if not any(delimiter in gold_text for delimiter in _LATEX_DELIMITERS):
            gold_text = f"${gold_text}$"
        # math-verify's time limits are alarms, which only the main thread may set; the runner enforces the limit.
        gold = parse(gold_text, parsing_timeout=None)
        if not gold:
            raise InputError(f"math_verify cannot parse the answer {str(expected)[:80]!r}: use exact_match for text")
        found = parse(text_of(completion), parsing_timeout=None)
        scores.append(float(verify(gold, found, timeout_seconds=None)))
    return scores


@per_sample
def reasoning_gym(
    completions: Sequence[Any],
    reasoning_gym_task: Sequence[str],
    reasoning_gym_entry: Sequence[dict[str, Any]],
    **_: Any,
) -> list[float]:
    """The score, 0 to 1, of reasoning-gym's scorer for the task; some tasks give partial credit.

    The answer is the text in the last `<answer>...</answer>`, else the whole completion, without surrounding white
    space. The columns are those of `load_prompts("reasoning-gym:TASK")`.

    Raises InputError if reasoning-gym is not installed.
    """
    scores = []
    for completion, task, entry in zip(completions, reasoning_gym_task, reasoning_gym_entry, strict=True):
        text = text_of(completion)
        tagged = last_tagged(text)
        scores.append(float(_scorer(task)(answer=(text if tagged is None else tagged).strip(), entry=entry)))
    return scores


def tagged_match(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float]:
    """1.0 if the text in the completion's last `<answer>...</answer>` is the answer, but for white space.

    An answer with tags of its own is the text in them. A completion without tags scores 0.

    >>> tagged_match(["It barks. <answer> a dog </answer>", "a dog"], answer=["a dog", "a dog"])
    [1.0, 0.0]
    """
    scores = []
    for completion, expected in zip(completions, answer, strict=True):
        found, wanted = last_tagged(text_of(completion)), last_tagged(str(expected))
        wanted = str(expected) if wanted is None else wanted
        scores.append(float(found is not None and found.split() == wanted.split()))
    return scores


def last_tagged(text: str) -> str | None:
    """The text in the last `<answer>...</answer>`; None where there is none."""
    found = _ANSWER_TAGS.findall(text)
    return found[-1] if found else None


@functools.cache  # building a task can be slow, e.g. if it reads word lists
def _scorer(task: str) -> Callable[..., float]:
    try:
        from reasoning_gym import get_score_answer_fn
    except ImportError as error:
        raise missing_package("reasoning-gym", "verifiers", "the reward 'reasoning_gym'") from error
    return get_score_answer_fn(task)


def last_number(text: str) -> Fraction | None:
    """The last number in the text; None if there is none, or if it divides by zero or has over 1000 characters."""
    found = list(_NUMBER.finditer(text.replace("\N{MINUS SIGN}", "-")))
    if not found or len(found[-1].group()) > 1000:
        return None
    last = found[-1]
    value = Fraction(last["value"].replace(",", ""))
    if last["denominator"]:
        denominator = Fraction(last["denominator"].replace(",", ""))
        if denominator == 0:
            return None
        value /= denominator
    return -value if last["sign"] == "-" else value


def _is_not_about_timeouts(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Timeout is disabled")
