"""Who is the spy, in words: clues about scenes of which one is another, and votes.

The game of Vision-Zero (arXiv 2509.25541), whose scenes are images with one object changed. Here: scenes of objects
with a colour and a place, told as texts; the spy's has one object in another colour. Clues, votes, rewards and the
switch between stages are the method's, `vision_zero`; nothing of its vision is here.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from experiments.recipes.recipe import Row, config_of, main
from jaxrl_llm.training.config import TrainConfig

COLOURS = ("red", "blue", "green", "yellow", "grey")
THINGS = ("cube", "ball", "ring", "cone", "coin")
PLACES = ("on the left", "on the right", "at the back", "in front")
RULES = "Find the spy. Each game has a scene; clues and votes are about it. Game {}."


def rows(seed: int, count: int) -> list[Row]:
    """Scenes of three objects, and the spy's, in which one of them has another colour."""
    chosen, out = random.Random(seed), []
    for number in range(count):
        things, places = chosen.sample(THINGS, 3), chosen.sample(PLACES, 3)
        colours = [chosen.choice(COLOURS) for _ in things]
        other, place = list(colours), chosen.randrange(3)
        other[place] = chosen.choice([colour for colour in COLOURS if colour != colours[place]])
        told = [
            ", ".join(f"a {colour} {thing} {where}" for colour, thing, where in zip(each, things, places, strict=True))
            for each in (colours, other)
        ]
        out.append({"prompt": RULES.format(f"{seed}-{number}"), "scene": told[0], "spy_scene": told[1]})
    return out


def config(folder: Path, model: str, rows: list[Row], **settings: Any) -> TrainConfig:
    """The run. Rewards are the game's."""
    usual: dict[str, Any] = {"algorithm": "vision_zero", "group_size": 8, "max_new_tokens": 48, "eval_size": 0}
    return config_of(folder, model, rows, ("environment",), **{**usual, **settings})


if __name__ == "__main__":
    main(__doc__, rows, config)
