"""Replies read as plans: which tokens say the decision, the subgoal and the action."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from speaking import run_agents, tokenizer_of

from jaxrl_llm.data.chat.calls import Reply
from jaxrl_llm.environments.protocol import Observation
from jaxrl_llm.rollouts.agents.plans import planned
from jaxrl_llm.rollouts.agents.program import agent
from jaxrl_llm.utils.errors import InputError

SAID = (
    "<switch>SWITCH</switch><subgoal>find é</subgoal> so <action>go</action>",
    "<switch>KEEP</switch><subgoal> find é </subgoal><action>take</action>",
    "<switch>keep</switch><subgoal>leave</subgoal>",
)
KINDS = {1: ["KEEP", "keep"], 2: ["SWITCH"], 3: [" find é "], 4: ["find é", "leave"], 5: ["go", "take"]}


class Asking:
    """Three turns."""

    tools = ()

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.turn = 0

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        return Observation([{"role": "user", "content": "turn 0"}])

    def step(self, reply: Reply) -> Observation:
        self.turn += 1
        return Observation([{"role": "user", "content": f"turn {self.turn}"}], done=self.turn == 3)


@pytest.mark.parametrize("fresh", [False, True])
def test_the_tokens_of_each_part(fresh: bool) -> None:
    """Also where each turn is a row of its own, whose subgoal is compared with that of the row before."""
    tokenizer = tokenizer_of("plain")

    def says(text: str, number: int) -> str:
        return SAID[int(text.rpartition("turn ")[2][0])] + "<|im_end|>"

    rollout = planned(agent(Asking, turns=3, fresh=fresh))
    assert "plan" in rollout.provides
    found, _ = run_agents(rollout, tokenizer, says, [{"prompt": "Plan."}])
    rows = found.groups[0].episodes
    assert len(rows) == (6 if fresh else 2)
    for number in range(2):
        said: dict[int, list[str]] = {}
        for row in rows[3 * number : 3 * number + 3] if fresh else rows[number : number + 1]:
            kinds, ids = np.asarray(row.info["plan"]), row.own.token
            assert len(kinds) == row.size
            assert not kinds[~row.actions].any()
            edges = np.flatnonzero(np.diff(kinds, prepend=-1, append=-1))
            for start, end in pairwise(edges):
                if kinds[start]:
                    said.setdefault(int(kinds[start]), []).append(tokenizer.decode(ids[start:end].tolist()))
        assert said == KINDS


def test_other_tags_and_what_does_not_fit() -> None:
    with pytest.raises(InputError, match="three names"):
        planned(agent(Asking), tags=("a", "b"))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="three names"):
        planned(agent(Asking), tags=("a", "b", "c>"))
    found, _ = run_agents(
        planned(agent(Asking, turns=1), ("s", "goal", "do")), tokenizer_of("plain"),
        lambda text, number: "<do>x</do><|im_end|>", [{"prompt": "Plan."}],
    )  # fmt: skip
    kinds = found.groups[0].episodes[0].info["plan"]
    assert kinds == [0.0] * 4 + [5.0] + [0.0] * (len(kinds) - 5)
