"""Bad episodes that turn around into good ones (Agent-R): the tree, the pairs, the cut, and what is learnt of each."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path as Folder
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from batches import batch_of
from method_step import learn

from jaxrl_llm.algorithms.agents.agent_r import ANSWER, THOUGHTS, agent_r, levels_of, paired, revising
from jaxrl_llm.data.chat.calls import Reply
from jaxrl_llm.environments.protocol import Observation
from jaxrl_llm.rollouts.agents.fork import searched
from jaxrl_llm.rollouts.agents.program import agent, with_episodes
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.programs import group
from jaxrl_llm.utils.errors import InputError

sys.path.append(str(Folder(__file__).parents[1] / "rollouts"))

from speaking import TEMPLATES, run_agents, tokenizer_of

END = TEMPLATES["plain"][1]
TURNS = 4


class Path:
    """Four replies, numbers; its reward is a hash of them between 0 and 1, or the share of those that are even."""

    tools = ()

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.said, self.hashed = list[int](), bool(row.get("hashed"))

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        return Observation([{"role": "user", "content": "go"}])

    def step(self, reply: Reply) -> Observation:
        self.said.append(int(str(reply.message["content"])))
        here = "-".join(map(str, self.said))
        return Observation([{"role": "user", "content": f"at {here}"}], done=len(self.said) == TURNS)

    def close(self) -> float:
        return hashed(self.said) if self.hashed else sum(x % 2 == 0 for x in self.said) / TURNS


def hashed(replies: Any) -> float:
    return (sum((i + 2) * 7919 * x for i, x in enumerate(replies)) % 1009) / 1009


def numbers(text: str, sample: int) -> str:
    """Sample n says n + 1, whatever it is asked."""
    return f"{sample + 1}{END}"


async def environment_reward(task: Any, episodes: Any) -> list[Episode]:
    return [episode.scored(episode.rewards["environment"]) for episode in episodes]


def played(monkeypatch: pytest.MonkeyPatch, rollout: Any, says: Any, row: dict[str, Any], samples: int) -> Any:
    monkeypatch.setattr("speaking.by_length", environment_reward)
    found, engines = run_agents(rollout, tokenizer_of("plain"), says, [{"prompt": "Walk.", **row}], samples, limit=400)
    (one,) = found.groups
    assert not one.failed
    return list(one.episodes), engines[0].requests


def replies(row: Episode) -> tuple[int, ...]:
    tokenizer = tokenizer_of("plain")
    said = (row.own.token[row.turns == turn].tolist() for turn in range(int(row.turns.max()) + 1))
    return tuple(int(tokenizer.decode(ids).removesuffix(END)) for ids in said)


def slow_search(episodes: int, width: int, exploration: float) -> list[tuple[int, ...]]:
    """The replies of each episode, by a table of sums over all episodes so far that begin with given replies."""
    out = list[tuple[int, ...]]()
    for number in range(episodes):
        prefix: tuple[int, ...] = ()
        while True:
            after = list(dict.fromkeys(one[: len(prefix) + 1] for one in out if one[: len(prefix)] == prefix))
            if len(after) < width:
                break
            n = sum(one[: len(prefix)] == prefix for one in out)
            scores = {}
            for child in after:
                through = [hashed(one) for one in out if one[: len(child)] == child]
                if len(child) < TURNS:
                    scores[child] = np.mean(through) + exploration * math.sqrt(math.log(n) / len(through))
            prefix = max(scores, key=lambda child: scores[child])
        out.append((*prefix, *[number + 1] * (TURNS - len(prefix))))
    return out


@pytest.mark.parametrize("exploration", [0.0, 0.5, 2.0])
def test_the_tree_is_that_of_a_table_of_sums(exploration: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """In which no state but the last is ever exhausted, as it has fewer than width ** 3 episodes."""

    async def play(tools: Any, task: Any, settings: Any) -> list[Episode]:
        found, root = await searched(tools, task, settings, 7, 2, exploration)
        assert root.visits == 7
        assert root.total == pytest.approx(sum(one.value for one in found))
        return [one.end for one in found]

    rollout = with_episodes(agent(Path, turns=TURNS), play, "episodes are searched", "searched")
    rows, _ = played(monkeypatch, rollout, numbers, {"hashed": True}, 7)
    assert [replies(row) for row in rows] == slow_search(7, 2, exploration)


def judged(bad: str) -> Any:
    """Says which numbers the samples say, and that a reply is bad that is in `bad`."""

    def says(text: str, sample: int) -> str:
        asked = text.rpartition("<|im_start|>user")[2]
        if "Judge the last action" not in asked:
            return numbers(text, sample)
        last = [line for line in asked.split("\n") if line.startswith("assistant: ")][-1].removeprefix("assistant: ")
        return ("bad" if last in bad else "good") + END

    return says


# Samples 0 and 1 are 1 1 1 1 and 2 2 2 2, worth 0 and 1; with exploration 0 the next two leave the latter.
OPTIONS: dict[str, Any] = {"width": 2, "exploration": 0.0, "alphas": (0.6,), "pairs": 3}


def revised(monkeypatch: pytest.MonkeyPatch, bad: str, samples: int = 4, **options: Any) -> Any:
    rollout: Any = revising(**{**OPTIONS, **options}).wrap
    return played(monkeypatch, rollout(agent(Path, turns=TURNS)), judged(bad), {}, samples)


def loss_by_hand(first: list[int], text: str, rest: list[int], good: list[int], shared: int) -> list[tuple[str, bool]]:
    """What a revision row says after its prompt, and whether it is learnt: from the replies alone."""
    out = list[tuple[str, bool]]()
    for i, reply in enumerate(first):
        out += [(f"{reply}{END}", False)]
        out += [(f"\n<|im_start|>user\nat {'-'.join(map(str, first[: i + 1]))}{END}\n<|im_start|>assistant\n", False)]
    out += [(f"{text}{END}", True), (f"\n<|im_start|>user\n{ANSWER}{END}\n<|im_start|>assistant\n", False)]
    for i, reply in enumerate(rest):
        out += [(f"{reply}{END}", True)]
        if i + 1 < len(rest):
            here = "-".join(map(str, good[: shared + i + 1]))
            out += [(f"\n<|im_start|>user\nat {here}{END}\n<|im_start|>assistant\n", False)]
    return out


def assert_says(row: Episode, wanted: list[tuple[str, bool]]) -> None:
    tokenizer = tokenizer_of("plain")
    assert tokenizer.decode(row.own.token) == "".join(text for text, _ in wanted)
    assert row.actions.tolist() == [is_so for text, is_so in wanted for _ in tokenizer.encode(text)]


def test_agent_r_splices_as_a_loop_over_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sample n says n + 1 where it left the tree. The last episode is as good as the second, and comes after it."""
    rows, _ = revised(monkeypatch, bad="13")
    assert [replies(row) for row in rows[:4]] == [(1, 1, 1, 1), (2, 2, 2, 2), (2, 3, 3, 3), (2, 2, 4, 4)]
    assert [row.reward for row in rows] == [0, 1, 0.25, 1, 1, 1]
    assert [row.part for row in rows] == [0, 0, 0, 0, 1, 1]
    assert [row.info["pivot"] for row in rows] == [4, 0, 4, 0, 0, 0], "bad episodes are not learnt"
    assert [row.info["refined"] for row in rows] == [0, 0, 0, 0, 1, 1]
    # The first is cut after its first reply, and shares nothing; the other after its second, and shares one.
    for row, first, shared in ((rows[4], [1], 0), (rows[5], [2, 3], 1)):
        text = next(text for text in THOUGHTS if text in tokenizer_of("plain").decode(row.own.token))
        assert_says(row, loss_by_hand(first, f"{text}\nAction: wait", [2, 2, 2, 2][shared:], [2, 2, 2, 2], shared))
        assert row.prompt == rows[0].prompt
        assert row.info["off_prompt"] == 1.0
        assert len(row.state_keys) == int(row.turns.max()) + 1 == 5 - shared
    assert len({row.info["episode"] for row in rows}) == 6


