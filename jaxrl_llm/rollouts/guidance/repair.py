"""Programs that try groups again that teach nothing: with hints, or with a prompt that the policy rewrites."""

import re
from asyncio import gather
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from jaxrl_llm.core.annotations import Rewrite
from jaxrl_llm.core.arguments.checks import expect
from jaxrl_llm.core.arguments.ranges import Count, Fraction, NonNegativeInt
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.rollout import Demands, Rollout, Task
from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.guidance.hints import Hints, from_column, problem_of
from jaxrl_llm.rollouts.programs import program_part, scored_samples
from jaxrl_llm.utils.errors import InputError

SIMPLER = """Rewrite the problem below so that it is easier to solve: use simple words, and state every condition that
has to hold. The task must stay the same, its answer must still be {solution}, and the text must not reveal the answer.
Write the new problem between two lines of three backticks.

Problem: {problem}
"""
REWORDED = """Say the problem below in other words. The task must stay the same, its answer must still be {solution},
and the text must not reveal the answer. Write the new problem between two lines of three backticks.

Problem: {problem}
"""
HARDER = """Rewrite the problem below so that it is harder to solve: it should take more steps, or say less directly
what is given. Its answer must still be {solution}, and the text must not reveal the answer. Write the new problem
between two lines of three backticks.

Problem: {problem}
"""
Succeeds = Callable[[Episode], bool]
When = Callable[[Sequence[Episode]], bool]
Fix = Callable[[Tools, Task, list[Episode]], Awaitable[list[Episode] | None]]


@part
def succeeds(success: float = 0.0, accuracy: str | None = None) -> Succeeds:
    """A function of a scored episode: whether its reward, or that component of it, is above `success`.

    Without a score it is not. Raises InputError, when it is called, for a component that the run's rewards do not have.
    """

    def test(episode: Episode) -> bool:
        if accuracy is not None and accuracy not in episode.rewards:
            names = ", ".join(sorted(episode.rewards)) or "none"
            raise InputError(f"accuracy is {accuracy!r}, but the rewards are {names}: name one of them")
        return (episode.score if accuracy is None else episode.rewards[accuracy]) > success

    return test


def marked_episodes(
    episodes: Sequence[Episode], unhinted: bool = False, **info: float | Sequence[float]
) -> list[Episode]:
    """The episodes with `info` and info["guided"] 0 where they have no such entry, and info["unhinted"] for all."""
    known = {"guided": 0.0, **info}
    return [episode.with_info(**{**known, **episode.info, "unhinted": float(unhinted)}) for episode in episodes]


def none_succeed(succeeds: Succeeds) -> When:
    """A condition: no sample of the group succeeds."""
    return lambda found: not any(map(succeeds, found))


def _all_succeed(succeeds: Succeeds) -> When:
    """A condition: all samples of the group succeed."""
    return lambda found: all(map(succeeds, found))


@program_part("repair", {"guided"})
async def repair(
    tools: Tools, task: Task, *cases: tuple[When, Fix], start: NonNegativeInt = 0, **info: float | Sequence[float]
) -> list[Episode]:
    """A group of samples, which is fixed as the first of the cases says whose condition holds of it, if any does.

    cases: a condition of the scored group, and its fix, an async function (tools, task, group) that returns the group
    in its place, or None where the row has nothing that helps. The samples that it draws have numbers from
    `task.samples` on. start: the first training step, from 0, in which groups are fixed. info: of episodes to which a
    fix gave no such entry.

    Provides info["guided"], 1 for episodes to which a fix gave it; info["unhinted"] is 1 where nothing helped.
    """
    found = await scored_samples(tools, task.prompt, range(task.samples))
    fix = next((fix for when, fix in cases if when(found)), None)
    if fix is None or tools.first_step < start:
        return marked_episodes(found, False, **info)
    fixed = await fix(tools, task, found)
    return marked_episodes(found if fixed is None else fixed, fixed is None, **info)


@part
def again(hints: Hints, when: When, plain: NonNegativeInt = 0, mark: str = "guided") -> Fix:
    """Sample the group again with the hints of its prompt, one after the other, as long as the condition holds of it.

    plain: samples of each new group without a hint. mark: the entry of info that is 1 for the others, "guided", or
    "harder" for texts that no group needs.
    """

    async def fix(tools: Tools, task: Task, found: list[Episode]) -> list[Episode] | None:
        G, texts = task.samples, await hints.write(tools, task, task.samples)
        longer = G - min(plain, G - 1)
        for level, text in enumerate(texts, start=1):
            first = level * G + hints.samples
            with_text, others = await gather(
                scored_samples(tools, tools.prompt_with(text), range(first, first + longer)),
                scored_samples(tools, task.prompt, range(first + longer, first + G)),
            )
            found = [*(episode.with_info(**{mark: 1.0}) for episode in with_text), *others]
            if not when(found):
                break
        return found if texts or mark == "harder" else None

    return fix


@part
def retried(
    hints: Hints, succeeds: Succeeds, plain: NonNegativeInt = 0, start: NonNegativeInt = 0, harder: Hints | None = None
) -> Rollout:  # fmt: skip
    """Sample a group again with the hints of its prompt, one after the other, until a sample succeeds.

    A group in which no sample succeeds is replaced by one under the prompt with the first hint, that by one with the
    second, and so on; after the last hint the group stays as it is. plain: samples of each new group that get no hint,
    and are drawn anew (in a group that is not larger, all but one of them get it). start: the first training step, from
    0, in which there are hints. Samples with a hint are trained on under the prompt with it.

    harder: texts that make a problem harder, the weakest first, such as a further condition. With it a group in which
    all samples succeed, which teaches as little, is sampled again likewise, until a sample fails.

    Provides info["guided"], 1 for episodes with a hint; info["unhinted"] is 1 in a group that failed and had no hint.
    With `harder`, info["harder"] is 1 for episodes with such a text.
    """
    expect("retried's hints", hints, Hints)
    none, every = none_succeed(succeeds), _all_succeed(succeeds)
    failed = none, again(hints, none, plain)
    if harder is None:
        return replace(repair(failed, start=start), name=f"retried({hints.name})", columns=hints.columns)
    expect("retried's harder", harder, Hints)
    rollout = repair(failed, (every, again(harder, every, plain, "harder")), start=start, harder=0.0)
    name, columns = f"retried({hints.name}, {harder.name})", (*hints.columns, *harder.columns)
    return replace(rollout, name=name, columns=columns)


