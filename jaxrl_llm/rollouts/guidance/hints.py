"""Where hints come from: a column of the data set, the beginning of a known solution, or the policy itself."""

import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from jaxrl_llm.core.arguments.ranges import Range
from jaxrl_llm.core.repr import layout, part
from jaxrl_llm.core.rollout import Task
from jaxrl_llm.data.chat.messages import text_of_content
from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.utils.errors import InputError, shown

Few = Annotated[int, Range(least=1, most=64)]
Write = Callable[[Tools, Task, int], Awaitable[Sequence[str]]]

HINT = "\n\nHint: {}"
BEGINNING = "\n\nA correct solution begins as follows, and you may go on from there:\n{}"
LEVELS = """Below are a problem and a correct solution. Write {levels} hints for a student who cannot solve the problem.
The first hint names the key idea only, the next give a direction, and the last guides in detail. No hint may contain
the final answer. Answer with a JSON list of {levels} strings and nothing else.

Problem: {problem}

Solution: {solution}
"""
EXPLAIN = """Problem: {problem}

The correct answer is: {solution}

Explain why this answer is correct.
"""
ABSTRACT = """Problem: {problem}

The correct answer is: {solution}

An explanation: {explanation}

State in one or two sentences the knowledge that is most needed to solve the problem. Give neither the answer nor any
step of the solution.
"""


@dataclass(frozen=True, repr=False)
class Hints:
    """A source of hints for a prompt.

    write: async (tools, task, number) -> texts to add to the prompt, the weakest first; none if there is no hint. It
    may sample from the policy under the sample numbers from `number` to `number + samples - 1`.
    """

    write: Write
    name: str = "hints"
    columns: tuple[str, ...] = ()  # columns of the data set that it reads
    samples: int = 0  # most samples that it draws from the policy for one prompt

    def __post_init__(self) -> None:
        if not callable(self.write):
            raise InputError(f"a source of hints is {shown(self.write)}, but must be an async function")

    __repr__ = layout


def levels_of(value: Any) -> list[str]:
    """The hints in a column's value, from the weakest to the strongest.

    A text is one hint and a list of texts one hint each. Of a list of tiers, each a list of parts, a hint is the first
    parts of one tier. Raises InputError for anything else.

    >>> levels_of([["idea", "theorem"], ["first step"]])
    ['idea', 'idea\\ntheorem', 'first step']
    """
    if value is None or isinstance(value, str):
        return [value] if value else []
    if not isinstance(value, list | tuple) or not all(isinstance(one, str | list | tuple) for one in value):
        raise InputError(f"hints are a text, a list of texts, or a list of lists of texts, but found {shown(value)}")
    out: list[str] = []
    for tier in value:
        if isinstance(tier, str):
            out += [tier] if tier else []
        elif all(isinstance(x, str) for x in tier):
            out += ["\n".join(tier[: count + 1]) for count in range(len(tier))]
        else:
            raise InputError(f"a tier of hints is a list of texts, but found {shown(tier)}")
    return out


def texts_of(value: Any, column: str) -> list[str]:
    """The texts in a column: one, or those of a list; none for empty or missing ones. InputError for anything else."""
    listed = list(value) if isinstance(value, list | tuple) else [value]
    if not all(one is None or isinstance(one, str) for one in listed):
        raise InputError(f"the column {column!r} must have a text or a list of texts, but has {shown(value)}")
    return [one for one in listed if one]


@part
def from_column(column: str = "hint", text: str = HINT) -> Hints:
    """The hints of a column of the data set, see `levels_of`. text: how a hint is written after the prompt."""

    async def write(tools: Tools, task: Task, number: int) -> Sequence[str]:
        return [text.format(hint) for hint in levels_of(task.row.get(column))]

    return Hints(write, f"from_column({column})", (column,))


@part
def beginnings(column: str = "solution", stages: Few = 3, text: str = BEGINNING) -> Hints:
    """The first 1/(stages + 1), 2/(stages + 1) ... of the characters of a known solution, rounded to whole ones."""

    async def write(tools: Tools, task: Task, number: int) -> Sequence[str]:
        solution = task.row.get(column)
        if not isinstance(solution, str | None):
            raise InputError(f"the solution of a prompt is a text, but the column {column!r} has {shown(solution)}")
        if not solution:
            return []
        return [text.format(solution[: round(i / (stages + 1) * len(solution))]) for i in range(1, stages + 1)]

    return Hints(write, f"beginnings({column})", (column,))


@part
def own_levels(
    column: str = "solution", levels: Few = 3, tries: Few = 3, template: str = LEVELS, text: str = HINT
) -> Hints:
    """Hints of several levels that the current policy writes, all in one answer, from the solution in a column.

    template: the prompt, with {problem}, {solution} and {levels}. The answer must contain a JSON list of `levels`
    texts; else the policy is asked again, `tries` times in all, then there is no hint. Answers are not trained on.
    """

    async def write(tools: Tools, task: Task, number: int) -> Sequence[str]:
        solution = task.row.get(column)
        if not solution:
            return []
        prompt = tools.prompt(template.format(problem=problem_of(task.row), solution=solution, levels=levels))
        for i in range(tries):
            answer = await tools.sample(prompt, number=number + i)
            if hints := list_in(tools.decode(answer.last), levels):
                return [text.format(hint) for hint in hints]
        return []

    return Hints(write, f"own_levels({column})", (column,), tries)


@part
def own_hint(column: str = "answer", explain: str = EXPLAIN, template: str = ABSTRACT, text: str = HINT) -> Hints:
    """One abstract hint that the current policy writes from the answer in a column, after it has explained the answer.

    explain, template: the two prompts, with {problem} and {solution}, the second with {explanation}. There is no hint
    if one of the policy's two texts is blank. They are not trained on.
    """

    async def write(tools: Tools, task: Task, number: int) -> Sequence[str]:
        solution = task.row.get(column)
        if solution is None or solution == "":
            return []
        known = {"problem": problem_of(task.row), "solution": solution}
        explanation = await tools.sample(tools.prompt(explain.format(**known)), number=number)
        if not (why := tools.decode(explanation.last).strip()):
            return []
        hint = await tools.sample(tools.prompt(template.format(**known, explanation=why)), number=number + 1)
        said = tools.decode(hint.last).strip()
        return [text.format(said)] if said else []

    return Hints(write, f"own_hint({column})", (column,), 2)


def problem_of(row: Mapping[str, Any]) -> str:
    """The text of a row's prompt: of its last message, if it is a conversation; "" for token ids.

    >>> problem_of({"prompt": [{"role": "user", "content": "2 + 2?"}]})
    '2 + 2?'
    """
    prompt = row.get("prompt")
    if isinstance(prompt, list | tuple) and prompt and isinstance(prompt[-1], Mapping):
        return text_of_content(prompt[-1].get("content"))
    return prompt if isinstance(prompt, str) else ""


def list_in(text: str, count: int) -> list[str]:
    """The first JSON list of `count` texts in a text, none of them blank; an empty list if there is none.

    >>> list_in('Sure: ["add", "add twice"].', 2)
    ['add', 'add twice']
    """
    reader = json.JSONDecoder()
    for found in re.finditer(r"\[\s*\"", text):
        try:
            value, _ = reader.raw_decode(text, found.start())
        except (json.JSONDecodeError, RecursionError):
            continue
        if isinstance(value, list) and len(value) == count and all(isinstance(x, str) and x.strip() for x in value):
            return value
    return []
