import math
import re
from asyncio import gather
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Annotated, Any, NamedTuple

import jax.numpy as jnp

from jaxrl_llm.algorithms.classic.ppo import ppo
from jaxrl_llm.algorithms.method import Algorithm, beside, method
from jaxrl_llm.core.annotations import Code, Count, NonNegative, OfRun, Ours, Positive, Range
from jaxrl_llm.core.parts import Array, Trajectories, batch_part, chain, part, step_part
from jaxrl_llm.rewards.transforms import rescore
from jaxrl_llm.rewards.workers.loading import load_function
from jaxrl_llm.rollouts.agents.plans import items_in
from jaxrl_llm.rollouts.auxiliary_prompts import problem_text, second_prompt
from jaxrl_llm.rollouts.episode import Segment
from jaxrl_llm.rollouts.programs import Demands, Episode, Rollout, Task, Tools
from jaxrl_llm.utils.errors import InputError, shown
from jaxrl_llm.utils.words import cosine

Similarity = Callable[[str, str], float]
Nouns = Callable[[str], Collection[str]]
_FUNCTION_WORDS = (
    "a about after all also am an and any are as at be been before but by can could did do does each few for from had "
    "has have he her him his how i if in into is it its many may more most much must my no not of on one or our out "
    "per she should so some such than that the their them then there these they this those to up was we were what when "
    "where which who whose why will with would you your"
)
FUNCTION_WORDS = frozenset(_FUNCTION_WORDS.split())
DECOMPOSE = """{problem}

A first attempt at this problem:
{attempt}

Do not solve the problem. Write the questions whose answers would help to solve it, one on a line, and nothing else."""
QUESTION = """{problem}

{known}Answer this question about the problem, and nothing else: {question}"""
AGAIN = """{problem}

{known}Solve the problem with the help of these answers."""


@batch_part
def shaped_by_decomposition(batch: Trajectories, shaping: float) -> Array:
    """A function `batch -> f32[N]`: the scores, plus `shaping` times the sum of info["decomposition"] f32[N, 4]."""
    terms = (batch.info or {}).get("decomposition")
    return batch.scores if terms is None else batch.scores + shaping * jnp.sum(jnp.nan_to_num(terms), axis=1)


@method(paper="arXiv 2310.18338", test="test_daslam.py::test_daslam_is_ppo_of_its_reward")
@beside("supervised", "the supervised start of both models", "supervised training before the run")
def daslam(
    solver: OfRun[str | None] = None,
    column: Code[str] = "solution",
    questions: Ours[int] = 8,
    solver_tokens: Ours[int | None] = None,
    nouns: Ours[str | None] = None,
    embed: Ours[str | None] = None,
    shaping: Code[float] = 1.0,
    clip_low: Code[NonNegative] = 0.2,
    clip_high: Code[NonNegative] = 0.2,
    value_clip: Code[Positive | None] = 0.2,
    value_coefficient: Code[NonNegative] = 0.1,
    gamma: Code[float] = 1.0,
    lam: Code[float] = 0.95,
    kl_coefficient: Code[NonNegative] = 0.01,
    kl_target: Ours[Positive | None] = 0.1,
    kl_horizon: Code[Positive] = 10000.0,
) -> Algorithm:
    """Decomposition and solution by language models (DaSLaM).

    The policy learns to ask. A solver, which does not learn, answers the problem; the policy sees the problem and that
    attempt, and writes sub-questions; the solver answers them, and then the problem again with these answers. An
    episode's reward, with q_i, a_i a sub-question and its answer, and c1, c2 the similarities of the i-th steps of the
    solver's first and last answer to that of the solution in `column`, is

        R = 1 - |nouns(problem) xor nouns(q)| / |nouns(problem)|  +  0.25 sum_i cos(q_i, a_i)  +  r
            + sum_i (0.5 c1 if c2 > c1, else -1 - 0.5 c1)  +  sum_j (0.5 if operator j is the solution's, else -0.5)

    where r is the run's reward of the last answer; shaping multiplies the four others, and 0 leaves r alone. Then `ppo`
    on the policy's tokens, with a penalty to the reference whose coefficient begins at kl_coefficient and is adapted to
    kl_target, nats per token (the code's 4 are of a whole sequence; None: not adapted), with kl_horizon.

    solver: FILE.py:FUNCTION of a prompt that returns an answer, such as a larger model's; None: the run's reference,
    the initial policy, whose answers have at most solver_tokens. questions: most of them. nouns, embed: see
    `decomposing`; by default words with a meaning of their own, and counts of words, where the code
    has a tagger and vectors of words. clip_low, clip_high, value_clip, value_coefficient, gamma and lam as in `ppo`.
    The words of the prompts are ours. The paper first trains the policy on known sub-questions.
    """
    base = ppo(
        clip_low=clip_low, clip_high=clip_high, value_clip=value_clip, value_coefficient=value_coefficient, gamma=gamma,
        lam=lam, kl_coefficient=kl_coefficient, kl_target=kl_target, kl_horizon=kl_horizon,
    )  # fmt: skip
    return replace(
        base,
        transform=chain(rescore(shaped_by_decomposition(shaping), {"decomposition"}), base.transform),
        rollout=decomposing(solver, column, questions, solver_tokens, nouns, embed),
    )


