"""Prompts that show candidate answers to a hard problem, a teacher's and the policy's own wrong ones."""

from asyncio import gather
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jaxrl_llm.core.arguments.ranges import Count, NonNegativeInt
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.rollout import Rollout, Task
from jaxrl_llm.rewards.workers.loading import load_function
from jaxrl_llm.rollouts.auxiliary_prompts import Question, also_ask, problem_text, second_prompt, stated_answer
from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.rollouts.episode import Episode, given, sampled_ids
from jaxrl_llm.rollouts.guidance.prefixes import responses_of
from jaxrl_llm.rollouts.guidance.repair import succeeds

CONTRASTED, WRONG_ONES = 1, 2  # parts of the program: what prompts show

REWRITE = """Problem: {problem}

Solution: {solution}

Rewrite this solution briefly, without judging or correcting it. Keep its steps and its final answer."""

CONTRAST = """{problem}

Of two candidate solutions, one is right and one is wrong.

Candidate 1:
{first}

Candidate 2:
{second}

Find out which, and solve the problem."""

WRONG = """{problem}

The following solutions are all wrong. Their final answers are: {answers}

{solutions}

Avoid their mistakes, and solve the problem."""


def contrast(random: np.random.Generator, problem: str, right: str, wrong: str) -> str:
    """The text of a prompt with a right and a wrong solution in random order, which does not say whose they are."""
    pair = (right, wrong) if random.random() < 0.5 else (wrong, right)
    return CONTRAST.format(problem=problem, first=pair[0], second=pair[1])


def wrong_ones(problem: str, stated: Sequence[str | None], solutions: Sequence[str]) -> str:
    """The text of a prompt with wrong solutions, and the distinct answers that they state."""
    distinct = list(dict.fromkeys(answer for answer in stated if answer is not None))
    numbered = "\n\n".join(f"Wrong solution {i}:\n{text}" for i, text in enumerate(solutions, start=1))
    return WRONG.format(problem=problem, answers=", ".join(distinct) or "none", solutions=numbered)


@part
def with_candidates(
    column: str = "teacher", threshold: float = 0.5, teachers: NonNegativeInt = 4, words: Count = 512,
    rewriter: str | None = None, success: float = 0.5,
) -> Rollout:  # fmt: skip
    """A group of samples, and for a problem whose mean reward is below `threshold`, groups of prompts with candidates.

    column: a teacher's responses to the problem, a text or a list of texts, of which `teachers` are drawn and scored,
    and right ones (reward above `success`) kept. A teacher that is frozen may answer before the run. Group 1
    (info["part"]) is of a prompt with a right response of the teacher and a wrong sample, if there are both; group 2 of
    one with all wrong samples and the answers that they state. Each has `task.samples` samples, scored as answers to
    the row. Adds info["solved"], the mean reward of the plain group.

    Candidates are first rewritten in at most `words` tokens, all in the same way, so that their style does not tell the
    teacher's from the policy's: by `rewriter`, FILE.py:FUNCTION of (problem, solution) that returns a text, such as a
    call of the teacher, or by the policy itself (None). Raises InputError for a rewriter that cannot be loaded.
    """
    external = None if rewriter is None else load_function(rewriter, "the rewriter").function
    is_right = succeeds(success)

    async def rewritten(tools: Tools, task: Task, problem: str, texts: Sequence[str]) -> list[str]:
        async def one(number: int, text: str) -> str:
            if external is not None:
                said = str(await tools.call(external, problem, text, name=f"rewrite {number}"))
                return tools.decode(tools.encode(said)[:words])
            prompt = second_prompt(tools, task, REWRITE.format(problem=problem, solution=text))
            # After the numbers of the three groups.
            found = await tools.sample(prompt, number=3 * task.samples + number, limit=min(words, task.limit))
            return tools.decode(sampled_ids(found))

        return list(await gather(*(one(number, text) for number, text in enumerate(texts))))

    async def taught(tools: Tools, task: Task, random: np.random.Generator) -> list[str]:
        """Right responses of the teacher among those drawn."""
        known = responses_of(tools, task, column)
        order = random.permutation(len(known))[:teachers]
        blank = Episode(task.prompt, task.prompt_id)
        tried = [blank + given(known[i])._replace(sampled=True) for i in order]
        scored = await tools.score(tried) if tried else []
        return [tools.decode(sampled_ids(one)) for one in scored if is_right(one)]

    async def questions(tools: Tools, task: Task, group: list[Episode]) -> dict[int, Question]:
        texts = [tools.decode(sampled_ids(episode)) for episode in group if not is_right(episode)]
        if mean_score(group) >= threshold or not texts:
            return {}
        random, problem = tools.random("candidates"), problem_text(tools, task)
        right = await taught(tools, task, random)
        teacher, student = int(random.integers(max(len(right), 1))), int(random.integers(len(texts)))
        short = await rewritten(tools, task, problem, [*texts, *right[teacher : teacher + 1]])
        stated = [stated_answer(text) for text in texts]
        asked = {WRONG_ONES: Question(wrong_ones(problem, stated, short[: len(texts)]))}
        if right:
            asked[CONTRASTED] = Question(contrast(random, problem, short[-1], short[student]))
        return asked

    asking = also_ask(questions, 2)

    async def program(tools: Tools, task: Task) -> list[Episode]:
        found = await asking.program(tools, task)
        solved = mean_score(found[: task.samples])
        return [episode.with_info(solved=solved) for episode in found]

    return replace(asking, program=program, name=f"with_candidates({column})", columns=(column,))


def mean_score(episodes: Sequence[Episode]) -> float:
    """The mean reward, 0 for episodes that are not scored."""
    return float(np.nan_to_num([one.score for one in episodes]).mean())
