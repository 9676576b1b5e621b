"""Both verifiers of DeepTravel: which episodes and turns they are asked about, and what becomes of their verdicts."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("rollouts", "training")]
import speaking
import test_turn_runs as turn_runs
import tiny_runs as runs
from speaking import TEMPLATES, run_agents, tokenizer_of
from test_judged import scripted

from jaxrl_llm.algorithms.agents import deeptravel as deeptravel_module
from jaxrl_llm.algorithms.agents.deeptravel import deeptravel, judged_turns
from jaxrl_llm.core.rollout import Rollout
from jaxrl_llm.environments.tools.base import with_tools
from jaxrl_llm.rewards.judges.questions import Grading
from jaxrl_llm.rewards.specs import JUDGE
from jaxrl_llm.rollouts.agents.compaction import Summary
from jaxrl_llm.rollouts.agents.program import agent
from jaxrl_llm.rollouts.programs import group
from jaxrl_llm.utils.errors import InputError

TOKENIZER, END = tokenizer_of("hermes"), TEMPLATES["hermes"][1]
PLANS = ["T1 and Inn", "T1 and Hut", "T1 twice", "T1 and what?", "T1 hm"]  # of samples 0 to 4


def trains(start: str) -> str:
    """Trains.

    Args:
        start: A town.
    """
    return f"T1 leaves {start}"


def rooms(town: str) -> str:
    """Rooms.

    Args:
        town: A town.
    """
    return f"Inn in {town}"


def says(text: str, sample: int) -> str:
    """Two calls in the first reply, one in the second, and the plan in the third."""
    turn = text.count("assistant\n") - 1
    calls = [("trains", {"start": "Elm"}), ("trains", {"start": "Ash"})], [("rooms", {"town": "Ash"})]
    if turn == 2:
        return f"{PLANS[sample]}{END}"
    written = (json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls[turn])
    return "".join(f"<tool_call>\n{one}\n</tool_call>" for one in written) + END


def verdict(question: str) -> str | None:
    """By hand: sample 2 is not complete; in sample 1 the room is another; samples 3 and 4 are hard to judge."""
    plan = question.split("Answer:\n" if "The tool said" in question else "Response:\n")[1].split("\n\n")[0]
    if "The tool said" not in question:
        if plan.endswith("hm"):
            return "Hard to say."
        return "[[no]]" if plan.endswith("twice") and "complete" in question else "[[yes]]"
    told = question.split("The tool said:\n")[1].split("\n\nNames")[0]
    assert told in ("tool: T1 leaves Elm\n\ntool: T1 leaves Ash", "tool: Inn in Ash")
    if plan.endswith("?") and "Inn" in told:
        return None
    return "[[no]]" if "Hut" in plan and "Inn" in told else "[[yes]]"


def around(rollout: Rollout, inner: Rollout) -> Rollout:
    assert rollout.wrap is not None
    return rollout.wrap(inner)


@pytest.fixture(autouse=True)
def verdicts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def score(task: Any, episodes: Any) -> Any:
        return [one.scored(one.rewards[JUDGE], one.rewards) for one in episodes]

    monkeypatch.setattr(speaking, "by_length", score)


def test_turns_are_judged_where_the_whole_passes() -> None:
    asked = list[str]()
    rollout = around(judged_turns(scripted(verdict, asked)), agent(with_tools([trains, rooms]), turns=4))
    found, _ = run_agents(rollout, TOKENIZER, says, [{"prompt": "Go to Ash."}], 5, limit=400)
    episodes = found.groups[0].episodes
    assert [one.score for one in episodes] == pytest.approx([1, 1, 0, math.nan, math.nan], nan_ok=True)
    assert [one.turn_rewards for one in episodes] == [
        (1, 1, 0), (1, -1, 0), (0, 0, 0), (1, -1, 0), (0, 0, 0),
    ]  # fmt: skip
    assert all("user: Go to Ash." in one for one in asked)
    whole = [one for one in asked if "The tool said" not in one]
    assert (len(whole), len(asked)) == (2 * 5, 2 * 5 + 2 * 3), "of three plans the turns with results are judged"
    info = episodes[0].info
    assert (info["judge/asked"], info["judge/unparsed"]) == (16, pytest.approx(3 / 16))


def test_a_rubric_of_the_row_takes_the_place_of_the_criteria() -> None:
    asked = list[str]()
    rollout = around(judged_turns(scripted(verdict, asked), "rubric"), agent(with_tools([trains, rooms]), turns=4))
    assert rollout.columns == ("rubric",)
    rows = [{"prompt": "Go.", "rubric": ["It is short.", {"criterion": "It is complete.", "weight": 2}]}]
    found, _ = run_agents(rollout, TOKENIZER, says, rows, 3, limit=400)
    assert [one.score for one in found.groups[0].episodes] == [1, 1, 0]
    assert sum("Criterion: It is short." in one for one in asked) == 3
    broken, _ = run_agents(rollout, TOKENIZER, says, [{"prompt": "Go.", "rubric": []}], 3, limit=400)
    assert broken.groups[0].failed


def test_rewards_of_the_environments_turns_are_part_of_its_reward() -> None:
    class Steps:
        def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
            self.turn = 0
            return "Begin.", {}

        def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            self.turn += 1
            return "On.", 0.25, self.turn == 3, False, {}

    rollout = around(
        judged_turns(scripted(lambda question: "[[yes]]")), agent(lambda row: environment(Steps()), turn_rewards=True)
    )
    found, _ = run_agents(rollout, TOKENIZER, lambda text, sample: f"a{END}", [{"prompt": "Go."}], 2)
    for one in found.groups[0].episodes:
        assert one.rewards == {"environment": 0.75, JUDGE: 1.0}
        assert one.turn_rewards == (1, 1, 0)


def environment(world: Any) -> Any:
    from jaxrl_llm.environments.adapters import adapted

    return adapted(world)


def test_the_method_asks_its_judge_and_refuses_what_cannot_be_judged() -> None:
    own = deeptravel(judge="reference").rollout
    assert own is not None
    inner = agent(with_tools([rooms]), turns=2)
    wrapped = around(own, inner)
    assert {JUDGE, "turn_rewards", "turns"} <= wrapped.provides
    assert wrapped.demands.reference
    assert deeptravel().rollout is None
    with pytest.raises(InputError, match="a judge of turns reads episodes of agents, but the rollout"):
        around(own, group())
    with pytest.raises(InputError, match="leave out compact"):
        around(own, agent(with_tools([rooms]), context_tokens=400, compact=Summary()))
    with pytest.raises(InputError, match="rubric is a column of criteria for the judge"):
        deeptravel(rubric="rubric")


@pytest.mark.heavy
def test_a_run_with_a_judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of random weights, whose texts are read as verdicts; its reward is that of the whole and of all turns."""

    def short(template: str = "") -> Grading:
        return Grading("{problem}|{response}|{criterion}", lambda text: float(len(text) % 3 > 0))

    monkeypatch.setattr(deeptravel_module, "Grading", short)  # the context is small
    monkeypatch.setattr(deeptravel_module, "CRITERIA", ("feasible", "complete"))
    config = turn_runs.config_of(
        tmp_path, "deeptravel", rollout="group", environment=f"{turn_runs.WORLDS}:Walk", turns=3, rewards=("judge",),
        hyperparameters={"judge": "policy", "every": 1},
    )  # fmt: skip
    taken: list[runs.Taken] = []
    with runs.watched(taken):
        runs.train(config)
    lines = runs.lines_of(tmp_path / "run" / "metrics.jsonl")
    for one, line in zip(taken, lines, strict=True):
        assert line.get("rollout/failed_groups", 0) == 0
        assert line["judge/unparsed"] == 0
        batch = one.scored.batch
        whole, turns = np.asarray(batch.reward), np.asarray(batch.turn_rewards)
        assert set(whole.tolist()) <= {0.0, 1.0}
        assert not turns[whole == 0].any()
        assert set(turns.ravel().tolist()) <= {-1.0, 0.0, 1.0}
        method = deeptravel()
        found = np.asarray(method.transform.apply(method.transform.init(), batch)[1].reward)
        np.testing.assert_array_equal(found, whole * (turns >= 0).all(1))
    assert any(np.asarray(one.scored.batch.turn_rewards).any() for one in taken)
