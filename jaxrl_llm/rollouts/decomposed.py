"""Rollouts in which the policy writes sub-questions, and another model that does not learn solves the problem."""

from __future__ import annotations

from asyncio import gather
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.rollout import Rollout
from jaxrl_llm.rewards.decomposition import Terms, content_words, of_vectors, of_word_counts, terms_of
from jaxrl_llm.rewards.workers.loading import load_function
from jaxrl_llm.rollouts.agents.plans import items_in
from jaxrl_llm.rollouts.auxiliary_prompts import problem_of, second_prompt
from jaxrl_llm.rollouts.context import Task, Tools
from jaxrl_llm.rollouts.episode import Episode, Segment
from jaxrl_llm.utils.errors import InputError, shown

DECOMPOSE = """{problem}

A first attempt at this problem:
{attempt}

Do not solve the problem. Write the questions whose answers would help to solve it, one on a line, and nothing else."""
QUESTION = """{problem}

{known}Answer this question about the problem, and nothing else: {question}"""
AGAIN = """{problem}

{known}Solve the problem with the help of these answers."""


def known_text(questions: Sequence[str], answers: Sequence[str]) -> str:
    """Questions with their answers; "" for none."""
    told = "\n".join(f"{one}\n{other}" for one, other in zip(questions, answers, strict=True))
    return f"{told}\n\n" if told else ""


@part
def decomposing(
    solver: str | None = None,
    column: str = "solution",
    questions: int = 8,
    solver_tokens: int | None = None,
    nouns: str | None = None,
    embed: str | None = None,
) -> Rollout:
    """Groups of decompositions of a problem, each judged by what a solver that does not learn makes of it (DaSLaM).

    The solver answers the problem; the policy sees both, and writes at most `questions` sub-questions, one on a line,
    the only tokens that are trained on; the solver answers them one after the other, and then the problem again with
    these answers. That last answer is what the run's reward functions score.

    solver: FILE.py:FUNCTION of a prompt's text that returns the answer; None: the run's reference policy, whose most
    probable tokens are taken, at most `solver_tokens` in an answer (None: as many as a completion has). column: of the
    data set, with a solution, a step on a line; "" for none. nouns, embed: FILE.py:FUNCTION of a text that returns its
    nouns, and its vector; see `rewards.decomposition`.

    Provides decomposition, the four terms of `rewards.decomposition.Terms`. InputError for a function that cannot be
    loaded, and for a solution that is no text.
    """
    check_number("questions", questions, least=1, most=1024, whole=True)
    check_number("solver_tokens", solver_tokens, least=1, whole=True, or_none=True)
    function = None if solver is None else load_function(solver, "the solver").function
    named: Callable[[str], Any] = content_words if nouns is None else load_function(nouns, "nouns").function
    alike = of_word_counts if embed is None else of_vectors(load_function(embed, "embed").function)

    async def solved(tools: Tools, task: Task, prompt: Sequence[int], text: str, number: int) -> Episode:
        """The solver's answer to a prompt; blank where the prompt fills the context. number: of the sample."""
        blank = Episode(tuple(task.prompt), task.prompt_id, number)
        if function is not None:
            said = str(await tools.call(function, text, name=f"solver {number}"))
            return blank + tools.given(said)._replace(sampled=True)
        if not tools.fits(prompt):
            return blank + tools.given("")._replace(sampled=True)
        answer = await tools.sample(prompt, number=number, limit=solver_tokens, greedy=True, reference=True)
        return blank + Segment(answer.segments[-1].tokens, sampled=True)

    async def one(tools: Tools, task: Task, number: int, attempt: str) -> tuple[Episode, Episode, list[str], list[str]]:
        problem = problem_of(tools, task)
        prompt = second_prompt(tools, task, DECOMPOSE.format(problem=problem, attempt=attempt))
        if not tools.fits(prompt):
            raise InputError(
                f"the problem of prompt {task.prompt_id} and an attempt at it have {len(prompt)} tokens, which fill "
                "the model's context: lower solver_tokens"
            )
        episode = await tools.sample(prompt, number=number)
        asked, answers = items_in(tools.decode(episode.last))[:questions], list[str]()
        first = task.samples + 1 + number * (questions + 1)
        for place, question in enumerate(asked):
            known = known_text(asked[:place], answers)
            text = QUESTION.format(problem=problem, known=known, question=question)
            found = await solved(tools, task, second_prompt(tools, task, text), text, first + place)
            answers.append(tools.decode(found.last))
        text = AGAIN.format(problem=problem, known=known_text(asked, answers)) if asked else problem
        again = await solved(tools, task, second_prompt(tools, task, text), text, first + questions)
        return episode, again, asked, answers

    async def program(tools: Tools, task: Task) -> list[Episode]:
        problem, solution = problem_of(tools, task), task.row.get(column) or ""
        if not isinstance(solution, str):
            raise InputError(f"the solution of a prompt is a text, but the column {column!r} has {shown(solution)}")
        attempt = tools.decode((await solved(tools, task, task.prompt, problem, task.samples)).last)
        found = await gather(*(one(tools, task, number, attempt) for number in range(task.samples)))
        scored = await tools.score([again for _, again, _, _ in found])
        out = []
        for number, ((episode, again, asked, answers), score) in enumerate(zip(found, scored, strict=True)):
            after = tools.decode(again.last)
            texts = (problem, asked, answers, solution, attempt, after)
            terms = Terms(*await tools.call(terms_of, *texts, named, alike, name=f"terms {number}"))
            judged = replace(episode, reward=score.reward, rewards=score.rewards, entries=score.entries)
            out.append(judged.with_info(decomposition=list(terms)))
        return out

    return Rollout(program, "decomposing", frozenset({"decomposition"}), (column,), reference=function is None)
