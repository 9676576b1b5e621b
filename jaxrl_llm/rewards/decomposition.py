"""Rewards of sub-questions that help another model to solve a problem (DaSLaM, EMNLP 2023), from texts alone.

Similarities are cosines. By default they are of counts of words, and "nouns" are the words that have a meaning of their
own; functions for both can be given.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

Similarity = Callable[[str, str], float]
Nouns = Callable[[str], Collection[str]]

_FUNCTION_WORDS = (
    "a about after all also am an and any are as at be been before but by can could did do does each few for from had "
    "has have he her him his how i if in into is it its many may more most much must my no not of on one or our out "
    "per she should so some such than that the their them then there these they this those to up was we were what when "
    "where which who whose why will with would you your"
)
FUNCTION_WORDS = frozenset(_FUNCTION_WORDS.split())


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
    a, b = Counter(words_of(one)), Counter(words_of(other))
    size = math.sqrt(sum(n * n for n in a.values()) * sum(n * n for n in b.values()))
    return sum(n * b[word] for word, n in a.items()) / size if size else 0.0


def of_vectors(embed: Callable[[str], Sequence[float]]) -> Similarity:
    """The cosine of the vectors that a function gives of two texts; 0 where one is 0."""

    def similarity(one: str, other: str) -> float:
        a, b = (list(map(float, embed(text))) for text in (one, other))
        size = math.sqrt(sum(x * x for x in a) * sum(x * x for x in b))
        return sum(x * y for x, y in zip(a, b, strict=True)) / size if size else 0.0

    return similarity


def coverage(question: Collection[str], asked: Collection[str]) -> float:
    """1 - |Q xor S| / |Q| of the nouns of a question and of its sub-questions; 1 if the question has none.

    >>> coverage({"apples", "tom", "price"}, {"apples", "price", "shop"})
    0.33333333333333337
    """
    return 1.0 - len(set(question) ^ set(asked)) / len(set(question)) if question else 1.0


def relevance(questions: Sequence[str], answers: Sequence[str], similarity: Similarity = of_word_counts) -> float:
    """0.25 sum_i cos(question i, its answer)."""
    return 0.25 * math.fsum(similarity(one, other) for one, other in zip(questions, answers, strict=True))


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


def operator_agreement(gold: Sequence[str], said: Sequence[str]) -> float:
    """The sum of 0.5 for each operator that is that of the solution at its place, and -0.5 for others.

    >>> operator_agreement(["+", "*", "-"], ["+", "/"])
    0.0
    """
    return math.fsum(0.5 if one == other else -0.5 for one, other in zip(gold, said, strict=False))


def lines_of(text: str) -> list[str]:
    """The lines of a text that are not blank."""
    return [line.strip() for line in text.splitlines() if line.strip()]


def terms_of(
    question: str, asked: Sequence[str], answers: Sequence[str], solution: str, before: str, after: str,
    nouns: Nouns = content_words, similarity: Similarity = of_word_counts,
) -> Terms:  # fmt: skip
    """The four terms of sub-questions and their answers.

    solution: the reference's, a step on each line; "" for none, whose two terms are 0. before, after: the solver's
    answers to the question without and with the sub-questions.
    """
    own = {word for one in asked for word in nouns(one)}
    return Terms(
        coverage(nouns(question), own),
        relevance(asked, answers, similarity),
        step_gain(lines_of(solution), lines_of(before), lines_of(after), similarity),
        operator_agreement(operators_of(solution), operators_of(after)),
    )
