"""Questions to a judge or verifier: their texts, what answers to them state, and the reward that trains a verifier.

A verdict is a number from 0 to 1, or None where an answer states none. The last verdict of an answer counts, so that
reasoning may come before it.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl_llm.core.arguments.ranges import check_number
from jaxrl_llm.core.repr import layout, part
from jaxrl_llm.rewards.verifiers import text_of
from jaxrl_llm.utils.errors import InputError, shown

Verdict = Callable[[str], float | None]

COMPARE = """Two responses to a prompt follow. Decide which of them is better.

Prompt:
{problem}

Response A:
{first}

Response B:
{second}

Explain in a few sentences which one serves the prompt better. The order of the responses says nothing. Then write your verdict in the last line: [[A]], [[B]], or [[tie]]."""  # noqa: E501
GRADE = """Grade a response to a prompt.

Prompt:
{problem}

Response:
{response}

Explain in a few sentences what is good and bad about it. Then write a number from {low} to {high}, the best, in the last line, such as [[{high}]]."""  # noqa: E501
CHECK = """Check whether a response to a prompt meets a criterion.

Prompt:
{problem}

Response:
{response}

Criterion: {criterion}

Explain in a sentence. Then write [[yes]] or [[no]] in the last line."""

_MARKED = re.compile(r"\[\[\s*(.*?)\s*\]\]|\\boxed\{\s*(?:\\text\{)?\s*([^{}]*?)\s*\}?\s*\}", re.DOTALL)
_STATED = r"(?:(?:verdict|answer|winner|score|grade|rating|better|response)\W+)*"


def stated(text: str) -> str | None:
    r"""What an answer states last, in lower case: between [[ and ]], in \boxed{}, or alone in its last line.

    >>> stated("B is short. [[B]] no, [[A]]"), stated("so \\boxed{tie}"), stated("Good.\n**Verdict: B**"), stated(" ")
    ('a', 'tie', 'b', None)
    """
    if found := _MARKED.findall(text):
        return str(found[-1][0] or found[-1][1]).lower()
    lines = [line for line in text.lower().splitlines() if line.strip()]
    if not lines:
        return None
    last = re.sub(r"[*_`#>\"']", "", lines[-1]).strip().rstrip(".!")
    return re.sub(rf"^{_STATED}", "", last).strip() or None


def preferred(text: str) -> float | None:
    """The verdict of a comparison: 1 for A, which is shown first, 0 for B, 1/2 for a tie, which some call C.

    >>> preferred("[[A]]"), preferred("Answer: b"), preferred("It is a [[tie]]"), preferred("Both are fine")
    (1.0, 0.0, 0.5, None)
    """
    return {"a": 1.0, "b": 0.0, "tie": 0.5, "c": 0.5, "equal": 0.5}.get(stated(text) or "")


def met(text: str) -> float | None:
    """The verdict of a check: 1 for yes or true, 0 for no or false."""
    return {"yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}.get(stated(text) or "")


@part
def on_scale(low: float = 1, high: float = 10) -> Verdict:
    """The verdict of a grade from `low` to `high`: its place between them. A grade beyond them is none.

    >>> on_scale(1, 5)("fine\\n[[4]]"), on_scale(0, 10)("Score: 7/10"), on_scale(0, 10)("[[11]]")
    (0.75, 0.7, None)
    """
    check_number("low", low)
    check_number("high", high, above=low)

    def grade(text: str) -> float | None:
        number = re.fullmatch(r"(-?[0-9]{1,9}(?:\.[0-9]{1,9})?)(?:\s*(?:/|of|out of)\s*([0-9]+))?", stated(text) or "")
        if number is None or (number[2] and float(number[2]) != high) or not low <= float(number[1]) <= high:
            return None
        return (float(number[1]) - low) / (high - low)

    return grade


@dataclass(frozen=True, repr=False)
class Comparison:
    """A question which of two responses is better.

    template: with {problem}, {first} and {second}, as `str.format` fills them in. verdict: of an answer, the
    probability that the first one is better.
    """

    template: str = COMPARE
    verdict: Verdict = preferred

    def __post_init__(self) -> None:
        check_template(self.template, ("problem", "first", "second"))

    __repr__ = layout

    def text(self, problem: str, first: str, second: str) -> str:
        """The question."""
        return self.template.format(problem=problem, first=first, second=second)


@dataclass(frozen=True, repr=False)
class Grading:
    """A question how good a response is, or whether it meets a criterion.

    template: with {problem} and {response}; and with {criterion} where it is asked for one.
    """

    template: str = CHECK
    verdict: Verdict = met

    def __post_init__(self) -> None:
        check_template(self.template, ("problem", "response"), ("criterion",))

    __repr__ = layout

    def text(self, problem: str, response: str, criterion: str = "") -> str:
        """The question."""
        return self.template.format(problem=problem, response=response, criterion=criterion)


@part
def grading(low: float = 1, high: float = 10) -> Grading:
    """A question for a grade on a scale."""
    return Grading(GRADE.replace("{low}", f"{low:g}").replace("{high}", f"{high:g}"), on_scale(low, high))


def check_template(template: str, fields: Sequence[str], others: Sequence[str] = ()) -> None:
    """InputError for a template without one of the fields, or with one that is neither among them nor the others."""
    try:
        template.format(**dict.fromkeys([*fields, *others], ""))
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise InputError(
            f"a judge's template has another field than {', '.join(fields)} ({error}): double braces that are text"
        ) from None
    if missing := [name for name in fields if f"{{{name}}}" not in template]:
        raise InputError(f"a judge's template {shown(template)} lacks {{{missing[0]}}}")


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

    The column `steps` has the steps, or how many there are; `first_error` is -1 if none is wrong. InputError otherwise.
    """
    scores: list[float | None] = []
    for completion, expected, listed in zip(completions, first_error, steps, strict=True):
        count = len(listed) if isinstance(listed, list | tuple) else listed
        if not isinstance(count, int) or not isinstance(expected, int) or not NONE <= expected < count:
            raise InputError(f"first_error is {shown(expected)}, but must be -1 or one of the steps, {shown(listed)}")
        scores.append(nearness(first_error_in(text_of(completion), count), expected, count))
    return scores