def coverage(question: Collection[str], asked: Collection[str]) -> float:
    """1 - |Q xor S| / |Q| of the nouns of a question and of its sub-questions; 1 if the question has none.

    >>> coverage({"apples", "tom", "price"}, {"apples", "price", "shop"})
    0.33333333333333337
    """
    return 1.0 - len(set(question) ^ set(asked)) / len(set(question)) if question else 1.0


class Terms(NamedTuple):
    """The shaped terms of a decomposition, beside whether the last answer is right."""

    coverage: float
    relevance: float
    steps: float
    operators: float


def words_of(text: str) -> list[str]:
    """The words of a text in lower case, without numbers.

    >>> words_of("Tom's 3 red Apples")
    ['tom', 's', 'red', 'apples']
    """
    return re.findall(r"[^\W\d_]+", text.lower())


def content_words(text: str) -> set[str]:
    """The words of a text with a meaning of their own.

    >>> sorted(content_words("How many apples has Tom?"))
    ['apples', 'tom']
    """
    return {word for word in words_of(text) if len(word) > 1 and word not in FUNCTION_WORDS}


def of_word_counts(one: str, other: str) -> float:
    """The cosine of the texts' counts of words; 0 for a text without words.

    >>> round(of_word_counts("red apple", "red pear"), 6)
    0.5
    """
    return cosine(Counter(words_of(one)), Counter(words_of(other)))


@step_part
def of_vectors(one: str, other: str, embed: Callable[[str], Sequence[float]]) -> float:
    """The cosine of the vectors that a function gives of two texts; 0 where one is 0."""
    return cosine(*(dict(enumerate(map(float, embed(text)))) for text in (one, other)))


def step_gain(
    gold: Sequence[str], before: Sequence[str], after: Sequence[str], similarity: Similarity = of_word_counts
) -> float:
    """The sum over i of 0.5 c1 if c2 > c1, else -1 - 0.5 c1, over the steps that all three have.

    c1 is the similarity of the i-th step of a solution to that of the first attempt, c2 to that of the second.
    """
    total = 0.0
    for step, one, other in zip(gold, before, after, strict=False):
        c1, c2 = similarity(step, one), similarity(step, other)
        total += 0.5 * c1 if c2 > c1 else -1.0 - 0.5 * c1
    return total


def operators_of(text: str) -> list[str]:
    """The operators between numbers or brackets.

    >>> operators_of("3 + 4*(2-1), well-known")
    ['+', '*', '-']
    """
    return re.findall(r"(?<=[\d)])\s*([-+*/\u00d7\u00f7])\s*(?=[\d(])", text)


def terms_of(
    question: str, asked: Sequence[str], answers: Sequence[str], solution: str, before: str, after: str,
    nouns: Nouns = content_words, similarity: Similarity = of_word_counts,
) -> Terms:  # fmt: skip
    """The four terms of sub-questions and their answers; see `daslam`.

    solution: the reference's, a step on each line; "" for none, whose two terms are 0. before, after: the solver's
    answers to the question without and with the sub-questions.
    """
    own = {word for one in asked for word in nouns(one)}
    lines = ([line.strip() for line in text.splitlines() if line.strip()] for text in (solution, before, after))
    gold, first, second = lines
    operators = zip(operators_of(solution), operators_of(after), strict=False)
    return Terms(
        coverage(nouns(question), own),
        0.25 * math.fsum(similarity(one, other) for one, other in zip(asked, answers, strict=True)),
        step_gain(gold, first, second, similarity),
        math.fsum(0.5 if one == other else -0.5 for one, other in operators),
    )


def known_text(questions: Sequence[str], answers: Sequence[str]) -> str:
    """Questions with their answers; "" for none."""
    told = "\n".join(f"{one}\n{other}" for one, other in zip(questions, answers, strict=True))
    return f"{told}\n\n" if told else ""


@part
def decomposing(
    solver: str | None = None,
    column: str = "solution",
    questions: Annotated[int, Range(least=1, most=1024)] = 8,
    solver_tokens: Count | None = None,
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
    nouns, and its vector. Without them nouns are the words that have a meaning of their own, and similarities are
    cosines of counts of words.

    Provides decomposition, the four terms of `Terms`. InputError for a function that cannot be
    loaded, and for a solution that is no text.
    """
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
        problem = problem_text(tools, task)
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
        problem, solution = problem_text(tools, task), task.row.get(column) or ""
        if not isinstance(solution, str):
            raise InputError(f"the solution of a prompt is a text, but the column {column!r} has {shown(solution)}")
        attempt = tools.decode((await solved(tools, task, task.prompt, problem, task.samples)).last)
        found = await gather(*(one(tools, task, number, attempt) for number in range(task.samples)))
        scored = await tools.score([again for _, again, _, _ in found])
        out = []
        for number, ((episode, again, asked, answers), score) in enumerate(zip(found, scored, strict=True)):
            texts = (problem, asked, answers, solution, attempt, tools.decode(again.last))
            terms = Terms(*await tools.call(terms_of, *texts, named, alike, name=f"terms {number}"))
            judged = replace(episode, reward=score.reward, rewards=score.rewards, entries=score.entries)
            out.append(judged.with_info(decomposition=list(terms)))
        return out

    return Rollout(
        program, "decomposing", frozenset({"decomposition"}), (column,), demands=Demands(reference=function is None)
    )
