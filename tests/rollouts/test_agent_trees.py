"""Episodes with environments that fork after observations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from speaking import TEMPLATES, run_agents, tokenizer_of

from jaxrl_llm.data.chat.calls import Reply
from jaxrl_llm.environments.protocol import Observation
from jaxrl_llm.rollouts.agents.fork import by_chance, forking_agents, shared_nodes
from jaxrl_llm.rollouts.agents.metrics import agent_metrics
from jaxrl_llm.rollouts.agents.program import agent
from jaxrl_llm.rollouts.episode import Episode, given
from jaxrl_llm.rollouts.programs import group
from jaxrl_llm.rollouts.runtime.collate import to_batch
from jaxrl_llm.sampling.sampler import SamplingConfig
from jaxrl_llm.utils.errors import InputError

END = TEMPLATES["plain"][1]


class Telling:
    """It repeats all that it was told; over after three replies. Its reward is how often it was told something."""

    tools = ()

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.told: list[str] = []

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        return Observation()

    def step(self, reply: Reply) -> Observation:
        self.told.append(str(reply.message["content"]))
        return Observation([{"role": "user", "content": "/".join(self.told)}], done=len(self.told) == 3)

    def close(self) -> float:
        return float(len(self.told))


class Alone(Telling):
    """It can be neither copied nor replayed."""

    made = 0

    def __init__(self, row: Mapping[str, Any]) -> None:
        super().__init__(row)
        Alone.made += 1
        self.number, self.lock = Alone.made, (x for x in ())

    def step(self, reply: Reply) -> Observation:
        self.told.append(f"{reply.message['content']} {self.number}")
        return Observation([{"role": "user", "content": "/".join(self.told)}], done=len(self.told) == 3)


def says(text: str, sample: int) -> str:
    return f"{sample}{END}"


def conversations(
    rollout: Any, samples: int, environment: Any = Telling, **settings: Any
) -> tuple[Any, list[str], Any]:
    """The batch of one group with its episodes, and the observations of each row's last turn with the last reply."""
    tokenizer = tokenizer_of("plain")
    found, _ = run_agents(
        rollout.wrap(agent(environment, turns=3)), tokenizer, says, [{"prompt": "Go."}], samples, **settings
    )
    texts = []
    for episode in found.groups[0].episodes:
        *_, seen, reply = [s for s in episode.segments]
        words = [tokenizer.decode(s.tokens.token.tolist(), skip_special_tokens=True) for s in (seen, reply)]
        texts.append(words[0].split("user\n")[-1].split("\n")[0].replace("assistant", "") + "/" + words[1])
    return to_batch(found.groups, SamplingConfig(), 0), texts, found.groups[0].episodes


def test_forks_go_on_with_a_copy_of_the_environment() -> None:
    """All fork: 0 after its first observation and again after its second, where the fork of the first does, too."""
    batch, texts, rows = conversations(forking_agents(by_chance(1.0, 0.0), 1), 4)
    assert texts == ["0/0/0", "0/1/1", "0/0/2", "0/1/3"]
    assert np.asarray((batch.info or {})["episode"]).tolist() == [0, 1, 2, 3]
    node, action = np.asarray((batch.info or {})["node"]), np.asarray(batch.action_mask)
    first = [row[mask][0] for row, mask in zip(node, np.asarray(batch.turn) == 0, strict=True)]
    assert len(set(first)) == 1, "the first reply is one node of all"
    ends = [row[mask][-1] for row, mask in zip(node, np.asarray(batch.turn) == 2, strict=True)]
    assert len(set(ends)) == 4
    assert not np.isnan(node[action]).any()
    assert [row.rewards["environment"] for row in rows] == [3.0] * 4
    assert agent_metrics([rows, rows])["rollout/forks"] == 3.0


def test_missing_episodes_begin_at_the_question() -> None:
    _, texts, rows = conversations(forking_agents(by_chance(0.0, 0.0), 2), 4)
    assert texts == ["0/0/0", "1/1/1", "2/2/2", "3/3/3"]
    assert agent_metrics([rows])["rollout/forks"] == 0.0


def test_the_entropies_of_a_first_episode_say_how_many_begin_there() -> None:
    """All entropies are equal: 4 of 6, floor(6 / 2) + 1, of which the first is over; the others fork once each."""
    asked = list[tuple[float, int]]()

    def forks(change: float, uniform: float, rounds: int) -> bool:
        assert 0 <= uniform < 1
        asked.append((change, rounds))
        return True

    _, texts, _ = conversations(forking_agents(forks, None), 6)
    assert texts == ["0/0/0", "1/1/1", "2/2/2", "3/3/3", "1/4/4", "2/5/5"]
    assert set(asked) == {(0.0, 0)}, "once the group is complete it is not asked again"


def test_an_environment_that_cannot_be_copied_costs_the_fork_its_score(caplog: pytest.LogCaptureFixture) -> None:
    Alone.made = 0
    rows = conversations(forking_agents(by_chance(1.0, 0.0), 1), 2, Alone)[2]
    assert [bool(np.isnan(row.reward)) for row in rows] == [False, True]
    assert "sample 1 of prompt 0 does not fork" in caplog.text
    assert agent_metrics([rows])["rollout/forks"] == 0.0


def test_chances() -> None:
    forks = by_chance(0.5, 0.2)
    uniform = (np.arange(1000) + 0.5) / 1000
    for change, expected in zip([-0.5, 0.0, 0.5, 1.0], [0.4, 0.5, 0.6, 0.7], strict=True):
        assert np.mean([forks(change, u, 3) for u in uniform]) == pytest.approx(expected)
    damped = by_chance(0.5, 0.2, 0.05)
    for u in uniform:
        assert damped(0.5, u, 2) == (min(max((u + 0.1) * 0.9, 0), 1) >= 0.5)


def test_it_is_for_agents_and_some_samples() -> None:
    made = forking_agents(by_chance(), 8)
    assert made.wrap is not None
    with pytest.raises(InputError, match="the rollout group has none"):
        made.wrap(group())
    assert made.wrap(agent(Telling)).demands.min_samples == 9


def test_nodes_of_rows_with_other_prompts_differ() -> None:
    rows = [Episode(prompt) + given(own) for prompt, own in [((1,), [4, 5]), ((2,), [4, 5]), ((1,), [4, 6])]]
    nodes = [list(np.atleast_1d(row.info["node"])) for row in shared_nodes(rows)]
    assert nodes[0][0] == nodes[2][0] != nodes[1][0]
    assert len({node for row in nodes for node in row}) == 4
