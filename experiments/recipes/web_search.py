"""Questions that a search in a local corpus answers, in two hops.

The idea of search agents that learn from the answer alone (Search-R1, 2503.09516, and its successors): the policy asks
a search engine as often as it wants, what it finds is masked out of the loss, and the answer is compared. Here: a
corpus of people, towns and rivers that is made with the questions, and `search_in` over it (BM25); no page of the web.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from experiments.recipes.recipe import Row, config_of, main
from jaxrl_llm.environments.tools.search import search_in
from jaxrl_llm.rewards.verifiers import text_of
from jaxrl_llm.training.config import TrainConfig

FIRST = ("Ada", "Bela", "Chen", "Dora", "Emil", "Fatu", "Gita", "Hugo", "Ines", "Jona", "Kira", "Liam")
LAST = ("Arn", "Brook", "Calder", "Dahl", "Eaton", "Frost", "Grove", "Hale")
TOWN = ("Alder", "Birch", "Cedar", "Dune", "Elm", "Fern", "Gorse", "Hazel")
END = ("ton", "ford", "wick", "by", "stead")
RIVER = ("Aure", "Brin", "Coll", "Dove", "Esk", "Fal", "Garr", "Hodder")


def world(seed: int) -> tuple[dict[str, str], dict[str, str]]:
    """Where each person was born, and the river of each town."""
    chosen = random.Random(seed)
    towns = [first + last for first in TOWN for last in END]
    born = {f"{first} {last}": chosen.choice(towns) for first in FIRST for last in LAST}
    return born, {town: chosen.choice(RIVER) for town in towns}


def passages(seed: int) -> list[str]:
    """The corpus: one sentence for each person and each town."""
    born, rivers = world(seed)
    people = [f"{person} is a writer who was born in {town}." for person, town in born.items()]
    return people + [f"{town} is a town on the river {river}." for town, river in rivers.items()]


def rows(seed: int, count: int) -> list[Row]:
    """Questions whose answer is two facts away. The corpus stays the same for every seed."""
    born, rivers = world(0)
    people = random.Random(seed).choices(list(born), k=count)
    ask = "On which river is the town where {} was born? Search, then answer with the name of the river."
    return [{"prompt": ask.format(person), "answer": rivers[born[person]]} for person in people]


def config(folder: Path, model: str, rows: list[Row], **settings: Any) -> TrainConfig:
    """The run: four searches an episode at most, and the last reply."""
    usual: dict[str, Any] = {"tools": [search_in(passages(0), results=2)], "turns": 5, "max_new_tokens": 96}
    return config_of(folder, model, rows, [f"{Path(__file__).resolve()}:names_river"], **{**usual, **settings})


def names_river(completions: Any, answer: Any, **_: Any) -> list[float]:
    """1 where the last reply names the right river, and no other."""
    out = []
    for messages, right in zip(completions, answer, strict=True):
        said = text_of(messages)
        out.append(float([river for river in RIVER if river in said] == [right]))
    return out


if __name__ == "__main__":
    main(__doc__, rows, config)
