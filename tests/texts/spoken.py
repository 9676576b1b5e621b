"""An engine without a model: answers and replies are functions of what is asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from jaxrl_llm.texts.engine import Answer, Row


class Spoken:
    """answer: (text, question, sample) -> (answer, reward). reply: (question, number) -> reply."""

    def __init__(
        self,
        answer: Callable[[str, str, int], tuple[str, float]] = lambda text, question, sample: ("", 0.0),
        reply: Callable[[str, int], str] = lambda question, number: "",
        longest: int = 10_000,
        samples: int = 2,
    ) -> None:
        self.random, self.counts = np.random.default_rng(0), Counter[str]()
        self.asked, self.answered = list[str](), list[tuple[str, str]]()
        self._answer, self._reply, self._longest, self._samples = answer, reply, longest, samples

    def answers(self, asked: Sequence[tuple[str, Row]], samples: int | None = None) -> list[list[Answer]]:
        self.answered += [(text, row["prompt"]) for text, row in asked]
        many = self._samples if samples is None else samples
        return [[Answer(row, *self._answer(text, row["prompt"], n)) for n in range(many)] for text, row in asked]

    def replies(self, questions: Sequence[str], count: int = 1) -> list[list[str]]:
        self.asked += questions
        return [[self._reply(one, n) for n in range(count)] for one in questions]

    def fits(self, text: str) -> bool:
        return len(text) <= self._longest


def tasks(*questions: str) -> list[Row]:
    """Rows with these prompts."""
    return [{"prompt": one} for one in questions]