def test_without_a_bad_action_the_whole_episode_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """And an action that is called bad, but shared, is followed by the good one's next."""
    rows, requests = revised(monkeypatch, bad="", samples=3)
    whole = tokenizer_of("plain").decode(rows[3].own.token)
    assert whole.startswith(f"1{END}\n<|im_start|>user\nat 1{END}")
    assert f"at 1-1-1-1{END}\n<|im_start|>assistant\n" in whole.partition("Action: wait")[0]
    asked = [tokenizer_of("plain").decode(one.prompt) for one in requests]
    assert sum("Judge the last action" in text for text in asked) == 8, "four actions of each of two"
    rows, _ = revised(monkeypatch, bad="12", samples=3)
    assert replies(rows[2]) == (2, 3, 3, 3)
    said = tokenizer_of("plain").decode(rows[4].own.token)
    assert [line for line in said.replace(END, "").split("\n") if line.isdigit()] == ["2", "2", "2", "2"]


def test_which_episodes_are_paired() -> None:
    values, none = [0.2, 0.9, 0.9, math.nan, 0.75], [[0] * 5] * 5
    shared = [list(row) for row in none]
    shared[2][0] = 2
    assert paired(values, none, 0.5, 0.1, 9) == [(1, 0), (1, 4)]
    assert paired(values, shared, 0.5, 0.1, 9) == [(2, 0), (1, 4)]
    assert paired(values, none, 0.5, 0.2, 9) == [(1, 0)]
    assert paired(values, none, 0.9, 0.1, 9) == []
    assert paired(values, none, 0.5, 0.1, 1) == [(1, 0)]
    assert paired(values, [[-1] * 5] * 5, 0.5, 0.1, 9) == []
    assert levels_of("0.5,1") == (0.5, 1.0)
    for wrong in ("high", "0.5,,1", "nan"):
        with pytest.raises(InputError, match="must be numbers separated by commas"):
            agent_r(alphas=wrong)
    with pytest.raises(InputError, match="the rollout group has none"):
        revising().wrap(group())  # type: ignore[misc]


