"""Rewards that compare a completion with a known answer: 1.0 if it is correct, else 0.0.

Each takes `completions` (N strings, or N message lists) and columns of N values by keyword, and returns N floats.
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_llm.rewards.parsing.final_answers import answer_text, final_answer, is_huge, last_number, numeric_value
from jaxrl_llm.rewards.parsing.readings import (
    LATEX_DELIMITERS,
    THOUGHTS,
    after_thoughts,
    as_latex,
    choice_of,
    math_verify_reading,
    readings,
    same_text,
)
from jaxrl_llm.rewards.workers.calling import per_sample
from jaxrl_llm.utils.errors import InputError, optional_package

_ONE_ANSWER = r"<answer>(?:(?!</?answer>|</?think>).)*</answer>"
_THOUGHTS_AND_ANSWER = re.compile(rf"\s*<think>(?:(?!</?think>).)*</think>\s*{_ONE_ANSWER}\s*", re.DOTALL)
TAGS = re.compile(r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*", re.DOTALL)
_SMALL = 1e-3  # numbers below are compared by their ratio


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
    """1.0 if the completion equals the answer, ignoring leading and trailing white space; a number by its value.

    Raises InputError for an answer that is no text and no number.
    """

    def same(text: str, expected: Any) -> bool:
        wanted = answer_text(expected).strip()
        as_number = not isinstance(expected, str) and numeric_value(text.strip()) == numeric_value(wanted) is not None
        return text.strip() in (wanted, str(expected)) or as_number

    return score_each(same, completions, answer)


def number_match(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float]:
    """1.0 if the last number of the final answer equals the last number in the expected one exactly.

    The final answer is what the last \\boxed{...} or <answer>...</answer> holds, else the completion. Reads 42, -3,
    0.5, .5, 1,234.50, 1 234, 1.234.567, 1e-3, 3 x 10^5, 3/4, 1 1/2, and digits of other scripts; for expressions use
    `math_verify`.

    >>> number_match(["half of 2,468 is 1,234."], answer=["1234.0"])
    [1.0]

    Raises InputError for an answer without a number.
    """
    return score_each(_same_number, completions, answer)


def number_match_strict(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float]:
    """As `number_match`, but 0.0 for a completion without a box or answer tag."""
    return score_each(functools.partial(_same_number, strict=True), completions, answer)


def score_each(score: Callable[[str, Any], float], completions: Sequence[Any], column: Sequence[Any]) -> list[float]:
    """The score of each completion's text with its entry of a column."""
    return [float(score(text_of(one), entry)) for one, entry in zip(completions, column, strict=True)]


def _same_number(text: str, expected: Any, strict: bool = False) -> bool:
    wanted = last_number(answer_text(expected))
    if wanted is None:
        raise InputError(f"the answer {str(expected)[:80]!r} has no number to match: use exact_match for text")
    found = final_answer(text)
    if found is None:
        return not strict and last_number(text) == wanted
    return last_number(found) == wanted


def format_match(pattern: str) -> Callable[..., list[float]]:
    """A reward that is 1.0 if the whole completion matches the regular expression; `.` also matches newlines.

    Where the chat template has opened a tag for the reply, such as <think>, the completion may match with it too.
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
    def format_match(completions: Sequence[Any], reply_start: Sequence[str] | None = None, **_: Any) -> list[float]:
        return matching(compiled.fullmatch, completions, reply_start)

    return format_match


def think_format_reward(completions: Sequence[Any], reply_start: Sequence[str] | None = None, **_: Any) -> list[float]:
    """1.0 if the completion begins with thoughts, <think>...</think>, and has no other <think>; as TRL's of that name.

    >>> think_format_reward(["<think>2 + 2</think>4", "2 + 2</think>4"])
    [1.0, 0.0]
    """
    return matching(THOUGHTS.match, completions, reply_start)


def answer_format_reward(completions: Sequence[Any], reply_start: Sequence[str] | None = None, **_: Any) -> list[float]:
    """1.0 if the completion is <think>...</think><answer>...</answer>, each once, with white space between."""
    return matching(_THOUGHTS_AND_ANSWER.fullmatch, completions, reply_start)


def answer_tags(completions: Sequence[Any], reply_start: Sequence[str] | None = None, **_: Any) -> list[float]:
    """1.0 if the whole completion is <think>...</think><answer>...</answer>, else 0.0; see `matching`."""
    return matching(TAGS.fullmatch, completions, reply_start)


def one_answer(completions: Sequence[Any], **_: Any) -> list[float]:
    """How nearly a completion has one tagged answer: 1 - min((blocks - 1)/turns, 1); 0 without one, or unbalanced tags.

    The form that `grpo_roc` prefers among right episodes, as the component `one_answer*0` of the reward. turns: the
    messages of the policy, 1 for a text.

    >>> one_answer(["<answer>4</answer>", "4", "<answer>4", "<answer>3</answer> or <answer>4</answer>"])
    [1.0, 0.0, 0.0, 0.0]
    """
    return [_one_answer(one) for one in completions]


def _one_answer(completion: Any) -> float:
    said = [completion]
    if not isinstance(completion, str):
        said = [str(one.get("content") or "") for one in completion if one.get("role") == "assistant"]
    text = "\n".join(said)
    blocks = text.count("<answer>")
    if not blocks or blocks != text.count("</answer>"):
        return 0.0
    return 1.0 - min((blocks - 1) / max(len(said), 1), 1.0)


def matching(match: Callable[[str], Any], completions: Sequence[Any], starts: Sequence[str] | None) -> list[float]:
    """1.0 where a completion's text matches, by itself or after what its prompt holds of the reply."""
    texts = [_whole_text(completion) for completion in completions]
    pairs = zip(texts, starts or [""] * len(texts), strict=True)
    return [float(bool(match(text) or (start and match(start + text)))) for text, start in pairs]


