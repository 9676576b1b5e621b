"""Recorded trajectories as environments: what matches, patches, and the dialogue that the policy sees."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent.parent / "rollouts"))

from speaking import run_agents, tokenizer_of

from jaxrl_llm.environments.recorded import RecordedSteps, judge_action, said_by
from jaxrl_llm.rollouts.agents.program import semi_online
from jaxrl_llm.utils.errors import InputError

STEPS = [
    {"observation": f"screen {n}", "action": {"action": kind, "at": [n, 0]}, "thought": "I see"}
    for n, kind in enumerate(["click", "type", "click", "done"])
]
ROW: dict[str, Any] = {"prompt": "Book it.", "steps": STEPS}


@pytest.mark.parametrize(
    ("reply", "graded"),
    [
        ('<action>{"action": "Click ", "at": [1, 2]}</action>', (1.0, 1.0)),
        ('ok <action>{"action": "click", "at": [1, 3]}</action>', (1.0, 0.5)),
        ('<action>{"action": "type", "at": [1, 2]}</action>', (1.0, 0.1)),
        ('{"action": "click", "at": [1, 2]}', (0.0, 1.0)),
        ('<action>{"action": 3}</action>', (0.0, 0.0)),
        ("<action>{}</action><action>{}</action>", (0.0, 0.0)),
        ("click", (0.0, 0.0)),
    ],
)
def test_replies_are_graded(reply: str, graded: tuple[float, float]) -> None:
    assert judge_action(reply, {"action": "click", "at": [1, 2]}) == graded


def right(number: int) -> str:
    return f"<action>{json.dumps(STEPS[number]['action'])}</action>"


def says(wrong: dict[int, str]) -> Any:
    """A policy that is right but for these steps."""

    def reply(text: str, number: int) -> str:
        at = int(text.rpartition("screen ")[2][0])
        return wrong.get(at, right(at)) + "<|im_end|>"

    return reply


BAD, NONE = '<action>{"action": "type", "at": [9, 9]}</action>', "no idea"


@pytest.mark.parametrize(
    ("wrong", "patches", "rewards", "score"),
    [
        ({}, 0, [1, 1, 1, 1], 1.0),
        ({0: BAD, 1: BAD}, 2, [0.19, 0.55, 1, 1], 0.5),
        ({0: BAD, 1: BAD, 2: NONE}, 2, [0.19, 0.55, 0.0], 0.0),
        ({0: BAD, 1: BAD, 2: NONE, 3: NONE}, -1, [0.19, 0.55, 0.0, 0.0], 0.0),
        ({3: NONE}, 0, [1, 1, 1, 0.0], 0.75),
        ({1: NONE}, 0, [1, 0.0], 0.25),
    ],
)
def test_an_episode_goes_on_while_there_are_patches(
    wrong: dict[int, str], patches: int, rewards: list[float], score: float
) -> None:
    tokenizer = tokenizer_of("plain")
    found, _ = run_agents(semi_online("steps", patches), tokenizer, says(wrong), [ROW], limit=90)
    rows = found.groups[0].episodes[: len(rewards)]
    assert len(found.groups[0].episodes) == 2 * len(rewards)
    np.testing.assert_allclose([row.turn_rewards[0] for row in rows], rewards, atol=1e-6)
    assert [row.info["first_turn"] for row in rows] == list(range(len(rewards)))
    assert all(row.rewards["environment"] == score for row in rows)
    for number, row in enumerate(rows):
        prompt = tokenizer.decode(list(row.prompt))
        told = [said_by(STEPS[k]) if k in wrong else right(k) for k in range(number)]
        wanted = "<|im_start|>user\nBook it.\n\n" + "".join(
            f"screen {k}<|im_end|>\n<|im_start|>assistant\n{text}<|im_end|>\n<|im_start|>user\n"
            for k, text in enumerate(told)
        )
        assert prompt == f"{wanted}screen {number}<|im_end|>\n<|im_start|>assistant\n"
        assert tokenizer.decode(list(row.last)) == wrong.get(number, right(number)) + "<|im_end|>"


@pytest.mark.parametrize("steps", [None, [], [{"observation": "x"}], [{"observation": 1, "action": {"action": "x"}}]])
def test_what_is_no_trajectory(steps: Any) -> None:
    with pytest.raises(InputError, match="must be a list of steps of an expert"):
        RecordedSteps({"prompt": "", "steps": steps})


def test_steps_may_be_written_as_json() -> None:
    assert RecordedSteps({"prompt": "", "steps": json.dumps(STEPS)}).steps == STEPS
