"""Episodes that begin again in the middle of a success: their tokens, environments, marks and rewards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from speaking import run_agents, tokenizer_of

from jaxrl_llm.data.chat.calls import Reply
from jaxrl_llm.environments.protocol import Observation
from jaxrl_llm.rollouts.agents.metrics import agent_metrics
from jaxrl_llm.rollouts.agents.path import converse, played
from jaxrl_llm.rollouts.agents.program import agent, graded, with_episodes
from jaxrl_llm.rollouts.agents.restarts import restarting
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.programs import group
from jaxrl_llm.utils.errors import InputError


class Summing:
    """Four turns; it says the sum of all numbers so far, and its final reward is that sum."""

    tools = ()

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.total, self.turns, self.limit = 0, 0, int(row.get("turns", 4))

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        return Observation([{"role": "user", "content": "sum 0"}])

    def step(self, reply: Reply) -> Observation:
        self.total += int(str(reply.message["content"]))
        self.turns += 1
        said = [{"role": "user", "content": f"sum {self.total}"}]
        return Observation(said, 0.0, self.turns == self.limit)

    def close(self) -> float:
        return float(self.total)


class Forgetful(Summing):
    """Each one counts from another number, so that no replay answers the same."""

    made = 0

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        Forgetful.made += 1
        return Observation([{"role": "user", "content": f"sum {1000 * Forgetful.made}"}])


def says(text: str, number: int) -> str:
    return f"{number + 1}<|im_end|>"


async def environment_reward(task: Any, episodes: Any) -> list[Episode]:
    return [episode.scored(episode.rewards["environment"]) for episode in episodes]


def rows_of(monkeypatch: pytest.MonkeyPatch, rollout: Any, row: dict[str, Any], samples: int) -> list[Episode]:
    monkeypatch.setattr("speaking.by_length", environment_reward)
    found, _ = run_agents(rollout, tokenizer_of("plain"), says, [{"prompt": "Add.", **row}], samples)
    return list(found.groups[0].episodes)


def replies(row: Episode) -> list[int]:
    tokenizer = tokenizer_of("plain")
    said = [row.own.token[row.turns == turn].tolist() for turn in range(int(row.turns.max()) + 1)]
    return [int(tokenizer.decode(ids).removesuffix("<|im_end|>")) for ids in said]


def test_half_of_a_group_begins_with_its_first_success(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sample n always says n + 1. With success 5 the first success is sample 1, whose sum is 8."""
    rows = rows_of(monkeypatch, restarting(agent(Summing), success=5.0), {}, 6)
    assert [replies(row) for row in rows] == [
        [1] * 4, [2] * 4, [3] * 4, [2, 2, 2, 4], [2, 2, 5, 5], [2, 6, 6, 6]
    ]  # fmt: skip
    assert [row.reward for row in rows] == [4, 8, 12, 10, 14, 20]
    assert agent_metrics([rows])["rollout/restarts"] == 3.0
    assert [row.sample for row in rows] == list(range(6))
    for number, row in enumerate(rows):
        taken = (0, 0, 0, 3, 2, 1)[number]
        marks = np.asarray(row.info["imitated"])
        assert marks.tolist() == [4.0 - t if 0 <= t < taken else 0.0 for t in row.turns]
        assert row.info["imitated_score"] == (8.0 if taken else 0.0)
        assert row.actions[row.turns >= 0].all()
        assert row.info["episode"] == number
    # What the environment of a restart says follows from the replies that were taken over.
    text = tokenizer_of("plain").decode(rows[4].own.token.tolist())
    assert [int(part.partition("<|im_end|>")[0]) for part in text.split("sum ")[1:]] == [2, 4, 9]


