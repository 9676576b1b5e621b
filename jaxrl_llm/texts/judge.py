"""A judge of pairs: which of two answers is better, asked in both orders, by majority."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from jaxrl_llm.texts.engine import Engine, one_each
from jaxrl_llm.texts.proposer import check_slots, filled

SLOTS = ("question", "first", "second")
JUDGE = (
    "Question: {question}\n\nAnswer A: {first}\n\nAnswer B: {second}\n\n"
    "Which answer is better? Reply with one letter, A or B."
)


class Verdicts(NamedTuple):
    """Votes of a judge. unreadable: replies that name neither answer."""

    new: int
    old: int
    unreadable: int

    @property
    def wins(self) -> bool:
        """Whether the new one has more votes; a tie keeps the old one."""
        return self.new > self.old


def verdict(reply: str) -> str | None:
    """ "A" or "B", the first that a reply names as an answer, or begins with; None for a reply without one.

    >>> verdict("Answer B is better than A."), verdict("(a)"), verdict("A better one would be short.")
    ('B', 'A', None)
    """
    found = re.match(r"\W*([AB])\b(?!\s+[a-z])", reply) or re.fullmatch(r"\W*([ab])\W*", reply)
    found = found or re.search(r"\b[Aa]nswer\W+(?:is\W+)?([AB])\b", reply)
    return found[1].upper() if found else None


def compare(engine: Engine, pairs: Sequence[tuple[str, str, str]], votes: int, template: str = JUDGE) -> Verdicts:
    """Ask the policy of each (question, old answer, new answer) `votes` times which is better.

    The order of the two alternates, and which comes first at first is drawn for each question. Equal answers are not
    asked about. Raises InputError for a template without the slots {question}, {first} and {second}.
    """
    check_slots("judge", template, SLOTS)
    questions, new_first = list[str](), list[bool]()
    for question, old, new in pairs:
        if old == new:
            continue
        begin = int(engine.random.integers(2))
        for vote in range(votes):
            swap = (begin + vote) % 2 == 1
            first, second = (new, old) if swap else (old, new)
            questions.append(filled(template, question=question, first=first, second=second))
            new_first.append(swap)
    letters = [verdict(reply) for reply in one_each(engine, questions)]
    for_new = sum(one == ("A" if first else "B") for one, first in zip(letters, new_first, strict=True))
    unreadable = letters.count(None)
    engine.counts["judge/verdicts"] += len(letters)
    engine.counts["judge/unreadable"] += unreadable
    return Verdicts(for_new, len(letters) - unreadable - for_new, unreadable)
