"""Rewards of sub-questions that help another model to solve a problem (DaSLaM, EMNLP 2023), from texts alone.

Similarities are cosines. By default they are of counts of words, and "nouns" are the words that have a meaning of their
own; functions for both can be given.
"""

from __future__ import annotations

from collections.abc import Collection


def coverage(question: Collection[str], asked: Collection[str]) -> float:
    """1 - |Q xor S| / |Q| of the nouns of a question and of its sub-questions; 1 if the question has none.

    >>> coverage({"apples", "tom", "price"}, {"apples", "price", "shop"})
    0.33333333333333337
    """
    return 1.0 - len(set(question) ^ set(asked)) / len(set(question)) if question else 1.0