def test_alpha_rises_with_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The episodes of step 0 are judged by the first, which here nothing exceeds."""
    rows, _ = revised(monkeypatch, bad="13", alphas=(1.0, 0.5))
    assert [row.info["pivot"] for row in rows] == [4, 4, 4, 4]


def test_the_loss_is_the_mean_over_what_is_learnt() -> None:
    """Of three rows: one that is not learnt, one whose first reply is given, and one that is learnt whole."""
    turn = np.array([[0, 0, -1, 1, 1], [-1, -1, -1, 0, 0], [0, -1, 1, -1, -1]])
    random = np.random.default_rng(1)
    logp = -random.gamma(2.0, 0.5, turn.shape)
    info = {
        "pivot": np.array([2.0, 0, 0]),
        "episode": np.arange(3.0),
        "first_turn": np.zeros(3),
        "refined": np.zeros(3),
    }
    batch = batch_of(turn >= 0, [0.0, 1, 1], logp, info=info).replace(
        turn=jnp.asarray(turn, jnp.int32), state_key=jnp.ones((3, 2), jnp.uint32)
    )
    found = learn(agent_r(), batch, logp)
    kept = (turn >= 0) & (np.arange(3) > 0)[:, None]
    assert found.loss == pytest.approx(-logp[kept].mean(), rel=1e-6)
    np.testing.assert_allclose(found.gradient, -1.0 * kept / kept.sum(), atol=1e-7)
