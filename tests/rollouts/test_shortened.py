"""Fewer samples and turns of agents on tasks that the policy solves."""

from __future__ import annotations

from typing import Any

import pytest
from speaking import TEMPLATES, run_agents, tokenizer_of
from test_agents import ROWS, Counting, says

from jaxrl_llm.algorithms.agents.dart_gui import LONGEST, SHARE, shortened
from jaxrl_llm.rollouts.agents.program import agent


@pytest.mark.parametrize(
    ("told", "samples", "turns"),
    [
        ({}, 6, 3),
        ({SHARE: 1.0, LONGEST: 0}, 6, 3),
        ({SHARE: 0.5, LONGEST: 2}, 3, 2),
        ({SHARE: 0.6, LONGEST: 9}, 4, 3),
        ({SHARE: 0.0, LONGEST: 1}, 2, 1),
    ],
)
def test_a_row_says_how_many_samples_and_turns(told: dict[str, Any], samples: int, turns: int) -> None:
    """The environment itself ends after three turns; 0.6 of 6 are 3.6, and two are the least."""
    name = next(iter(TEMPLATES))
    rollout = shortened(2).wrap(agent(Counting))  # type: ignore[misc]
    found, _ = run_agents(rollout, tokenizer_of(name), says(TEMPLATES[name][1]), [{**ROWS[0], **told}], samples=6)
    (group,) = found.groups
    assert not group.failed
    assert [int(one.turns.max()) + 1 for one in group.episodes] == [turns] * samples
    assert all(one.truncated == (turns < 3) for one in group.episodes)