@part
def hinted(column: str = "hint", above: float = 0.0) -> Rollout:
    """`retried` with the hints in a column of the data set, where no reward is above `above`."""
    return replace(retried(from_column(column), succeeds(above)), name=f"hinted({column})")


@part
def rescued(hints: Hints, succeeds: Succeeds, start: NonNegativeInt = 0) -> Rollout:
    """Replace a sample of a group in which none succeeds by one that succeeds with the weakest possible hint.

    One sample is drawn for each hint of the prompt, all at once. Of those that succeed the one with the weakest hint
    replaces the first sample of the group, and is trained on under the prompt with the hint. Without a success the
    group stays as it is. start: as in `retried`, and so is what it provides.
    """

    expect("rescued's hints", hints, Hints)

    async def rescue(tools: Tools, task: Task, found: list[Episode]) -> list[Episode] | None:
        texts = await hints.write(tools, task, task.samples)
        first = task.samples + hints.samples
        tried = await tools.score(
            await gather(*(tools.sample(tools.prompt_with(t), number=first + i) for i, t in enumerate(texts)))
        )
        right = [episode.with_info(guided=1.0) for episode in tried if succeeds(episode)][:1]
        return [*right, *found[len(right) :]] if texts else None

    rollout = repair((none_succeed(succeeds), rescue), start=start)
    return replace(rollout, name=f"rescued({hints.name})", columns=hints.columns)


@program_part(
    "rewritten({which})", {"rewritten", "hard"}, ["{column}"],
    Demands(variable_size=True, max_episodes=lambda G: 2 * G),
)  # fmt: skip
async def rewritten(
    tools: Tools,
    task: Task,
    succeeds: Succeeds,
    hard: Fraction = 0.3,
    medium: Fraction = 0.7,
    which: Rewrite = "both",
    column: str = "answer",
    limit: Count = 400,
    simpler: str = SIMPLER,
    reworded: str = REWORDED,
    harder: str = "",
) -> list[Episode]:
    """Sample, beside a prompt that is not easy, a prompt that the policy writes in its place.

    With a share of successes of at most `hard` the policy is asked for a simpler version of the problem, with one of at
    most `medium` for other words (which "hard_only" or "medium_only": for one of them only), and, if `harder` is given,
    such as HARDER, for a harder version where all samples succeed. simpler, reworded, harder: what it is asked, with
    {problem} and, from `column`, {solution}. Its answer of at most `limit` tokens must have the new
    problem between two lines of three backticks, without the solution unless the old problem has it. The new prompt is
    sampled as often as the old one and scored by the same row. Of the two groups those are returned in which some, but
    not all samples succeed; the old one if there is none.

    Provides info["rewritten"], 1 for samples of the new prompt, a group of their own, and info["hard"], 1 for samples
    of both where the share of successes was at most `hard`. info["unhinted"]: 1 where no new problem could be read.
    """
    G = task.samples
    old = await scored_samples(tools, task.prompt, range(G))
    share = sum(map(succeeds, old)) / G
    is_hard = share <= hard
    solved = bool(harder) and share == 1

    def told(episodes: Sequence[Episode], rewritten: float = 0.0, unhinted: float = 0.0) -> list[Episode]:
        known = {"rewritten": rewritten, "hard": float(is_hard), "unhinted": unhinted}
        return [episode.with_info(**known) for episode in episodes]

    if not solved and (share > medium or which == ("medium_only" if is_hard else "hard_only")):
        return told(old)
    said = problem_of(task.row)
    solution = str(task.row.get(column, ""))
    question = simpler if is_hard else reworded
    if solved:
        question = harder
    asked = tools.prompt(question.format(problem=said, solution=solution))
    answer = await tools.sample(asked, number=G, limit=limit)
    text = fenced(tools.decode(answer.last))
    if not text or (solution and states(text, solution) and not states(said, solution)):
        return told(old, unhinted=1.0)
    new = await scored_samples(tools, tools.prompt(text), range(G + 1, 2 * G + 1))
    groups = [told(old), told(new, rewritten=1.0)]
    kept = [episode for some in groups if 0 < sum(map(succeeds, some)) < G for episode in some]
    return kept or groups[0]


def states(text: str, solution: str) -> bool:
    """Whether a text has the solution as words or numbers of its own, not within longer ones.

    >>> states("It is 8.", "8"), states("There are 18 or 8.5 of them, or 8,000.", "8"), states("x = a/b", "a/b")
    (True, False, True)
    """
    return re.search(rf"(?<!\w)(?<!\d[.,]){re.escape(solution)}(?!\w)(?![.,]\d)", text) is not None


def fenced(text: str) -> str:
    r"""The first text between two lines that begin with three backticks; "" if there is none.

    >>> fenced("Here:\n```text\nWhat is 2 + 2?\n```\n")
    'What is 2 + 2?'
    """
    found: Any = re.search(r"^```[^\n]*\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    return found[1].strip() if found else ""