@pytest.mark.parametrize(
    ("rollout", "row"),
    [
        (restarting(agent(Summing), success=99.0), {}),
        (restarting(agent(Summing)), {"turns": 1}),
        (restarting(agent(Forgetful)), {}),
        (restarting(agent(Summing), share=0.0), {}),
    ],
    ids=["no success", "one turn", "no copy", "none"],
)
def test_without_a_place_to_begin_episodes_are_their_own(
    rollout: Any, row: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_of(monkeypatch, rollout, row, 4)
    assert [replies(one) for one in rows] == [[n + 1] * row.get("turns", 4) for n in range(4)]
    assert not any(np.asarray(one.info["imitated"]).any() for one in rows)
    assert {one.info["imitated_score"] for one in rows} == {0.0}
    assert agent_metrics([rows])["rollout/restarts"] == 0.0


def encoded(reply: int) -> list[int]:
    return list(tokenizer_of("plain").encode(f"{reply}<|im_end|>"))


def test_a_success_of_another_step_is_told_to_a_fresh_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sample n says n + 1; of three samples of four, success 99 is out of reach, and one succeeded before."""
    known = [encoded(20), encoded(30), encoded(40), encoded(50)]
    row = {"restart": {"replies": known, "score": 140.0}}
    rows = rows_of(monkeypatch, restarting(agent(Summing), 0.75, success=99.0), row, 4)
    assert [replies(one) for one in rows] == [[1] * 4, [20, 30, 40, 2], [20, 30, 3, 3], [20, 4, 4, 4]]
    assert [one.reward for one in rows] == [4, 92, 56, 32]
    assert agent_metrics([rows])["rollout/restarts"] == 3.0
    for one, taken in zip(rows, (0, 3, 2, 1), strict=True):
        assert one.info["imitated"] == [4.0 - t if 0 <= t < taken else 0.0 for t in one.turns]
        assert one.info["imitated_score"] == (140.0 if taken else 0.0)
        assert (one.own.logp[(one.turns >= 0) & (one.turns < taken)] == 0).all(), "nobody drew them here"
    text = tokenizer_of("plain").decode(rows[2].own.token.tolist())
    assert [int(part.partition("<|im_end|>")[0]) for part in text.split("sum ")[1:]] == [20, 50, 53]


def test_a_place_says_where_all_leave_and_what_is_imitated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a teacher's texts, of which the first is imitated. Its place counts even if the group has a success."""
    model = {"replies": ["20", "30", "40", "50"], "score": 1.0, "place": 3, "learnt": 1}
    rows = rows_of(monkeypatch, restarting(agent(Summing)), {"restart": model}, 4)
    assert [replies(one) for one in rows] == [[1] * 4, [2] * 4, [20, 30, 40, 3], [20, 30, 40, 4]]
    for one in rows[2:]:
        assert one.info["imitated"] == [{0: 4.0, 1: -1.0, 2: -1.0}.get(t, 0.0) for t in one.turns.tolist()]
        assert one.own.token[one.turns == 0].tolist() == encoded(20), "with the end of a reply"
    rows = rows_of(monkeypatch, restarting(agent(Summing)), {"restart": {**model, "place": 0}}, 4)
    assert [replies(one) for one in rows] == [[n] * 4 for n in range(1, 5)], "all of it is the policy's"
    assert not any(np.asarray(one.info["imitated"]).any() for one in rows)


def test_an_environment_that_ends_earlier_ends_the_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"turns": 2, "restart": {"replies": [encoded(x) for x in (20, 30, 40, 50)], "score": 140.0}}
    rows = rows_of(monkeypatch, restarting(agent(Summing), success=99.0), row, 2)
    assert [replies(one) for one in rows] == [[1, 1], [20, 30]]
    assert rows[1].reward == 50


def test_going_back_to_a_turn_leaves_the_episode_and_can_be_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sample 2 leaves sample 0 after three turns, and sample 4 leaves sample 2 after one, which was sample 0's."""

    async def play(tools: Any, task: Any, settings: Any) -> list[Episode]:
        first = await converse(tools, task, 0, settings)
        second = first.before(3, 2)
        await second.copy_world()
        third = (await played(second)).before(1, 4)
        await third.copy_world()
        await played(third)
        found = [path.one for path in (first, second, third)]
        assert [len(path.past) for path in (first, second, third)] == [4, 4, 4]
        assert [one.replies for one in found] == [4, 4, 4]
        return [row for of_one in await graded(tools, found, settings.turn_rewards) for row in of_one]

    rows = rows_of(monkeypatch, with_episodes(agent(Summing), play, "episodes go back", "again"), {}, 3)
    assert [replies(row) for row in rows] == [[1, 1, 1, 1], [1, 1, 1, 3], [1, 5, 5, 5]]
    assert [row.reward for row in rows] == [4, 6, 16]
    assert [row.sample for row in rows] == [0, 2, 4]


def test_what_does_not_fit() -> None:
    with pytest.raises(InputError, match="the rollout group has none"):
        restarting(group())
    with pytest.raises(InputError, match="share"):
        restarting(agent(Summing), share=1.0)
