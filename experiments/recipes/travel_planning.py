"""Travel plans with tools: trains and rooms within a budget.

The idea of agents that plan trips with cached tools (DeepTravel, 2509.21842, whose abstract was read): the tools answer
from a file, so that every run sees the same world, and two verifiers check the plan, by itself and against what each
turn's tools said. Here: two tools over made tables, whose answers are kept in such a file, and the reference policy as
both verifiers; no live services. What a rule finds right with the plan is logged beside, without weight.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.recipes.recipe import Row, config_of, main
from jaxrl_llm.environments.tools import EachEpisode
from jaxrl_llm.environments.tools.kept import kept
from jaxrl_llm.rewards.verifiers import text_of
from jaxrl_llm.training.config import TrainConfig

TOWNS = ("Alder", "Birch", "Cedar", "Dune", "Elm")


def tables(seed: int = 0) -> tuple[dict[tuple[str, str], list[tuple[str, int]]], dict[str, list[tuple[str, int]]]]:
    """Trains between towns, and rooms in each: names and prices."""
    chosen = random.Random(seed)
    trains = {
        (a, b): [(f"T{chosen.randint(100, 999)}", chosen.randint(10, 60)) for _ in range(3)]
        for a in TOWNS for b in TOWNS if a != b
    }  # fmt: skip
    return trains, {town: [(f"{town} Inn {i}", chosen.randint(20, 90)) for i in range(1, 4)] for town in TOWNS}


def trains(start: str, end: str) -> str:
    """Trains from one town to another, with their prices.

    Args:
        start: Town where the journey begins.
        end: Town where it ends.
    """
    found = tables()[0].get((start.strip(), end.strip()))
    return "; ".join(f"{name} {price}" for name, price in found) if found else "There are no such trains."


def rooms(town: str) -> str:
    """Rooms in a town, with their prices for a night.

    Args:
        town: Where to stay.
    """
    found = tables()[1].get(town.strip())
    return "; ".join(f"{name} {price}" for name, price in found) if found else "There is no such town."


def sandbox(path: Path) -> EachEpisode:
    """The tools, answering from a file alone, which has all trains and rooms."""

    async def ask() -> None:
        by_train, by_town = tables()
        ask_trains, ask_rooms = kept(path, [trains, rooms])().functions
        for start, end in by_train:
            await ask_trains(start=start, end=end)
        for town in by_town:
            await ask_rooms(town=town)

    asyncio.run(ask())
    return kept(path)


def rows(seed: int, count: int) -> list[Row]:
    """Trips with a budget that the cheapest plan keeps, with a little to spare."""
    chosen, (by_train, by_town), out = random.Random(seed), tables(), []
    for _ in range(count):
        start, end = chosen.sample(TOWNS, 2)
        nights = chosen.randint(1, 3)
        least = min(price for _, price in by_train[start, end]) + nights * min(price for _, price in by_town[end])
        budget = least + chosen.randint(0, 20)
        prompt = (
            f"Plan a trip from {start} to {end} with {nights} night(s) for at most {budget}. Look up trains and rooms, "
            "then say the plan: <train>NAME</train> <room>NAME</room> <cost>TOTAL</cost>."
        )
        out.append({"prompt": prompt, "trip": f"{start},{end},{nights},{budget}"})
    return out


def planned(completions: Sequence[Any], trip: Sequence[str], **_: Any) -> list[float]:
    """A quarter each for a train that goes there, a room that is there, the right total, and one within the budget."""
    by_train, by_town = tables()
    out = []
    for messages, wanted in zip(completions, trip, strict=True):
        said = text_of(messages)
        start, end, nights, budget = wanted.split(",")
        found = {name: re.findall(rf"<{name}>(.*?)</{name}>", said) for name in ("train", "room", "cost")}
        train = dict(by_train[start, end]).get(found["train"][-1].strip()) if found["train"] else None
        room = dict(by_town[end]).get(found["room"][-1].strip()) if found["room"] else None
        total = None if train is None or room is None else train + int(nights) * room
        told = re.fullmatch(r"\s*(\d{1,6})\s*", found["cost"][-1]) if found["cost"] else None
        right = total is not None and told is not None and int(told[1]) == total
        out.append(sum((train is not None, room is not None, right, total is not None and total <= int(budget))) / 4)
    return out


def config(folder: Path, model: str, rows: list[Row], **settings: Any) -> TrainConfig:
    """The run: up to four calls of tools, and the plan."""
    usual: dict[str, Any] = {
        "algorithm": "deeptravel", "hyperparameters": {"judge": "reference"}, "eval_size": 0,
        "tools": [sandbox(Path(f"{folder}.answers.jsonl"))], "turns": 5, "max_new_tokens": 96,
    }  # fmt: skip
    return config_of(folder, model, rows, ["judge", f"{Path(__file__).resolve()}:planned*0"], **{**usual, **settings})


if __name__ == "__main__":
    main(__doc__, rows, config)