def _whole_text(completion: Any) -> str:
    """As `text_of`, after the thoughts that a message holds apart from its content, "reasoning_content"."""
    text = text_of(completion)
    if isinstance(completion, str):
        return text
    said = [message for message in completion if message.get("role") == "assistant"]
    thoughts = said[-1].get("reasoning_content") if said else None
    return f"<think>\n{thoughts.strip()}\n</think>\n\n{text}" if isinstance(thoughts, str) else text


@per_sample
def math_verify(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float]:
    """1.0 if math-verify judges the completion's final expression to be mathematically equal to the answer.

    The final expression is what the last \\boxed{...} or <answer>...</answer> holds, else the one that math-verify
    finds. An answer without LaTeX delimiters is read as a single formula: `x^2+1` means `$x^2+1$`.

    Raises InputError if math-verify is not installed or an answer cannot be parsed.
    """
    return score_each(_same_expression, completions, answer)


@per_sample
def math_verify_strict(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float]:
    """As `math_verify`, but 0.0 for a completion without a box or answer tag."""
    return score_each(functools.partial(_same_expression, strict=True), completions, answer)


def _same_expression(text: str, expected: Any, strict: bool = False) -> bool:
    with optional_package("math-verify", "verifiers", "the reward 'math_verify'"):
        from math_verify import verify
    wanted, found = answer_text(expected), final_answer(text)
    formula = as_latex(wanted)
    gold = math_verify_reading(formula if any(one in wanted for one in LATEX_DELIMITERS) else f"${formula}$")
    if not gold:
        raise InputError(f"math_verify cannot parse the answer {str(expected)[:80]!r}: use exact_match for text")
    if found is None and strict:
        return False
    said = after_thoughts(text) if found is None else found
    number, right = numeric_value(said), numeric_value(wanted)
    if number is not None and right is not None and (number == right or number.denominator == right.denominator == 1):
        return number == right
    if (letter := choice_of(wanted)) is not None and len(wanted.strip(" $()")) == 1 and choice_of(said) == letter:
        return True
    if "dots" in wanted or "..." in wanted:  # what is left out cannot be computed
        return same_text(said, wanted)
    if is_huge(said) and not is_huge(wanted):
        return False
    return any(
        verify(gold, one, allow_set_relation_comp=True, timeout_seconds=None) and _near(gold[0], one[0])
        for one in readings(text, right is not None)
    )


def _near(one: Any, other: Any) -> bool:
    """Whether numbers that math-verify takes for equal are: it rounds to six decimals, where small ones are all 0."""
    from sympy import Expr, N

    if not all(isinstance(each, Expr) and each.is_number and each.is_real for each in (one, other)):
        return True
    first, second = N(one, 15), N(other, 15)
    small, large = sorted((abs(first), abs(second)))
    return bool(small == 0 or small > _SMALL or (first * second > 0 and small > large * (1 - _SMALL)))


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

    def score(text: str, of: tuple[str, dict[str, Any]]) -> float:
        task, entry = of
        tagged = last_tagged(text)
        answer = text if tagged is None else tagged
        return _scorer(task)(answer=answer.strip(), entry=entry)

    return score_each(score, completions, list(zip(reasoning_gym_task, reasoning_gym_entry, strict=True)))


def tagged_match(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float]:
    """1.0 if the text in the completion's last `<answer>...</answer>` is the answer, but for white space.

    An answer with tags of its own is the text in them. A completion without tags scores 0.

    >>> tagged_match(["It barks. <answer> a dog </answer>", "a dog"], answer=["a dog", "a dog"])
    [1.0, 0.0]
    """

    def same(text: str, expected: Any) -> bool:
        found, wanted = last_tagged(text), last_tagged(str(expected))
        if wanted is None:
            wanted = str(expected)
        return found is not None and found.split() == wanted.split()

    return score_each(same, completions, answer)


def last_tagged(text: str) -> str | None:
    """The text in the last `<answer>...</answer>`; None where there is none."""
    end = text.rfind("</answer>")  # and no regular expression, which takes the square of the number of tags
    begin = text.rfind("<answer>", 0, max(end, 0))
    return text[begin + len("<answer>") : end] if begin >= 0 else None


@functools.cache  # building a task can be slow, e.g. if it reads word lists
def _scorer(task: str) -> Callable[..., float]:
    with optional_package("reasoning-gym", "verifiers", "the reward 'reasoning_gym'"):
        from reasoning_gym import get_score_answer_fn
    return get_score_answer_fn(task)
